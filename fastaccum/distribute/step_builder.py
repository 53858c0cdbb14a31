"""The step of a training: made from the specs of a first micro-batch, and held against what comes after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters import own_loss, remat
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.outputs import Outputs
from fastaccum.data.stacks import Batch, Layout
from fastaccum.distribute import replicas
from fastaccum.distribute.identity import Identity
from fastaccum.distribute.replicas import Replicas
from fastaccum.distribute.replicated_step import ReplicatedStep
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.step import compilable
from fastaccum.step.model_step import ModelStep
from fastaccum.step.options import Options
from fastaccum.step.probe import probe
from fastaccum.step.program import without_collection

Step = ModelStep | ReplicatedStep
_FITTED: list[int] = []  # the ids of the models that a `fit` is training


class StepBuilder:
    """Makes the step of a model once, and says in which stacks it takes its data.

    Args:
        given: "loss" and "loss_weights", as they were passed.
        replicas: of the model's strategy, or None for one device.

    Attributes:
        step: what it has made, or None.
        split_sensitive: losses that mix the rows of a batch, by name, for a checkpoint to warn of.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        losses: Losses,
        metrics: Metrics,
        given: Mapping[str, Any],
        replicas: Replicas | None,
        identity: Identity,
    ):
        self._model, self._optimizer, self._losses, self._metrics = model, optimizer, losses, metrics
        self._given, self._replicas, self._identity = given, replicas, identity
        self.needs_targets = given["loss"] is not None and not model.overrides("compute_loss")
        self._compilation: tuple[Any, Any] = None, None
        self.step: Step | None = None
        self.sample: Batch | None = None  # that it was built for

    @graph_scoped_gradients()
    @without_collection()
    def of(self, sample: Batch, options: Options) -> Step:
        """The step; built, with the model, from the specs of the first micro-batch.

        Raises:
            ValueError: raised if there is nothing to train or no loss, or if the model, its `trainable` attributes or
                its targets are no longer those that it was built for.
        """
        self._model.require_inputs(sample.x)
        if self.step is None:
            self.step, self.sample = self._build(sample, options), sample
            self._identity.require_one_program(options, sample)
            if id(self._model.model) not in _FITTED:
                self._compile()
            self._moving = self._model.moving_layers
            with replicas.first_of(self._replicas):
                self.split_sensitive = probe(self.step.objective, sample)
            self._recomputed = remat.installed(self._model.model)
        if self._recomputed != (now := remat.installed(self._model.model)):
            self._recomputed = now
            self.step.retrace()
        self.require_same_weights()
        if not self._model.takes_targets_apart:
            # Targets for other outputs, on a program that exists, would be an obscure error of tf.function's.
            self._losses.require_targets(self._outputs, sample.y)
        return self.step

    def _build(self, sample: Batch, options: Options) -> Step:
        model, losses, metrics = self._model, self._losses, self._metrics
        self._identity.require_one_program(options, sample)
        own = self._replicas
        with contextlib.nullcontext() if own is None else own.strategy.scope():  # a model that is not built yet
            y_pred = model.symbolic_call(sample.x, training=True)
        y_true = tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), sample.y)
        if options.jit_compile:
            compilable.require(model)
        compilable.require_recomputable(model)
        if self.needs_targets or metrics.given:
            y_true, y_pred = model.matched(sample.x, y_true, y_pred)
        self._outputs = Outputs(model.output_names, y_pred, self._given["loss"], model.legacy)
        losses.build(self._outputs, y_true, model.takes_targets_apart)
        metrics.build(self._outputs, y_true, losses.log_names, model.own_metrics)
        if not losses.outputs:
            own_loss.require_any(model, called=True)
        if not model.trainable_variables:
            raise ValueError(f"model {model.model.name!r} has no trainable variables: there is nothing to train.")
        parts = model, self._outputs, losses, metrics, self._optimizer, options
        return ModelStep(*parts) if own is None else ReplicatedStep(own, *parts)

    def _compile(self) -> None:
        self._model.adopt(self._optimizer.optimizer, self._metrics, **self._given)
        self._compilation = self._model.compilation

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Around a fit: the model is compiled with what trains it, and another Trainer's `evaluate` leaves it so."""
        if self._model.compiled_since(self._compilation):
            self._compile()
        _FITTED.append(id(self._model.model))
        try:
            yield
        finally:
            _FITTED.remove(id(self._model.model))

    def require_same(self) -> None:
        """Raises ValueError if a callback has changed what is trained."""
        self.require_same_weights()
        if self._model.compiled_since(self._compilation):
            raise ValueError(
                "The model was compiled anew within this fit, by a callback or by another Trainer. As in Keras, that "
                "cannot change a training under way: end the fit, and make a new Trainer."
            )

    def require_same_weights(self) -> None:
        """Raises ValueError if the `trainable` attributes are no longer those that the step was built for."""
        trained_now = () if self.step is None else self.step.cycle.trained
        trained, trainable = ({id(v): v for v in vs} for vs in (trained_now, self._model.trainable_variables))
        if list(trained) != list(trainable):
            switched = ((trained | trainable)[i] for i in trained.keys() ^ trainable.keys())
            changed = [getattr(v, "path", v.name) for v in switched]
            raise ValueError(
                f"The model's trainable variables have changed since this Trainer was built: {sorted(changed)}. If the "
                "`trainable` of a layer was switched, switch it back; to train it as it is now, make a new Trainer, "
                "with a new optimizer."
            )
        if moved := sorted({*self._moving} ^ {*self._model.moving_layers}):
            raise ValueError(
                f"`trainable` of {moved} was switched since this Trainer was built, whose step moves the statistics "
                "that it moved then. Make a new Trainer, or switch it back."
            )

    # Once the model has been called: before, it is not known whether its rows are coupled.

    def training_layout(self, options: Options) -> Layout:
        """How stacks of train steps hold the rows."""
        own = not self.needs_targets or self._losses.mixing
        exact = self._model.couples_rows or bool(own) or self._metrics.need_exact_rows
        return self._layout(options.gradient_accumulation_steps, options.steps_per_execution, exact)

    def evaluation_layout(self, micro_batches: int) -> Layout:
        """How stacks for an evaluation do, each of so many micro-batches."""
        mixed = self._model.mixes_rows or self._model.couples_losses or self._losses.mixing
        counted = any(o.power for o in self._losses.outputs)
        exact = bool(mixed) or counted or not self.needs_targets or self._metrics.need_exact_rows
        return self._layout(micro_batches, 1, exact)

    def _layout(self, micro_batches: int, steps: int, exact_rows: bool) -> Layout:
        layout = Layout(micro_batches, steps, exact_rows)
        if self._replicas is None:
            return layout
        return layout._replace(replicas=self._replicas.count, shards=self._replicas.shards)
