"""Random numbers that XLA:CPU draws fast."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.ops import random_ops_util

from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import in_xla

_get_key_counter_alg = random_ops_util.get_key_counter_alg
_lock = threading.Lock()
_scopes = 0


@contextlib.contextmanager
def hoist_prng_key() -> Iterator[None]:
    """Hoists the derivation of a random draw's key out of the loop that draws, where XLA compiles for a CPU.

    This concerns `tf.random.stateless_*`, which Keras 3's layers draw with, and changes no number. Blocks may overlap,
    also those of several threads.
    """
    global _scopes
    with _lock:
        _scopes += 1
        random_ops_util.get_key_counter_alg = _once
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            if not _scopes:
                random_ops_util.get_key_counter_alg = _get_key_counter_alg


def _once(seed: tf.Tensor, alg: tf.random.Algorithm | str | int) -> tuple[tf.Tensor, tf.Tensor, int]:
    key, counter, alg = _get_key_counter_alg(seed, alg)
    if alg == random_ops_util.Algorithm.AUTO_SELECT.value and in_xla() and not has_gpu():
        # XLA would make the last rounds of the derivation part of the loop that draws.
        key, counter = xla.optimization_barrier(key, counter)
    return key, counter, alg
