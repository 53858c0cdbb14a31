"""Where programs run, for the few choices that differ between a CPU and a GPU."""

import functools

import tensorflow as tf


@functools.cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU: programs then run on it, and their results are not waited for."""
    return bool(tf.config.list_logical_devices("GPU"))
