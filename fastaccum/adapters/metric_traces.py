"""Traces a metric: finds what mixes rows in it, and where it calls Python."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from fastaccum.adapters.metric_kinds import adds_up_as_keras, is_keras_function
from fastaccum.adapters.tf_keras_metrics import with_axis_of_targets, wraps_tf_keras
from fastaccum.basics.attributes import of_keras
from fastaccum.graphs import row_counts, row_mixing, traces
from fastaccum.kernels import private

# The specs of one output's y_true and y_pred.
Specs = tuple[tf.TensorSpec, tf.TensorSpec]


def find_mixing_op(metric: keras.metrics.Metric, specs: Specs) -> str | None:
    """Finds the operation by which a metric's function mixes rows or computes with their number.

    A trace shows it. None is returned also for a metric without a function, and for one whose
    function takes a fixed number of rows.
    """
    wrapper = getattr(metric, "wrapped", metric)

    def values(pair: Sequence[tf.Tensor]) -> tf.Tensor:
        y_true, y_pred = pair
        if wraps_tf_keras(metric):  # which makes their dtypes and ranks alike
            y_true = tf.cast(with_axis_of_targets(y_true, y_pred), metric.dtype)
            y_pred = tf.cast(y_pred, metric.dtype)
            rank = min(len(y_true.shape), len(y_pred.shape))
            y_true = _without_unit_axis(y_true, rank)
            y_pred = _without_unit_axis(y_pred, rank)
        return private.fn(wrapper)(y_true, y_pred, **private.fn_kwargs(wrapper))

    with contextlib.suppress(Exception):
        traced = traces.trace(values, specs)
        has_rows = len(getattr(traced.structured_outputs, "shape", ())) > 0
        operation = row_mixing.find_mixing_op(traced, values, specs)
        if operation:
            return operation
        if not has_rows:
            return metric.name
        if not of_keras(private.fn(wrapper)):
            return row_counts.find_row_counter(traced, values, specs)
    return None


def _without_unit_axis(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    """Drops a last axis of length 1 that is beyond `rank`."""
    if len(tensor.shape) > rank and tensor.shape[-1] == 1:
        return tensor[..., 0]
    return tensor


def calls_python(metric: keras.metrics.Metric, specs: Specs) -> bool:
    """Tells if a metric of the user's calls Python, as by tf.numpy_function."""
    wrapper = getattr(metric, "wrapped", metric)
    if adds_up_as_keras(wrapper) and is_keras_function(wrapper):
        return False
    # A trace fails for a fixed number of rows: XLA says it when it compiles the step.
    with contextlib.suppress(Exception):
        traced = traces.trace(lambda pair: metric.update_state(*pair), specs)
        return bool(traces.list_python_calls(traced.graph))
    return False
