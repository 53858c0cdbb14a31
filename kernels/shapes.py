"""Shapes of tensors in traces that leave some lengths open."""

from __future__ import annotations

import tensorflow as tf


def lengths(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Lists the lengths of a tensor's axes: numbers where they are known in a trace, int32 scalars
    elsewhere.
    """
    if tensor.shape.is_fully_defined():
        return list(tensor.shape)
    computed = tf.unstack(tf.shape(tensor), tensor.shape.rank)
    return [
        given if known is None else known
        for known, given in zip(tensor.shape, computed, strict=True)
    ]


def as_float(number: int | tf.Tensor) -> tf.Tensor:
    """Returns a length as a float32 scalar."""
    return tf.cast(number, tf.float32)
