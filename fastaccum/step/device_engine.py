"""The programs that train and evaluate a Keras model on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.data.stacks import Batch, Dispatch, trip_count
from fastaccum.kernels.xla_ops import loop
from fastaccum.step import diagnosis
from fastaccum.step.built_model import BuiltModel
from fastaccum.step.engine import Engine, FirstRun
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.retraces import Retraces
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import StepResult, TrainStep
from fastaccum.step.update_by_micro_batch import UpdateByMicroBatch


class DeviceEngine(Engine):
    """Trains and evaluates a model on one device.

    Its programs run the whole steps of a `TrainStep` with a `ModelObjective`. Where sizes vary, an
    update is run in parts instead, by programs of a single micro-batch. If `compile_parts`, XLA
    compiles the parts, each for one size; else TensorFlow runs them op by op, and one trace is for
    all sizes.
    """

    def __init__(self, built: BuiltModel, compile_parts: bool):
        options = built.options
        self.objective = ModelObjective(
            built.model, built.outputs, built.losses, built.metrics, options
        )
        self.running = self.objective.running
        self.cycle = TrainStep(
            self.objective,
            built.model.trainable_variables,
            built.optimizer,
            loss_scale=options.loss_scale,
            clip_norm=options.clip_norm,
            jit_compile=options.uses_xla,
            optimizer_state_dtype=options.optimizer_state_dtype,
            stochastic_rounding=options.stochastic_rounding,
        )
        # The fifth shape is warned of. A fit has a few by itself: a whole stack, a short last one,
        # and the sizes that rows are filled up to.
        retraces_of_steps = Retraces(many=5)
        # One more, since validation data and those of `evaluate` may differ in size.
        retraces_of_evaluations = Retraces(many=6)
        uses_xla = options.uses_xla
        self.compiled_execute = Program(self._execute, uses_xla, retraces_of_steps)
        self.compiled_execute.admit = functools.partial(
            self._admit_program, is_multi_step=False, training=True
        )
        self.compiled_execute_many = Program(self._execute_many, uses_xla, retraces_of_steps)
        self.compiled_execute_many.axes = ("train steps", *self.compiled_execute.axes)
        self.compiled_execute_many.admit = functools.partial(
            self._admit_program, is_multi_step=True, training=True
        )
        self.compiled_evaluate = Program(self._evaluate, uses_xla, retraces_of_evaluations)
        self.compiled_evaluate.what = "the evaluation"
        self.compiled_evaluate.admit = functools.partial(
            self._admit_program, is_multi_step=False, training=False
        )
        self.shapes_are_free = not compile_parts
        self._by_micro_batch = UpdateByMicroBatch(
            self.cycle,
            self.objective,
            compile_parts,
            retraces_of_steps=Retraces(many=3),
            retraces_of_evaluations=retraces_of_evaluations,
            admit=self._admit_part,
        )

    # Compiled.

    def _run(self, *stacks: Batch) -> StepResult:
        scale = self.cycle.loss_scale.scale()
        rows = self.objective.rows(stacks)
        return self.running.add_step(scale, self.cycle.run(*stacks), rows)

    def _execute(self, *stacks: Batch) -> Executed:
        """Runs one train step on the micro-batches of all stacks, and reports the logs so far."""
        return self.running.report(self._run(*stacks))

    def _execute_many(self, stack: Batch) -> Executed:
        """Runs train steps over the leading axis of [steps, micro-batches, rows, ...]."""
        before_first_step = StepResult(
            loss=tf.zeros([]),
            weight=tf.zeros([]),
            grad_norm=tf.zeros([]),
            grads_finite=tf.zeros([], tf.bool),
            loss_scale=tf.zeros([]),
        )

        def run_step(i, last):
            result = self._run(_at(stack, i))
            # A step that only fills up the dispatch has no gradient.
            is_empty = tf.equal(result.weight, 0.0)
            grad_norm = tf.where(is_empty, last.grad_norm, result.grad_norm)
            return [result._replace(grad_norm=grad_norm)]

        (result,) = loop(trip_count(stack), run_step, [before_first_step])
        return self.running.report(result)

    def _evaluate(self, *stacks: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self.objective.evaluate(*stacks), self.running.index_checks.seen()

    # Called by the host.

    @property
    def programs(self) -> dict[str, Program]:
        return {
            "train step": self.compiled_execute,
            "train steps of a dispatch": self.compiled_execute_many,
            "evaluation": self.compiled_evaluate,
            **self._by_micro_batch.programs,
        }

    def _admit_program(
        self, concrete: ConcreteFunction, is_multi_step: bool, training: bool
    ) -> AbstractContextManager[None]:
        stacks, _ = concrete.structured_input_signature
        run = FirstRun(
            programs=[concrete],
            captured=concrete.captured_inputs,
            dispatch=Dispatch(stacks, is_multi_step=is_multi_step),
            training=training,
            is_compiled=self.objective.options.uses_xla,
        )
        return self._admit(run)

    def _admit_part(
        self, part: str, training: bool, concrete: ConcreteFunction
    ) -> AbstractContextManager[None]:
        run = FirstRun(
            programs=[concrete],
            captured=concrete.captured_inputs,
            dispatch=Dispatch(()),
            training=training,
            part=part,
            is_compiled=not self.shapes_are_free,
        )
        return self._admit(run)

    def retrace(self) -> None:
        for program in self.programs.values():
            program.retrace()

    @property
    def _training_programs(self) -> list[Program]:
        return [
            self.compiled_execute,
            self.compiled_execute_many,
            *self._by_micro_batch.programs.values(),
        ]

    def trace(self, dispatch: Dispatch) -> list[ConcreteFunction]:
        return [self._program(dispatch).trace(*dispatch.stacks)]

    def _program(self, dispatch: Dispatch) -> Program:
        if dispatch.is_multi_step:
            return self.compiled_execute_many
        return self.compiled_execute

    def _dispatch(self, dispatch: Dispatch) -> Executed:
        if dispatch.by_micro_batch:
            return self._by_micro_batch(dispatch.stacks)
        return self._program(dispatch)(*dispatch.stacks)

    def _evaluate_dispatch(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        if dispatch.by_micro_batch:
            evaluated = [self._by_micro_batch.evaluate(stack) for stack in dispatch.stacks]
        else:
            evaluated = [self.compiled_evaluate(*dispatch.stacks)]
        sums_of_stacks = [sums for sums, _ in evaluated]
        totals = [tf.add_n(values) for values in zip(*sums_of_stacks, strict=True)]
        _, seen = evaluated[-1]  # the indices of all stacks: each returns those so far
        return totals, lambda: self.running.index_checks.require(seen)

    def _require(self, executed: Executed, dispatch: Dispatch, place: str = "") -> None:
        """Checks the outcome as `Engine.require` does; an error's message begins with `place`."""
        if executed.fine:
            return
        running = self.running
        running.index_checks.require(executed.indices)
        steps_since_end = running.stuck_steps.since_end(executed.stuck)
        if steps_since_end is None:
            return
        stacks = dispatch.stacks
        if dispatch.is_multi_step:
            # Diagnose the step at which training ended, so many steps before the dispatch's last:
            # those after it were not applied.
            (stack,) = stacks
            last_step = trip_count(stack) - 1
            stacks = (_at(stack, last_step - steps_since_end),)
        try:
            raise diagnosis.error(self.cycle, self.objective, stacks, place)
        finally:
            running.stuck_steps.reset()


def _at(stack: Batch, i: tf.Tensor | int) -> Batch:
    return tf.nest.map_structure(lambda t: tf.gather(t, i), stack)
