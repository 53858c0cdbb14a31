"""A model and what trains it, as a Trainer was given them; and what workers and a resumed training
must share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from fastaccum import families
from fastaccum.adapters import fingerprint, own_loss, own_methods
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.basics import arguments
from fastaccum.basics.attributes import Variable, raw
from fastaccum.checkpoint import state
from fastaccum.data.source import Source, make_data_source
from fastaccum.data.stacks import Batch
from fastaccum.distribute import replicas
from fastaccum.distribute.replicas import Replicas
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


class RunFingerprint:
    """Describes a run as plain values, and compares the description with those of the other
    workers.
    """

    def __init__(self, recipe: Recipe):
        self._recipe, self._replicas = recipe, recipe.replicas
        self._given = {
            "loss": recipe.losses.loss,
            "loss_weights": recipe.losses.loss_weights,
            **dict(zip(("metrics", "weighted_metrics"), recipe.metrics.user, strict=True)),
        }
        self.changes = state.ChangesOfTraining()

    def require_alike(self, call: str, **description: object) -> None:
        """Raises WorkersDifferError on every worker if the workers are in other calls, or describe
        them differently.
        """
        if self._replicas is not None:
            self._replicas.require_alike(call, **description)

    def require_one_program(self, options: Options, sample: Batch) -> None:
        """Raises WorkersDifferError if the workers' programs would differ, which may not come
        through the build.
        """
        if self._replicas is None or self._replicas.workers == 1:
            return
        variables = {
            "model": self._recipe.model.variables,
            "optimizer": [],
            "loss_scale": [],
            "step": [],
        }
        description = self.describe(variables, options, sample, {})
        others = {name: getattr(options, name) for name in options.names(must_agree=False)}
        self.require_alike(
            "the first step", versions=state.versions(), **description, options=others
        )

    def describe(
        self,
        variables: Mapping[str, Sequence[Variable]],
        options: Options,
        sample: Batch,
        plan: Mapping[str, object],
    ) -> state.Json:
        """Describes the model, its losses and metrics, the optimizer, the options and the data as
        plain values.
        """
        model, optimizer, named = (
            self._recipe.model,
            self._recipe.optimizer,
            state.name_variables(variables),
        )
        # under mixed precision the dtype of a tf_keras model's variable is the compute dtype
        specs = {
            group: {
                name: f"{getattr(v, 'true_dtype', v.dtype).name}{v.shape.as_list()}"
                for name, v in own.items()
            }
            for group, own in named.items()
        }
        known, layers = [*model.layers, optimizer.optimizer], dict[str, object]()
        for layer in model.layers:
            layers[state.free_name(layer.name, layers)] = fingerprint.describe(layer, known)
        rules = {id(raw(v)): optimizer.describe_rules(v) for v in model.trainable_variables}
        trained = {name: rules[id(v)] for name, v in named["model"].items() if id(v) in rules}
        backend = model.keras_module.backend
        compared = {name: getattr(options, name) for name in options.names(must_agree=True)}
        loss_scale = fingerprint.describe(compared.pop("loss_scale"))  # which has variables, too
        compared |= {
            name: getattr(backend, name)() for name in ("epsilon", "floatx", "image_data_format")
        }
        data = [f"{spec.dtype.name}{spec.shape.as_list()[1:]}" for spec in tf.nest.flatten(sample)]
        return state.plain(
            {
                "model": {"layers": layers, "variables": specs["model"], "trained": trained},
                "loss": fingerprint.describe(self._given, known),
                "optimizer": {**optimizer.description, "variables": specs["optimizer"]},
                "loss_scale": {**loss_scale, "variables": specs["loss_scale"]},
                "metrics": {"variables": specs["step"]},
                "batch plan": {**compared, "data": data, **plan},
            }
        )
