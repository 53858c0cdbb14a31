"""Facts about the machine: whether there is a GPU, which one, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import tensorflow as tf

from fastaccum.kernels import private

# Bytes of memory of a GPU that does not say how much it has: data-centre GPUs have at least this.
_DEFAULT_MEMORY = 16 * 2**30

_CUDA_SUCCESS = 0  # what a call of the CUDA driver returns if it did what it was asked


@functools.cache
def has_gpu() -> bool:
    """Returns whether TensorFlow sees a GPU.

    Programs then run on it, and Python does not wait for their results.
    """
    return bool(tf.config.list_logical_devices("GPU"))


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Returns the CUDA compute capability of the first GPU.

    This is (9, 0) for an H100 or H200, and (0, 0) without a GPU.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return (0, 0)
    details = tf.config.experimental.get_device_details(gpus[0])
    return details.get("compute_capability", (0, 0))


@functools.cache
def device_memory() -> int:
    """Returns the bytes of memory of the first GPU.

    Without a GPU, or if its driver does not say, this is 16 GiB.
    """
    size = ctypes.c_size_t()
    if has_gpu():
        with contextlib.suppress(OSError, AttributeError):
            _read_total_memory(size)
    return size.value or _DEFAULT_MEMORY


def _read_total_memory(size: ctypes.c_size_t) -> None:
    """Asks the driver of the first GPU for its memory; `size` stays as it is if a call fails."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    if driver.cuInit(0) != _CUDA_SUCCESS:
        return
    if driver.cuDeviceGet(ctypes.byref(device), 0) != _CUDA_SUCCESS:
        return
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)


def has_op_determinism() -> bool:
    """Returns whether `enable_op_determinism()` or TF_DETERMINISTIC_OPS is in effect."""
    if private.has("is_op_determinism_enabled"):
        return private.is_op_determinism_enabled()
    try:
        tf.random.Generator.from_non_deterministic_state()
    except RuntimeError:  # what op determinism makes of it
        return True
    return False
