"""Accumulation of Keras 3 on Keras's own JAX backend.

Keras takes its backend from `KERAS_BACKEND` as it is imported, so this peer needs a process of its
own. The user's code is that of `keras_accumulation`.
"""

import jax
import keras

from benchmarks.peers import keras_accumulation


def make(workload):
    """Makes the `Fit` of `model.fit` with accumulation and the defaults of `compile`.

    Raises:
        RuntimeError: if Keras was imported with another backend.
    """
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"Keras's backend is {keras.backend.backend()!r} here: set KERAS_BACKEND=jax before "
            "the process starts."
        )
    # The suites compare on the CPU, and a CUDA plugin of JAX may be installed.
    jax.config.update("jax_platforms", "cpu")
    return keras_accumulation.make(workload)
