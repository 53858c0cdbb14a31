"""A model and what trains it, as a Trainer was given them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastaccum import families
from fastaccum.adapters import own_loss, own_methods
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.basics import arguments
from fastaccum.data.source import Source, make_data_source
from fastaccum.distribute import replicas
from fastaccum.distribute.replicas import Replicas
from fastaccum.fingerprint.run import RunFingerprint
from fastaccum.step.options import Options


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and what trains it."""

    model: Model
    optimizer: Optimizer
    losses: Losses
    metrics: Metrics
    replicas: Replicas | None  # of the model's strategy

    @classmethod
    def build(cls, model: arguments.KerasModel, **compiled: Any) -> Recipe:
        """Checks arguments of `Trainer` and completes those of `compile` by what the model was
        compiled with.
        """
        adapted = families.adapt_model(model)
        own_methods.require_called(adapted)
        metrics = own_loss.with_compiled_defaults(adapted, compiled)
        trains = families.adapt_optimizer(metrics.pop("optimizer"), adapted.keras_module.optimizers)
        losses = Losses(metrics.pop("loss"), metrics.pop("loss_weights"))
        found = cls(
            adapted,
            trains,
            losses,
            Metrics(**metrics),
            replicas.replicas_for(adapted),
        )
        if found.replicas is not None:
            found.replicas.require_optimizer(found.optimizer)
        return found

    @property
    def needs_targets(self) -> bool:
        return self.losses.loss is not None and not self.model.overrides("compute_loss")

    def make_fingerprint(self) -> RunFingerprint:
        """Returns the fingerprint of the run that trains the model by this recipe."""
        return RunFingerprint(self.model, self.optimizer, self.losses, self.metrics, self.replicas)

    def require_replicas(self, options: Options) -> None:
        """Raises ValueError for an optimizer that is to be shared out, with no replicas to share
        it.
        """
        if options.shard_optimizer is True and self.replicas is None:
            raise ValueError(
                "shard_optimizer=True, and the model was made outside the scope of a "
                "tf.distribute strategy: make it inside, or pass 'auto'."
            )

    def takes_text(self, options: Options) -> bool:
        by_itself = options.jit_compile == "auto" and bool(self.model.uncompilable_layers())
        return (by_itself or not options.jit_compile) and self.model.may_take_text

    def make_source(
        self, x: object, y: object, sample_weight: object, options: Options, **arguments: Any
    ) -> Source:
        """Makes the source of data as `fit` takes them; `arguments` are those of
        `make_data_source`.
        """
        arguments |= {
            "preprocess": self.model.preprocess,
            "sparse_labels": self.losses.take_class_indices,
        }
        arguments |= {"needs_targets": self.needs_targets, "text": self.takes_text(options)}
        return make_data_source(x, y, sample_weight, **arguments)
