"""Keras metrics inside the compiled loop, with the rows that only pad left out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.trainers.compile_utils import CompileMetrics

from fastaccum import checks
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.outputs import Matched, Outputs, distinct, mask_of, require_known
from fastaccum.adapters.packages import kinds, of_keras

_SHORTHANDS = ("accuracy", "acc", "crossentropy", "ce")  # Keras takes the one that fits the targets


class Metrics:
    """A model's metrics: Keras names, `keras.Metric`s or functions, in a list or by output, as in `compile`."""

    def __init__(self, metrics: Any = (), weighted_metrics: Any = ()):
        for name, nest in (("metrics", metrics), ("weighted_metrics", weighted_metrics)):
            for each in tf.nest.flatten(nest):
                if isinstance(each, type):
                    raise TypeError(f"{name}={each!r} must be a Keras 3 metric object: call the class.")
                require_known(name, each, "Keras 3 metric", keras.metrics.get, _SHORTHANDS)
        self._passed = metrics, weighted_metrics
        self.user = _of_keras_3(metrics), _of_keras_3(weighted_metrics)
        self.compiled: CompileMetrics  # from `build` on
        self.own: list[Any] = []
        # What the model's own `compute_metrics` returned last, beyond the results of metrics, in training and not.
        self._returned: dict[bool, dict[str, tf.Variable]] = {True: {}, False: {}}

    def build(self, outputs: Outputs, y_true: Any, taken: Sequence[str] = (), own: Sequence[Any] = ()) -> None:
        """Creates the metrics' variables; `y_true` holds specs of one batch of targets, `taken` names in the logs.

        `own` are metrics that the model updates itself, reset and logged with the others.
        """
        self.own = list(own)
        targets = outputs.targets(y_true) if self.given else outputs.specs
        named = zip(("metrics", "weighted_metrics"), self.user, strict=True)
        plain, weighted = (_by_output(name, each, outputs, targets) for name, each in named)
        if len(targets) == 1:  # before 3.14 Keras takes no list of lists there
            plain, weighted = (metrics for (metrics,) in (plain, weighted))
        self.compiled = CompileMetrics(plain, weighted, output_names=outputs.names)
        with checks.naming("metrics"):
            self.compiled.build(targets, outputs.specs)
        self._plain, self._weighted = (
            [(i, metric) for i, metrics in enumerate(by_output) if metrics for metric in metrics.metrics]
            for by_output in (self.compiled._flat_metrics, self.compiled._flat_weighted_metrics)
        )
        placed = [*self._plain, *self._weighted]
        for metric in (metrics := [metric for _, metric in placed]):
            if sum(metric is each for each in metrics) > 1:
                raise ValueError(
                    f"The metric {metric.name!r} is given twice, and would count all rows twice: pass two."
                )
        for i, metric in placed:
            if isinstance(metric, _LegacyMetric):
                metric.build(targets[i], outputs.specs[i])
            elif not (of_keras(type(metric)) and getattr(metric, "_built", True)):
                _make_variables(metric, targets[i], outputs.specs[i])
        with checks.naming("metrics"):
            self._by_batch = any(_one_value(metric, targets[i], outputs.specs[i]) for i, metric in placed)
        self._named = self._with_names(outputs, taken)

    @property
    def given(self) -> bool:
        """Whether the user passed any."""
        return any(each is not None for each in self.user)

    def for_compile(self, legacy: bool) -> dict[str, Any]:
        """What the user passed, as arguments of the model's `compile`; none of it where some is of the other Keras."""
        other = "keras.Metric" if legacy else "tf_keras.Metric"
        if any(other in kinds(each) for each in tf.nest.flatten(self._passed)):
            return {}
        return {name: each or None for name, each in zip(("metrics", "weighted_metrics"), self._passed, strict=True)}

    def _with_names(self, outputs: Outputs, taken: Sequence[str]) -> list[tuple[str, keras.Metric]]:
        """The metrics by the names that Keras logs them by, in its order."""
        named = []
        for i, metric in self._plain:
            named.append((i, f"{outputs.names[i]}_{metric.name}" if len(outputs.names) > 1 else metric.name))
        for i, metric in self._weighted:
            name, prefix = f"weighted_{metric.name}", f"{outputs.names[i]}_" if len(outputs.names) > 1 else ""
            is_alone = all(each != prefix + metric.name for _, each in named)
            named.append((i, prefix + (metric.name if is_alone else name)))
        names = distinct((name for _, name in named), ("loss", *taken))
        placed = zip((i for i, _ in named), names, (m for _, m in (*self._plain, *self._weighted)), strict=True)
        in_order = sorted(placed, key=lambda each: each[0]) if outputs.legacy else placed
        return [(name, metric) for _, name, metric in in_order]

    def require_none(self, output: int, name: str) -> None:
        """Raises ValueError if an output has metrics: its logits are never computed."""
        names = [metric.name for i, metric in (*self._plain, *self._weighted) if i == output]
        if names:
            raise ValueError(
                f"The metrics {names} of output {name!r} need the logits, which LinearCrossEntropy never "
                "computes. Leave them out, or use keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
            )

    @property
    def variables(self) -> list[tf.Variable]:
        """The state of every metric."""
        variables = [v for metric in (self.compiled, *self.own) for v in metric.variables]
        return [*map(raw, variables), *self._kept]

    @property
    def need_exact_rows(self) -> bool:
        """Whether padded rows cannot be kept from some metric by a weight of 0.

        True for a metric of the user's own class, which may ignore `sample_weight`, and for a function that returns
        one value for a whole batch.
        """
        metrics = self.compiled.metrics
        return self._by_batch or bool(self.own) or not all(of_keras(type(getattr(m, "legacy", m))) for m in metrics)

    @property
    def unknown_states(self) -> list[str]:
        """Names of metrics whose state may not be a sum over rows, from zero: those of the user's own classes, but for
        what derives from Keras's Mean and Sum.
        """
        sums = keras.metrics.Mean, keras.metrics.Sum
        metrics: list[Any] = [*self.compiled.metrics, *self.own]
        return [*(m.name for m in metrics if not (of_keras(type(m)) or isinstance(m, sums)))]

    def update(self, batch: Matched, valid: tf.Tensor | None) -> None:
        """Updates every metric with one micro-batch's valid rows."""
        if self.need_exact_rows:
            valid = None
        for metrics, weights in ((self._plain, None), (self._weighted, batch.sample_weight)):
            for i, metric in metrics:
                rows = _row_weight(valid, batch.y_pred[i], None if weights is None else weights[i])
                keywords = {} if rows is None else {"sample_weight": rows}
                with checks.naming(f"metrics: {metric.name!r}, called with y of shape {batch.y_true[i].shape}"):
                    metric.update_state(batch.y_true[i], batch.y_pred[i], **keywords)

    def result(self, training: bool) -> dict[str, tf.Tensor]:
        """Every metric's value by its log name."""
        results = [(name, metric.result()) for name, metric in self._named]
        results += [(metric.name, metric.result()) for metric in self.own] + list(self._returned[training].items())
        return {
            k: tf.cast(tf.convert_to_tensor(v), tf.float32)
            for name, value in results
            for k, v in (value.items() if isinstance(value, dict) else [(name, value)])
        }

    def expect(self, returned: Mapping[str, Any], training: bool) -> None:
        """Makes room for what `compute_metrics` returns beyond the results of metrics."""
        results: dict[str, Any] = self.compiled.result()
        known = {*results, *(metric.name for metric in self.own)}
        names = [name for name in returned if name not in known]
        for name in names:
            if len(getattr(returned[name], "shape", ())):
                raise ValueError(
                    f"compute_metrics returned {name!r} of shape {tuple(returned[name].shape)}: each value must be a "
                    "scalar. Return one for each number."
                )
        self._returned[training] = {name: tf.Variable(0.0, trainable=False, name=name) for name in names}

    def keep(self, returned: Mapping[str, Any], training: bool) -> None:
        """Keeps what `compute_metrics` returned last, for the logs."""
        for name, variable in self._returned[training].items():
            variable.assign(tf.cast(returned[name], tf.float32))

    @property
    def _kept(self) -> list[tf.Variable]:
        return [variable for by_name in self._returned.values() for variable in by_name.values()]

    def reset(self) -> None:
        """Starts every metric anew."""
        for metric in (self.compiled, *self.own):
            metric.reset_state()
        for variable in self._kept:
            variable.assign(0.0)


class _LegacyMetric(keras.metrics.Metric):
    """A tf_keras metric (tensorflow-addons' are some) as one of Keras 3, updated as tf_keras's `fit` updates it."""

    def __init__(self, legacy: Any):
        super().__init__(name=legacy.name)
        self.legacy = legacy

        @tf.function  # by AutoGraph, as in tf_keras
        def update(y_true, y_pred, sample_weight):
            legacy.update_state(y_true, y_pred, sample_weight=sample_weight)

        self._update, self._result = update, tf.function(legacy.result)

    @property
    def variables(self) -> list[Any]:
        return list(self.legacy.variables)

    def build(self, y_true: Any, y_pred: Any) -> None:
        """Makes the variables that the metric makes at its first update."""
        self.legacy.update_state(*(tf.zeros([1, *t.shape[1:]], t.dtype) for t in (y_true, y_pred)))
        self.reset_state()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if len(y_true.shape) == 1 and len(y_pred.shape) == 2 and y_pred.shape[-1] == 1:
            y_true = y_true[:, tf.newaxis]
        mask = mask_of(y_pred)
        if mask is not None:
            mask = tf.cast(mask, tf.float32)
            sample_weight = mask if sample_weight is None else sample_weight * mask
        self._update(y_true, y_pred, sample_weight)

    def result(self) -> Any:
        return self._result()

    def reset_state(self) -> None:
        self.legacy.reset_state()

    def get_config(self) -> dict[str, Any]:
        return {"legacy": self.legacy}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _LegacyMetric:
        legacy = config["legacy"]
        return cls(type(legacy).from_config(legacy.get_config()))


def _of_keras_3(metrics: Any) -> Any:
    """The metrics, tf_keras's as Keras 3's; None for an empty nest."""
    if not tf.nest.flatten(metrics):
        return None
    return tf.nest.map_structure(lambda m: _LegacyMetric(m) if "tf_keras.Metric" in kinds(m) else m, metrics)


def _by_output(name: str, metrics: Any, outputs: Outputs, targets: Sequence[Any]) -> list[Any]:
    """A list of metrics for each output."""
    if metrics is not None and not isinstance(metrics, (list, tuple, dict)) and not outputs.legacy:
        raise ValueError(f"{name} must be a list, tuple, or dict, as in Keras; got {metrics!r}.")
    if len(outputs.names) == 1 and not isinstance(metrics, dict):
        found = [tf.nest.flatten(metrics)]
    elif outputs.legacy and isinstance(metrics, (list, tuple)) and not any(map(tf.nest.is_nested, metrics)):
        # In tf_keras a plain list is for every output.
        found = [[_anew(metric) for metric in metrics] for _ in outputs.names]
    else:
        found = [
            tf.nest.flatten([] if m is None else m)
            for m in outputs.match(metrics, "metrics", outputs.legacy, several=True)
        ]
    found = [[metric for metric in each if metric is not None] for each in found]
    for name, each, target in zip(outputs.names, found, targets, strict=True):
        if each and target is None and not outputs.legacy:
            raise ValueError(f"Output {name!r} has metrics but no target.")
    return [[] if target is None else each for each, target in zip(found, targets, strict=True)]


def _anew(metric: Any) -> Any:
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.Metric) else metric


def _row_weight(valid: tf.Tensor | None, prediction: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor | None:
    """`weight` with 0 for padded rows, at a rank that Keras can multiply with the prediction's mask."""
    factors = [tf.cast(each, tf.float32) for each in (valid, weight) if each is not None]
    if not factors:
        return None
    mask = mask_of(prediction)
    if mask is not None:
        factors.append(tf.ones(mask.shape))
    rank = max(factor.shape.rank for factor in factors)
    return functools.reduce(
        tf.multiply, (tf.reshape(factor, [*factor.shape, *[1] * (rank - factor.shape.rank)]) for factor in factors)
    )


def _make_variables(metric: keras.Metric, y_true: Any, y_pred: Any) -> None:
    """Makes the variables that a metric makes at its first update, as F1Score and R2Score do: a checkpoint holds those
    that there are before a step.
    """
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in (y_true, y_pred)]
    with contextlib.suppress(Exception):  # which the step itself tells of, if its shapes do not settle it
        tf.function(lambda *batch: metric.update_state(*batch), autograph=False).get_concrete_function(*specs)


def _one_value(metric: keras.Metric, y_true: Any, y_pred: Any) -> bool:
    """Whether a metric made from a user's function averages over the batch by itself."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper) or of_keras(metric._fn):
        return False
    value: Any = compute_output_spec(metric._fn, y_true, y_pred, **metric._fn_kwargs)
    return len(getattr(value, "shape", ())) == 0  # it may be a number
