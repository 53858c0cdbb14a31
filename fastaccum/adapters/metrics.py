"""Keras metrics inside the compiled loop, with the rows that only pad left out."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from fastaccum.adapters import models
from fastaccum.adapters.losses import by_output


class Metrics:
    """A model's metrics: Keras names, `keras.Metric`s or functions, in a list or by output, as in `compile`.

    Args:
        metrics: updated without weights.
        weighted_metrics: updated with the sample weights.

    Raises:
        ValueError: an unknown name, or metrics that do not fit the model's outputs.
    """

    def __init__(self, metrics: Any = (), weighted_metrics: Any = ()):
        for each in tf.nest.flatten([metrics or [], weighted_metrics or []]):
            _require_metric(each)
        self._user = metrics or None, weighted_metrics or None
        self.compiled: CompileMetrics | None = None

    def build(self, y_true: Any, y_pred: Any, output_names: list[str]) -> None:
        """Creates the metrics' variables, from specs of targets and predictions."""
        plain, weighted = (list(m) if isinstance(m, tuple) else m for m in self._user)
        names = list(by_output(y_pred, output_names, y_pred, "y_pred"))
        for each in (plain, weighted):
            if isinstance(each, dict):  # Keras drops what it cannot place
                by_output(each, output_names, y_pred, "metrics")
        self.compiled = CompileMetrics(plain, weighted, output_names=names)
        if len(names) > 1:
            y_true = _like(y_pred, by_output(y_true, output_names, y_pred, "y"))
        self.compiled.build(y_true, y_pred)
        self._by_batch = any(
            _one_value(metric, target, prediction)
            for metrics, target, prediction in zip(
                self.compiled._flat_metrics, tf.nest.flatten(y_true), tf.nest.flatten(y_pred), strict=False
            )
            for metric in (metrics.metrics if metrics else ())
        )

    @property
    def variables(self) -> list[tf.Variable]:
        return [v.value for v in self.compiled.variables]

    @property
    def need_exact_rows(self) -> bool:
        """Whether padded rows cannot be kept from some metric by a weight of 0.

        So it is for one of the user's own, which may ignore `sample_weight`, and for a function that returns one
        value for a whole batch.
        """
        return self._by_batch or any(_own(type(metric)) for metric in self.compiled.metrics)

    @property
    def unknown_states(self) -> list[str]:
        """Names of metrics whose state may be no sum over rows, from zero: those of the user's own classes, but for
        what derives from Keras's Mean and Sum.
        """
        sums = keras.metrics.Mean, keras.metrics.Sum
        return [m.name for m in self.compiled.metrics if _own(type(m)) and not isinstance(m, sums)]

    def update(
        self, y_true: Any, y_pred: Any, sample_weight: Any, valid: tf.Tensor | None, output_names: list[str]
    ) -> None:
        """Updates every metric with one micro-batch's valid rows."""
        predictions = by_output(y_pred, output_names, y_pred, "y_pred")
        targets = by_output(y_true, output_names, y_pred, "y")
        weights = by_output(sample_weight, output_names, y_pred, "sample_weight", repeat=True)
        compiled = self.compiled
        if self.need_exact_rows:
            valid = None
        for i, (name, prediction) in enumerate(predictions.items()):
            weight = weights.get(name)
            for metrics, given in (
                (compiled._flat_metrics[i], None),
                (compiled._flat_weighted_metrics[i], weight),
            ):
                for metric in metrics.metrics if metrics else ():
                    rows = _row_weight(valid, prediction, given)
                    keywords = {} if rows is None else {"sample_weight": rows}
                    metric.update_state(targets[name], prediction, **keywords)

    def result(self) -> dict[str, tf.Tensor]:
        """Every metric's value by its log name."""
        results = self.compiled.result()
        return {
            k: tf.cast(tf.convert_to_tensor(v), tf.float32)
            for name, value in results.items()
            for k, v in (value.items() if isinstance(value, dict) else [(name, value)])
        }

    def reset(self) -> None:
        self.compiled.reset_state()


def _row_weight(valid, prediction, weight):
    """`weight` with 0 for padded rows, at a rank that Keras can multiply with the prediction's mask."""
    factors = [tf.cast(each, tf.float32) for each in (valid, weight) if each is not None]
    if not factors:
        return None
    mask = models.mask_of(prediction)
    if mask is not None:
        factors.append(tf.ones(mask.shape))
    rank = max(factor.shape.rank for factor in factors)
    return math.prod(tf.reshape(factor, [*factor.shape, *[1] * (rank - factor.shape.rank)]) for factor in factors)


def _own(thing: Any) -> bool:
    """Whether a class or function is the user's, not Keras's."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0] != "keras"


def _one_value(metric: keras.Metric, y_true: Any, y_pred: Any) -> bool:
    """Whether a metric made from a user's function averages over the batch by itself."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper) or not _own(metric._fn):
        return False
    value = keras.src.backend.compute_output_spec(metric._fn, y_true, y_pred, **metric._fn_kwargs)
    return len(value.shape) == 0


def _like(y_pred: Any, values: dict[str, Any]) -> Any:
    return values if isinstance(y_pred, dict) else [values[name] for name in values]


def _require_metric(metric: Any) -> None:
    if metric is None or isinstance(metric, keras.Metric) or (callable(metric) and not isinstance(metric, type)):
        return
    if not isinstance(metric, str):
        raise TypeError(f"metrics={metric!r} must be a Keras 3 metric object, its name, or fn(y_true, y_pred).")
    if metric.lower() in ("accuracy", "acc", "crossentropy", "ce"):
        return
    try:
        keras.metrics.get(metric)
    except ValueError:
        raise ValueError(
            f"metrics={metric!r} is no Keras metric. Pass one of its names, such as 'accuracy' or 'mae', a "
            "keras.metrics.Metric, or fn(y_true, y_pred)."
        ) from None
