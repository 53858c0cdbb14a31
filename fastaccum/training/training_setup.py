"""A model with the optimizer, losses and metrics that train it, before it is built."""

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
class TrainingSetup:
    """A model with the optimizer, losses and metrics that a Trainer was made with."""

    model: Model
    optimizer: Optimizer
    losses: Losses
    metrics: Metrics
    replicas: Replicas | None  # of the model's strategy

    @classmethod
    def build(cls, model: arguments.KerasModel, **compiled: Any) -> TrainingSetup:
        """Checks the arguments of `Trainer`, and completes them by what `compile` was given.

        `compiled` are the optimizer, the losses and the metrics, named as in Keras's `compile`.
        """
        adapted = families.adapt_model(model)
        own_methods.require_called(adapted)
        completed = own_loss.with_compiled_defaults(adapted, compiled)
        optimizer = families.adapt_optimizer(
            completed.pop("optimizer"), adapted.keras_module.optimizers
        )
        losses = Losses(completed.pop("loss"), completed.pop("loss_weights"))
        metrics = Metrics(**completed)
        all_replicas = replicas.replicas_for(adapted)
        if all_replicas is not None:
            all_replicas.require_optimizer(optimizer)
        return cls(adapted, optimizer, losses, metrics, all_replicas)

    @property
    def needs_targets(self) -> bool:
        """False for a model that computes its loss itself."""
        return self.losses.loss is not None and not self.model.overrides("compute_loss")

    def make_fingerprint(self) -> RunFingerprint:
        """Returns the fingerprint of the run that trains the model so."""
        return RunFingerprint(self.model, self.optimizer, self.losses, self.metrics, self.replicas)

    def require_replicas(self, options: Options) -> None:
        """Raises ValueError if the optimizer is to be shared out without replicas to share it."""
        if options.shard_optimizer is True and self.replicas is None:
            raise ValueError(
                "shard_optimizer=True, and the model was made outside the scope of a "
                "tf.distribute strategy: make it inside, or pass 'auto'."
            )

    def takes_text(self, options: Options) -> bool:
        """Tells if the model's inputs may be strings, which XLA does not know."""
        runs_without_xla = not options.jit_compile
        if options.jit_compile == "auto":
            runs_without_xla = bool(self.model.uncompilable_layers())
        return runs_without_xla and self.model.may_take_text

    def make_source(
        self, x: object, y: object, sample_weight: object, options: Options, **arguments: Any
    ) -> Source:
        """Makes the source of data as `fit` takes them.

        `arguments` are the others of `make_data_source`.
        """
        return make_data_source(
            x,
            y,
            sample_weight,
            preprocess=self.model.preprocess,
            sparse_labels=self.losses.take_class_indices,
            needs_targets=self.needs_targets,
            text=self.takes_text(options),
            **arguments,
        )
