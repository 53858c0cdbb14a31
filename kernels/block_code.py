"""Holds float32 numbers in 8 bits each, in blocks of 256 with a scale."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.devices import has_gpu

BLOCK = 256  # as in bitsandbytes and torchao

_PART = 32  # numbers of a block that a CPU compares at once

_EXPONENT_BIAS = 127  # of a float32
_MANTISSA_BITS = 23
_EXPONENT_MASK = 0x7F800000

# An octave of the code covers a factor of 8, three binades of a float32. A factor of 10, as in
# bitsandbytes, has a larger error, worst and mean, and takes logarithms instead of shifts.
_BINADES = 3
_OCTAVES = 7  # of a code with a sign; one without has one more


class Blocks(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
        codes: int8, of the numbers' shape. In a block without negative numbers its bits are those
            of a uint8.
        scales: float32 [blocks], the largest magnitude of each block; below 0 for a block without
            negative numbers (on a CPU, -0.0 counts as one). Blocks go over the flattened numbers;
            the last may be shorter.
    """

    codes: tf.Tensor
    scales: tf.Tensor


def count_blocks(size: int) -> int:
    """Returns how many blocks hold so many numbers."""
    return math.ceil(size / BLOCK)


def encode(x: tf.Tensor, scales: tf.Tensor | None = None) -> Blocks:
    """Rounds each number to the nearest of its block's code.

    The code of a block with a scale s, its largest magnitude, is

        0, and +-s * 8**-m * (1/8 + 7/8 * j / 2**k),   j = 1 .. 2**k,   m = 0 .. 6,   k = 6 - m

    that is 64 numbers from s / 8 to s, 32 from there down by another factor of 8, and so on: fine
    for large numbers, and a wide range. A block without negative numbers, as of second moments,
    needs no sign, so k is 7 - m, and m up to 7. In it only 0 becomes 0: a second moment of 0 beside
    a first one that is not would make a step of any length.

    Worst error: 7/8 / 64 / 2 = 0.0068 of the scale, half of that without a sign. bitsandbytes' code
    has 0.0070 and 0.0035, and 2 to 11% more in the mean, for numbers from a normal distribution to
    ones that are spread over many orders of magnitude.

    Sources: Dettmers et al., 8-bit Optimizers via Block-wise Quantization
    (https://arxiv.org/abs/2110.02861), whose dynamic code has factors of 10; Li et al., Memory
    Efficient Optimizers with 4-bit States (https://arxiv.org/abs/2309.01507), for the 0.

    Args:
        x: float32, finite, of a static shape.
        scales: `measure(x)`, where it was computed before.

    >>> blocks = encode(tf.constant([0.5, -1.0, 0.01, 0.0]))
    >>> blocks.codes.numpy(), blocks.scales.numpy()
    (array([  90, -127,   24,    0], dtype=int8), array([1.], dtype=float32))
    >>> decode(blocks).numpy().round(4)
    array([ 0.4941, -1.    ,  0.0096,  0.    ], dtype=float32)
    """
    if scales is None:
        scales = measure(x)
    rows = _in_rows(x)
    is_signed = scales[:, None] > 0.0
    largest = tf.abs(scales[:, None])
    # In a block of zeros there is nothing to divide.
    share = tf.abs(rows) / tf.where(largest > 0.0, largest, 1.0)

    octaves = tf.where(is_signed, _OCTAVES, _OCTAVES + 1)
    # The binade of a share in (2**e, 2**(e + 1)]: one unit of the last place less has the exponent
    # e.
    below = tf.bitcast(share, tf.int32) - 1
    e = tf.bitwise.right_shift(below, _MANTISSA_BITS) - _EXPONENT_BIAS
    # The octave m has the shares in (8**-(m + 1), 8**-m]. For numbers below 256, x * 171 >> 9 is
    # x // 3.
    m = tf.bitwise.right_shift((-e - 1) * 171, 9)
    k = tf.maximum(octaves - 1 - m, 0)
    m = octaves - 1 - k
    in_octave = share * _power_of_two(_BINADES * m)
    j = tf.round((in_octave * 8.0 - 1.0) * (1 / 7) * _power_of_two(k))
    # The last octave has one number, its upper end, beside 0.
    j = tf.where(k == 0, tf.round(in_octave), j)
    magnitude = tf.bitwise.left_shift(tf.ones_like(k), k) - 1 + tf.cast(j, tf.int32)
    least = tf.cast(~is_signed & (rows > 0.0), tf.int32)
    magnitude = tf.maximum(magnitude, least)
    codes = tf.cast(tf.where(rows < 0.0, -magnitude, magnitude), tf.int8)
    return Blocks(_in_shape(codes, x.shape), scales)


def measure(x: tf.Tensor) -> tf.Tensor:
    """Returns the scales of the blocks of x, as `Blocks` has them."""
    rows = _in_rows(x)
    if has_gpu():
        largest = tf.reduce_max(tf.abs(rows), axis=1)
        return tf.where(tf.reduce_min(rows, axis=1) < 0.0, largest, -largest)
    # On a CPU XLA takes vector instructions for a reduction of what it has just computed only if
    # an inner axis remains: so there are two, which take a tenth of the time of one. XLA would
    # merge them, were both of floats. So the second is of their bits, which are in the same order
    # for numbers that are not negative.
    parts = tf.reshape(rows, [-1, BLOCK // _PART, _PART])
    largest_bits = tf.bitcast(tf.reduce_max(tf.abs(parts), axis=1), tf.int32)
    largest = tf.bitcast(tf.reduce_max(largest_bits, axis=1), tf.float32)
    least_bits = tf.bitcast(tf.reduce_min(parts, axis=1), tf.int32)
    return tf.where(tf.reduce_min(least_bits, axis=1) < 0, largest, -largest)


def decode(blocks: Blocks) -> tf.Tensor:
    """Returns the numbers, float32, of the codes' shape."""
    codes = tf.cast(_in_rows(blocks.codes), tf.float32)
    scales = blocks.scales[:, None]
    is_signed = scales > 0.0
    as_unsigned = tf.where(codes < 0.0, codes + 256.0, codes)
    magnitude = tf.where(is_signed, tf.abs(codes), as_unsigned)
    # 2**k is the power of two in a magnitude of 2**k - 1 + j, and 0 in the magnitude 0. With it
    # 8**k * (1/8 + 7/8 * j / 2**k) takes few operations, which XLA computes again for each of the
    # update's results, where it would keep what takes many.
    power = tf.bitcast(tf.bitcast(magnitude, tf.int32) & _EXPONENT_MASK, tf.float32)
    share = power * power * (0.875 * magnitude + 0.875 - 0.75 * power)
    top = tf.where(is_signed, 8.0 ** (1 - _OCTAVES), 8.0**-_OCTAVES)
    x = share * top * tf.abs(scales)  # a scale times `top` may be below float32's normal numbers
    return _in_shape(tf.where(is_signed & (codes < 0.0), -x, x), blocks.codes.shape)


def _in_rows(x: tf.Tensor) -> tf.Tensor:
    """Returns the blocks of a tensor, [blocks, BLOCK], filled up with zeros."""
    size = x.shape.num_elements()
    flat = tf.reshape(x, [size])
    missing = count_blocks(size) * BLOCK - size
    if missing:
        flat = tf.pad(flat, [[0, missing]])
    return tf.reshape(flat, [-1, BLOCK])


def _in_shape(rows: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    size = shape.num_elements()
    flat = tf.reshape(rows, [-1])
    if flat.shape[0] != size:
        flat = flat[:size]
    return tf.reshape(flat, shape)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Returns 2**exponent in float32, for int32 exponents from -126 to 127."""
    bits = tf.bitwise.left_shift(exponent + _EXPONENT_BIAS, _MANTISSA_BITS)
    return tf.bitcast(bits, tf.float32)
