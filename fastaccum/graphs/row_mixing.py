"""Finds the operation by which the result for a row of a batch depends on other rows, if there is
one.

A trace of many rows shows it by shapes: no other axis is as long. Where it cannot tell, a few rows
are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest, restored
from fastaccum.graphs.traces import (
    CALLS,
    CALLS_OF_PYTHON,
    COMPILED,
    TELLING_ROWS,
    WEIGHTS,
    drawn_batch,
    trace,
)
from fastaccum.kernels import private
from fastaccum.kernels.recomputed_function import DRAWS

_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_ALONG_AN_AXIS = {"ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp"}
_SUMS = {"Sum", "Mean", "L2Loss", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum"}
_LINEAR = {"Add", "AddV2", "AddN", "Sub", "Neg", "Sum", "Mean", "Cast", "Identity", "IdentityN"}
_LINEAR |= {"Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2", "StopGradient"}
_FUNCTIONS = CALLS | {"While", "StatelessWhile"}  # sums, where nothing looks into them
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan", "Div", "TrueDiv"}

# Operations whose results for a row follow from that row alone, if they have rows: of elements, and
# of other axes.
_BY_ELEMENT = {
    "Abs",
    "Neg",
    "Sign",
    "Square",
    "Sqrt",
    "Rsqrt",
    "Exp",
    "Expm1",
    "Log",
    "Log1p",
    "Reciprocal",
    "Inv",
}
_BY_ELEMENT |= {
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Atan2",
    "Sinh",
    "Cosh",
    "Tanh",
    "Asinh",
    "Acosh",
    "Atanh",
}
_BY_ELEMENT |= {
    "Sigmoid",
    "Relu",
    "Relu6",
    "Elu",
    "Selu",
    "LeakyRelu",
    "Softplus",
    "Softsign",
    "Erf",
    "Erfc",
    "Erfinv",
}
_BY_ELEMENT |= {
    "Lgamma",
    "Digamma",
    "Floor",
    "Ceil",
    "Round",
    "Rint",
    "IsNan",
    "IsInf",
    "IsFinite",
    "LogicalNot",
}
_BY_ELEMENT |= {
    "Add",
    "AddV2",
    "AddN",
    "Sub",
    "Mul",
    "MulNoNan",
    "RealDiv",
    "Div",
    "DivNoNan",
    "TrueDiv",
    "FloorDiv",
}
_BY_ELEMENT |= {
    "FloorMod",
    "Mod",
    "Maximum",
    "Minimum",
    "Pow",
    "SquaredDifference",
    "Xdivy",
    "Xlogy",
    "BiasAdd",
}
_BY_ELEMENT |= {
    "Equal",
    "NotEqual",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
    "LogicalAnd",
    "LogicalOr",
}
_BY_ELEMENT |= {
    "Select",
    "SelectV2",
    "ClipByValue",
    "Cast",
    "Bitcast",
    "ZerosLike",
    "OnesLike",
    "CheckNumerics",
}
_BY_ELEMENT |= {
    "Identity",
    "IdentityN",
    "StopGradient",
    "PreventGradient",
    "EnsureShape",
    "OneHot",
    "Bucketize",
}
_BY_ELEMENT |= {"Complex", "ComplexAbs", "Real", "Imag", "Conj", "Angle"}
_OF_OTHER_AXES = {
    "Transpose",
    "ExpandDims",
    "Squeeze",
    "Pack",
    "Unpack",
    "ConcatV2",
    "Split",
    "SplitV",
    "Tile",
    "Slice",
}
_OF_OTHER_AXES |= {
    "Pad",
    "PadV2",
    "MirrorPad",
    "BroadcastTo",
    "Sum",
    "Mean",
    "Max",
    "Min",
    "Prod",
    "All",
    "Any",
}
_OF_OTHER_AXES |= {
    "ArgMax",
    "ArgMin",
    "EuclideanNorm",
    "Softmax",
    "LogSoftmax",
    "MatMul",
    "BatchMatMul",
}
_OF_OTHER_AXES |= {"BatchMatMulV2", "BatchMatMulV3", "ResourceGather", *_ALONG_AN_AXIS}
# Of a batch, if its first axis has the rows.
_OF_A_BATCH = {
    "Conv2D",
    "Conv3D",
    "Conv",
    "DepthwiseConv2dNative",
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
}
_OF_A_BATCH |= {
    "MaxPool",
    "MaxPoolV2",
    "AvgPool",
    "MaxPool3D",
    "AvgPool3D",
    "ResizeBilinear",
    "ResizeNearestNeighbor",
}
_OF_A_BATCH |= {
    "ResizeBicubic",
    "ResizeArea",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
}
_FFTS = {
    f"{kind}FFT{axes}": int((axes or "1")[0])
    for kind in ("", "I", "R", "IR")
    for axes in ("", "2D", "3D")
}
_OF_LISTS = {
    "TensorListGetItem",
    "TensorListSetItem",
    "TensorListStack",
    "TensorListPushBack",
    "TensorListPopBack",
}
_LOOKED_INTO = {*CALLS, "While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}


def find_mixing_op(
    traced: tf.types.experimental.ConcreteFunction, function: Callable, specs: Nest
) -> str | None:
    """Names an operation by which a row's result depends on other rows; None if there is none.

    `traced` is the function's trace for inputs of these specs. Where it cannot tell, as in a loop
    over rows, the function is computed for a few drawn rows, of which one is changed at a time.
    """
    mixing = first_cross_example_op(traced.graph)
    if mixing is not None:
        return mixing
    operations = list(_operations(traced.graph))
    moving = next((operation.name for operation in operations if _may_move_rows(operation)), None)
    if moving is None:
        return None
    kinds = {operation.type for operation in operations}
    # Whether rows are mixed may hang on what is drawn, and a user's Python does not run before the
    # training.
    if any("StatelessRandom" in kind for kind in kinds) or kinds & (DRAWS | CALLS_OF_PYTHON):
        return moving
    return moving if _changes_other_rows(function, specs) else None


def first_cross_example_op(graph: tf.Graph) -> str | None:
    """Names the first operation whose shapes show that a row's result depends on others; None if
    there is none.
    """
    for operation in _operations(graph):
        if operation.type in _OF_SHAPES:
            continue
        if _is_square(operation) or _loses_rows(operation) or _goes_along_rows(operation):
            return operation.name
    return None


def first_comparison_of_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that compares all rows of a batch with each other; None if there is
    none.
    """
    return next(
        (operation.name for operation in graph.get_operations() if _is_square(operation)), None
    )


def first_op_along_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that reverses, adds up or shuffles rows; None if there is none."""
    return next(
        (operation.name for operation in graph.get_operations() if _goes_along_rows(operation)),
        None,
    )


def first_sum_in_weights(graph: tf.Graph) -> str | None:
    """Names an operation over all rows of a batch on which the tensors named WEIGHTS depend; None
    if there is none.
    """
    needed = {op.name for op in graph.get_operations() if WEIGHTS in op.name.rpartition("/")[2]}
    for operation in reversed(graph.get_operations()):  # each before its inputs
        if operation.name in needed and operation.type not in _OF_SHAPES:
            if _loses_rows(operation):
                return operation.name
            needed |= {t.op.name for t in operation.inputs}
    return None


def first_op_beyond_sums(
    scalar: tf.Tensor, model_is_by_row: bool, functions_are_sums: bool = True
) -> str | None:
    """Names an operation after which a scalar is no sum or mean over rows any more, as a root; None
    if none is.

    Loops and called functions that take rows and return none are sums if `functions_are_sums`.
    """
    sums = _SUMS | _FUNCTIONS if functions_are_sums else _SUMS
    # operations that depend on a tensor with rows, and not on the number of rows alone
    reaches: set[str] = set()
    for operation in scalar.graph.get_operations():  # each after its inputs
        depends = _has_rows(operation.outputs) or any(
            t.op.name in reaches for t in operation.inputs
        )
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
    return operation.type in _LINEAR or (
        factor and (operation.type == "Mul" or inputs[0] is operation.inputs[0])
    )


def _has_rows(tensors: Sequence[tf.Tensor]) -> bool:
    return any(
        t.shape.rank is None or any(d and d % TELLING_ROWS == 0 for d in t.shape) for t in tensors
    )


def _loses_rows(operation: tf.Operation) -> bool:
    # which hold rows, and show no shape
    lists = any(t.dtype == tf.variant for t in operation.outputs)
    return (
        _has_rows(operation.inputs)
        and bool(operation.outputs)
        and not lists
        and not _has_rows(operation.outputs)
    )


def _is_square(operation: tf.Operation) -> bool:
    return any(t.shape.rank and list(t.shape).count(TELLING_ROWS) > 1 for t in operation.outputs)


def _goes_along_rows(operation: tf.Operation) -> bool:
    """Tells if an operation reverses, adds up or shuffles the rows, or takes a softmax over
    them.
    """
    if operation.type == "RandomShuffle":
        return True
    if operation.type in ("Softmax", "LogSoftmax"):
        axes = np.array(-1)
    elif operation.type in _ALONG_AN_AXIS:
        axes = tf.get_static_value(operation.inputs[-1])
    else:
        return False
    shape = operation.inputs[0].shape
    if not shape.rank:
        return False
    return axes is None or any(
        shape[int(axis)] and _is_of_rows(shape[int(axis)]) for axis in axes.ravel()
    )


def _may_move_rows(operation: tf.Operation) -> bool:
    """Tells if a row of an operation's results may come from others, which its shapes do not
    show.
    """
    kind, inputs = operation.type, operation.inputs
    if not _has_rows(inputs) or any(t.dtype in (tf.string, tf.resource) for t in inputs):
        return False
    if kind in _BY_ELEMENT | _OF_OTHER_AXES | _OF_SHAPES | _OF_LISTS | _LOOKED_INTO | {"Assert"}:
        return False
    if kind in CALLS_OF_PYTHON:  # taken for functions of each row
        return False
    shape = inputs[0].shape
    if shape.rank is None:
        return True
    if kind in _OF_A_BATCH:
        # of a transposed convolution: not the sizes
        first = next(t.shape for t in inputs if _has_rows([t]))
        return not (first.rank and _is_of_rows(first[0]))
    if kind in _FFTS:
        return not (shape.rank > _FFTS[kind] and _is_axis_of_rows(shape, 0))
    if kind == "FusedBatchNormV3":
        return operation.get_attr("is_training")
    if kind == "TensorListFromTensor":  # for a loop over its first axis
        return _is_axis_of_rows(shape, 0)
    if kind == "TopKV2":
        return _is_axis_of_rows(shape, -1)
    if kind == "GatherV2":
        axis = tf.get_static_value(inputs[2])
        return _has_rows(inputs[:1]) and (axis is None or _is_axis_of_rows(shape, int(axis)))
    if kind == "GatherNd":
        return _has_rows(inputs[:1])
    if kind == "StridedSlice":
        strides = tf.get_static_value(inputs[3])
        return _has_rows(inputs[:1]) and (strides is None or bool((strides < 0).any()))
    if kind == "Reshape":
        # Another product of axes before that of the rows deals them out anew, as heads that are
        # folded into rows.
        return _lengths_before_rows(shape) != _lengths_before_rows(operation.outputs[0].shape)
    if kind == "Einsum":
        return not _keeps_row_labels(operation)
    return True


def _keeps_row_labels(operation: tf.Operation) -> bool:
    """Tells if an einsum has one label for the rows of all its factors, and of its result."""
    terms, _, result = tf.compat.as_str(operation.get_attr("equation")).partition("->")
    labels = set()
    for term, factor in zip(terms.split(","), operation.inputs, strict=True):
        if "." in term or factor.shape.rank is None:
            return False
        labels |= {
            label
            for label, length in zip(term, factor.shape, strict=True)
            if length and _is_of_rows(length)
        }
    return len(labels) == 1 and labels <= set(result)


def _is_axis_of_rows(shape: tf.TensorShape, axis: int) -> bool:
    """Tells if an axis has the rows; one of unknown length has, where no other axis does."""
    if shape[axis] is None:
        return not any(length and _is_of_rows(length) for length in shape)
    return _is_of_rows(shape[axis])


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
    """Yields the operations that a function's results need, with those of its loops, branches and
    functions.
    """
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
                inner = getattr(function, "graph", None)  # which those of TensorFlow 1 do not show
                if inner is not None:
                    yield from _operations(inner)


def _changes_other_rows(function: Callable, specs: Nest) -> bool:
    """Tells if a change of one of a few drawn rows changes others' results; True where that cannot
    be computed.
    """
    rows = 4
    try:
        traced = trace(function, specs, rows)
        variables = list(traced.graph.variables)

        def results(batch: Nest) -> list[np.ndarray]:
            with restored(variables):  # seeds too: each call draws the same
                for variable in variables:
                    # a gate that is 0 before the training would hide what it lets in
                    if variable.dtype.is_floating:
                        variable.assign_add(tf.cast(tf.fill(variable.shape, 0.1), variable.dtype))
                found = [tf.cast(t, tf.float32).numpy() for t in tf.nest.flatten(traced(batch))]
            return [value.reshape(rows, -1) for value in found]

        for factor in (1, -5):  # of floats: what lies behind a threshold is to be reached
            drawn, changed = (_scaled(drawn_batch(specs, rows, seed), factor) for seed in (0, 1))
            before = results(drawn)
            for row in range(rows):
                after = results(_with_row(drawn, changed, row))
                others = np.arange(rows) != row
                for one, other in zip(before, after, strict=True):
                    if not np.allclose(
                        one[others], other[others], rtol=1e-4, atol=1e-6, equal_nan=True
                    ):
                        return True
    except Exception:  # it takes no such values, or is of a fixed number of rows
        return True
    return False


def _scaled(batch: Nest, factor: int) -> Nest:
    return tf.nest.map_structure(
        lambda t: t * tf.cast(factor, t.dtype) if t.dtype.is_floating else t, batch
    )


def _with_row(batch: Nest, other: Nest, row: int) -> Nest:
    """Returns the batch with this row of the other one in place of its own."""
    return tf.nest.map_structure(
        lambda t, o: tf.tensor_scatter_nd_update(t, [[row]], o[row : row + 1]), batch, other
    )
