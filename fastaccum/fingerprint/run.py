"""A run as plain values: its model, losses, optimizer, options and data."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.basics.attributes import Variable, raw
from fastaccum.basics.processes import Workers, WorkersDifferError
from fastaccum.data.stacks import Batch
from fastaccum.fingerprint.differences import differences
from fastaccum.fingerprint.objects import describe
from fastaccum.fingerprint.values import Json, plain
from fastaccum.fingerprint.variables import free_name, name_variables
from fastaccum.graphs import jit_choice
from fastaccum.step.options import Options

# Differences that an error of workers lists; it counts the others.
_MAX_LISTED = 10

# Settings of Keras that a step is traced with.
_KERAS_SETTINGS = ("epsilon", "floatx", "image_data_format")


class RunFingerprint:
    """Describes a run as plain values, and compares the description with the other workers'.

    Args:
        workers: the processes that train together, or None for a model of no strategy.

    Attributes:
        changes: takes out of descriptions what the run changes itself.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        losses: Losses,
        metrics: Metrics,
        workers: Workers | None,
    ):
        self._model = model
        self._optimizer = optimizer
        self._losses = losses
        self._metrics = metrics
        self._workers = workers
        self.changes = ChangesOfTraining()

    def require_alike(self, call: str, **description: object) -> None:
        """Raises WorkersDifferError on all workers unless they describe the same call alike."""
        workers = self._workers
        if workers is None:
            return
        described = plain(description)
        text = json.dumps([call, described])
        checksums = workers.exchange(hashlib.sha256(text.encode()).hexdigest())
        if len(set(checksums)) == 1:
            return

        texts = workers.exchange(text)
        other = next(worker for worker, theirs in enumerate(texts) if theirs != text)
        call_of_other, described_by_other = json.loads(texts[other])
        name_of_other = f"worker {other}"
        name_of_this = f"this one, worker {workers.worker}"
        if call_of_other != call:
            lines = [f"{name_of_other} is in {call_of_other}, {name_of_this}, in {call}"]
        else:
            lines = differences(
                described_by_other,
                json.loads(text)[1],
                words=f"{{}} on {name_of_other}, {{}} on {name_of_this}",
            )
        listed = "; ".join(lines[:_MAX_LISTED])
        if len(lines) > _MAX_LISTED:
            listed += f"; and {len(lines) - _MAX_LISTED} more"
        raise WorkersDifferError(
            f"Workers differ, and nothing was trained: {listed}. Run the same program on all, with "
            "the same arguments, files and versions."
        )

    def require_one_program(self, options: Options, sample: Batch) -> None:
        """Raises WorkersDifferError if the workers' programs would differ.

        Workers whose programs differ may not come through the build.
        """
        if self._workers is None or self._workers.workers == 1:
            return
        variables: dict[str, Sequence[Variable]] = {
            "model": self._model.variables,
            "optimizer": [],
            "loss_scale": [],
            "step": [],
        }
        description = self.describe(variables, options, sample, {})
        free_options = {name: getattr(options, name) for name in options.names(must_agree=False)}
        self.require_alike(
            "the first step", versions=versions(), **description, options=free_options
        )

    def describe(
        self,
        variables: Mapping[str, Sequence[Variable]],
        options: Options,
        sample: Batch,
        plan: Mapping[str, object],
    ) -> Json:
        """Describes the model, its losses and metrics, the optimizer, the options and the data.

        Args:
            variables: all that training changes, by the groups "model", "optimizer", "loss_scale"
                and "step".
            sample: specs of a micro-batch.
            plan: what else must be the same of the data and their weights.
        """
        named_groups = name_variables(variables)
        specs = {group: _describe_specs(named) for group, named in named_groups.items()}
        specs["optimizer"] = self._describe_slots(named_groups["optimizer"])
        metrics, weighted_metrics = self._metrics.user
        losses = {
            "loss": self._losses.loss,
            "loss_weights": self._losses.loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
        }
        known = [*self._model.layers, self._optimizer.optimizer]
        layers: dict[str, object] = {}
        for layer in self._model.layers:
            layers[free_name(layer.name, layers)] = describe(layer, known)
        optimizer = {}
        for part in self._optimizer.described:
            optimizer.update(describe(part))

        batch_plan = {name: getattr(options, name) for name in options.names(must_agree=True)}
        # Checkpoints of version 0.1.0 lack these.
        if not batch_plan["float8"]:
            del batch_plan["float8"]
        if batch_plan["stochastic_rounding"]:
            del batch_plan["stochastic_rounding"]
        loss_scale = describe(batch_plan.pop("loss_scale"))  # which has variables, too
        for name in _KERAS_SETTINGS:
            batch_plan[name] = getattr(self._model.keras_module.backend, name)()
        specs_of_data = tf.nest.flatten(sample)
        batch_plan["data"] = [
            f"{spec.dtype.name}{spec.shape.as_list()[1:]}" for spec in specs_of_data
        ]
        return plain(
            {
                "model": {
                    "layers": layers,
                    "variables": specs["model"],
                    "trained": self._describe_trained(named_groups["model"]),
                },
                "loss": describe(losses, known),
                "optimizer": {**optimizer, "variables": specs["optimizer"]},
                "loss_scale": {**loss_scale, "variables": specs["loss_scale"]},
                "metrics": {"variables": specs["step"]},
                "batch plan": {**batch_plan, **plan},
            }
        )

    def _describe_slots(self, named: Mapping[str, tf.Variable]) -> Json:
        """Describes the optimizer's variables as Keras makes them, however they are stored."""
        optimizer = self._optimizer
        ids_of_scales = {id(scales) for scales in optimizer.scales.values()}
        dtypes = optimizer.dtypes_by_keras
        specs = {}
        for name, variable in named.items():
            if id(variable) not in ids_of_scales:
                dtype = dtypes.get(id(variable), variable.dtype)
                specs[name] = _describe_spec(variable, dtype)
        return specs

    def _describe_trained(self, named: Mapping[str, tf.Variable]) -> Json:
        """Describes the rules of trained variables beside their updates, by their names."""
        rules = {}
        for variable in self._model.trainable_variables:
            rules[id(raw(variable))] = describe(self._optimizer.rules(variable))
        return {name: rules[id(v)] for name, v in named.items() if id(v) in rules}


def _describe_specs(named: Mapping[str, tf.Variable]) -> Json:
    """Describes the dtypes and shapes of variables, by their names."""
    specs = {}
    for name, variable in named.items():
        # Under mixed precision the dtype of a tf_keras model's variable is the compute dtype.
        dtype = getattr(variable, "true_dtype", variable.dtype)
        specs[name] = _describe_spec(variable, dtype)
    return specs


def _describe_spec(variable: tf.Variable, dtype: tf.DType) -> str:
    return f"{dtype.name}{variable.shape.as_list()}"


class ChangesOfTraining:
    """Takes out of a description what the earlier fits of this process changed themselves.

    A loss may append to a list of its own, and a callback may anneal an attribute of a layer. A
    checkpoint holds the description without such changes, as a new process begins without them.
    What a program changes between two fits stays in: that is another training.
    """

    def __init__(self) -> None:
        self._start: Json | None = None
        self._end: Json | None = None

    def begin(self, describe: Callable[[], Json]) -> Json:
        """Returns the description of a fit that begins."""
        self._beginning = _undo(describe(), self._end, self._start)
        self._describe = describe
        return self._beginning

    def end(self) -> None:
        """Notes what the fit that began last has changed."""
        end = self._describe()
        self._start = self._beginning
        self._end = end


def _undo(now: Any, end: Any, start: Any) -> Any:
    """Returns `now` with what `start` has, where `now` is as in `end`."""
    if now == end:
        return start
    if not (isinstance(now, dict) and isinstance(end, dict) and isinstance(start, dict)):
        return now

    undone = {}
    for name in dict.fromkeys([*start, *now]):
        if name in now and name in start:
            undone[name] = _undo(now[name], end.get(name), start[name])
        elif name in end:
            continue  # training added the item, or a program removed it after the fit
        elif name in now:
            undone[name] = now[name]  # a program added it after the fit
        else:
            undone[name] = start[name]  # training removed it
    return undone


def versions() -> dict[str, str]:
    """Returns the versions that a training's bits depend on, and if TensorFlow uses oneDNN."""
    packages = {
        name: sys.modules[name].__version__
        for name in ("tensorflow", "keras", "numpy", "fastaccum")
    }
    return {
        "python": platform.python_version(),
        **packages,
        "TF_ENABLE_ONEDNN_OPTS": str(int(jit_choice.ONEDNN)),
    }
