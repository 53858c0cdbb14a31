"""Passes over data that move no weight: `evaluate`, and the validation within `fit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from fastaccum.adapters.callbacks import Callbacks
from fastaccum.data.stacks import Batch, Position
from fastaccum.distribute.step_builder import Step


class Evaluation:
    """Loss and metrics over stacks, whose loss is that of all their rows as one batch.

    Args:
        model: as the caller made it.
        around: makes a scope for whatever traces or runs a program.
    """

    def __init__(self, step: Step, stacks: Any, model: Any, around: Callable[[], AbstractContextManager[None]]):
        self._step, self._stacks, self._model, self._around = step, stacks, model, around
        dispatches, self._size = stacks.steps_per_epoch, stacks.layout.accumulation
        self.batches = None if dispatches is None else dispatches * self._size

    def __call__(self, hooks: Callbacks) -> dict[str, float]:
        """The logs of a pass."""
        step, stacks = self._step, self._stacks
        step.running.metrics.reset()
        self._model.stop_evaluating = False
        hooks.list.on_test_begin()
        begin, end = hooks.hooks("test")
        totals = None
        dispatches = step.together(stacks, next(stacks.epochs(Position(0, 0))), training=False)
        for batch, dispatch in zip(itertools.count(step=self._size), dispatches, strict=False):
            begin(batch)
            with self._around():
                sums, check = step.evaluate(dispatch)
            totals = sums if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
            read = functools.partial(self._logs, totals, check)
            end(batch + self._size - 1, read)
            if self._model.stop_evaluating:
                break
        logs = read()
        hooks.list.on_test_end(logs)
        return logs

    def _logs(self, totals: list[tf.Tensor], check: Callable[[], None]) -> dict[str, float]:
        check()
        return self._step.objective.evaluated([t.numpy().item() for t in totals])

    def in_order(self, logs: Mapping[str, float]) -> list[float]:
        """The logs' values in the order in which Keras's `evaluate` lists them."""
        return [logs[name] for name in self._step.objective.in_order(logs)]

    def require_traceable(self, sample: Batch, like: Batch) -> None:
        """Traces it for micro-batches like `sample`, unless training takes rows of these shapes: what does not fit is
        found before training rather than after an epoch of it.
        """
        if _row_shapes(sample) == _row_shapes(like):
            return
        one = tf.nest.map_structure(lambda s: tf.TensorSpec([1, s.shape[0] or 1, *s.shape[1:]], s.dtype), sample)
        with self._around():
            tf.function(self._step.objective.evaluate, autograph=False).get_concrete_function(one)


def _row_shapes(sample: Batch) -> Any:
    return tf.nest.map_structure(lambda spec: tuple(spec.shape[1:]), (sample.x, sample.y))
