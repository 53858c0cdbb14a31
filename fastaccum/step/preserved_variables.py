"""Variables that outlive the failure of a program that would write over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data


@contextlib.contextmanager
def preserve_variables(handles: Iterable[tf.Tensor]) -> Iterator[None]:
    """Keeps the values of the variables that a program captured through a failure of its run inside the block.

    XLA writes a program's results over the variables that they replace, and has freed these if it runs out of memory
    before it begins. Values that are held elsewhere XLA leaves alone, and writes to memory of its own; so the run takes
    as much memory again.
    """
    resources = [handle for handle in handles if handle.dtype == tf.resource]
    dtypes = [get_eager_safe_handle_data(handle).shape_and_type[0].dtype for handle in resources]
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=d) for h, d in zip(resources, dtypes, strict=True)]
    yield
    values.clear()
    # What XLA has allocated it does not write over, then or later: back to memory of TensorFlow's.
    for handle, dtype in zip(resources, dtypes, strict=True):
        with tf.device(handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=value))
