"""Layer norm, RMS norm, batch norm and GELU, with gradients that keep little of the forward pass.

Shape suffixes: M rows, of which there may be several axes, and D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.origins import known_name
from fastaccum.kernels.xla_ops import HALF, in_xla, unfused

_GELUS = ("keras.gelu", "keras_hub.gelu_approximate")


def layer_norm(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, *, epsilon: float
) -> tf.Tensor:
    """Subtracts each row's mean and divides by its standard deviation.

    This is the layer norm of https://arxiv.org/abs/1607.06450, computed in float32 (float64 for
    float64) and rounded to x's dtype:

        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        y = (x - mean) * rsqrt(variance + epsilon) * scale + offset

    x is [..., D], of a floating dtype; scale and offset, [D], are float32 (float64 with x), and so
    are their gradients.
    """
    return _norm(x, scale, offset, epsilon, centred=True)


def rms_norm(x: tf.Tensor, scale: tf.Tensor | None = None, *, epsilon: float) -> tf.Tensor:
    """Divides each row by its root mean square.

    This is the norm of Zhang and Sennrich (2019, https://arxiv.org/abs/1910.07467):

        y = x * rsqrt(mean(x**2, -1, keepdims=True) + epsilon) * scale

    Shapes, dtypes and rounding are those of `layer_norm`.
    """
    return _norm(x, scale, None, epsilon, centred=False)


def _norm(x, scale, offset, epsilon, centred):
    wide = accumulator_dtype(x.dtype)
    width = [x.shape[-1]]
    # On a GPU the moments of half-precision values take one pass: variance = mean(x**2) - mean**2.
    # That difference cancels where the mean is large beside the spread. bfloat16 has lost such
    # values before, by its own rounding; float16 has not, so each row's first value is subtracted.
    one_pass = x.dtype in HALF and has_gpu()

    @custom_gradient
    def normalise(x, scale_D, offset_D):
        def normal():
            x_MD = tf.cast(x, wide)
            if one_pass and centred and x.dtype == tf.float16:
                x_MD -= tf.stop_gradient(x_MD[..., :1])
            if centred:
                mean_M1 = _mean(x_MD)
            else:
                mean_M1 = tf.zeros([], wide)
            centred_MD = x_MD - mean_M1
            if one_pass:
                variance_M1 = tf.maximum(_mean(tf.square(x_MD)) - tf.square(mean_M1), 0.0)
            else:
                variance_M1 = _mean(tf.square(centred_MD))
            rate_M1 = tf.math.rsqrt(variance_M1 + epsilon)
            return centred_MD * rate_M1, rate_M1

        def gradient(dy):
            # Once more, from x, for whoever differentiates this gradient; XLA merges the two.
            normal_MD, rate_M1 = normal()
            dy_MD = tf.cast(dy, wide)
            dnormal_MD = dy_MD * scale_D
            # One difference after the other, as XLA:GPU knows it: one kernel.
            dcentred_MD = dnormal_MD
            if centred:
                dcentred_MD = dnormal_MD - _mean(dnormal_MD)
            dcentred_MD -= normal_MD * _mean(dnormal_MD * normal_MD)
            rows = list(range(x.shape.rank - 1))
            dscale_D = tf.reduce_sum(dy_MD * normal_MD, rows)
            doffset_D = tf.reduce_sum(dy_MD, rows)
            return tf.cast(rate_M1 * dcentred_MD, x.dtype), dscale_D, doffset_D

        normal_MD, _ = normal()
        return tf.cast(normal_MD * scale_D + offset_D, x.dtype), gradient

    if scale is None:
        scale = tf.ones(width, wide)
    if offset is None:
        offset = tf.zeros(width, wide)
    return normalise(x, scale, offset)


def batch_norm(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, *, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalises each channel by its moments over all other axes, and returns both moments too.

    It is for a step without XLA on a CPU, and computes:

        mean, variance = tf.nn.moments(x, axes)  # all but the last
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon)

    x is [..., D] in float32, as scale and offset, [D]. The gradient of y is one operation of
    TensorFlow's in place of a dozen that each pass over the memory. Values and second derivatives
    are those of these lines; the moments have none. A gradient through a tape's `jacobian`, which
    vectorizes, and forward mode raise LookupError.
    """

    def normal(x, scale, offset):
        mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon)
        return y, mean, variance

    @custom_gradient
    def normalise(x, scale, offset):
        y, mean, variance = normal(x, scale, offset)

        @custom_gradient
        def differentiate(dy, x, scale):
            flat = [1, 1, -1, x.shape[-1]]
            dx, dscale, doffset, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=tf.reshape(dy, flat),
                x=tf.reshape(x, flat),
                scale=scale,
                reserve_space_1=mean,
                reserve_space_2=variance,
                reserve_space_3=[],
                epsilon=epsilon,
            )
            # A vectorized gradient would get the operation's gradient, not Keras's: tf.nn.moments
            # stops a gradient.
            message = (
                "BatchNormalization has no forward mode or Jacobian's gradient without XLA: use "
                "jit_compile=True."
            )

            def gradient(*upstream):
                with tf.GradientTape() as second:
                    second.watch((dy, x, scale))
                    with tf.GradientTape() as first:
                        inputs = (x, scale, offset)
                        first.watch(inputs)
                        y, *_ = normal(*inputs)
                    gradients = first.gradient(y, inputs, dy)
                if gradients[0] is None:  # in forward mode no tape records
                    raise LookupError(message)
                return second.gradient(gradients, (dy, x, scale), upstream)

            gradients = (tf.reshape(dx, tf.shape(x)), dscale, doffset)
            guarded = tuple(tf.raw_ops.PreventGradient(input=t, message=message) for t in gradients)
            return guarded, gradient

        return (y, mean, variance), lambda dy, *_: differentiate(dy, x, scale)

    return normalise(x, scale, offset)


def _mean(t_MD):
    return tf.reduce_mean(t_MD, -1, keepdims=True)


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Computes `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`.

    This is the approximate GELU of Hendrycks and Gimpel (2016, https://arxiv.org/abs/1606.08415);
    a GPU computes it in float32 and rounds once. x is of any floating dtype, and the result of the
    same. On a GPU its gradient is computed from x alone.
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
            dx = tf.cast(dy, wide) * part * (1 + t * (1 - part) * slope)
            return tf.cast(dx, x.dtype)

        t = tf.cast(x, wide)
        return tf.cast(0.5 * t * (1 + tf.tanh(_inner(t))), x.dtype), gradient

    return activate(x)


def activated(activation: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Computes `activation(x)`; on a GPU the gradient of Keras's GELUs is computed from x alone."""
    if known_name(activation) not in _GELUS or not (has_gpu() and in_xla()):
        return activation(x)

    @custom_gradient
    def activate(x):
        def gradient(dy):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                # Else XLA would keep what it has computed on the way forward.
                input_again = unfused(x)
                tape.watch(input_again)
                y = activation(input_again)
            return tape.gradient(y, input_again, dy)

        return activation(x), gradient

    return activate(x)


def _inner(t):
    return math.sqrt(2 / math.pi) * t * (1 + 0.044715 * tf.square(t))
