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
from fastaccum.step.program import Program, make_programs
from fastaccum.step.retraces import Retraces
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import StepResult, TrainStep
from fastaccum.step.update_by_micro_batch import UpdateByMicroBatch


class DeviceEngine(Engine):
    """Trains and evaluates a model on one device: the programs of a `TrainStep` with a
    `ModelObjective`.

    XLA compiles those that take a single micro-batch, as sizes that vary need, if `compile_parts`:
    each of them for one size. Else TensorFlow runs them op by op, and one trace is for all sizes.
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
        )
        # a whole stack, a short last one, and the sizes that rows are filled up to
        retraces = Retraces(many=5)
        functions = self._execute, self._execute_many
        self.compiled_execute, self.compiled_execute_many = make_programs(
            functions, options.uses_xla, retraces
        )
        # validation data and those of `evaluate` may differ in size
        of_evaluations = Retraces(many=6)
        (self.compiled_evaluate,) = make_programs(
            [self._evaluate], options.uses_xla, of_evaluations
        )
        self.compiled_execute.admit = functools.partial(self._admit_program, False, True)
        self.compiled_evaluate.what = "the evaluation"
        self.compiled_execute_many.axes = ("train steps", *self.compiled_execute.axes)
        self.compiled_execute_many.admit = functools.partial(self._admit_program, True, True)
        self.compiled_evaluate.admit = functools.partial(self._admit_program, False, False)
        self.shapes_are_free = not compile_parts
        self._by_micro_batch = UpdateByMicroBatch(
            self.cycle,
            self.objective,
            compile_parts,
            (Retraces(many=3), of_evaluations),
            self._admit_part,
        )

    # Compiled.

    def _run(self, *stacks: Batch) -> StepResult:
        scale, rows = self.cycle.loss_scale.scale(), self.objective.rows(stacks)
        return self.running.add_step(scale, self.cycle.run(*stacks), rows)

    def _execute(self, *stacks: Batch) -> Executed:
        """Runs one train step on the stacks, one after the other, and reports the logs so far."""
        return self.running.report(self._run(*stacks))

    def _execute_many(self, stack: Batch) -> Executed:
        """Runs train steps over the leading axis of [steps, micro-batches, rows, ...], in one
        program.
        """
        nothing = StepResult(
            *(tf.zeros([], d) for d in (tf.float32, tf.float32, tf.float32, tf.bool, tf.float32))
        )

        def turn(i, last):
            result = self._run(_at(stack, i))
            # What only fills up the dispatch has no gradient.
            return [
                result._replace(
                    grad_norm=tf.where(
                        tf.equal(result.weight, 0.0), last.grad_norm, result.grad_norm
                    )
                )
            ]

        (result,) = loop(trip_count(stack), turn, [nothing])
        return self.running.report(result)

    def _evaluate(self, *stacks: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self.objective.evaluate(*stacks), self.running.index_checks.seen()

    # Called by the host.

    @property
    def programs(self) -> dict[str, Program]:
        step, steps, evaluation = (
            self.compiled_execute,
            self.compiled_execute_many,
            self.compiled_evaluate,
        )
        whole = {"train step": step, "train steps of a dispatch": steps, "evaluation": evaluation}
        return {**whole, **self._by_micro_batch.programs}

    def _admit_program(
        self, several: bool, training: bool, concrete: ConcreteFunction
    ) -> AbstractContextManager[None]:
        stacks, _ = concrete.structured_input_signature
        dispatch = Dispatch(stacks, is_multi_step=several)
        is_compiled = self.objective.options.uses_xla
        run = FirstRun(
            [concrete], concrete.captured_inputs, dispatch, training, is_compiled=is_compiled
        )
        return self._admit(run)

    def _admit_part(
        self, part: str, training: bool, concrete: ConcreteFunction
    ) -> AbstractContextManager[None]:
        is_compiled = not self.shapes_are_free
        run = FirstRun(
            [concrete], concrete.captured_inputs, Dispatch(()), training, part, is_compiled
        )
        return self._admit(run)

    def retrace(self) -> None:
        for each in self.programs.values():
            each.retrace()

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
        return self.compiled_execute_many if dispatch.is_multi_step else self.compiled_execute

    def _dispatch(self, dispatch: Dispatch) -> Executed:
        if dispatch.by_micro_batch:
            return self._by_micro_batch(dispatch.stacks)
        return self._program(dispatch)(*dispatch.stacks)

    def _evaluate_dispatch(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        if dispatch.by_micro_batch:
            evaluated = [self._by_micro_batch.evaluate(stack) for stack in dispatch.stacks]
        else:
            evaluated = [self.compiled_evaluate(*dispatch.stacks)]
        totals = [tf.add_n(values) for values in zip(*(sums for sums, _ in evaluated), strict=True)]
        _, seen = evaluated[-1]  # of all so far
        return totals, lambda: self.running.index_checks.require(seen)

    def _require(self, executed: Executed, dispatch: Dispatch, place: str = "") -> None:
        """Checks the outcome as `Engine.require` does; the message of an error begins with
        `place`.
        """
        if executed.fine:
            return
        running = self.running
        running.index_checks.require(executed.indices)
        since = running.stuck_steps.since_end(executed.stuck)
        if since is None:
            return
        stacks = dispatch.stacks
        if dispatch.is_multi_step:
            (stack,) = stacks
            stacks = (_at(stack, trip_count(stack) - 1 - since),)
        try:
            raise diagnosis.error(self.cycle, self.objective, stacks, place)
        finally:
            running.stuck_steps.reset()


def _at(stack: Batch, i: tf.Tensor | int) -> Batch:
    return tf.nest.map_structure(lambda t: tf.gather(t, i), stack)
