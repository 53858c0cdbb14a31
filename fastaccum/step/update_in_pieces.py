"""An update computed a micro-batch at a time, for sizes that seldom come together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.data.stacks import Batch
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program, make_programs
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import Accumulated, TrainStep


class HeldSums:
    """Variables for the sums of the micro-batches so far: a copy of the weights in float32, on their device."""

    def __init__(self, cycle: TrainStep):
        sparse = cycle.variables if cycle.optimizer.needs_lookups else []
        self.gradients = [_zeros(v.shape, accumulator_dtype(v.dtype)) for v in cycle.variables]
        self.looked_up = {j: _zeros(v.shape[:1], tf.bool) for j, v in enumerate(sparse) if v.shape.rank}
        self.state = [tf.Variable(v, trainable=False) for v in cycle.objective.state]
        self.loss_sum = _zeros([], tf.float32)
        self.weight_sum = _zeros([], tf.float32)
        self.rows = _zeros([], tf.float32)


class UpdateInPieces:
    """Computes an update of stacks of one micro-batch each, of any sizes.

        for stack in stacks:  add(stack)  # compiled once for each size
        end()                             # compiled once

    A program of the whole update would be compiled for each combination of sizes. Its numbers are these, to float32
    rounding. Between the programs the sums are in variables, which XLA adds to in place.

    Args:
        cycle: the train step of whole updates.
        objective: the cycle's objective.
        jit_compile: compile with XLA.
        admit: `admit(stacks, program)` returns the scope of a program's first run.
    """

    def __init__(
        self,
        cycle: TrainStep,
        objective: ModelObjective,
        jit_compile: bool,
        admit: Callable[[Sequence[Batch], ConcreteFunction], AbstractContextManager[None]],
    ):
        self._cycle = cycle
        self._objective = objective
        self._held: HeldSums | None = None
        # Places of the variables that the loss reaches, and of those of which it looks rows up: known from a trace.
        self._reached: list[int] = []
        self._looked_up: list[int] = []
        self._latest: Sequence[Batch] = ()
        self._count, self._add, self._end = make_programs((self._counted, self._added, self._ended), jit_compile)
        for program in self.programs.values():
            program.admit = lambda concrete: admit(self._latest, concrete)

    @property
    def programs(self) -> dict[str, Program]:
        """The programs, by what a call does."""
        return {
            "counts of a micro-batch": self._count,
            "micro-batch of an update": self._add,
            "end of an update": self._end,
        }

    def __call__(self, stacks: Sequence[Batch]) -> Executed:
        """Runs the train step on the stacks; after an error the objective's state is what it was before."""
        objective = self._objective
        if self._held is None:
            objective.warn_of_parts()
        held = self._sums
        counts = None
        if objective.has_several_terms:
            self._latest = stacks[:1]
            counts = tf.add_n([self._count(stack) for stack in stacks])
        begun = False
        try:
            for stack in stacks:
                self._latest = [stack]
                self._add(tf.constant(not begun), counts, stack)
                begun = True
            return self._end()
        except BaseException:
            for variable, before in zip(objective.state, held.state if begun else [], strict=False):
                variable.assign(before)
            raise

    @property
    def _sums(self) -> HeldSums:
        if self._held is None:
            with tf.init_scope():
                self._held = HeldSums(self._cycle)
        return self._held

    # Compiled.

    def _counted(self, stack: Batch) -> tf.Tensor:
        return tf.stack(self._objective.count(stack))

    def _added(self, is_first: tf.Tensor, counts: tf.Tensor | None, stack: Batch) -> None:
        """Adds the sums of a stack to those of the update, which begins with it if `is_first`."""
        objective, held = self._objective, self._sums
        found = self._cycle.accumulate(stack, counts=None if counts is None else tf.unstack(counts))
        # Each stack's losses were divided by what is typical of that stack.
        typical = objective.typical_weight([stack])
        gradients = {j: g * tf.cast(typical, g.dtype) for j, g in enumerate(found.gradients) if g is not None}
        self._reached = list(gradients)
        self._looked_up = list(found.looked_up)

        def add(variable: tf.Variable, value: tf.Tensor) -> None:
            variable.assign(tf.where(is_first, value, variable + value))

        for j, gradient in gradients.items():
            add(held.gradients[j], gradient)
        add(held.loss_sum, found.loss_sum)
        add(held.weight_sum, found.weight_sum)
        add(held.rows, objective.rows([stack]))
        for j, met in found.looked_up.items():
            held.looked_up[j].assign(met | (held.looked_up[j] & ~is_first))
        for variable, before in zip(held.state, found.state, strict=True):
            variable.assign(tf.where(is_first, before, variable))

    def _ended(self) -> Executed:
        """Ends the update with the sums of all its stacks."""
        held, running = self._sums, self._objective.running
        gradients: list[tf.Tensor | None] = [None] * len(held.gradients)
        for j in self._reached:
            gradients[j] = held.gradients[j].read_value()
        sums = Accumulated(
            gradients=gradients,
            loss_sum=held.loss_sum.read_value(),
            weight_sum=held.weight_sum.read_value(),
            scale=self._cycle.loss_scale.scale(),
            state=[v.read_value() for v in held.state],
            looked_up={j: held.looked_up[j].read_value() for j in self._looked_up},
        )
        result = running.add_step(sums.scale, self._cycle.finish(sums), held.rows.read_value())
        return running.report(result)


def _zeros(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), trainable=False)
