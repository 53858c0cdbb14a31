"""Stacks that the caller of `Trainer.train_step` made, checked once for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from fastaccum.basics import arguments
from fastaccum.data.rows import as_stack
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.kernels.devices import has_gpu
from fastaccum.layers import remat
from fastaccum.step.options import Options
from fastaccum.step.program import Program
from fastaccum.step.signatures import flatten
from fastaccum.step.step import PendingStep, Step
from fastaccum.step.train_step import StepResult
from fastaccum.training.step_builder import StepBuilder


class TrainStepInputs:
    """Checks stacks `(x, y)` or `(x, y, sample_weight)` of [micro-batches, rows, ...], and runs
    train steps on them.
    """

    def __init__(self, builder: StepBuilder, options: Callable[[], Options]):
        self._builder, self._options = builder, options
        self._step: Step | None = None
        self._layers: list[keras.layers.Layer] = []
        self._known: set[tuple] = set()
        self._pending: PendingStep | None = None

    def prepare(self, stack: Sequence[arguments.Arrays | None]) -> tuple[Step, Batch]:
        """Returns the step and the stack as a `Batch`; a stack like an earlier one is not checked
        again.
        """
        batch = stack
        if type(stack) in (tuple, list) and 1 <= len(stack) <= 3:
            x, *others = stack
            batch = Batch(x, *(() if each is None else each for each in others or [None]))
        if (
            self._step is not None
            and isinstance(batch, Batch)
            and self._signature(batch) in self._known
        ):
            return self._step, batch
        recipe, options = self._builder.recipe, self._options()
        batch = as_stack(stack, recipe.needs_targets, recipe.takes_text(options))
        if self._step is None or self._signature(batch) not in self._known:
            sample = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), batch)
            self._step = self._builder.get_or_build(sample, options)
            self._layers = list(recipe.model.layers)
            self._known.add(self._signature(batch))
        return self._step, batch

    def _signature(self, batch: Batch) -> tuple:
        return flatten(batch)[1], remat.changes(), *[layer.trainable for layer in self._layers]

    def run(self, stack: Sequence[arguments.Arrays | None]) -> StepResult:
        """Runs one train step and raises what its outcome says; on a GPU, without a wait, at the
        next call.
        """
        step, batch = self.prepare(stack)
        if self._builder.recipe.replicas is not None:
            batch = self._builder.training_layout(self._options()).shard(batch)
        dispatch = Dispatch((batch,))
        executed = step.dispatch(dispatch)
        pending = PendingStep(step, executed, dispatch)
        late, self._pending = (self._pending, pending) if has_gpu() else (pending, None)
        if late is not None:
            try:
                late.require()
            except Exception:
                # The new step was skipped too, because the step before it failed.
                self._pending = None
                raise
        return executed.result

    def program(self, stack: Sequence[arguments.Arrays | None]) -> tuple[Program, Batch]:
        """Returns the program of one device for a stack of this shape, and the stack; ValueError
        with replicas.
        """
        if (replicas := self._builder.recipe.replicas) is not None:
            raise ValueError(
                f"Under {type(replicas.strategy).__name__} a train step is several programs: ask "
                "for that of the same model made outside the scope, with the batch_size of one "
                "replica."
            )
        step, batch = self.prepare(stack)
        return step.programs["train step"], batch
