"""Class weights, as factors of the sample weights."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def weigh(class_weight: dict[int, float], sparse_labels: bool, y: Any, sample_weight: Any) -> tf.Tensor:
    """The sample weights times the factors of the classes in `y`; 1 for a class that has none.

    Args:
        class_weight: a factor for each class.
        sparse_labels: whether `y` holds class indices even if it has more than one axis.
        y: class indices, or one-hot classes.
        sample_weight: for each row or token; None for 1.
    """
    if tf.nest.is_nested(y):
        raise ValueError(f"class_weight={class_weight} needs a single output, but y holds several.")
    labels = y
    if not sparse_labels and y.shape.rank > 1:
        if y.shape[-1] not in (None, 1) and max(class_weight) >= y.shape[-1]:
            raise ValueError(
                f"class_weight={class_weight} names class {max(class_weight)}, but y has {y.shape[-1]} classes, "
                f"from 0 to {y.shape[-1] - 1}."
            )
        labels = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)
    matches = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)[..., tf.newaxis] == classes
    factor = tf.where(tf.reduce_any(matches, -1), tf.reduce_sum(tf.cast(matches, tf.float32) * factors, -1), 1.0)
    if sample_weight is None:
        return factor
    weight = tf.cast(sample_weight, tf.float32)
    while weight.shape.rank < factor.shape.rank:
        weight = weight[..., tf.newaxis]
    while factor.shape.rank < weight.shape.rank:
        factor = factor[..., tf.newaxis]
    return weight * factor
