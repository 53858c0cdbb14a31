"""Finds the operation by which the result for a row of a batch depends on other rows, if there is one.

A trace of many rows shows it by shapes: no other axis is as long. Where it cannot tell, a few rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.adapters.attributes import Nest, restored
from fastaccum.adapters.traces import CALLS, COMPILED, TELLING_ROWS, WEIGHTS, drawn_batch, trace
from fastaccum.kernels import private

_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_CHECKS = {"All", "Any", "Assert"}
_ALONG_AN_AXIS = {"ReverseV2", "Roll", "Cumsum", "Cumprod"}
_SUMS = {"Sum", "Mean", "L2Loss", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum"}
_LINEAR = {"Add", "AddV2", "AddN", "Sub", "Neg", "Sum", "Mean", "Cast", "Identity", "IdentityN"}
_LINEAR |= {"Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2", "StopGradient"}
_FUNCTIONS = CALLS | {"While", "StatelessWhile"}  # sums, where nothing looks into them
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan", "Div", "TrueDiv"}
_REORDERING = {"TensorListFromTensor", "TopKV2", "GatherV2", "StridedSlice", "Reshape"}
_SCATTERS = {"ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "SegmentSum", "UnsortedSegmentSum"}


def find_mixing_op(traced: tf.types.experimental.ConcreteFunction, function: Callable, specs: Nest) -> str | None:
    """Names an operation by which a row's result depends on other rows; None if there is none.

    `traced` is the function's trace for inputs of these specs. Where it cannot tell, as in a loop over rows, the
    function is computed for a few drawn rows, of which one is changed at a time.
    """
    mixing = first_cross_example_op(traced.graph)
    if mixing is not None:
        return mixing
    for operation in _operations(traced.graph):
        if _may_reorder_rows(operation):
            return operation.name if _changes_other_rows(function, specs) else None
    return None


def first_cross_example_op(graph: tf.Graph) -> str | None:
    """Names the first operation whose shapes show that a row's result depends on others; None if there is none."""
    for operation in _operations(graph):
        if operation.type in _OF_SHAPES | _CHECKS:
            continue
        if _is_square(operation) or _loses_rows(operation) or _goes_along_rows(operation):
            return operation.name
    return None


def first_comparison_of_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that compares all rows of a batch with each other; None if there is none."""
    return next((operation.name for operation in graph.get_operations() if _is_square(operation)), None)


def first_op_along_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that reverses, adds up or shuffles rows; None if there is none."""
    return next((operation.name for operation in graph.get_operations() if _goes_along_rows(operation)), None)


def first_sum_in_weights(graph: tf.Graph) -> str | None:
    """Names an operation over all rows of a batch on which the tensors named WEIGHTS depend; None if there is none."""
    needed = {op.name for op in graph.get_operations() if WEIGHTS in op.name.rpartition("/")[2]}
    for operation in reversed(graph.get_operations()):  # each before its inputs
        if operation.name in needed and operation.type not in _OF_SHAPES:
            if _loses_rows(operation):
                return operation.name
            needed |= {t.op.name for t in operation.inputs}
    return None


def first_op_beyond_sums(scalar: tf.Tensor, model_is_by_row: bool, functions_are_sums: bool = True) -> str | None:
    """Names an operation after which a scalar is no sum or mean over rows any more, as a root; None if none is.

    Loops and called functions that take rows and return none are sums if `functions_are_sums`.
    """
    sums = _SUMS | _FUNCTIONS if functions_are_sums else _SUMS
    reaches: set[str] = set()  # operations that depend on a tensor with rows, and not on the number of rows alone
    for operation in scalar.graph.get_operations():  # each after its inputs
        depends = _has_rows(operation.outputs) or any(t.op.name in reaches for t in operation.inputs)
        reaches |= {operation.name} if depends and operation.type not in _OF_SHAPES else set()
    needed = {scalar.op.name} & reaches
    for operation in reversed(scalar.graph.get_operations()):  # each before its inputs
        if operation.name not in needed or COMPILED in operation.name:
            continue
        inputs = [t for t in operation.inputs if t.op.name in reaches]
        if any(t.dtype == tf.variant for t in (*operation.inputs, *operation.outputs)):
            pass  # lists, as recurrent layers make them of time steps
        elif _has_rows(operation.outputs):
            if model_is_by_row and not all(map(_has_rows, ([t] for t in inputs))):
                return operation.name
        elif _has_rows(operation.inputs):
            if operation.type not in sums:
                return operation.name
        elif not _is_linear(operation, inputs):
            return operation.name
        needed |= {t.op.name for t in inputs}
    return None


def _is_linear(operation: tf.Operation, inputs: list[tf.Tensor]) -> bool:
    factor = operation.type in _PRODUCTS and len(inputs) == 1
    return operation.type in _LINEAR or (factor and (operation.type == "Mul" or inputs[0] is operation.inputs[0]))


def _has_rows(tensors: Sequence[tf.Tensor]) -> bool:
    return any(t.shape.rank is None or any(d and d % TELLING_ROWS == 0 for d in t.shape) for t in tensors)


def _loses_rows(operation: tf.Operation) -> bool:
    lists = any(t.dtype == tf.variant for t in operation.outputs)  # which hold rows, and show no shape
    return _has_rows(operation.inputs) and bool(operation.outputs) and not lists and not _has_rows(operation.outputs)


def _is_square(operation: tf.Operation) -> bool:
    return any(t.shape.rank and list(t.shape).count(TELLING_ROWS) > 1 for t in operation.outputs)


def _goes_along_rows(operation: tf.Operation) -> bool:
    """Tells if an operation reverses, adds up or shuffles the rows, or takes a softmax over them."""
    if operation.type in ("Softmax", "LogSoftmax"):
        return operation.inputs[0].shape[-1] == TELLING_ROWS
    if operation.type not in _ALONG_AN_AXIS or not operation.inputs[0].shape.rank:
        return operation.type == "RandomShuffle"
    axes = tf.get_static_value(operation.inputs[-1])
    return operation.inputs[0].shape[0] == TELLING_ROWS and axes is not None and 0 in axes.ravel()


def _may_reorder_rows(operation: tf.Operation) -> bool:
    """Tells if an operation may put a row in another's place: it takes rows apart, picks some or turns them round."""
    if not operation.inputs:
        return False
    shape = operation.inputs[0].shape
    if shape.rank is None:
        return operation.type in _REORDERING
    if shape.rank == 0:
        return False
    if operation.type == "TensorListFromTensor":  # for a loop over its first axis
        return _is_of_rows(shape[0])
    if operation.type == "TopKV2":
        return _is_of_rows(shape[-1])
    if operation.type == "GatherV2":
        axis = tf.get_static_value(operation.inputs[2])
        return axis is None or _is_of_rows(shape[int(axis)])
    if operation.type == "StridedSlice":
        strides = tf.get_static_value(operation.inputs[3])
        return _has_rows(operation.inputs[:1]) and (strides is None or bool((strides < 0).any()))
    if operation.type == "Reshape":
        # Another product of axes before that of the rows deals them out anew, as heads that are folded into rows.
        return _lengths_before_rows(shape) != _lengths_before_rows(operation.outputs[0].shape)
    return operation.type in _SCATTERS and _has_rows(operation.inputs)


def _is_of_rows(length: int | None) -> bool:
    return length is None or (length > 0 and length % TELLING_ROWS == 0)


def _lengths_before_rows(shape: tf.TensorShape) -> int | None:
    """Multiplies the lengths of the axes before that of the rows; None if there is no such axis."""
    before = 1
    for length in shape:
        if _is_of_rows(length):
            return before
        before *= length
    return None


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations that a function's results need, with those of its loops, branches and functions."""
    needed = {t.op.name for t in graph.outputs}
    for operation in reversed(graph.get_operations()):  # each before its inputs
        if operation.name in needed:
            needed |= {t.op.name for t in operation.inputs}
    for operation in graph.get_operations():
        if operation.name not in needed:  # as what tf.vectorized_map has traced and then replaced
            continue
        yield operation
        for attribute in operation.node_def.attr.values():
            for called in [attribute.func, *attribute.list.func]:
                function = private.get_function(graph, called.name) if called.name else None
                if function is not None:
                    yield from _operations(function.graph)


def _changes_other_rows(function: Callable, specs: Nest) -> bool:
    """Tells if a change of one of a few drawn rows changes others' results; True where that cannot be computed."""
    rows = 4
    try:
        traced = trace(function, specs, rows)
        variables = list(traced.graph.variables)
        drawn, changed = (drawn_batch(specs, rows, seed) for seed in (0, 1))

        def results(batch: Nest) -> list[np.ndarray]:
            with restored(variables):  # seeds too: each call draws the same
                for variable in variables:
                    if variable.dtype.is_floating:  # a gate that is 0 before the training would hide what it lets in
                        variable.assign_add(tf.cast(tf.fill(variable.shape, 0.1), variable.dtype))
                found = [tf.cast(t, tf.float32).numpy() for t in tf.nest.flatten(traced(batch))]
            return [value.reshape(rows, -1) for value in found]

        before = results(drawn)
        for row in range(rows):
            batch = tf.nest.map_structure(
                lambda t, c, row=row: tf.tensor_scatter_nd_update(t, [[row]], c[row : row + 1]), drawn, changed
            )
            others = np.arange(rows) != row
            for one, other in zip(before, results(batch), strict=True):
                if not np.allclose(one[others], other[others], rtol=1e-4, atol=1e-6, equal_nan=True):
                    return True
    except Exception:  # it takes no such values, or is of a fixed number of rows
        return True
    return False
