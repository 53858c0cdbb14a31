"""What a trace tells of the rows of a batch: whether an operation mixes them, and what a loss makes of their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from fastaccum.kernels.layer_graph import DRAWS

# Of a batch that is only traced: no other axis of a model is as long.
TELLING_ROWS = 1031
# What `compute_loss` hands to its compiled loss as sample weights, and what it gets from it, by name.
WEIGHTS, COMPILED = "weight_of_compute_loss", "compiled_loss_of_compute_loss"

_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_DRAWS = DRAWS - {"RngReadAndSkip"}  # whose state is in a variable; that of the others is nowhere to be read
_CHECKS = {"All", "Any", "Assert"}
_ALONG_AN_AXIS = {"ReverseV2", "Roll", "Cumsum", "Cumprod"}
_SUMS = {"Sum", "Mean", "L2Loss", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum"}
_LINEAR = {
    *("Add", "AddV2", "AddN", "Sub", "Neg", "Sum", "Mean", "Cast", "Identity", "IdentityN"),
    *("Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2"),
}
_FUNCTIONS = {"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"}  # not looked into
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan", "Div", "TrueDiv"}


def traced(function: Callable, nest: Any, rows: int | None = TELLING_ROWS) -> Any:
    """A function of one batch, traced for so many rows of what `nest` has specs of; None for as many as it says."""
    specs = tf.nest.map_structure(lambda s: tf.TensorSpec([rows or s.shape[0] or 1, *s.shape[1:]], s.dtype), nest)
    return tf.function(function, autograph=False).get_concrete_function(specs)


def mixing(graph: tf.Graph) -> str | None:
    """The name of an operation whose result for a row depends on other rows, where there is one."""
    for operation in graph.get_operations():
        if operation.type in _OF_SHAPES | _CHECKS or operation.type == "TensorListSetItem":  # rows that a loop keeps
            continue
        if _is_square(operation) or _loses_rows(operation) or _goes_along_rows(operation):
            return operation.name
    return None


def draws(graph: tf.Graph) -> list[str]:
    """The names of the operations that draw random numbers from no seed of the model's."""
    return [operation.name for operation in graph.get_operations() if operation.type in _DRAWS]


def square(graph: tf.Graph) -> str | None:
    """The name of an operation that compares the rows of a batch with each other, where there is one."""
    return next((operation.name for operation in graph.get_operations() if _is_square(operation)), None)


def sum_in_weights(graph: tf.Graph) -> str | None:
    """The name of an operation over all rows of a batch on which what is called WEIGHTS depends, where there is one."""
    pending = [op for op in graph.get_operations() if WEIGHTS in op.name.rpartition("/")[2]]
    seen = set()
    while pending:
        operation = pending.pop()
        if operation.name in seen or operation.type in _OF_SHAPES:
            continue
        seen.add(operation.name)
        if _loses_rows(operation):
            return operation.name
        pending += [tensor.op for tensor in operation.inputs]
    return None


def beyond_sums(scalar: tf.Tensor, model_is_by_row: bool) -> str | None:
    """The name of an operation that makes of sums or means over rows what is no longer one, where there is one: a
    root, a product or a quotient of two, a maximum; where the model itself is by row, also a sum that scales rows.
    """
    reaches = _reaching_rows(scalar.graph)
    pending, seen = [scalar.op], set()
    while pending:
        operation = pending.pop()
        if operation.name in seen or COMPILED in operation.name or operation.name not in reaches:
            continue
        seen.add(operation.name)
        inputs = [t for t in operation.inputs if t.op.name in reaches]
        if any(t.dtype == tf.variant for t in (*operation.inputs, *operation.outputs)):
            pass  # lists, as recurrent layers make them of time steps
        elif _has_rows(operation.outputs):
            if model_is_by_row and not all(map(_has_rows, ([t] for t in inputs))):
                return operation.name
        elif _has_rows(operation.inputs):
            if operation.type not in _SUMS | _FUNCTIONS:
                return operation.name
        elif not _is_linear(operation, inputs):
            return operation.name
        pending += [t.op for t in inputs]
    return None


def _is_linear(operation: tf.Operation, inputs: list[tf.Tensor]) -> bool:
    """Whether an operation is linear in these of its inputs."""
    if operation.type in _LINEAR:
        return True
    only_one = operation.type in _PRODUCTS and len(inputs) == 1
    return only_one and (operation.type == "Mul" or inputs[0] is operation.inputs[0])


def _has_rows(tensors: Sequence[tf.Tensor]) -> bool:
    return any(t.shape.rank is None or any(d and d % TELLING_ROWS == 0 for d in t.shape) for t in tensors)


def _loses_rows(operation: tf.Operation) -> bool:
    return _has_rows(operation.inputs) and bool(operation.outputs) and not _has_rows(operation.outputs)


def _is_square(operation: tf.Operation) -> bool:
    return any(t.shape.rank and list(t.shape).count(TELLING_ROWS) > 1 for t in operation.outputs)


def _goes_along_rows(operation: tf.Operation) -> bool:
    """Whether it reverses or adds up along the rows, shuffles them, or takes a softmax over them."""
    if operation.type in ("Softmax", "LogSoftmax"):
        return operation.inputs[0].shape[-1] == TELLING_ROWS
    if operation.type not in _ALONG_AN_AXIS or not operation.inputs[0].shape.rank:
        return operation.type == "RandomShuffle"
    axes = tf.get_static_value(operation.inputs[-1])
    return operation.inputs[0].shape[0] == TELLING_ROWS and axes is not None and 0 in axes.ravel()


def _reaching_rows(graph: tf.Graph) -> set[str]:
    """The names of the operations on the way of which something is that has rows, the number of rows apart."""
    found: set[str] = set()
    for operation in graph.get_operations():  # each after its inputs
        if operation.type in _OF_SHAPES:
            continue
        if _has_rows(operation.outputs) or any(t.op.name in found for t in operation.inputs):
            found.add(operation.name)
    return found
