"""Computes any Keras loss of a micro-batch as two sums, of losses and of weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import scalar_losses
from fastaccum.adapters.head import FusedHeadLoss
from fastaccum.adapters.label_metrics import ScoredLabels
from fastaccum.adapters.loss_kinds import as_called, loss_name, not_per_example, reduction_of
from fastaccum.adapters.outputs import get_mask
from fastaccum.basics.attributes import function_of, known_name, of_keras
from fastaccum.kernels.shapes import as_float, lengths


class Term(NamedTuple):
    """One output's loss over one micro-batch: float32 scalars, which micro-batches add up."""

    loss_sum: tf.Tensor  # of weight x loss over valid elements
    weight_sum: tf.Tensor  # what the loss's reduction divides by, once added up
    scored: ScoredLabels | None = None  # where metrics need the labels' scores
    factor: scalar_losses.Factor | None = None  # of a scalar, by its weights and mask


def compute_term(
    loss: keras.losses.Loss,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    valid: tf.Tensor | None = None,
) -> Term:
    """Computes the sums behind `loss(y_true, y_pred, sample_weight)` over the `valid` elements.

    With `l = loss.call(y_true, y_pred)`, `v` the valid elements or rows (what does not merely pad,
    and where a Keras mask is true) and `w` the sample weights:

        loss_sum = sum(v * w * l)
        weight_sum = sum(v)      # "sum_over_batch_size", "mean", "sum": as in Keras, a 0 counts
        weight_sum = sum(v * w)  # "mean_with_sample_weight"

    so that `loss_sum / weight_sum` is what Keras computes ("sum" divides by nothing). Raises
    ValueError if the loss returns a mean instead of one value per example, or if a shape does not
    fit.
    """
    masks = [get_mask(y_pred)]
    if isinstance(loss, FusedHeadLoss):
        # It computes the sum alone. Its labels have the shape and the mask of the losses.
        values = loss.labels(y_true, y_pred)
    elif hasattr(y_pred, "log_prob"):
        # A cast would draw from a distribution of tensorflow-probability.
        function = function_of(loss) or loss.call
        values = function(y_true, y_pred)
    else:
        values = _call(loss, y_true, y_pred)
    masks.append(get_mask(values))
    if not isinstance(loss, FusedHeadLoss):
        _require_per_example(loss, values, y_pred.shape[0])
        values = tf.cast(values, tf.float32)

    rows = lengths(values)[0]
    elements = tf.ones([rows, *[1] * (values.shape.rank - 1)], tf.bool)
    if valid is not None:
        elements = elements & _aligned("mask of padding", valid, values)
    for mask in masks:
        if mask is not None:
            elements = elements & _aligned("mask", tf.cast(mask, tf.bool), values)
    weights = None
    if sample_weight is not None:
        weights = _aligned("sample_weight", tf.cast(sample_weight, tf.float32), values)
        if sample_weight.shape.rank < values.shape.rank:
            weights = tf.broadcast_to(weights, lengths(values))

    scored = None
    if isinstance(loss, FusedHeadLoss):
        loss_sum, scored = loss.sum(values, y_pred, elements, weights)
    else:
        weighted_values = values
        if weights is not None:
            weighted_values = values * weights
        loss_sum = tf.reduce_sum(tf.where(elements, weighted_values, 0.0))
    if weights is not None and reduction_of(loss) == "mean_with_sample_weight":
        weight_sum = tf.reduce_sum(tf.where(elements, weights, 0.0))
    else:
        weight_sum = tf.reduce_sum(tf.cast(tf.broadcast_to(elements, lengths(values)), tf.float32))
    return Term(loss_sum, weight_sum, scored)


def compute_scalar_term(
    loss: keras.losses.Loss,
    kind: str,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None,
) -> Term:
    """Computes the sums behind the value of a loss that is a scalar, or a pair of scalars.

    A mean counts by its rows: `value * rows` over `rows`. A sum is added up, and divided by
    nothing. Weights and masks scale the value of the whole batch, by a factor that the divisor gets
    once all micro-batches are counted.
    """
    returned = _call(loss, y_true, y_pred)
    rows = as_float(lengths(y_pred)[0])
    if kind == "pair":
        if sample_weight is not None:
            raise ValueError(
                f"loss {loss_name(loss)!r} returns a pair (loss_sum, weight_sum), which "
                "sample_weight and class_weight cannot weigh. Return one loss per row or token, "
                "and they weigh it; reduction='mean_with_sample_weight' divides by the sum of "
                "the weights."
            )
        loss_sum, weight_sum = returned
        return Term(_as_scalar(loss_sum), _as_scalar(weight_sum))
    value = _as_scalar(returned)
    if kind == "mean":
        value *= rows
    factor = scalar_losses.make_factor(
        reduction_of(loss), rows, sample_weight, get_mask(y_pred), loss_name(loss)
    )
    return Term(value, rows, factor=factor)


def _as_scalar(number: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(number, tf.float32), [])


def scale_by_rows(
    term: Term,
    loss: keras.losses.Loss,
    power: float,
    rows: tf.Tensor,
    micro_rows: tf.Tensor,
    valid: tf.Tensor | None,
) -> Term:
    """Makes the loss of a micro-batch, which holds `micro_rows**power`, that of the step's `rows`.

    With the reduction "sum", `power` counts the sum over rows as well. The micro-batches' losses
    are then averaged by their rows, so that the weight sum is the number of valid rows.
    """
    loss_sum = term.loss_sum * (rows / micro_rows) ** power
    weight_sum = term.weight_sum
    if loss.reduction == "sum":
        weight_sum = micro_rows
        if valid is not None:
            weight_sum = tf.reduce_sum(tf.cast(valid, tf.float32))
        loss_sum *= micro_rows
    return Term(loss_sum, weight_sum)


def _call(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> Any:
    """Calls a loss as Keras does, with tensors of its dtype."""
    y_true, y_pred = as_called(loss, y_true, y_pred)
    _require_same_shape(loss, y_true, y_pred)
    shapes = f"y of shape {tuple(y_true.shape)} and predictions of shape {tuple(y_pred.shape)}"
    with checks.naming(f"loss {loss_name(loss)!r}, called with {shapes}"):
        return loss.call(y_true, y_pred)


def _aligned(what: str, tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Adds or drops trailing axes of 1 until the rank of `tensor` is that of `values`."""
    original_shape = tensor.shape
    while tensor.shape.rank > values.shape.rank and tensor.shape[-1] == 1:
        tensor = tf.squeeze(tensor, -1)
    while tensor.shape.rank < values.shape.rank:
        tensor = tf.expand_dims(tensor, -1)
    fits = tensor.shape.rank == values.shape.rank
    for length, length_of_values in zip(tensor.shape, values.shape, strict=False):
        fits = fits and length in (1, length_of_values)
    if not fits:
        raise ValueError(
            f"A {what} of shape {original_shape} does not fit losses of shape {values.shape}, from "
            "the first axis."
        )
    return tensor


def _require_per_example(loss: keras.losses.Loss, values: tf.Tensor, rows: int | None) -> None:
    if not tf.is_tensor(values):
        returned = repr(values)
    elif not values.dtype.is_floating:
        returned = f"dtype {values.dtype.name}"
    elif values.shape.rank == 0 and rows == 1:
        raise ValueError(
            f"loss {loss_name(loss)!r} returned a single number for a micro-batch of one row, "
            "as tf.squeeze makes it, and one for each row of others. Squeeze the last axis "
            "alone (axis=-1), or pass batch_size=2 or more."
        )
    elif values.shape.rank == 0 or values.shape[0] != rows:
        returned = f"shape {tuple(values.shape)} for {rows} examples"
    else:
        return
    raise ValueError(not_per_example(loss, returned))


# Keras's other losses compare target and prediction element by element, and would broadcast one to
# the other.
_TAKE_CLASS_INDICES = (
    "sparse_categorical_crossentropy",
    "categorical_generalized_cross_entropy",
    "ctc",
    "circle",
)


def _require_same_shape(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    function = function_of(loss)
    _, _, name = known_name(function).partition(".")
    if not of_keras(function):
        return
    target_shape = tuple(y_true.shape)
    output_shape = tuple(y_pred.shape)
    if name in _TAKE_CLASS_INDICES:
        has_classes = len(output_shape) > 1 and output_shape[-1] != 1
        is_sparse = name == "sparse_categorical_crossentropy"
        if is_sparse and has_classes and target_shape == output_shape:
            raise ValueError(
                f"y and the predictions both have shape {output_shape} (rows first), but loss "
                f"{loss_name(loss)!r} takes class indices, without the axis of classes: for "
                "one-hot targets, use 'categorical_crossentropy'."
            )
        return

    short, long = sorted([target_shape, output_shape], key=len)
    if short == long or (*short, 1) == long:
        return
    hint = ""
    if "categorical" in name and (len(target_shape) < len(output_shape) or target_shape[-1] == 1):
        hint = " for class indices, use 'sparse_categorical_crossentropy';"
    raise ValueError(
        f"y has shape {target_shape} and the predictions have {output_shape} (rows first), which "
        f"loss {loss_name(loss)!r} compares element by element:{hint} give the model's last "
        "layer as many units as y has columns, or reshape y."
    )
