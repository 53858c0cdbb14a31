"""What a training is, as its checkpoints and the workers that share it tell it from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.adapters import code
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
    """What a Trainer trains, and by what: `losses` are "loss" and "loss_weights", as they were passed."""

    def __init__(
        self, model: Model, optimizer: Optimizer, losses: Mapping[str, Any], metrics: Any, replicas: Replicas | None
    ):
        self._model, self._optimizer, self._losses, self._metrics = model, optimizer, losses, metrics
        self._replicas = replicas

    def require_alike(self, call: str, **description: Any) -> None:
        """Raises WorkersDifferError on every worker if they are in other calls, or what describes these differs."""
        if self._replicas is not None:
            self._replicas.require_alike(call, **description)

    def require_one_program(self, options: Options, sample: Batch) -> None:
        """The same for all that is known before the model is built, which workers whose variables differ in number
        would not come through.
        """
        if self._replicas is None or self._replicas.workers == 1:
            return
        losses, metrics = tf.nest.flatten(self._losses["loss"]), tf.nest.flatten(self._metrics)
        written = code.written([*self._model.layers, *losses, *metrics, self._optimizer.optimizer])
        given = {**self._losses, "metrics": self._metrics}
        unbuilt: dict[str, list] = {group: [] for group in ("model", "optimizer", "loss_scale", "step")}
        description = state.describe(
            self._model, given, self._optimizer, unbuilt, options=options, sample=sample, plan={}
        )
        chosen = {name: getattr(options, name) for name in Options.NAMES if name != "loss_scale"}
        self.require_alike("the first step", versions=state.versions(), **description, options=chosen, code=written)

    def require_one_fit(self, training: Callable[[], Training]) -> None:
        """The same for a fit that is built, and the values that it begins with."""
        if self._replicas is not None and self._replicas.workers > 1:
            fit = training()
            self.require_alike("fit, built", **fit.description, cut=fit.cut, checksums=state.checksums(fit.variables))

    def agreed_seed(self, shuffle: bool) -> int | None:
        """A seed of the shuffling that is every worker's."""
        seed = int(np.random.randint(2**31 - 1)) if shuffle else 0
        if self._replicas is not None:
            (seed,) = self._replicas.broadcast([seed])
        return seed if shuffle else None

    def training(
        self,
        options: Options,
        step: ModelStep | ReplicatedStep,
        stacks: Any,
        hooks: Callbacks,
        sample: Batch,
        plan: Mapping[str, Any],
        felt_by: Sequence[str],
    ) -> Training:
        """What a checkpoint needs to know of a fit."""
        variables = {
            "model": [*self._model.variables, *self._model.state],
            "optimizer": self._optimizer.variables,
            "loss_scale": step.cycle.loss_scale.variables,
            "step": step.running.variables,
        }
        description = state.describe(
            self._model, self._losses, self._optimizer, variables, options=options, sample=sample, plan=plan
        )
        cut = {
            **stacks.cut,
            "gradient_accumulation_steps": options.gradient_accumulation_steps,
            "replicas": 1 if self._replicas is None else self._replicas.count,
        }
        felt_by = [*self._model.felt_by, *felt_by]
        model, draws, savable = self._model.model, self._model.unsaved_draws, step.running.savable
        return Training(model, variables, description, cut, felt_by, draws, stacks, hooks, savable, self._replicas)
