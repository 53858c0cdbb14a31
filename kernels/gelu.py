"""The tanh form of GELU, which keeps nothing but its input."""

from __future__ import annotations

import math

import tensorflow as tf

from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.gradients import accumulator_dtype


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Computes `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))` (Hendrycks and Gimpel, 2016,
    https://arxiv.org/abs/1606.08415), on a GPU in float32 and rounded once.

    x is of any floating dtype, and the result of the same. On a GPU its gradient is computed from x alone.

    >>> gelu(tf.constant([-1.0, 0.0, 1.0])).numpy().round(4).tolist()
    [-0.1588, 0.0, 0.8412]
    """
    if not has_gpu():  # for a CPU, an exponential costs more than the memory that it saves
        return tf.nn.gelu(x, approximate=True)
    wide = accumulator_dtype(x.dtype)

    @custom_gradient
    def activate(x):
        def gradient(dy):
            t = tf.cast(x, wide)
            # As a sigmoid: XLA would merge a second tanh with the first, and keep it in float32.
            part = tf.sigmoid(2 * _inner(t))
            slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * tf.square(t))
            return tf.cast(tf.cast(dy, wide) * part * (1 + t * (1 - part) * slope), x.dtype)

        t = tf.cast(x, wide)
        return tf.cast(0.5 * t * (1 + tf.tanh(_inner(t))), x.dtype), gradient

    return activate(x)


def _inner(t):
    return math.sqrt(2 / math.pi) * t * (1 + 0.044715 * tf.square(t))
