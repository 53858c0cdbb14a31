"""Passes over data that move no weight: `evaluate`, the validation of `fit`, and `predict`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.callbacks import Callbacks, require
from fastaccum.adapters.models import Model
from fastaccum.data import source
from fastaccum.data.stacks import Batch, Dispatch, Position
from fastaccum.step.options import Options, capped
from fastaccum.training.step_builder import StepBuilder


class Evaluation:
    """Computes the loss and the metrics over `steps` batches of data, or all of them.

    It is called once for each of the `passes`. A pass over data that is read once, such as a
    generator, begins where the last one ended.
    """

    def __init__(
        self,
        builder: StepBuilder,
        data: source.Source,
        options: Options,
        steps: int | None,
        passes: int = 1,
    ):
        steps = capped("steps", steps)
        if steps is not None and isinstance(data, source.DatasetSource):
            data.read_at_most(steps * passes)
        self._builder = builder
        self._engine = builder.get_or_build(data.sample, options)
        # With `steps`, a dispatch has one micro-batch, so that a pass can end after any of them.
        micro_batches = 1
        if steps is None:
            micro_batches = options.gradient_accumulation_steps * options.steps_per_execution
        self._stacks = data.stacks(builder.evaluation_layout(options, micro_batches), steps, passes)
        self._sample = data.sample
        self._model = self._engine.objective.model.model
        self._read_once = data.read_once
        self._passes_left: Iterator[Iterator[Dispatch]] = iter(())  # of data that is read once
        self._size = self._stacks.layout.accumulation  # batches in a dispatch
        self.batches: int | None = None  # in a pass, where that is known
        dispatches = self._stacks.steps_per_epoch
        if dispatches is not None:
            self.batches = dispatches * self._size

    def __call__(self, callbacks: Callbacks) -> dict[str, float]:
        """Runs a pass and returns its logs; a fit around it keeps the logs of its own epoch."""
        with self._builder.keeping_logs():
            return self._run(callbacks)

    def close(self) -> None:
        """Ends the threads that read ahead; no pass can be run afterwards."""
        self._stacks.close()

    def _run(self, callbacks: Callbacks) -> dict[str, float]:
        engine = self._engine
        stacks = self._stacks
        stacks.reset()
        engine.running.reset_logs()
        self._model.stop_evaluating = False
        callbacks.callback_list.on_test_begin()
        begin, end = callbacks.hooks("test")
        totals: list[tf.Tensor] | None = None
        # A pass has at least one dispatch, so that the loop sets `read_logs`.
        dispatches = engine.lockstep(stacks, self._next_pass(), training=False)
        for first_batch, dispatch in zip(
            itertools.count(step=self._size), dispatches, strict=False
        ):
            begin(first_batch)
            sums, check = engine.evaluate(dispatch)
            if totals is None:
                totals = sums
            else:
                totals = [total + value for total, value in zip(totals, sums, strict=True)]
            # Called by callbacks that want the logs, and after the last batch: it waits for the
            # device.
            read_logs = functools.partial(self._logs, totals, check)
            end(first_batch + self._size - 1, read_logs)
            if self._model.stop_evaluating:
                break
        logs = read_logs()
        callbacks.callback_list.on_test_end(logs)
        return logs

    def _next_pass(self) -> Iterator[Dispatch]:
        """Returns the dispatches of the next pass.

        Raises:
            ValueError: raised if data that is read once is used up.
        """
        if self._read_once:
            dispatches = next(self._passes_left, None)
            if dispatches is not None:
                return dispatches
        # The first pass, or a new reading of the data. Data that is read once and used up raises.
        self._passes_left = self._stacks.epochs(Position(0, 0))
        return next(self._passes_left)

    def _logs(self, totals: list[tf.Tensor], check: Callable[[], None]) -> dict[str, float]:
        check()
        return self._engine.objective.evaluated([t.numpy().item() for t in totals])

    def in_order(self, logs: Mapping[str, float]) -> float | list[float]:
        """Returns the values as Keras's `evaluate` does: a list in its order, or the only one."""
        values = [logs[name] for name in self._engine.objective.in_order(logs)]
        if len(values) == 1:
            return values[0]
        return values

    def require_traceable(self, like: Batch) -> None:
        """Traces the evaluation, so that its errors come before training.

        It is left out for rows of the shapes of `like`, the data that trains: they have been traced
        in the train step.
        """
        if _row_shapes(self._sample) == _row_shapes(like):
            return

        def one_micro_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
            rows = spec.shape[0] or 1  # 1 where their number is not known
            return tf.TensorSpec([1, rows, *spec.shape[1:]], spec.dtype)

        stack = tf.nest.map_structure(one_micro_batch, self._sample)
        evaluate = tf.function(self._engine.objective.evaluate, autograph=False)
        with self._engine.translate_errors():
            evaluate.get_concrete_function(stack)


def _row_shapes(sample: Batch) -> object:
    return tf.nest.map_structure(lambda spec: tuple(spec.shape[1:]), (sample.x, sample.y))


def predict(model: Model, x: object, **options: Any) -> Any:
    """Returns Keras's predictions.

    Raises:
        ValueError: raised for data that the model cannot be called with.
    """
    for name in ("batch_size", "steps"):
        if options[name] is not None:
            checks.whole_number(name, options[name])
    require(options["callbacks"], options["verbose"], model.callback_kind)
    if model.preprocess is None:
        source.require_predictable(x, model.may_take_text)
    try:
        with checks.naming(f"x ({type(x).__name__})", AttributeError):
            return model.predict(x, **options)
    except (tf.errors.InvalidArgumentError, StopIteration) as error:
        why = str(error) or "it yields nothing"
        raise ValueError(
            f"The model cannot be called with x ({type(x).__name__}): {why}"
        ) from error
