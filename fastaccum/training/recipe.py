"""A model and what trains it, as a Trainer was given them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastaccum.adapters import arguments, models, optimizers, own_loss
from fastaccum.adapters.losses import Losses, sparse_labels
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.data import source
from fastaccum.data.arrays import ArraySource
from fastaccum.data.datasets import DatasetSource
from fastaccum.distribute import replicas
from fastaccum.distribute.replicas import Replicas
from fastaccum.step.options import Options


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and what trains it.

    Attributes:
        given: "loss" and "loss_weights", as they were passed or compiled.
        replicas: those of the model's strategy; None for one device.
    """

    model: Model
    optimizer: Optimizer
    losses: Losses
    metrics: Metrics
    given: Mapping[str, object]
    replicas: Replicas | None

    @classmethod
    def build(
        cls,
        model: arguments.KerasModel,
        optimizer: arguments.KerasOptimizer | str,
        loss: arguments.LossArgument,
        metrics: arguments.MetricsArgument,
        loss_weights: arguments.WeightsArgument,
        weighted_metrics: arguments.MetricsArgument,
    ) -> Recipe:
        """Checks the arguments of `Trainer` and completes them by what the model was compiled with."""
        adapted = models.get(model)
        own_loss.require_plain_steps(adapted)
        loss, loss_weights, metrics, weighted_metrics = own_loss.with_compiled_defaults(
            adapted, loss, loss_weights, metrics, weighted_metrics
        )
        found = cls(
            adapted,
            optimizers.get(optimizer, adapted.keras_module.optimizers),
            Losses(loss, loss_weights),
            Metrics(metrics, weighted_metrics),
            {"loss": loss, "loss_weights": loss_weights},
            replicas.replicas_for(adapted),
        )
        if found.replicas is not None:
            found.replicas.require_optimizer(found.optimizer)
        return found

    @property
    def needs_targets(self) -> bool:
        return self.given["loss"] is not None and not self.model.overrides("compute_loss")

    def takes_text(self, options: Options) -> bool:
        by_itself = options.jit_compile == "auto" and bool(self.model.uncompilable_layers())
        return (by_itself or not options.jit_compile) and self.model.may_take_text

    def make_source(
        self, x: object, y: object, sample_weight: object, options: Options, **arguments: Any
    ) -> ArraySource | DatasetSource:
        """Makes the source of data as `fit` takes them; `arguments` are those of `make_data_source`."""
        return source.make_data_source(
            x,
            y,
            sample_weight,
            preprocess=self.model.preprocess,
            sparse_labels=sparse_labels(self.given["loss"]),
            needs_targets=self.needs_targets,
            text=self.takes_text(options),
            **arguments,
        )
