"""Losses that a forward pass adds, by `add_loss` or activity regularisers.

An activity regulariser returns a sum over rows. Keras divides it by the rows from 3.14 on; before,
it stays a sum, and is marked as one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras

# Whether Keras divides what an activity regulariser returns, which sums over rows, by their number.
_DIVIDES_BY_ROWS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)


def require_sum_over_rows(layer: keras.layers.Layer) -> None:
    """Raises ValueError if a user's activity regulariser is a mean over rows: Keras takes a sum."""
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is None or of_keras(type(regularizer)):
        return
    is_mean = "tensorflow_probability.KLDivergenceRegularizer" in kinds(regularizer)
    with contextlib.suppress(Exception):  # it may take other shapes, or a distribution
        of_one_row = float(regularizer(tf.fill([1, 4], 0.5)))
        of_two_rows = float(regularizer(tf.fill([2, 4], 0.5)))
        if of_one_row == of_two_rows != 0.0:
            is_mean = True
    if is_mean:
        name = getattr(regularizer, "__name__", type(regularizer).__name__)
        strength = ""
        if _DIVIDES_BY_ROWS:
            strength = "; divided by the rows of an update it is as strong as in Keras"
        raise ValueError(
            f"The activity_regularizer {name} of layer {layer.name!r} is a mean over rows where "
            "Keras takes a sum: its strength would depend on the micro-batch's size. Let it "
            "return a sum over rows, or add the mean in a layer by add_loss, as "
            f"tensorflow-probability's KLDivergenceAddLoss does{strength}."
        )


def get_reduction(added_loss: tf.Tensor) -> str:
    """Returns "mean" for a scalar, and "sum" for a loss per row, as Keras reduces added losses."""
    if len(added_loss.shape) or getattr(added_loss, "sums_rows", False):
        return "sum"
    return "mean"


def mark_regularizers(
    layers: list[keras.layers.Layer],
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """Returns attributes to replace, (layer, name, value), so that regularisers' sums are marked.

    `get_reduction` reads the mark. Keras that divides by the rows itself needs none.
    """
    if _DIVIDES_BY_ROWS:
        return []

    def marked(regularizer, output):
        loss = regularizer(output)
        loss.sums_rows = True
        return loss

    replacements: list[tuple[keras.layers.Layer, str, Callable]] = []
    for layer in layers:
        regularizer = layer.activity_regularizer
        if regularizer is not None:
            marking = functools.partial(marked, regularizer)
            replacements.append((layer, "activity_regularizer", marking))
    return replacements
