"""Random numbers that XLA draws fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from fastaccum.kernels import private, trace_context
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import in_xla

# 2**32 divided by the golden ratio: it spreads numbers that follow each other over all 32 bits.
_GOLDEN_RATIO = 0x9E3779B9


@contextlib.contextmanager
def hoist_prng_key() -> Iterator[None]:
    """Hoists the derivation of a `stateless` draw's key out of the loop that draws.

    It does so where XLA compiles for a CPU.
    """
    with trace_context.current().extended(hoists_keys=True):
        yield


def hash_bits(keys: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Draws 32 bits for each number by each pair of keys.

    keys is uint32 [..., 2], numbers uint32 [k], and the bits are uint32 [..., k]. They are the same
    for any part of the numbers, on any device: a hash of each number, which XLA fuses into what
    reads it, with the multipliers of lowbias32 (https://github.com/skeeto/hash-prospector) and a
    key for each round.
    """
    bits = keys[..., :1] ^ (numbers * _GOLDEN_RATIO)
    second_key = keys[..., 1:]
    first_key = keys[..., :1]
    bits = _xor_shifted(bits, 16) * 0x7FEB352D + second_key
    bits = _xor_shifted(bits, 15) * 0x846CA68B + first_key
    return _xor_shifted(bits, 16)


def _xor_shifted(bits: tf.Tensor, shift: int) -> tf.Tensor:
    return bits ^ tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))


def _replace_derivation(random_ops_util: Any) -> None:
    """Replaces the derivation of keys for good.

    Without `hoists_keys` in a trace's context it does what it did.
    """
    derive = random_ops_util.get_key_counter_alg

    def derive_once(
        seed: tf.Tensor, alg: tf.random.Algorithm | str | int
    ) -> tuple[tf.Tensor, tf.Tensor, int]:
        key, counter, alg = derive(seed, alg)
        hoists = trace_context.current().hoists_keys and in_xla() and not has_gpu()
        if hoists and alg == random_ops_util.Algorithm.AUTO_SELECT.value:
            # XLA would make the last rounds of the derivation part of the loop that draws.
            key, counter = private.xla.optimization_barrier(key, counter)
        return key, counter, alg

    random_ops_util.get_key_counter_alg = derive_once


if private.has("random_ops_util"):
    _replace_derivation(private.random_ops_util)
