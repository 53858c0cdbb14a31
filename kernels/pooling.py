"""Max pooling over windows that do not overlap, in plain arithmetic: XLA:CPU runs the general form as scalar code."""

from __future__ import annotations

import functools
import itertools

import tensorflow as tf


def max_pool2d(x: tf.Tensor, pool_size: tuple[int, int]) -> tf.Tensor:
    """`tf.nn.max_pool2d(x, pool_size, pool_size, "VALID")`, as the maximum of the windows' corners, one by one.

    The gradient goes to the first of equal maxima, as TensorFlow's does. x's height and width are known.

    >>> x = tf.reshape([1.0, 2.0, 4.0, 4.0], [1, 2, 2, 1])
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = max_pool2d(x, (2, 2))
    >>> y.numpy().item(), tape.gradient(y, x).numpy().ravel().tolist()
    (4.0, [0.0, 0.0, 1.0, 0.0])
    """
    rows, columns = pool_size
    height, width = (size // window * window for size, window in zip(x.shape[1:3], pool_size, strict=True))

    @tf.custom_gradient
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
