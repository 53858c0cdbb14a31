"""Weights of rows in the form that a metric takes, with 0 for rows that pad."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.adapters.metric_kinds import adds_up_as_keras, is_keras_function
from fastaccum.adapters.metric_traces import Specs
from fastaccum.adapters.outputs import get_mask
from fastaccum.adapters.tf_keras_metrics import wraps_tf_keras
from fastaccum.graphs import row_mixing, traces
from fastaccum.kernels.shapes import lengths

# Lengths of a tensor's axes, the rows first, as a shape or as a list.
Lengths = Sequence[Any]
# Returns the axes that weights have behind the rows, from the lengths of y_true and y_pred.
_WeightAxes = Callable[[Lengths, Lengths], Lengths]


def _row_axes(y_true: Lengths, y_pred: Lengths) -> Lengths:
    return ()


def _unit_axes(y_true: Lengths, y_pred: Lengths) -> Lengths:
    return (1,) * (min(len(y_true), len(y_pred)) - 1)


def _target_axes(y_true: Lengths, y_pred: Lengths) -> Lengths:
    return y_true[1:]


def _flattened_axes(y_true: Lengths, y_pred: Lengths) -> Lengths:
    return y_true[1:-1]


# What a metric may want behind the rows of its weights, in the order in which it is tried: no axis,
# as many axes as y has, the axes of y_true, or those that a metric flattens.
_AXES = (_row_axes, _unit_axes, _target_axes, _flattened_axes)


class WeightForm(NamedTuple):
    """The form in which a metric takes the weights of rows."""

    axes: _WeightAxes | None  # of `_AXES`; None if none is known to fit
    is_keras: bool  # the metric and its function are Keras's or tf_keras's


def find_weight_form(metric: keras.metrics.Metric, specs: Specs) -> WeightForm:
    """Finds which of `_AXES` a metric takes, by traces of a telling number of rows.

    There is none for a metric of the user's, and none where each makes Keras's metric fail or
    compare rows.
    """
    # the variables of a first update are there before a step, to be saved
    with contextlib.suppress(Exception):
        traces.trace(lambda pair: metric.update_state(*pair), specs)
    wrapper = getattr(metric, "wrapped", metric)
    if not adds_up_as_keras(wrapper):
        return WeightForm(None, is_keras=False)

    is_keras = is_keras_function(wrapper)
    y_true, y_pred = specs
    for axes in _AXES:
        with contextlib.suppress(Exception):
            shape = [traces.TELLING_ROWS, *axes(y_true.shape, y_pred.shape)]
            update = functools.partial(_update_with_ones, metric, shape)
            traced = traces.trace(update, specs)
            if row_mixing.first_comparison_of_rows(traced.graph) is None:
                return WeightForm(axes, is_keras)
    return WeightForm(None, is_keras)


def _update_with_ones(metric: keras.metrics.Metric, shape: list[int], pair: Any) -> object:
    return metric.update_state(*pair, sample_weight=tf.ones(shape, metric.dtype))


def trace_without_weights(
    metric: keras.metrics.Metric, y_true: tf.Tensor, y_pred: tf.Tensor
) -> None:
    """Traces an update without weights, of a telling number of rows: it raises Keras's errors."""
    traces.trace(functools.partial(_update_without_weights, metric), (y_true, y_pred))


def _update_without_weights(metric: keras.metrics.Metric, y: Any) -> object:
    return metric.update_state(*y, sample_weight=None)


def undiluted(
    metric: keras.Metric, valid: tf.Tensor | None, weight: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns `weight` for rows that padding made longer.

    Keras's means over rows are of the means of each row, which padding dilutes.
    """
    if (
        valid is None
        or valid.shape.rank < 2
        or not isinstance(metric, keras.metrics.MeanMetricWrapper)
    ):
        return weight
    real = tf.cast(valid, tf.float32)
    times_longer = tf.math.divide_no_nan(1.0, tf.reduce_mean(real, 1, keepdims=True))
    if weight is None:
        return times_longer
    weight = tf.cast(weight, tf.float32)
    if weight.shape.rank <= 1:
        times_longer = times_longer[:, 0]
    return weight * times_longer


def row_weight(
    metric: keras.Metric,
    prediction: tf.Tensor,
    valid: tf.Tensor | None,
    weight: tf.Tensor | None,
    axes: Sequence[Any],
) -> tf.Tensor | None:
    """Returns `weight` with 0 for padded rows, with the metric's `axes` or those of the mask."""
    dtype = metric.dtype if weight is None else tf.float32
    factors = []
    if valid is not None:
        factors.append(tf.cast(valid, dtype))
    if weight is not None:
        factors.append(tf.cast(weight, dtype))
    mask = get_mask(prediction)
    if mask is not None and wraps_tf_keras(metric):
        factors.append(tf.cast(mask, dtype))
    elif mask is not None and isinstance(metric, keras.metrics.MeanMetricWrapper):
        axes = lengths(mask)[1:]
    if not factors:
        return None
    factors.append(tf.ones([1, *axes], dtype))

    rank = max(factor.shape.rank for factor in factors)
    shaped = []
    for factor in factors:
        axes_of_one = [1] * (rank - factor.shape.rank)
        shaped.append(tf.reshape(factor, [*lengths(factor), *axes_of_one]))
    return functools.reduce(tf.multiply, shaped)
