"""What a training is, as its checkpoints and the workers that share it tell it from another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.adapters import fingerprint
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.callbacks import Callbacks
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.checkpoint import state
from fastaccum.checkpoint.state import Training
from fastaccum.data.stacks import Batch
from fastaccum.distribute.replicas import Replicas
from fastaccum.distribute.replicated_step import ReplicatedStep
from fastaccum.step.model_step import ModelStep
from fastaccum.step.options import Options


class Identity:
    """A Trainer's model, optimizer and arguments, for comparison: `given` are losses, weights and metrics as passed."""

    def __init__(self, model: Model, optimizer: Optimizer, given: Mapping[str, Any], replicas: Replicas | None):
        self._model, self._optimizer, self._given, self._replicas = model, optimizer, given, replicas

    def require_alike(self, call: str, **description: Any) -> None:
        """Raises WorkersDifferError on every worker if they are in other calls, or what describes these differs."""
        if self._replicas is not None:
            self._replicas.require_alike(call, **description)

    def require_one_program(self, options: Options, sample: Batch) -> None:
        """The same for all that is known before the model is built, which workers whose variables differ in number
        would not come through; and once more when it is.
        """
        if self._replicas is None or self._replicas.workers == 1:
            return
        variables = {"model": self._model.variables, "optimizer": [], "loss_scale": [], "step": []}
        description = self._describe(variables, options, sample, {})
        others = {name: getattr(options, name) for name in options.names(must_agree=False)}
        self.require_alike("the first step", versions=state.versions(), **description, options=others)

    def require_one_fit(self, training: Callable[[], Training]) -> None:
        """The same for a fit that is built, and the values that it begins with."""
        if self._replicas is not None and self._replicas.workers > 1:
            fit = training()
            self.require_alike("fit, built", **fit.description, cut=fit.cut, checksums=state.checksums(fit.variables))

    def agreed_seed(self, shuffle: bool) -> int | None:
        """A seed of the shuffling that is every worker's."""
        seed = int(np.random.randint(2**31 - 1)) if shuffle else 0
        if self._replicas is not None:
            seed = int(self._replicas.gather([seed])[0][0])  # the chief's
        return seed if shuffle else None

    def training(
        self,
        options: Options,
        step: ModelStep | ReplicatedStep,
        stacks: Any,
        hooks: Callbacks,
        sample: Batch,
        plan: Mapping[str, Any],
        split_sensitive: Sequence[str],
    ) -> Training:
        """What a checkpoint needs to know of a fit."""
        variables = {
            "model": [*self._model.variables, *self._model.state],
            "optimizer": self._optimizer.variables,
            "loss_scale": step.cycle.loss_scale.variables,
            "step": step.running.variables,
        }
        description = self._describe(variables, options, sample, plan)
        cut = {
            **stacks.cut,
            "gradient_accumulation_steps": options.gradient_accumulation_steps,
            "replicas": 1 if self._replicas is None else self._replicas.count,
        }
        sensitive = [*self._model.split_sensitive_layers, *split_sensitive]
        model, draws, savable = self._model.model, self._model.unsaved_draws, step.running.savable
        return Training(model, variables, description, cut, sensitive, draws, stacks, hooks, savable, self._replicas)

    def _describe(
        self, variables: Mapping[str, Sequence[Any]], options: Options, sample: Batch, plan: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Describes, as plain values, what workers must have in common, and a checkpoint with what resumes from it."""
        model, optimizer, named = self._model, self._optimizer, state.name_variables(variables)
        specs = {  # under mixed precision the dtype of a tf_keras model's variable is the compute dtype
            group: {name: f"{getattr(v, 'true_dtype', v.dtype).name}{v.shape.as_list()}" for name, v in own.items()}
            for group, own in named.items()
        }
        known, layers = [*model.layers, optimizer.optimizer], dict[str, Any]()
        for layer in model.layers:
            layers[state.free_name(layer.name, layers)] = fingerprint.describe(layer, known)
        rules = {id(raw(v)): optimizer.describe_rules(v) for v in model.trainable_variables}
        trained = {name: rules[id(v)] for name, v in named["model"].items() if id(v) in rules}
        backend = sys.modules["tf_keras" if model.legacy else "keras"].backend
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
