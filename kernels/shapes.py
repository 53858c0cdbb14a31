"""Shapes of tensors in traces that leave some lengths open."""

from __future__ import annotations

import tensorflow as tf


def lengths(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Lists the lengths of a tensor's axes.

    A length is a number where the trace knows it, and an int32 scalar elsewhere.
    """
    if tensor.shape.is_fully_defined():
        return list(tensor.shape)
    computed = tf.unstack(tf.shape(tensor), tensor.shape.rank)
    axes = []
    for static_length, computed_length in zip(tensor.shape, computed, strict=True):
        axes.append(computed_length if static_length is None else static_length)
    return axes


def as_float(number: int | tf.Tensor) -> tf.Tensor:
    """Returns a length as a float32 scalar."""
    return tf.cast(number, tf.float32)
