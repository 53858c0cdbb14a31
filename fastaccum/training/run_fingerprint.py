"""The fingerprint of a run: what its workers, and a training that is resumed, must have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from fastaccum.adapters import fingerprint
from fastaccum.adapters.attributes import Variable, raw
from fastaccum.checkpoint import state
from fastaccum.data.stacks import Batch
from fastaccum.step.options import Options
from fastaccum.training.recipe import Recipe


class RunFingerprint:
    """Describes a run as plain values, and compares the description with those of the other workers."""

    def __init__(self, recipe: Recipe):
        self._recipe, self._replicas = recipe, recipe.replicas
        metrics = dict(zip(("metrics", "weighted_metrics"), recipe.metrics.user, strict=True))
        self._given = {**recipe.given, **metrics}
        self.changes = state.ChangesOfTraining()

    def require_alike(self, call: str, **description: object) -> None:
        """Raises WorkersDifferError on every worker if the workers are in other calls, or describe them differently."""
        if self._replicas is not None:
            self._replicas.require_alike(call, **description)

    def require_one_program(self, options: Options, sample: Batch) -> None:
        """Raises WorkersDifferError if the workers' programs would differ.

        Called before the model is built, since workers whose variables differ in number would not come through the
        build; and once more when it is built.
        """
        if self._replicas is None or self._replicas.workers == 1:
            return
        variables = {"model": self._recipe.model.variables, "optimizer": [], "loss_scale": [], "step": []}
        description = self.describe(variables, options, sample, {})
        others = {name: getattr(options, name) for name in options.names(must_agree=False)}
        self.require_alike("the first step", versions=state.versions(), **description, options=others)

    def describe(
        self, variables: Mapping[str, Sequence[Variable]], options: Options, sample: Batch, plan: Mapping[str, object]
    ) -> state.Json:
        """Describes the model, its losses and metrics, the optimizer, the options and the data as plain values."""
        model, optimizer, named = self._recipe.model, self._recipe.optimizer, state.name_variables(variables)
        specs = {  # under mixed precision the dtype of a tf_keras model's variable is the compute dtype
            group: {name: f"{getattr(v, 'true_dtype', v.dtype).name}{v.shape.as_list()}" for name, v in own.items()}
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
        compared |= {name: getattr(backend, name)() for name in ("epsilon", "floatx", "image_data_format")}
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
