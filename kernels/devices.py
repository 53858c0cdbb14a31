"""Facts about the machine: whether there is a GPU, which one, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import tensorflow as tf

from fastaccum.kernels import private


@functools.cache
def has_gpu() -> bool:
    """Returns whether TensorFlow sees a GPU: programs then run on it, and Python does not wait for
    their results.
    """
    return bool(tf.config.list_logical_devices("GPU"))


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Returns the CUDA compute capability of the first GPU: (9, 0) for an H100 or H200, (0, 0)
    without one.
    """
    gpus = tf.config.get_visible_devices("GPU")
    return (
        tf.config.experimental.get_device_details(gpus[0]).get("compute_capability", (0, 0))
        if gpus
        else (0, 0)
    )


@functools.cache
def device_memory() -> int:
    """Returns the bytes of memory of the first GPU; 16 GiB without one, or if its driver does not
    say.
    """
    size, device = ctypes.c_size_t(), ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1") if has_gpu() else None
        if driver and not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)):
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value or 16 * 2**30


def has_op_determinism() -> bool:
    """Returns whether op determinism is on, by `enable_op_determinism()` or
    TF_DETERMINISTIC_OPS.
    """
    if private.has("is_op_determinism_enabled"):
        return private.is_op_determinism_enabled()
    try:
        tf.random.Generator.from_non_deterministic_state()
    except RuntimeError:  # what op determinism makes of it
        return True
    return False
