"""Updates and evaluations computed a micro-batch at a time, for sizes that vary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.attributes import replaced
from fastaccum.data.stacks import Batch
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.retraces import Retraces
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import Accumulated, TrainStep


class HeldSums:
    """Variables that hold an update's sums between its programs.

    They hold the state from before the update's first micro-batch, too.
    """

    def __init__(self, cycle: TrainStep):
        self.gradients = [_zeros(v.shape, accumulator_dtype(v.dtype)) for v in cycle.variables]
        self.looked_up: dict[int, tf.Variable] = {}
        if cycle.optimizer.needs_lookups:
            for j, variable in enumerate(cycle.variables):
                if variable.shape.rank:
                    self.looked_up[j] = _zeros(variable.shape[:1], tf.bool)
        self.loss_sum = _zeros([], tf.float32)
        self.weight_sum = _zeros([], tf.float32)
        self.rows = _zeros([], tf.float32)
        self.state_before = [tf.Variable(v, trainable=False) for v in cycle.objective.state]


class UpdateByMicroBatch:
    """Computes an update of stacks of one micro-batch each, of any sizes.

        for stack in stacks:  add(stack)  # compiled once for each size
        end()                             # compiled once

    A program of the whole update would be compiled for each combination of sizes. The losses and
    weights here equal that program's, to float32 rounding. Between the programs the sums are in
    variables, which XLA adds to in place.

    Args:
        cycle: the train step of whole updates.
        objective: the cycle's objective.
        jit_compile: compile with XLA, for each size. Without it, one trace is for all sizes.
        retraces_of_steps: shared by the programs that train.
        retraces_of_evaluations: shared by the programs that evaluate.
        admit: `admit(part, training, program)` returns the scope of the first run of a program of
            this part.
    """

    def __init__(
        self,
        cycle: TrainStep,
        objective: ModelObjective,
        jit_compile: bool,
        retraces_of_steps: Retraces,
        retraces_of_evaluations: Retraces,
        admit: Callable[[str, bool, ConcreteFunction], AbstractContextManager[None]],
    ):
        self._cycle = cycle
        self._objective = objective
        self._options = dataclasses.replace(objective.options, jit_compile=jit_compile)
        self._held: HeldSums | None = None
        # Places of the variables that the loss reaches, and of those of which it looks rows up.
        # Tracing `_add_micro_batch` fills both, so `_finish` is traced after all micro-batches.
        self._reached: set[int] = set()
        self._looked_up: set[int] = set()
        # The reached variables that `_finish` was traced with. A micro-batch of a new size may
        # reach more of them, and `_finish` is then traced again.
        self._reached_when_ended: set[int] = set()
        self._count = Program(self._count_micro_batch, jit_compile, retraces_of_steps)
        self._add = Program(self._add_micro_batch, jit_compile, retraces_of_steps)
        self._end = Program(self._finish, jit_compile, retraces_of_steps)
        self._evaluate = Program(self._evaluate_micro_batch, jit_compile, retraces_of_evaluations)
        self._evaluate.what = "the evaluation"
        for program in (self._count, self._add, self._evaluate):
            program.may_relax = True
        self._count.admit = functools.partial(admit, "A count of a micro-batch", True)
        self._add.admit = functools.partial(admit, "A micro-batch of a train step", True)
        self._end.admit = functools.partial(admit, "The end of a train step", True)
        self._evaluate.admit = functools.partial(admit, "A micro-batch of an evaluation", False)

    @property
    def programs(self) -> dict[str, Program]:
        """The programs, by what a call does."""
        return {
            "counts of a micro-batch": self._count,
            "micro-batch of an update": self._add,
            "end of an update": self._end,
            "micro-batch of an evaluation": self._evaluate,
        }

    def __call__(self, stacks: Sequence[Batch]) -> Executed:
        """Runs the train step on the stacks.

        An error after the first one leaves the objective's state as before.
        """
        objective = self._objective
        if self._held is None:
            objective.split_warnings.give()
            self._held = HeldSums(self._cycle)
        counts = None
        if objective.has_several_terms:
            counts = tf.add_n([self._count(stack) for stack in stacks])
        # The typical weight of all stacks scales each micro-batch as in a whole update's program.
        typical = tf.constant(objective.typical_weight(stacks))
        has_added = False
        try:
            for stack in stacks:
                is_first = not has_added
                self._add(tf.constant(is_first), typical, counts, stack)
                has_added = True
            if self._reached_when_ended != self._reached:
                self._end.retrace()
                self._reached_when_ended = set(self._reached)
            return self._end(typical)
        except BaseException:
            if has_added:  # else `state_before` is that of an earlier update
                for variable, before in zip(objective.state, self._held.state_before, strict=True):
                    variable.assign(before)
            raise

    def evaluate(self, stack: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the sums of `ModelObjective.evaluate` for one micro-batch.

        With them it returns what the index checks have seen.
        """
        return self._evaluate(stack)

    # Compiled, or run op by op.

    def _as_compiled(self) -> AbstractContextManager[None]:
        """Gives the objective the options of these programs inside the block.

        Its own options are those of the program of a whole update.
        """
        return replaced([(self._objective, "options", self._options)])

    def _count_micro_batch(self, stack: Batch) -> tf.Tensor:
        with self._as_compiled():
            return self._objective.count_stacked(stack)

    def _evaluate_micro_batch(self, stack: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        with self._as_compiled():
            return self._objective.evaluate(stack), self._objective.running.index_checks.seen()

    def _add_micro_batch(
        self, is_first: tf.Tensor, typical_weight: tf.Tensor, counts: tf.Tensor | None, stack: Batch
    ) -> None:
        """Adds the sums of a stack to those of the update, which begins with it if `is_first`.

        Tracing it notes which variables are reached and looked up.
        """
        held = self._held
        assert held is not None
        totals = None
        if counts is not None:
            totals = self._objective.unstack_counts(counts)
        with self._as_compiled():
            sums = self._cycle.accumulate(stack, counts=totals, typical_weight=typical_weight)

        def add(variable: tf.Variable, value: tf.Tensor) -> None:
            variable.assign(tf.where(is_first, value, variable + value))

        for j, gradient in enumerate(sums.gradients):
            if gradient is None:  # micro-batches of other sizes may have a gradient
                gradient = tf.zeros_like(held.gradients[j])
            else:
                self._reached.add(j)
            add(held.gradients[j], gradient)
        for j, rows in sums.looked_up.items():
            self._looked_up.add(j)
            held.looked_up[j].assign(rows | (held.looked_up[j] & ~is_first))
        add(held.loss_sum, sums.loss_sum)
        add(held.weight_sum, sums.weight_sum)
        add(held.rows, self._objective.rows([stack]))
        # `sums.state` is from before this micro-batch. It is from before the update for the first
        # one alone, so later ones keep what the variable holds.
        for variable, before in zip(held.state_before, sums.state, strict=True):
            variable.assign(tf.where(is_first, before, variable))

    def _finish(self, typical_weight: tf.Tensor) -> Executed:
        """Ends the update with the sums of all its micro-batches."""
        held = self._held
        running = self._objective.running
        assert held is not None
        gradients: list[tf.Tensor | None] = [None] * len(held.gradients)
        for j in self._reached:
            gradients[j] = held.gradients[j].read_value()
        scale = self._cycle.loss_scale.scale()
        sums = Accumulated(
            gradients=gradients,
            loss_sum=held.loss_sum.read_value(),
            weight_sum=held.weight_sum.read_value(),
            # Each micro-batch's loss was scaled by this, as in `TrainStep.accumulate`: the typical
            # weight keeps float16 cotangents in range.
            scale=scale / typical_weight,
            state=[v.read_value() for v in held.state_before],
            looked_up={j: held.looked_up[j].read_value() for j in self._looked_up},
        )
        result = running.add_step(scale, self._cycle.finish(sums), held.rows.read_value())
        return running.report(result)


def _zeros(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), trainable=False)
