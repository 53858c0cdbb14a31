"""Stacks that the caller made: checked once for each of a kind, and run without waiting on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fastaccum.adapters import remat
from fastaccum.data.rows import as_stack
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.kernels.devices import has_gpu
from fastaccum.step.model_step import Unread
from fastaccum.step.program import flat
from fastaccum.step.train_step import StepResult


class StacksByHand:
    """What `Trainer.train_step` and its like take: `(x, y)` or `(x, y, sample_weight)` of [micro-batches, rows, ...].

    `build` makes the model's step, fit for the specs of one micro-batch; `layers` lists those whose `trainable` counts.
    """

    def __init__(self, build: Callable[[Batch], Any], layers: Callable[[], list[Any]], needs_targets: bool):
        self._build, self._all_layers, self._needs_targets = build, layers, needs_targets
        self._step: Any = None
        self._layers: list[Any] = []
        self._known: set[tuple] = set()
        self._unread: Unread | None = None

    def prepare(self, stack: Any, text: bool = False) -> tuple[Any, Batch]:
        """The model's step, and the stack as it takes it; one like a stack before is not checked again."""
        batch = stack
        if type(stack) in (tuple, list) and 1 <= len(stack) <= 3:
            x, *others = stack
            batch = Batch(x, *(() if each is None else each for each in others or [None]))
        if isinstance(batch, Batch) and self._signature(batch) in self._known:
            return self._step, batch
        batch = as_stack(stack, self._needs_targets, text)
        if self._signature(batch) not in self._known:
            self._step = self._build(tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), batch))
            self._layers = self._all_layers()
            self._known.add(self._signature(batch))
        return self._step, batch

    def _signature(self, batch: Batch) -> tuple:
        return flat(batch)[1], remat.changes(), *[layer.trainable for layer in self._layers]

    def run(self, step: Any, batch: Batch) -> StepResult:
        """One train step; what it has to say is raised here, or with a GPU, which this does not wait for, next time."""
        dispatch = Dispatch((batch,))
        executed = step.dispatch(dispatch)
        unread = Unread(step.require, executed, dispatch)
        late, self._unread = (unread, None) if not has_gpu() else (self._unread, unread)
        if late is not None:
            try:
                late.require()
            except Exception:
                self._unread = None  # not applied, for what came before it
                raise
        return executed.result
