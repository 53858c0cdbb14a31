"""Batch normalisation whose sums over rows are matrix products, which XLA:CPU runs many times as fast as reductions."""

from __future__ import annotations

import tensorflow as tf


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

    Args:
        x: [..., channels], float32 or float64, of known channels.
        scale, offset: [channels], x's dtype.
        epsilon: added to the variance.

    Returns:
        y of x's shape, and mean and variance, [channels], which are constants to autodiff.

    >>> y, mean, variance = batch_norm(tf.constant([[1.0], [3.0]]), tf.constant([2.0]), tf.constant([5.0]), 0.0)
    >>> y.numpy().ravel().tolist(), mean.numpy().item(), variance.numpy().item()
    ([3.0, 7.0], 2.0, 1.0)
    """
    shape, channels = tf.shape(x), x.shape[-1]
    # Shape suffixes: M rows, C channels.
    x_MC = tf.reshape(x, [-1, channels])
    ones_M = tf.ones_like(x_MC[:, 0])
    rows = tf.reduce_sum(ones_M)

    def sums(t_MC):
        return tf.linalg.matvec(t_MC, ones_M, transpose_a=True)

    mean_C = tf.stop_gradient(sums(x_MC) / rows)
    variance_C = tf.stop_gradient(sums(tf.square(x_MC - mean_C)) / rows)
    inverse_C = tf.math.rsqrt(variance_C + epsilon)

    @tf.custom_gradient
    def normalise(x_MC, scale_C, offset_C):
        def gradient(dy_MC):
            normal_MC = (x_MC - mean_C) * inverse_C
            doffset_C, dscale_C = sums(dy_MC), sums(dy_MC * normal_MC)
            dx_MC = scale_C * inverse_C * (dy_MC - (doffset_C + normal_MC * dscale_C) / rows)
            return dx_MC, dscale_C, doffset_C

        return (x_MC - mean_C) * (inverse_C * scale_C) + offset_C, gradient

    y = normalise(x_MC, scale, offset)
    return tf.ensure_shape(tf.reshape(y, shape), x.shape), mean_C, variance_C
