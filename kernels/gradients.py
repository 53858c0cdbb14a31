"""Gradients of many micro-batches as one: accumulate, then norm, finite check, unscale and clip in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.device import has_gpu


class Reduced(NamedTuple):
    """What one pass over the accumulators yields: scalars."""

    norm: tf.Tensor  # float32, the global norm of the unscaled gradient, before clipping
    finite: tf.Tensor  # bool, whether every element of every gradient is finite
    factor: tf.Tensor  # float32, turns an accumulator into the final gradient


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """float64 for float64 variables, float32 for every other floating dtype."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def zeros(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """One accumulator per variable: zeros of its shape, in float32 (float64 for float64 variables)."""
    return [tf.zeros(v.shape, accumulator_dtype(v.dtype)) for v in variables]


def accumulate(accumulator: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """`accumulator + cast(gradient, accumulator.dtype)`, rows scattered where the gradient is sparse.

    An `IndexedSlices` costs O(rows it holds), not O(rows of the table). Repeated indices add up.

    >>> accumulator = tf.zeros([3, 1])
    >>> rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    >>> accumulate(accumulator, rows).numpy().ravel().tolist()
    [0.0, 0.0, 3.0]
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, accumulator.dtype)
        return tf.tensor_scatter_nd_add(accumulator, gradient.indices[:, tf.newaxis], values)
    return accumulator + tf.cast(gradient, accumulator.dtype)


def _sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    squares = tf.square(x)
    if x.shape.rank > 1 and not has_gpu():
        # XLA:CPU may not reorder a float sum, so its reductions are scalar chains; a product with ones is not.
        columns = x.shape[-1]
        squares = tf.linalg.matvec(tf.reshape(squares, [-1, columns]), tf.ones([columns], x.dtype))
    return tf.cast(tf.reduce_sum(squares), tf.float32)


def reduce(accumulators: Sequence[tf.Tensor], denominator: tf.Tensor, clip_norm: float | None = None) -> Reduced:
    """Norm, finite check and the one factor that unscales and clips, in a single read of the accumulators.

    With `g = accumulator / denominator` for every accumulator, and `norm = sqrt(sum(sum(g ** 2)))`:

        finite = all(isfinite(g))                    # inf and NaN survive summation into the norm
        factor = 1 / denominator                     # clip_norm is None
        factor = clip_norm / max(norm, clip_norm) / denominator

    so that `accumulator * factor` equals `tf.clip_by_global_norm(g, clip_norm)`. Nothing is written: the
    caller multiplies inside the optimizer's own pass, which XLA fuses. The denominator is the loss scale times the
    weight sum, a float32 scalar; 0 gives factor 0.

    >>> reduced = reduce([tf.constant([6.0, 8.0])], denominator=tf.constant(2.0), clip_norm=1.0)
    >>> float(reduced.norm), bool(reduced.finite), round(float(reduced.factor), 6)
    (5.0, True, 0.1)
    """
    unscale = tf.math.reciprocal_no_nan(denominator)
    # Unscaled before it is squared: at a loss scale of 2**24 the squares would overflow float32.
    norm = tf.sqrt(tf.add_n([_sum_of_squares(a * tf.cast(unscale, a.dtype)) for a in accumulators]))
    factor = unscale
    if clip_norm is not None:
        factor *= clip_norm / tf.maximum(norm, clip_norm)
    return Reduced(norm=norm, finite=tf.math.is_finite(norm), factor=factor)
