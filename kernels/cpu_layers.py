"""Convolutions, max pooling and batch normalisation as XLA:CPU runs them fast inside a loop.

There it runs the gradients of a convolution, a window's maximum and a sum over rows as scalar code.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.gradients import accumulator_dtype

# The most terms that a product adds up one after the other: its rounding error grows with their number.
_MOST_TERMS = 4096
# The fewest elements that XLA sums up by vectors.
_FEWEST_OF_VECTORS = 32 * 1024

Sizes = Sequence[int]  # of height and width
Pads = list[tuple[int, int]]  # before and after each of them


def conv2d(
    x: tf.Tensor, kernel: tf.Tensor, strides: tuple[int, int] = (1, 1), padding: Literal["same", "valid"] = "same"
) -> tf.Tensor:
    """Computes `tf.nn.conv2d(x, kernel, strides, padding.upper())`, with gradients written as forward convolutions.

    With dy spread by the strides and the kernel reversed in space (x's height and width are known):

        dx = conv(spread(dy), reversed(kernel) with its channels swapped)
        dkernel = conv(x with batch and channels swapped, spread(dy) as the kernel)
    """

    @custom_gradient
    def convolve(x, kernel):
        y = tf.nn.conv2d(x, kernel, strides, padding.upper())
        pads = _find_pads(x.shape[1:3], kernel.shape[:2], y.shape[1:3], strides, padding)

        def gradient(dy):
            dy = _dilate(dy, strides)
            return _grad_input(dy, kernel, pads), _grad_kernel(x, dy, pads)

        return y, gradient

    return convolve(x, kernel)


def conv2d_transpose(
    x: tf.Tensor, kernel: tf.Tensor, size: Sizes, strides: tuple[int, int], padding: Literal["same", "valid"]
) -> tf.Tensor:
    """Computes `tf.nn.conv2d_transpose` to an output of height and width `size`, as `conv2d` computes its dx."""

    @custom_gradient
    def convolve(x, kernel):
        pads = _find_pads(size, kernel.shape[:2], x.shape[1:3], strides, padding)

        def gradient(dy):
            return tf.nn.conv2d(dy, kernel, strides, padding.upper()), _grad_kernel(dy, _dilate(x, strides), pads)

        return _grad_input(_dilate(x, strides), kernel, pads), gradient

    return convolve(x, kernel)


def depthwise_conv2d(
    x: tf.Tensor, kernel: tf.Tensor, strides: tuple[int, int], padding: Literal["same", "valid"]
) -> tf.Tensor:
    """Computes `tf.nn.depthwise_conv2d(x, kernel, [1, *strides, 1], padding.upper())` and its gradients as sums over
    windows.

    They are float32 for a half-precision x, whose height and width are known.
    """
    taps, multiplier, wide = kernel.shape[:2], kernel.shape[3], accumulator_dtype(x.dtype)
    valid = [tap - 1 if padding == "valid" else 0 for tap in taps]
    out = [-((lost - size) // stride) for size, lost, stride in zip(x.shape[1:3], valid, strides, strict=True)]
    pads = _find_pads(x.shape[1:3], taps, out, strides, padding)
    # XLA sums up a product term by term, but the sum of its parts by vectors.
    axis, size = (1 if out[0] > 1 else 2), (x.shape[0] or 1) * math.prod(out) * kernel.shape[2] * multiplier
    fitting = [n for n in range(2, 9) if out[axis - 1] % n == 0 and size // n >= _FEWEST_OF_VECTORS]
    parts = max(fitting, default=1)

    @custom_gradient
    def convolve(x, kernel):
        def gradient(dy):
            products = [tf.split(window * dy, parts, axis) for window in _cut_windows(x, pads, taps, strides)]
            dkernel = tf.stack([tf.reduce_sum(functools.reduce(tf.add, each), [0, 1, 2]) for each in products])
            windows = _cut_windows(_dilate(dy, strides), _flip_pads(taps, pads), taps, (1, 1))
            return _add_windows(windows, tf.reverse(kernel, [0, 1])), tf.reshape(dkernel, kernel.shape)

        return _add_windows(_cut_windows(x, pads, taps, strides), kernel), gradient

    repeated = tf.repeat(tf.cast(x, wide), multiplier, axis=-1) if multiplier > 1 else tf.cast(x, wide)
    return tf.cast(convolve(repeated, tf.reshape(tf.cast(kernel, wide), [*taps, -1])), x.dtype)


def _cut_windows(x: tf.Tensor, pads: Pads, taps: Sizes, strides: Sizes) -> list[tf.Tensor]:
    """Returns, for each element of a kernel, the part of x that the element is multiplied with."""
    x = tf.pad(*_crop(x, pads))
    (rows, columns), (height, width) = strides, (size - tap + 1 for size, tap in zip(x.shape[1:3], taps, strict=True))
    corners = itertools.product(*map(range, taps))
    return [x[:, i : i + height : rows, j : j + width : columns] for i, j in corners]


def _add_windows(windows: list[tf.Tensor], kernel: tf.Tensor) -> tf.Tensor:
    weights = tf.unstack(tf.reshape(kernel, [len(windows), -1]))
    return functools.reduce(tf.add, map(tf.multiply, windows, weights))


def _find_pads(sizes: Sizes, taps: Sizes, out: Sizes, strides: Sizes, padding: str) -> Pads:
    """Returns the padding before and after each spatial axis, negative after an axis whose last rows no output sees."""
    pads = []
    for size, tap, outs, stride in zip(sizes, taps, out, strides, strict=True):
        total = (outs - 1) * stride + tap - size
        before = max(total, 0) // 2 if padding == "same" else 0
        pads.append((before, total - before))
    return pads


def _flip_pads(taps: Sizes, pads: Pads) -> Pads:
    """Returns the pads of the convolution that computes the input's gradient."""
    return [(tap - 1 - before, tap - 1 - after) for tap, (before, after) in zip(taps, pads, strict=True)]


def _grad_input(dy: tf.Tensor, kernel: tf.Tensor, pads: Pads) -> tf.Tensor:
    swapped = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
    return _convolve(dy, swapped, _flip_pads(kernel.shape[:2], pads))


def _grad_kernel(x: tf.Tensor, dy: tf.Tensor, pads: Pads) -> tf.Tensor:
    dkernel = _convolve(tf.transpose(x, [3, 1, 2, 0]), tf.transpose(dy, [1, 2, 0, 3]), pads)
    return tf.transpose(dkernel, [1, 2, 0, 3])


def _dilate(dy: tf.Tensor, strides: tuple[int, int]) -> tf.Tensor:
    """Puts stride - 1 zeros between neighbours of `dy`."""
    (rows, columns), (_, height, width, channels) = strides, dy.shape
    dy = tf.pad(dy[:, :, None, :, None], [[0, 0], [0, 0], [0, rows - 1], [0, 0], [0, columns - 1], [0, 0]])
    dy = tf.reshape(dy, [-1, height * rows, width * columns, channels])
    return dy[:, : height * rows - rows + 1, : width * columns - columns + 1]


def _convolve(x: tf.Tensor, kernel: tf.Tensor, pads: Pads) -> tf.Tensor:
    """Convolves with stride 1; a negative pad at the end leaves rows out."""
    x, inside = _crop(x, pads)
    return tf.nn.conv2d(x, kernel, 1, inside)


def _crop(x: tf.Tensor, pads: Pads) -> tuple[tf.Tensor, list[list[int]]]:
    """Returns x without the rows that a negative pad leaves out, and the remaining pads of all axes."""
    height, width = (size + min(after, 0) for size, (_, after) in zip(x.shape[1:3], pads, strict=True))
    return x[:, :height, :width], [[0, 0], *([before, max(after, 0)] for before, after in pads), [0, 0]]


def max_pool2d(x: tf.Tensor, pool_size: tuple[int, int]) -> tf.Tensor:
    """Computes `tf.nn.max_pool2d(x, pool_size, pool_size, "VALID")` as the maximum of the windows' corners, one by one.

    The gradient goes to the first of equal maxima, as TensorFlow's does. x's height and width are known.
    """
    rows, columns = pool_size
    height, width = (size // window * window for size, window in zip(x.shape[1:3], pool_size, strict=True))

    @custom_gradient
    def pool(x):
        corners = [x[:, i:height:rows, j:width:columns] for i, j in itertools.product(range(rows), range(columns))]
        y = functools.reduce(tf.maximum, corners)

        def gradient(dy):
            parts, free = [], tf.ones_like(y, tf.bool)
            for corner in corners:
                hit = free & (corner == y)
                free &= ~hit
                parts.append(tf.where(hit, dy, tf.zeros_like(dy)))
            by_row = [tf.stack(parts[i : i + columns], axis=3) for i in range(0, len(parts), columns)]
            dx = tf.reshape(tf.stack(by_row, axis=2), [-1, height, width, x.shape[3]])
            return tf.pad(dx, [[0, 0], [0, x.shape[1] - height], [0, x.shape[2] - width], [0, 0]])

        return y, gradient

    return pool(x)


def batch_norm(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalises every channel by its mean and variance over all rows of the batch.

    Ioffe and Szegedy, 2015 (https://arxiv.org/abs/1502.03167), with the gradient in closed form:

        mean, variance = tf.nn.moments(x, all axes but the last)
        y = scale * (x - mean) * rsqrt(variance + epsilon) + offset

    x is [..., channels], float32 or float64; mean and variance, [channels], are constants to autodiff. Shape suffixes:
    M rows, C channels.
    """

    @custom_gradient
    def normalise(x_MC, scale_C, offset_C):
        rows = tf.cast(tf.shape(x_MC)[0], x_MC.dtype)

        def moments():
            mean_C = _sum_rows(x_MC) / rows
            return mean_C, _sum_rows(tf.square(x_MC - mean_C)) / rows

        def gradient(dy_MC, *_):
            # Once more, from x, for whoever differentiates this gradient; XLA merges the two.
            mean_C, variance_C = moments()
            inverse_C = tf.math.rsqrt(variance_C + epsilon)
            normal_MC = (x_MC - mean_C) * inverse_C
            doffset_C, dscale_C = _sum_rows(dy_MC), _sum_rows(dy_MC * normal_MC)
            dx_MC = scale_C * inverse_C * (dy_MC - (doffset_C + normal_MC * dscale_C) / rows)
            return dx_MC, dscale_C, doffset_C

        mean_C, variance_C = moments()
        inverse_C = tf.math.rsqrt(variance_C + epsilon)
        return ((x_MC - mean_C) * (inverse_C * scale_C) + offset_C, mean_C, variance_C), gradient

    y, mean, variance = normalise(tf.reshape(x, [-1, x.shape[-1]]), scale, offset)
    return tf.ensure_shape(tf.reshape(y, tf.shape(x)), x.shape), mean, variance


def _sum_rows(t_MC: tf.Tensor) -> tf.Tensor:
    """Computes `tf.reduce_sum(t_MC, 0)` as products with ones, in two levels."""
    rows, channels = t_MC.shape
    parts = max((n for n in range(1, math.isqrt(rows or 0) + 1) if rows % n == 0), default=0)
    if not parts or rows // parts > _MOST_TERMS:
        return tf.reduce_sum(t_MC, 0)
    sums = t_MC
    for terms in (rows // parts, parts):
        sums = tf.linalg.matvec(tf.reshape(sums, [terms, -1]), tf.ones([terms], t_MC.dtype), transpose_a=True)
    return tf.reshape(sums, [channels])
