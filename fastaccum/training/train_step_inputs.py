"""Stacks that the caller of `Trainer.train_step` made, checked once for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum.basics import arguments
from fastaccum.data.rows import as_stack
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.kernels.devices import has_gpu
from fastaccum.layers import remat
from fastaccum.step.engine import Engine, PendingDispatch
from fastaccum.step.options import Options
from fastaccum.step.program import Program
from fastaccum.step.signatures import flatten
from fastaccum.step.train_step import StepResult
from fastaccum.training.step_builder import StepBuilder


class TrainStepInputs:
    """Runs train steps on stacks that the caller made, each kind of which is checked once.

    A stack is `(x, y)` or `(x, y, sample_weight)`, each of [micro-batches, rows, ...].
    """

    def __init__(self, builder: StepBuilder, options: Callable[[], Options]):
        self._builder = builder
        self._options = options
        self._engine: Engine | None = None
        self._layers: list[keras.layers.Layer] = []
        self._known: set[tuple] = set()  # signatures of the stacks that were checked
        self._pending: PendingDispatch | None = None

    def prepare(self, stack: Sequence[arguments.Arrays | None]) -> tuple[Engine, Batch]:
        """Returns the engine and the stack as a `Batch`, checked unless one like it was before."""
        unchecked = _as_batch(stack)
        if (
            self._engine is not None
            and unchecked is not None
            and self._signature(unchecked) in self._known
        ):
            return self._engine, unchecked

        setup = self._builder.setup
        options = self._options()
        batch = as_stack(stack, setup.needs_targets, setup.takes_text(options))
        if self._engine is None or self._signature(batch) not in self._known:
            sample = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), batch)
            self._engine = self._builder.get_or_build(sample, options)
            self._layers = list(setup.model.layers)
            self._known.add(self._signature(batch))
        return self._engine, batch

    def _signature(self, batch: Batch) -> tuple:
        """Returns what a stack must share with a checked one: specs, and the model's state."""
        _, specs = flatten(batch)
        return specs, remat.changes(), *[layer.trainable for layer in self._layers]

    def run(self, stack: Sequence[arguments.Arrays | None]) -> StepResult:
        """Runs one train step, and raises what its outcome says.

        On a GPU, which is not waited for, the outcome is read at the next call.
        """
        engine, batch = self.prepare(stack)
        if self._builder.setup.replicas is not None:
            batch = self._builder.training_layout(self._options()).shard(batch)
        dispatch = Dispatch((batch,))
        executed = engine.dispatch(dispatch)
        pending = PendingDispatch(engine, executed, dispatch)
        to_read: PendingDispatch | None = pending
        if has_gpu():
            to_read = self._pending
            self._pending = pending
        if to_read is not None:
            try:
                to_read.require()
            except Exception:
                # The new step was skipped too, because the step before it failed.
                self._pending = None
                raise
        return executed.result

    def program(self, stack: Sequence[arguments.Arrays | None]) -> tuple[Program, Batch]:
        """Returns the program of one device for a stack of this shape, and the stack.

        Raises:
            ValueError: raised with replicas, on which a step is several programs.
        """
        replicas = self._builder.setup.replicas
        if replicas is not None:
            raise ValueError(
                f"Under {type(replicas.strategy).__name__} a train step is several programs: ask "
                "for that of the same model made outside the scope, with the batch_size of one "
                "replica."
            )
        engine, batch = self.prepare(stack)
        return engine.programs["train step"], batch


def _as_batch(stack: Any) -> Batch | None:
    """Makes a `Batch` of a stack without a look at its parts; None where it has too many."""
    if isinstance(stack, Batch):
        return stack
    if type(stack) not in (tuple, list) or not 1 <= len(stack) <= 3:
        return None
    x, *targets = stack
    if not targets:
        targets = [None]
    return Batch(x, *[() if part is None else part for part in targets])
