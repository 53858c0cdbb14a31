"""Class labels and ids as whole numbers."""

from __future__ import annotations

import tensorflow as tf

NOT_WHOLE = tf.int64.min


def whole(indices: tf.Tensor) -> tf.Tensor:
    """As int64, with fractions and NaN, which a cast would make some index, as `NOT_WHOLE`."""
    as_int = tf.cast(indices, tf.int64)
    if not indices.dtype.is_floating:
        return as_int
    return tf.where(tf.cast(as_int, indices.dtype) == indices, as_int, NOT_WHOLE)
