"""Losses that a forward pass adds, `add_loss` and activity regularisers: over rows a mean, or a
sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras

# Whether Keras divides what an activity regulariser returns, which sums over rows, by their number.
_DIVIDES_BY_ROWS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)


def require_sum_over_rows(layer: keras.layers.Layer) -> None:
    """Raises ValueError if a user's activity regulariser is a mean over rows, where Keras divides a
    sum itself.
    """
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is None or of_keras(type(regularizer)):
        return
    try:
        one, two = (float(regularizer(tf.fill([rows, 4], 0.5))) for rows in (1, 2))
    except Exception:  # it takes other shapes, or a distribution
        one, two = 0.0, 1.0
    if one == two != 0.0 or "tensorflow_probability.KLDivergenceRegularizer" in kinds(regularizer):
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
    """Returns how an added loss counts, as in Keras: a scalar is the mean of the rows, one loss per
    row is summed.
    """
    return "sum" if len(added_loss.shape) or getattr(added_loss, "sums_rows", False) else "mean"


def mark_regularizers(
    layers: list[keras.layers.Layer],
) -> list[tuple[keras.layers.Layer, str, Callable]]:
    """Returns attributes to replace, (layer, name, value), by which `reduction` knows the sums of
    regularisers.
    """

    def marked(regularizer, output):
        loss = regularizer(output)
        loss.sums_rows = True
        return loss

    own = [] if _DIVIDES_BY_ROWS else [(each, each.activity_regularizer) for each in layers]
    return [
        (each, "activity_regularizer", functools.partial(marked, of))
        for each, of in own
        if of is not None
    ]
