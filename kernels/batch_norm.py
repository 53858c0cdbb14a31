"""Batch normalisation whose sums over rows are matrix products: XLA:CPU adds rows up one scalar after the other."""

from __future__ import annotations

import math

import tensorflow as tf

_MOST_TERMS = 4096


def batch_norm(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalises every channel by its mean and variance over all rows of the batch.

    Ioffe and Szegedy, 2015 (https://arxiv.org/abs/1502.03167), with the gradient in closed form. With m rows:

        mean, variance = tf.nn.moments(x, all axes but the last)
        normal = (x - mean) * rsqrt(variance + epsilon)
        y = scale * normal + offset

        doffset, dscale = sum(dy), sum(dy * normal)
        dx = scale * rsqrt(variance + epsilon) * (dy - doffset / m - normal * dscale / m)

    x is [..., channels], float32 or float64; mean and variance, [channels], are constants to autodiff. Shape suffixes:
    M rows, C channels.

    >>> y, mean, variance = batch_norm(tf.constant([[1.0], [3.0]]), tf.constant([2.0]), tf.constant([5.0]), 0.0)
    >>> y.numpy().ravel().tolist(), mean.numpy().item(), variance.numpy().item()
    ([3.0, 7.0], 2.0, 1.0)
    """

    @tf.custom_gradient
    def normalise(x_MC, scale_C, offset_C):
        rows = tf.cast(tf.shape(x_MC)[0], x_MC.dtype)

        def moments():
            mean_C = _sum_of_rows(x_MC) / rows
            return mean_C, _sum_of_rows(tf.square(x_MC - mean_C)) / rows

        def gradient(dy_MC, *_):
            # Once more, from x, for whoever differentiates this gradient; XLA merges the two.
            mean_C, variance_C = moments()
            inverse_C = tf.math.rsqrt(variance_C + epsilon)
            normal_MC = (x_MC - mean_C) * inverse_C
            doffset_C, dscale_C = _sum_of_rows(dy_MC), _sum_of_rows(dy_MC * normal_MC)
            dx_MC = scale_C * inverse_C * (dy_MC - (doffset_C + normal_MC * dscale_C) / rows)
            return dx_MC, dscale_C, doffset_C

        mean_C, variance_C = moments()
        inverse_C = tf.math.rsqrt(variance_C + epsilon)
        return ((x_MC - mean_C) * (inverse_C * scale_C) + offset_C, mean_C, variance_C), gradient

    y, mean, variance = normalise(tf.reshape(x, [-1, x.shape[-1]]), scale, offset)
    return tf.ensure_shape(tf.reshape(y, tf.shape(x)), x.shape), mean, variance


def _sum_of_rows(t_MC: tf.Tensor) -> tf.Tensor:
    """`tf.reduce_sum(t_MC, 0)`, as products with ones.

    In two levels: a product adds its terms one after the other, so that its rounding error grows with their number.
    """
    rows, channels = t_MC.shape
    parts = max((n for n in range(1, math.isqrt(rows or 0) + 1) if rows % n == 0), default=0)
    if not parts or rows // parts > _MOST_TERMS:
        return tf.reduce_sum(t_MC, 0)
    sums = t_MC
    for terms in (rows // parts, parts):
        sums = tf.linalg.matvec(tf.reshape(sums, [terms, -1]), tf.ones([terms], t_MC.dtype), transpose_a=True)
    return tf.reshape(sums, [channels])
