"""2-D convolution whose gradients are plain convolutions, the only kind that XLA:CPU runs fast inside a loop."""

from __future__ import annotations

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
        axes = [
            _Axis(size, filter_size, out, stride, padding)
            for size, filter_size, out, stride in zip(
                x.shape[1:3], kernel.shape[:2], y.shape[1:3], strides, strict=True
            )
        ]

        def gradient(dy):
            spread = _spread(dy, strides)
            swapped = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
            dx = _unit_stride(
                spread, swapped, [(a.filter_size - 1 - a.before, a.size - a.spread + a.before) for a in axes]
            )
            by_channel = tf.transpose(x, [3, 1, 2, 0])
            pads = [(a.before, a.filter_size + a.spread - 1 - a.size - a.before) for a in axes]
            dkernel = _unit_stride(by_channel, tf.transpose(spread, [1, 2, 0, 3]), pads)
            return dx, tf.transpose(dkernel, [1, 2, 0, 3])

        return y, gradient

    return convolve(x, kernel)


class _Axis:
    """The sizes along one spatial axis: `before` rows of padding, and the output's extent once spread."""

    def __init__(self, size: int, filter_size: int, out: int, stride: int, padding: str):
        self.size, self.filter_size = size, filter_size
        self.spread = (out - 1) * stride + 1
        total = max(self.spread + filter_size - 1 - size, 0) if padding == "same" else 0
        self.before = total // 2


def _spread(dy: tf.Tensor, strides: tuple[int, int]) -> tf.Tensor:
    """`dy` with stride - 1 zeros between neighbours."""
    for axis, stride in zip((1, 2), strides, strict=True):
        if stride > 1:
            extent = (dy.shape[axis] - 1) * stride + 1
            dy = tf.expand_dims(dy, axis + 1)
            dy = tf.pad(dy, [[0, stride - 1 if i == axis + 1 else 0] for i in range(5)])
            shape = [*dy.shape[:axis], dy.shape[axis] * stride, *dy.shape[axis + 2 :]]
            dy = tf.gather(tf.reshape(dy, [-1 if s is None else s for s in shape]), tf.range(extent), axis=axis)
    return dy


def _unit_stride(x: tf.Tensor, kernel: tf.Tensor, pads: list[tuple[int, int]]) -> tf.Tensor:
    """A convolution with stride 1; a negative pad at the end leaves rows out that no output has seen."""
    for axis, (_, after) in zip((1, 2), pads, strict=True):
        if after < 0:
            x = x[:, :after] if axis == 1 else x[:, :, :after]
    return tf.nn.conv2d(x, kernel, 1, [[0, 0], *([b, max(a, 0)] for b, a in pads), [0, 0]])
