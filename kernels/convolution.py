"""2-D convolution whose gradients are plain convolutions, the only kind that XLA:CPU runs fast inside a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tensorflow as tf


def conv2d(
    x: tf.Tensor, kernel: tf.Tensor, strides: tuple[int, int] = (1, 1), padding: Literal["same", "valid"] = "same"
) -> tf.Tensor:
    """`tf.nn.conv2d(x, kernel, strides, padding.upper())`, with gradients written as forward convolutions.

    XLA:CPU turns the gradients of a convolution into its fast library call only outside loops; inside a
    `tf.while_loop` they run as scalar code. With the kernel reversed in space (`r`), inputs padded by `p` and
    output gradients spread by the strides (`spread`), both gradients are what a forward convolution computes:

        dx = conv(spread(dy), r(kernel) with its channels swapped)
        dkernel = conv(x with batch and channels swapped, spread(dy) as the kernel)

    x is [batch, height, width, channels], of known height and width.

    >>> x, kernel = tf.ones([1, 4, 4, 1]), tf.ones([3, 3, 1, 1])
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(kernel)
    ...     y = conv2d(x, kernel, padding="valid")
    >>> tape.gradient(y, kernel)[0, 0, 0, 0].numpy().item()
    4.0
    """

    @tf.custom_gradient
    def convolve(x, kernel):
        y = tf.nn.conv2d(x, kernel, list(strides), padding.upper())
        pads = []  # before and after each spatial axis; less than none where no output has seen the last rows
        for size, taps, out, stride in zip(x.shape[1:3], kernel.shape[:2], y.shape[1:3], strides, strict=True):
            total = (out - 1) * stride + taps - size
            before = max(total, 0) // 2 if padding == "same" else 0
            pads.append((before, total - before))

        def gradient(dy):
            dy = _spread(dy, strides)
            swapped = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
            rest = [[taps - 1 - pad for pad in pair] for taps, pair in zip(kernel.shape[:2], pads, strict=True)]
            dx = _unit_stride(dy, swapped, rest)
            dkernel = _unit_stride(tf.transpose(x, [3, 1, 2, 0]), tf.transpose(dy, [1, 2, 0, 3]), pads)
            return dx, tf.transpose(dkernel, [1, 2, 0, 3])

        return y, gradient

    return convolve(x, kernel)


def _spread(dy: tf.Tensor, strides: tuple[int, int]) -> tf.Tensor:
    """`dy` with stride - 1 zeros between neighbours."""
    (rows, columns), (_, height, width, channels) = strides, dy.shape
    dy = tf.pad(dy[:, :, None, :, None], [[0, 0], [0, 0], [0, rows - 1], [0, 0], [0, columns - 1], [0, 0]])
    dy = tf.reshape(dy, [-1, height * rows, width * columns, channels])
    return dy[:, : height * rows - rows + 1, : width * columns - columns + 1]


def _unit_stride(x: tf.Tensor, kernel: tf.Tensor, pads: Sequence[Sequence[int]]) -> tf.Tensor:
    """A convolution with stride 1; a negative pad at the end leaves rows out."""
    height, width = (size + min(after, 0) for size, (_, after) in zip(x.shape[1:3], pads, strict=True))
    inside = [[before, max(after, 0)] for before, after in pads]
    return tf.nn.conv2d(x[:, :height, :width], kernel, 1, [[0, 0], *inside, [0, 0]])
