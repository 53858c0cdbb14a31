"""Finds the operation by which the result for a row of a batch depends on other rows.

A trace of many rows shows it by shapes, since no other axis is as long. Lists of operations say
which of the others keep each row to itself. Where one of the rest may move rows, a few rows are
computed. Numbers alone would not do: a function that draws, as Dropout does, or that calls a user's
Python is not computed before the training. Nor would lists alone: loops and reshapes over rows are
exact in most models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    list_operations,
    trace,
)
from fastaccum.kernels.recomputed_function import DRAWS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that read shapes, and no elements.
_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
# Operations that go along one axis.
_ALONG_AN_AXIS = {"ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp"}
# Operations by which a sum or mean over rows may be taken.
_SUMS = {"Sum", "Mean", "L2Loss", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum"}
# Calls of functions, taken for sums where nothing looks into them.
_FUNCTIONS = CALLS | {"While", "StatelessWhile"}
# Operations of scalars after which a sum over rows still is one.
_LINEAR = _names("""
    Add AddV2 AddN Sub Neg Sum Mean Cast Identity IdentityN Reshape Squeeze ExpandDims Pack
    ConcatV2 StopGradient
""")
# Products and quotients, which are linear if one factor alone depends on rows.
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan", "Div", "TrueDiv"}

# Operations whose result for a row follows from that row alone: those of elements.
_BY_ELEMENT = _names("""
    Abs Neg Sign Square Sqrt Rsqrt Exp Expm1 Log Log1p Reciprocal Inv Sin Cos Tan Asin Acos Atan
    Atan2 Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid Relu Relu6 Elu Selu LeakyRelu Softplus
    Softsign Erf Erfc Erfinv Lgamma Digamma Floor Ceil Round Rint IsNan IsInf IsFinite
    LogicalNot Add AddV2 AddN Sub Mul MulNoNan RealDiv Div DivNoNan TrueDiv FloorDiv FloorMod
    Mod Maximum Minimum Pow SquaredDifference Xdivy Xlogy BiasAdd Equal NotEqual Less LessEqual
    Greater GreaterEqual LogicalAnd LogicalOr Select SelectV2 ClipByValue Cast Bitcast ZerosLike
    OnesLike CheckNumerics Identity IdentityN StopGradient PreventGradient EnsureShape OneHot
    Bucketize Complex ComplexAbs Real Imag Conj Angle
""")
# And those of other axes, if the shape of the result has the rows.
_OF_OTHER_AXES = _names("""
    Transpose ExpandDims Squeeze Pack Unpack ConcatV2 Split SplitV Tile Slice Pad PadV2
    MirrorPad BroadcastTo Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm Softmax
    LogSoftmax MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 ResourceGather
""")
_OF_OTHER_AXES |= _ALONG_AN_AXIS
# And those of a batch, if its first axis has the rows.
_OF_A_BATCH = _names("""
    Conv2D Conv3D Conv DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2 MaxPool
    MaxPoolV2 AvgPool MaxPool3D AvgPool3D ResizeBilinear ResizeNearestNeighbor ResizeBicubic
    ResizeArea SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
""")
# And those of lists, as recurrent layers make them of time steps.
_OF_LISTS = _names("""
    TensorListGetItem TensorListSetItem TensorListStack TensorListPushBack TensorListPopBack
""")
# And calls of functions, whose operations are looked at themselves.
_LOOKED_INTO = {*CALLS, "While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}
_BY_ROW = _BY_ELEMENT | _OF_OTHER_AXES | _OF_SHAPES | _OF_LISTS | _LOOKED_INTO | {"Assert"}
# The last axes that a Fourier transform is of, by its operation.
_AXES_OF_FFTS = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), 2),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), 3),
}

# The rows of drawn batches, of which one is changed at a time.
DRAWN_ROWS = 4
# Factors of what is drawn, one after the other: of both signs, and large, to reach what lies behind
# a threshold.
FACTORS_OF_DRAWN = (1, -5)
# Added to all weights: a gate that is 0 before the training would hide what it lets in.
SHIFT_OF_WEIGHTS = 0.1


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
    operations = list(list_operations(traced.graph, needed_only=True))
    moving = _first(_may_move_rows, operations)
    if moving is None:
        return None
    # What is drawn may decide which rows are mixed, and a user's Python does not run before the
    # training: such a function is not computed.
    kinds = {operation.type for operation in operations}
    draws = bool(kinds & DRAWS) or any("StatelessRandom" in kind for kind in kinds)
    if draws or kinds & CALLS_OF_PYTHON:
        return moving
    if _changes_other_rows(function, specs):
        return moving
    return None


def first_cross_example_op(graph: tf.Graph) -> str | None:
    """Names the first operation whose shapes show that it mixes rows; None if none does."""

    def mixes(operation: tf.Operation) -> bool:
        if operation.type in _OF_SHAPES:
            return False
        return _is_square(operation) or _loses_rows(operation) or _goes_along_rows(operation)

    return _first(mixes, list_operations(graph, needed_only=True))


def first_comparison_of_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that compares all rows with each other; None if there is none."""
    return _first(_is_square, graph.get_operations())


def first_op_along_rows(graph: tf.Graph) -> str | None:
    """Names the first operation that reverses, adds up or shuffles rows; None if there is none."""
    return _first(_goes_along_rows, graph.get_operations())


def _first(
    is_one: Callable[[tf.Operation], bool], operations: Iterable[tf.Operation]
) -> str | None:
    """Names the first of the operations that is one; None if none is."""
    for operation in operations:
        if is_one(operation):
            return operation.name
    return None


def first_sum_in_weights(graph: tf.Graph) -> str | None:
    """Names an operation over all rows on which the tensors named WEIGHTS depend, or None."""
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
    """Names an operation after which a scalar is no sum or mean over rows, as a root; or None.

    Loops and called functions that take rows and return none are sums if `functions_are_sums`.
    """
    operations = scalar.graph.get_operations()
    sums = _SUMS | _FUNCTIONS if functions_are_sums else _SUMS

    # Operations that depend on a tensor with rows, and not on the number of rows alone.
    of_rows: set[str] = set()
    for operation in operations:  # each after its inputs
        depends = any(t.op.name in of_rows for t in operation.inputs)
        if operation.type not in _OF_SHAPES and (depends or _has_rows(operation.outputs)):
            of_rows.add(operation.name)

    needed = {scalar.op.name} & of_rows
    for operation in reversed(operations):  # each before its inputs
        if operation.name not in needed or COMPILED in operation.name:
            continue
        inputs = [t for t in operation.inputs if t.op.name in of_rows]
        tensors = [*operation.inputs, *operation.outputs]
        is_of_lists = any(t.dtype == tf.variant for t in tensors)
        if is_of_lists:  # as recurrent layers make them of time steps
            is_beyond = False
        elif _has_rows(operation.outputs):
            is_beyond = model_is_by_row and not all(_has_rows([t]) for t in inputs)
        elif _has_rows(operation.inputs):
            is_beyond = operation.type not in sums
        else:
            is_beyond = not _is_linear(operation, inputs)
        if is_beyond:
            return operation.name
        needed |= {t.op.name for t in inputs}
    return None


def _is_linear(operation: tf.Operation, inputs: list[tf.Tensor]) -> bool:
    """Tells if an operation is linear in these of its inputs."""
    if operation.type in _LINEAR:
        return True
    if operation.type not in _PRODUCTS or len(inputs) != 1:
        return False
    return operation.type == "Mul" or inputs[0] is operation.inputs[0]


def _has_rows(tensors: Iterable[tf.Tensor]) -> bool:
    """Tells if any of the tensors has an axis of rows, or an unknown shape."""
    for tensor in tensors:
        if tensor.shape.rank is None:
            return True
        if any(length and length % TELLING_ROWS == 0 for length in tensor.shape):
            return True
    return False


def _loses_rows(operation: tf.Operation) -> bool:
    """Tells if an operation has rows in its inputs, and none in its results."""
    if not operation.outputs or any(t.dtype == tf.variant for t in operation.outputs):
        return False  # lists hold rows, and show no shape
    return _has_rows(operation.inputs) and not _has_rows(operation.outputs)


def _is_square(operation: tf.Operation) -> bool:
    """Tells if a result has two axes of rows."""
    return any(t.shape.rank and list(t.shape).count(TELLING_ROWS) > 1 for t in operation.outputs)


def _goes_along_rows(operation: tf.Operation) -> bool:
    """Tells if an operation reverses, adds up or shuffles rows, or takes a softmax over them."""
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
    if axes is None:
        return True
    lengths = [shape[int(axis)] for axis in axes.ravel()]
    return any(length and _is_of_rows(length) for length in lengths)


def _may_move_rows(operation: tf.Operation) -> bool:
    """Tells if a row of the results may come from other rows, though the shapes do not show it."""
    kind = operation.type
    inputs = operation.inputs
    if not _has_rows(inputs) or any(t.dtype in (tf.string, tf.resource) for t in inputs):
        return False
    # Calls of Python are taken for functions of each row.
    if kind in _BY_ROW or kind in CALLS_OF_PYTHON:
        return False
    shape = inputs[0].shape
    if shape.rank is None:
        return True
    if kind in _OF_A_BATCH:
        # A transposed convolution's first input are the sizes of its result.
        with_rows = next(t.shape for t in inputs if _has_rows([t]))
        return not (with_rows.rank and _is_of_rows(with_rows[0]))
    if kind in _AXES_OF_FFTS:
        return shape.rank <= _AXES_OF_FFTS[kind] or not _is_axis_of_rows(shape, 0)
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
        # Rows are dealt out anew if the axes before them hold another number of elements, as where
        # heads are folded into rows.
        return _lengths_before_rows(shape) != _lengths_before_rows(operation.outputs[0].shape)
    if kind == "Einsum":
        return not _keeps_row_labels(operation)
    return True


def _keeps_row_labels(operation: tf.Operation) -> bool:
    """Tells if an einsum has one label for the rows of all its factors, and of its result."""
    terms, _, result = tf.compat.as_str(operation.get_attr("equation")).partition("->")
    labels_of_rows = set()
    for term, factor in zip(terms.split(","), operation.inputs, strict=True):
        if "." in term or factor.shape.rank is None:
            return False
        for label, length in zip(term, factor.shape, strict=True):
            if length and _is_of_rows(length):
                labels_of_rows.add(label)
    return len(labels_of_rows) == 1 and labels_of_rows <= set(result)


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


def _changes_other_rows(function: Callable, specs: Nest) -> bool:
    """Tells if changing one of a few drawn rows changes others' results.

    The result is True where that cannot be computed.
    """
    try:
        traced = trace(function, specs, DRAWN_ROWS)
        for factor in FACTORS_OF_DRAWN:
            batch = _scaled(drawn_batch(specs, DRAWN_ROWS, seed=0), factor)
            other_batch = _scaled(drawn_batch(specs, DRAWN_ROWS, seed=1), factor)
            before = _results_by_row(traced, batch)
            for row in range(DRAWN_ROWS):
                after = _results_by_row(traced, _with_row(batch, other_batch, row))
                is_other = np.arange(DRAWN_ROWS) != row
                for result, changed in zip(before, after, strict=True):
                    if not _are_close(result[is_other], changed[is_other]):
                        return True
    except Exception:  # it takes no such values, or is of a fixed number of rows
        return True
    return False


def _results_by_row(
    traced: tf.types.experimental.ConcreteFunction, batch: Nest
) -> list[np.ndarray]:
    """Computes a function with moved weights; returns its results as arrays [rows, elements]."""
    variables = list(traced.graph.variables)
    with restored(variables):  # seeds too: each call draws the same
        for variable in variables:
            if variable.dtype.is_floating:
                shift = tf.cast(tf.fill(variable.shape, SHIFT_OF_WEIGHTS), variable.dtype)
                variable.assign_add(shift)
        results = [tf.cast(t, tf.float32).numpy() for t in tf.nest.flatten(traced(batch))]
    return [result.reshape(DRAWN_ROWS, -1) for result in results]


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _scaled(batch: Nest, factor: int) -> Nest:
    """Multiplies the floats of a batch."""

    def scale(tensor):
        if not tensor.dtype.is_floating:
            return tensor
        return tensor * tf.cast(factor, tensor.dtype)

    return tf.nest.map_structure(scale, batch)


def _with_row(batch: Nest, other: Nest, row: int) -> Nest:
    """Returns the batch with this row of the other one in place of its own."""

    def replace_row(tensor, other_tensor):
        return tf.tensor_scatter_nd_update(tensor, [[row]], other_tensor[row : row + 1])

    return tf.nest.map_structure(replace_row, batch, other)
