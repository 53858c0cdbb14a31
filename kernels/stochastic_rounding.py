"""Rounds float32 to bfloat16 at random, so that the mean of many roundings is exact."""

from __future__ import annotations

import tensorflow as tf

from fastaccum.kernels.random_keys import hash_bits

# The half of a float32's bits that a bfloat16 keeps: sign, exponent, and 7 of the 23 bits of the
# mantissa.
_KEPT_BITS = 0xFFFF0000
_DROPPED_BITS = 16


def round_stochastically(x: tf.Tensor, key: tf.Tensor, half: int = 0) -> tf.Tensor:
    """Rounds to one of the two nearest bfloat16, each as often as x is near to it.

        bits = bits_of(x) + uniform integer of [0, 2**16)
        bfloat16(x) = the upper 16 of the bits

    So the mean over keys is x: an update of a thousandth of the last place moves a weight once in a
    thousand times, where rounding to nearest would never move it. A bfloat16 stays what it is, and
    so do infinities and NaN. The random integer of an element is a hash of the key and of its place
    in x: it is the same on every device.

    Source: Zamirai et al., Revisiting BFloat16 Training (https://arxiv.org/abs/2010.06192).

    Args:
        x: float32, of any shape.
        key: uint32 [2].
        half: 0 or 1: which half of the 32 bits that the key draws for a place is the random
            integer. Two tensors of one shape take one draw with a half each.

    Returns:
        bfloat16, of the shape of x.

    >>> x = tf.fill([10000], 1.001)  # between 1 and the next bfloat16, 1.0078125
    >>> rounded = tf.cast(round_stochastically(x, tf.constant([1, 2], tf.uint32)), tf.float32)
    >>> sorted(set(rounded.numpy().tolist()))
    [1.0, 1.0078125]
    >>> bool(abs(tf.reduce_mean(rounded) - 1.001) < 2e-4)
    True
    """
    places = tf.range(tf.size(x))
    random = tf.reshape(hash_bits(key, tf.cast(places, tf.uint32)), tf.shape(x))
    if half == 0:
        dropped = tf.bitwise.right_shift(random, tf.constant(_DROPPED_BITS, tf.uint32))
    else:
        dropped = random & tf.constant(2**_DROPPED_BITS - 1, tf.uint32)
    bits = (tf.bitcast(x, tf.uint32) + dropped) & tf.constant(_KEPT_BITS, tf.uint32)
    rounded = tf.where(tf.math.is_finite(x), tf.bitcast(bits, tf.float32), x)
    return tf.cast(rounded, tf.bfloat16)
