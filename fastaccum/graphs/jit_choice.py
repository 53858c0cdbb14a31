"""Chooses what `jit_compile="auto"` is on a CPU: if a train step runs faster as an XLA program.

XLA:CPU saves the launch of each operation, but runs the gradients of convolutions as scalar code.
So a step is compiled if its convolutions have few multiply-adds for each operation of the model.
`python -m benchmarks.tools.jit_forms` times 30 models in both forms, on three kinds of CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.graphs import traces
from fastaccum.kernels import private

# XLA is faster up to this many multiply-adds of convolutions, in the forward pass of a micro-batch,
# for each operation of the model. Of the 30 models, the one next below has 26,800, the one next
# above 50,800.
MAX_MULTIPLY_ADDS_PER_OPERATION = 35_000

# The rows of a micro-batch where the data do not say.
DEFAULT_ROWS = 16

# True if TensorFlow's operations use oneDNN.
ONEDNN: bool = private.has("pywrap_util_port") and private.pywrap_util_port.IsMklEnabled()

_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_TRANSPOSED = {"Conv2DBackpropInput", "Conv3DBackpropInputV2"}
# Operations that take no time of their own, and are not counted.
_FREE = {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape"}


class Work(NamedTuple):
    """The work of a model's forward pass, counted."""

    multiply_adds: float = 0.0  # of convolutions, for a row
    operations: int = 0  # those in the body of a loop, or of a branch, count once
    needs_xla: bool = False  # TensorFlow may have no CPU kernel of a convolution or a pooling


def is_faster_compiled(work: Work, rows: int | None) -> bool:
    """Tells if a train step on micro-batches of so many rows is faster with XLA on a CPU."""
    if work.needs_xla:
        return True
    rows = DEFAULT_ROWS if rows is None else rows
    return rows * work.multiply_adds <= MAX_MULTIPLY_ADDS_PER_OPERATION * work.operations


def count(traced: ConcreteFunction) -> Work:
    """Counts the work of a traced function of a batch, and of the functions that it calls."""
    multiply_adds = 0.0
    operations = 0
    needs_xla = False
    for operation in traces.list_operations(traced.graph):
        if operation.type not in _FREE:
            operations += 1
        multiply_adds += _multiply_adds(operation)
        if _lacks_kernel(operation) or _is_compiled_convolution(operation):
            needs_xla = True
    rows = traced.inputs[0].shape[0] or 1
    return Work(multiply_adds / rows, operations, needs_xla)


def _multiply_adds(operation: tf.Operation) -> float:
    """Counts the multiply-adds of a convolution; 0 for any other operation.

    An element of the result takes a product for each element of the kernel but for its last axis.
    This counts a depthwise convolution like a full one, with all input channels for each output
    channel, as XLA:CPU computes its gradient.
    """
    if operation.type in _CONVOLUTIONS:
        # The inputs are x and the kernel, which is applied at each element of the result.
        applied_at = operation.outputs[0].shape
    elif operation.type in _TRANSPOSED:
        # The inputs are the result's sizes, the kernel, and x: the kernel is applied at each
        # element of x.
        applied_at = operation.inputs[2].shape
    else:
        return 0.0
    kernel = operation.inputs[1].shape
    return _product(kernel[:-1]) * _product(applied_at)


def _lacks_kernel(operation: tf.Operation) -> bool:
    """Tells if TensorFlow may have no CPU kernel of a convolution, a pooling or its gradient."""
    kind = operation.type
    is_convolution = kind in _CONVOLUTIONS or kind in _TRANSPOSED
    if not is_convolution and "Pool" not in kind:
        return False
    dtype = operation.get_attr("T")
    if "Pool3D" in kind and dtype == tf.float16:
        return True
    if ONEDNN and "3D" not in kind and dtype == tf.float32:
        return False  # oneDNN takes any layout and dilation
    attributes = operation.node_def.attr
    is_dilated = max(attributes["dilations"].list.i, default=1) > 1
    if kind in _TRANSPOSED and is_dilated:
        return True
    return attributes["data_format"].s.startswith(b"NC")


def _is_compiled_convolution(operation: tf.Operation) -> bool:
    """Tells if a call compiles a convolution by itself, whatever the step's `jit_compile`.

    Keras does so where TensorFlow's own convolution fails on a CPU, as for grouped ones.
    """
    if not operation.node_def.attr[private.XLA_MUST_COMPILE].b:
        return False
    for graph in traces.called_graphs(operation):
        if any(_multiply_adds(inner) for inner in traces.list_operations(graph)):
            return True
    return False


def _product(shape: tf.TensorShape) -> int:
    """Multiplies the sizes of a shape; unknown ones are 1."""
    if shape.rank is None:
        return 1
    return math.prod(size or 1 for size in shape)
