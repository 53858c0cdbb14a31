"""Metrics of tf_keras and tensorflow-addons as Keras 3 metrics."""

from __future__ import annotations

from typing import Any, TypeGuard

import keras
import tensorflow as tf

from fastaccum.adapters.metric_kinds import adds_up_as_keras, is_keras_function
from fastaccum.basics import arguments
from fastaccum.basics.attributes import kinds


# Checkpoints describe the class by this name.
class _TFKerasMetric(keras.metrics.Metric):
    """A Keras 3 metric around one of tf_keras or tensorflow-addons, updated as by tf_keras."""

    def __init__(self, wrapped: keras.metrics.Metric):
        super().__init__(name=wrapped.name)
        self.wrapped = wrapped

        @tf.function  # by AutoGraph, as in tf_keras
        def update(y_true, y_pred, sample_weight):
            wrapped.update_state(y_true, y_pred, sample_weight=sample_weight)

        self._update = update
        if adds_up_as_keras(wrapped) and is_keras_function(wrapped):
            self._update = wrapped.update_state
        self._result = tf.function(wrapped.result)

    @property
    def variables(self) -> list[tf.Variable]:
        return list(self.wrapped.variables)

    def build(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
        """Creates the variables that the metric creates in its first update."""
        targets = tf.zeros([2, *y_true.shape[1:]], y_true.dtype)
        predictions = tf.zeros([2, *y_pred.shape[1:]], y_pred.dtype)
        self.update_state(targets, predictions)
        self.reset_state()

    def update_state(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> None:
        self._update(with_axis_of_targets(y_true, y_pred), y_pred, sample_weight)

    def result(self) -> tf.Tensor | dict[str, tf.Tensor]:
        return self._result()

    def reset_state(self) -> None:
        self.wrapped.reset_state()

    def get_config(self) -> dict[str, keras.metrics.Metric]:
        return {"wrapped": self.wrapped}

    @classmethod
    def from_config(cls, config: dict[str, keras.metrics.Metric]) -> _TFKerasMetric:
        wrapped = config["wrapped"]
        return cls(type(wrapped).from_config(wrapped.get_config()))


def as_keras_3(metrics: arguments.MetricsArgument) -> arguments.MetricsArgument:
    """Wraps the metrics of tf_keras in a nest; returns None for an empty nest."""
    if not tf.nest.flatten(metrics):
        return None

    def wrap(metric: Any) -> Any:
        if "tf_keras.Metric" in kinds(metric):
            return _TFKerasMetric(metric)
        return metric

    return tf.nest.map_structure(wrap, metrics)


def wraps_tf_keras(metric: keras.metrics.Metric) -> TypeGuard[_TFKerasMetric]:
    """Tells if a metric is one that `as_keras_3` wrapped."""
    return isinstance(metric, _TFKerasMetric)


def with_axis_of_targets(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns the targets as tf_keras passes them to a metric."""
    if len(y_true.shape) == 1 and len(y_pred.shape) == 2:
        return y_true[:, tf.newaxis]
    return y_true
