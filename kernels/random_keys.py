"""Random numbers that XLA draws fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from fastaccum.kernels import private, trace_context
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import in_xla


@contextlib.contextmanager
def hoist_prng_key() -> Iterator[None]:
    """Hoists the derivation of a `stateless` draw's key out of the loop that draws, where XLA
    compiles for a CPU.
    """
    with trace_context.current().extended(hoists_keys=True):
        yield


def hash_bits(keys: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Draws 32 bits, uint32 [..., k], for each number, uint32 [k], by each pair of keys, uint32
    [..., 2].

    The same bits for any part of the numbers, on any device: a hash of each number, which XLA fuses
    into what reads it, with the multipliers of lowbias32
    (https://github.com/skeeto/hash-prospector) and a key for each round.
    """
    bits = keys[..., :1] ^ (numbers * 0x9E3779B9)
    for shift, multiplier, key in (
        (16, 0x7FEB352D, keys[..., 1:]),
        (15, 0x846CA68B, keys[..., :1]),
    ):
        bits = (
            bits ^ tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        ) * multiplier + key
    return bits ^ tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))


def _replace_derivation(random_ops_util: Any) -> None:
    """Replaces the derivation of keys for good: without `hoists_keys` in a trace's context it does
    what it did.
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
