"""Tells Keras's metrics from those of a user's own class or function."""

from __future__ import annotations

from typing import Any

import keras

from fastaccum.basics.attributes import of_keras, runs_keras
from fastaccum.kernels import private


def adds_up_as_keras(metric: Any) -> bool:
    """Tells if a metric's `update_state` and `result` are Keras's or tf_keras's own."""
    if isinstance(metric, keras.metrics.Metric):
        return runs_keras(metric, "update_state") and runs_keras(metric, "result")
    # tf_keras sets wrappers of both on each metric.
    return of_keras(type(metric).update_state) and of_keras(type(metric).result)


def is_keras_function(metric: Any) -> bool:
    """Tells if a metric has no function in it, or one of Keras's or tf_keras's."""
    return not private.fn.exists(metric) or of_keras(private.fn(metric))
