"""The programs that train and evaluate a Keras model on one device, and what is read of them late."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.outputs import Outputs
from fastaccum.data.stacks import Batch, Dispatch, trip_count
from fastaccum.kernels.xla_ops import loop
from fastaccum.step import diagnosis
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.options import Options
from fastaccum.step.program import Program, aside, programs
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import StepResult, TrainStep


class FirstRun(NamedTuple):
    """What is about to run for the first time."""

    programs: list[Any]  # concrete functions of one device, in this order
    captured: Sequence[tf.Tensor]  # by them, on all of this process's devices
    dispatch: Dispatch  # of specs
    training: bool


Admit = Callable[[FirstRun], AbstractContextManager[None]]


class ModelStep:
    """The programs that train and evaluate a model on one device: a `TrainStep` of its `ModelObjective`."""

    sharing = 1  # of this process's replicas, how many share a device's memory

    def __init__(
        self, model: Model, outputs: Outputs, losses: Losses, metrics: Metrics, optimizer: Optimizer, options: Options
    ):
        self.objective = ModelObjective(model, outputs, losses, metrics, options)
        self.running = self.objective.running
        self.cycle = TrainStep(
            self.objective,
            model.trainable_variables,
            optimizer,
            loss_scale=options.loss_scale,
            clip_norm=options.clip_norm,
            jit_compile=options.jit_compile,
        )
        self.compiled_execute, self.compiled_execute_many, self.compiled_evaluate = programs(
            (self._execute, self._execute_many, self._evaluate), options.jit_compile
        )

    # Compiled.

    def _run(self, *stacks: Batch) -> StepResult:
        scale, rows = self.cycle.loss_scale.scale(), self.objective.rows(stacks)
        return self.running.add_step(scale, self.cycle.run(*stacks), rows)

    def _execute(self, *stacks: Batch) -> Executed:
        """One train step on the stacks, one after the other, and the logs so far."""
        return self.running.report(self._run(*stacks))

    def _execute_many(self, stack: Batch) -> Executed:
        """Train steps over the leading axis of [steps, micro-batches, rows, ...], in one program."""
        nothing = StepResult(*(tf.zeros([], d) for d in (tf.float32, tf.float32, tf.float32, tf.bool, tf.float32)))

        def turn(i, last):
            result = self._run(_at(stack, i))
            # What only fills up the dispatch has no gradient.
            return [result._replace(grad_norm=tf.where(tf.equal(result.weight, 0.0), last.grad_norm, result.grad_norm))]

        (result,) = loop(trip_count(stack), turn, [nothing])
        return self.running.report(result)

    def _evaluate(self, *stacks: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self.objective.evaluate(*stacks), self.running.index_checks.seen()

    # Called by the host.

    @property
    def programs(self) -> dict[str, Program]:
        """By what a call of it does."""
        of_steps = {"train step": self.compiled_execute, "train steps of a dispatch": self.compiled_execute_many}
        return {**of_steps, "evaluation": self.compiled_evaluate}

    def watch(self, admit: Admit) -> None:
        """Asks `admit` before the first run of each program."""

        def asked(is_multi_step: bool, training: bool, concrete: Any) -> AbstractContextManager[None]:
            stacks, _ = concrete.structured_input_signature
            dispatch = Dispatch(stacks, is_multi_step=is_multi_step)
            return admit(FirstRun([concrete], concrete.captured_inputs, dispatch, training))

        self.compiled_execute.admit = functools.partial(asked, False, True)
        self.compiled_execute_many.admit = functools.partial(asked, True, True)
        self.compiled_evaluate.admit = functools.partial(asked, False, False)

    def retrace(self) -> None:
        """Traces its programs anew when they are called next, for a model that computes otherwise since."""
        for each in self.programs.values():
            each.retrace()

    def aside(self) -> AbstractContextManager[None]:
        """Around steps of other shapes that are only looked at: of their programs nothing stays."""
        return aside(self.compiled_execute, self.compiled_execute_many)

    def dispatch(self, dispatch: Dispatch) -> Executed:
        """Runs the train steps of a dispatch."""
        return self._called(self._program(dispatch), dispatch)

    def _program(self, dispatch: Dispatch) -> Program:
        return self.compiled_execute_many if dispatch.is_multi_step else self.compiled_execute

    def traced(self, dispatch: Dispatch) -> list[Any]:
        """The concrete functions that a dispatch like this, of tensors or specs, runs one after the other."""
        return [self._program(dispatch).traced(*dispatch.stacks)]

    def evaluate(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        """What `ModelObjective.evaluate` sums up over a dispatch, and what raises if labels or ids are out of range."""
        sums, seen = self._called(self.compiled_evaluate, dispatch)
        return sums, lambda: self.running.index_checks.require(seen)

    def together(self, stacks: Any, dispatches: Iterator[Dispatch], training: bool = True) -> Iterator[Dispatch]:
        """The dispatches of a pass, which all workers have as many of: on one, any pass."""
        return dispatches

    def require(self, executed: Executed, dispatch: Dispatch, place: str = "") -> None:
        """Waits for a dispatch; ValueError if labels or ids are out of range, NonFiniteError if training can only skip
        its steps, whose error begins with `place`.
        """
        if executed.fine:
            return
        running = self.running
        running.index_checks.require(executed.indices, functools.partial(self._label, dispatch, place))
        since = running.stuck_steps.since_end(executed.stuck)
        if since is None:
            return
        stacks = dispatch.stacks
        if dispatch.is_multi_step:
            (stack,) = stacks
            stacks = (_at(stack, trip_count(stack) - 1 - since),)
        try:
            raise diagnosis.error(self.cycle, self.objective, stacks, running.stuck_steps.patience, place)
        finally:
            running.stuck_steps.reset()

    def _called(self, program: Program, dispatch: Dispatch) -> Any:
        """What a program returns; TensorFlow's error at an id out of range, which XLA has not, is a ValueError."""
        try:
            return program(*dispatch.stacks)
        except tf.errors.InvalidArgumentError as error:
            self.running.index_checks.reset()
            if not (found := re.search(r"indices\[.*\] = \S+ is not in \[0, \d+\)", str(error))):
                raise
            raise ValueError(
                f"x holds ids out of range: {found.group()} in an embedding. Nothing was updated with them. Correct "
                "the data."
            ) from error

    def _label(self, dispatch: Dispatch, place: str, lookup: int, size: int) -> str:
        """Where the first label out of range stands, as part of a sentence; empty if that is not known."""
        micro_batches = 0
        for labels in self.objective.labels(dispatch.stacks, lookup):
            bad = np.argwhere((labels < 0) | (labels >= size))
            if len(bad):
                *step, micro_batch, row = bad[0][: 2 + dispatch.is_multi_step].tolist()
                of_step = f" of step {step[0]} of the dispatch" if step else ""
                at = f"row {row} of micro-batch {micro_batches + micro_batch}{of_step} (counted from 0)"
                return f"; {place[:1].lower()}{place[1:]}the first is in {at}"
            micro_batches += len(labels)
        return ""


class Unread:
    """A dispatch whose outcome has not been read yet: `require` reads it, raises what it has to say, and lets go of its
    data, which whoever keeps the logs would hold with them.
    """

    def __init__(self, require: Callable[[Executed, Dispatch], None], executed: Executed, dispatch: Dispatch):
        self._require: Callable[[], None] | None = functools.partial(require, executed, dispatch)

    def require(self) -> None:
        """Raises what `ModelStep.require` raises, once."""
        if self._require is not None:
            self._require()
            self._require = None


def _at(stack: Any, i: tf.Tensor | int) -> Any:
    return tf.nest.map_structure(lambda t: tf.gather(t, i), stack)
