"""Multiplies by weights in float8, with one scale for each tensor, found anew each time.

Shape suffixes: T rows (tokens) of the input, I and O its width and the output's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import barred, in_xla

E4M3 = tf.dtypes.experimental.float8_e4m3fn  # of what the forward pass reads: 3 bits of mantissa
E5M2 = tf.dtypes.experimental.float8_e5m2  # of gradients: 2 bits of mantissa, a wider range

_LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# The bits of a float32: 8 of the exponent, above 23 of the mantissa.
_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


class Float8(NamedTuple):
    """A tensor in float8, times a scale.

    Attributes:
        values: E4M3 or E5M2 in XLA; elsewhere the same numbers in bfloat16, since TensorFlow's own
            loops carry no float8.
        scale: float32 [], a power of two.
    """

    values: tf.Tensor
    scale: tf.Tensor

    def dequantized(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the numbers that it stands for, which are exact in bfloat16 and float32."""
        return tf.cast(self.values, dtype) * tf.cast(self.scale, dtype)


def quantize(x: tf.Tensor, dtype: tf.DType, layer_axes: int = 0) -> Float8:
    """Rounds tensors to float8, each by a scale of its own.

    The scale is `max(|x|) / the dtype's largest number`, rounded up to a power of two: division by
    it, and multiplication, round nothing, and no number is too large. What is NaN becomes NaN;
    infinity anywhere makes a tensor NaN. With a NaN the scale is 1, and numbers above the dtype's
    largest become NaN, too.

    Args:
        x: [..., *axes of a tensor], float16, bfloat16 or float32.
        dtype: E4M3 or E5M2.
        layer_axes: how many leading axes count tensors, each of which has a scale of its own.
    """
    axes = list(range(layer_axes, x.shape.rank))
    largest = tf.cast(tf.reduce_max(tf.abs(x), axes), tf.float32)
    bits = tf.bitcast(largest / _LARGEST[dtype], tf.int32)
    bits_of_power = (bits + _MANTISSA) & _EXPONENT
    # Zero, and what the device takes for zero, has no scale.
    scale = tf.where(bits_of_power > 0, tf.bitcast(bits_of_power, tf.float32), 1.0)
    # In bfloat16, where x is: what is cast here may be written to memory before it is rounded.
    wide = x.dtype if x.dtype == tf.bfloat16 else tf.float32
    divisor = tf.reshape(tf.cast(scale, wide), [*scale.shape, *[1] * len(axes)])
    if has_gpu() and in_xla():
        # Without it XLA may keep the float32 numbers that x was rounded from, in twice the bytes.
        (x,) = barred(x)
    values = tf.cast(tf.cast(x, wide) / divisor, dtype)
    if not in_xla():
        values = tf.cast(values, tf.bfloat16)
    return Float8(values, scale)


def product_float8(x_TI: tf.Tensor, kernel_IO: tf.Tensor, rounded_IO: Float8) -> tf.Tensor:
    """Multiplies two matrices, with any number of leading axes that both share.

    Each tensor is rounded once. The forward pass and the kernel's gradient read the same copy of x;
    both gradients read the same copy of dy.
    """
    dtype = x_TI.dtype

    @custom_gradient
    def multiply(x_TI, kernel_IO):
        x8_TI, kernel8_IO = _keep_apart(quantize(x_TI, E4M3), rounded_IO)

        def gradient(dy_TO):
            dy8_TO = quantize(dy_TO, E5M2)
            dx_TI = _dot(dy8_TO, kernel8_IO, dtype, transpose_b=True)
            dkernel_IO = _dot(x8_TI, dy8_TO, tf.float32, transpose_a=True)
            return _first_order([dx_TI, dkernel_IO], [dy_TO, x_TI, kernel_IO])

        return _dot(x8_TI, kernel8_IO, dtype), gradient

    return multiply(x_TI, kernel_IO)


def _keep_apart(x: Float8, kernel: Float8) -> tuple[Float8, Float8]:
    """Puts the scale of x, and the kernel, behind an optimization barrier, on a GPU.

    XLA would else dequantize the kernels of a loop once, before the loop, or merge the products of
    one x, and multiply in half precision.
    """
    if not (has_gpu() and in_xla()):
        return x, kernel
    # The values of x are left as they are: they are rounded and transposed in one kernel, once.
    x_scale, *kernel_and_scale = barred(x.scale, *kernel)
    return Float8(x.values, x_scale), Float8(*kernel_and_scale)


def product_of_dequantized(x_TI: tf.Tensor, kernel_IO: tf.Tensor, rounded_IO: Float8) -> tf.Tensor:
    """Computes `product_float8` by products in float32 of the rounded numbers: the reference."""

    @custom_gradient
    def multiply(x_TI, kernel_IO):
        x = quantize(x_TI, E4M3).dequantized(tf.float32)
        kernel = rounded_IO.dequantized(tf.float32)

        def gradient(dy_TO):
            dy = quantize(dy_TO, E5M2).dequantized(tf.float32)
            dx_TI = tf.matmul(dy, kernel, transpose_b=True)
            dkernel_IO = tf.matmul(x, dy, transpose_a=True)
            dx_TI = tf.cast(dx_TI, x_TI.dtype)
            return _first_order([dx_TI, dkernel_IO], [dy_TO, x_TI, kernel_IO])

        return tf.cast(tf.matmul(x, kernel), x_TI.dtype), gradient

    return multiply(x_TI, kernel_IO)


def _first_order(
    gradients: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """Returns the gradients, whose own derivatives raise an error.

    No tape sees through float8 numbers: it would take the gradients for constants.
    """

    def refuse(*_):
        raise LookupError(
            "A product in float8 has no second derivatives: multiply in half precision there, in a "
            "Trainer with float8=False."
        )

    private.record.record_operation("float8", list(gradients), list(sources), refuse)
    return gradients


def _dot(
    a: Float8, b: Float8, dtype: tf.DType, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Multiplies in float8 where the device can, with sums in float32, to a result of the dtype.

    XLA reads from this form that the operands are float8, each times a scale. Elsewhere the product
    is one of the same numbers in bfloat16, or float32.
    """
    # Scales may be no numbers of float16, and XLA knows no product from bfloat16 to float16.
    half = tf.bfloat16 if dtype == tf.float16 else dtype
    if in_xla():
        product = tf.raw_ops.BatchMatMulV3(
            x=a.dequantized(tf.bfloat16),
            y=b.dequantized(tf.bfloat16),
            Tout=half,
            adj_x=transpose_a,
            adj_y=transpose_b,
        )
    else:
        a_wide = a.dequantized(tf.float32)
        b_wide = b.dequantized(tf.float32)
        product = tf.cast(tf.matmul(a_wide, b_wide, transpose_a, transpose_b), half)
    return tf.cast(product, dtype)
