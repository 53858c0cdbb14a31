"""Traces functions of a batch, and reads in their graphs what depends on which rows, or on how many."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.adapters.attributes import Nest, Variable, raw
from fastaccum.kernels import private
from fastaccum.kernels.recomputed_function import DRAWS

# Of a batch that is only traced: no other axis of a model is as long.
TELLING_ROWS = 1031
# What `compute_loss` hands to its compiled loss as sample weights, and what it gets from it, by name.
WEIGHTS, COMPILED = "weight_of_compute_loss", "compiled_loss_of_compute_loss"

_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
UNSEEDED = DRAWS - {"RngReadAndSkip"}  # whose state is in a variable; that of the others is nowhere to be read
_CALLS_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_CHECKS = {"All", "Any", "Assert"}
_ALONG_AN_AXIS = {"ReverseV2", "Roll", "Cumsum", "Cumprod"}
_SUMS = {"Sum", "Mean", "L2Loss", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum"}
_LINEAR = {"Add", "AddV2", "AddN", "Sub", "Neg", "Sum", "Mean", "Cast", "Identity", "IdentityN"}
_LINEAR |= {"Reshape", "Squeeze", "ExpandDims", "Pack", "ConcatV2", "StopGradient"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_FUNCTIONS = CALLS | {"While", "StatelessWhile"}  # not looked into
_PRODUCTS = {"Mul", "RealDiv", "DivNoNan", "Div", "TrueDiv"}


def trace(function: Callable, nest: Nest, rows: int | None = TELLING_ROWS) -> tf.types.experimental.ConcreteFunction:
    """Traces a function of one batch with so many rows; `nest` has the specs, and with None also the number of rows.

    The operations of a tf.function that it calls are in its own graph, except where one needs AutoGraph.
    """
    with contextlib.suppress(Exception), _inlined_functions():  # whatever a user's function raises without AutoGraph
        return trace_with_calls(function, nest, rows)
    return trace_with_calls(function, nest, rows)


def trace_with_calls(function: Callable, nest: Nest, rows: int | None) -> tf.types.experimental.ConcreteFunction:
    """Traces as `trace` does, with a tf.function that the function calls left a call, and compiled as it says."""
    specs = tf.nest.map_structure(lambda s: tf.TensorSpec([rows or s.shape[0] or 1, *s.shape[1:]], s.dtype), nest)
    return tf.function(function, autograph=False).get_concrete_function(specs)


@contextlib.contextmanager
def _inlined_functions() -> Iterator[None]:
    """Traces each tf.function that is called inside the block as a part of its caller."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def first_cross_example_op(graph: tf.Graph) -> str | None:
    """Names the first operation whose result for a row depends on other rows; None if there is none."""
    for operation in graph.get_operations():
        if operation.type in _OF_SHAPES | _CHECKS or operation.type == "TensorListSetItem":  # rows that a loop keeps
            continue
        if _is_square(operation) or _loses_rows(operation) or _goes_along_rows(operation):
            return operation.name
    return None


def list_python_calls(graph: tf.Graph) -> list[str]:
    """Names the operations that call Python (tf.numpy_function, tf.py_function), which XLA cannot compile."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return [node.name for node in nodes if node.op in _CALLS_OF_PYTHON]


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
    return _has_rows(operation.inputs) and bool(operation.outputs) and not _has_rows(operation.outputs)


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


def list_assigned(graph: tf.Graph, of_keras: Sequence[Variable]) -> list[Variable]:
    """Lists the variables that a graph assigns, as Keras variables where they are in `of_keras`."""
    # A variable has a component on every replica, or is its own.
    owners = {id(part.handle): v for v in of_keras for part in getattr(raw(v), "values", [raw(v)])}
    owners = {id(v.handle): v for v in graph.variables} | owners
    outside = {id(inside): id(handle) for handle, inside in graph.captures}
    written = [
        outside.get(id(t)) for op in graph.get_operations() for t in private.get_read_write_resource_inputs(op)[1]
    ]
    return list({id(owners[handle]): owners[handle] for handle in written if handle in owners}.values())


# The number of rows: where a function computes with it, and by which power.

OTHER_ROWS = 1543  # beside TELLING_ROWS: as telling, and a factor away that bfloat16 shows

_ARITHMETIC = {"Add", "AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Neg", "Pack", "ConcatV2"}
_PICKS = {"StridedSlice", "Slice", "GatherV2"}
_OF_THE_FIRST = {*_PICKS, "Reshape", "Squeeze", "ExpandDims", "Identity", "Prod", "Sum"}
_COMPARISONS = {"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"}

# How far the number of rows has come: nowhere, to an integer, which may be a shape, or to a value; and by which node.
Mark = tuple[int, str]
_NOTHING, _INTEGER, _VALUE = (0, ""), 1, 2


def find_row_counter(one: tf.types.experimental.ConcreteFunction, function: Callable, specs: Nest) -> str | None:
    """Names the operation by which the number of rows reaches results of a function, of which `one` is a trace."""
    graphs = [each.graph.as_graph_def() for each in (one, trace(function, specs, OTHER_ROWS))]
    libraries = [{f.signature.name: f for f in graph.library.function} for graph in graphs]
    level, name = max(_marks([g.node for g in graphs], {}, [t.name for t in one.outputs], libraries), default=_NOTHING)
    return name if level == _VALUE else None


def find_power_of_rows(function: Callable, specs: Nest) -> float | None:
    """Finds p, a multiple of 1/4 but not 0, where a row's result is `rows**p` times what follows from the row alone."""
    drawn, few, more = np.random.default_rng(0).uniform, 8, 12

    def results(rows: int) -> np.ndarray:
        batch = tf.nest.map_structure(lambda t: t[:rows], batches)
        return trace(function, specs, rows)(batch).numpy()[:few].ravel()

    try:
        batches = tf.nest.map_structure(
            lambda s: tf.cast(drawn(0.1, 0.9, [more, *s.shape[1:]]) * (1 + tf.as_dtype(s.dtype).is_integer), s.dtype),
            specs,
        )
        one, other = results(few), results(more)
    except Exception:  # it takes no such numbers
        return None
    with np.errstate(all="ignore"):
        powers = (np.log(other / one) / np.log(more / few))[(one != 0) | (other != 0)]
        found = np.round(powers.mean() * 4) / 4
    return float(found) if found and (np.abs(powers - found) < 1e-3).all() else None


def _marks(nodes: Sequence[Any], known: dict[str, Any], outputs: list[str], libraries: list[dict]) -> list[Mark]:
    """Returns the marks of `outputs`, from the `known` marks of arguments and the nodes of both traces."""

    def of(name: str) -> Mark:
        node, _, output = name.partition(":")
        found = known.get(node, _NOTHING)
        return found[int(output.rpartition(":")[2] or 0)] if isinstance(found, list) else found

    constants = [{node.name: node for node in each if node.op in {"Const", *_PICKS}} for each in nodes]
    for node, twin in itertools.zip_longest(*nodes):
        if node is None or twin is None or node.op != twin.op:
            return [(_VALUE, (node or twin).name)] * len(outputs)
        given = [of(name) for name in node.input if name[0] != "^"]
        called = [key for key in ("f", "body", "then_branch", "else_branch") if key in node.attr]
        if _are_equal_constants((node, twin), constants):
            known[node.name] = _NOTHING
        elif node.op == "Const":
            known[node.name] = _INTEGER + tf.as_dtype(node.attr["dtype"].type).is_floating, node.name
        elif called:
            known[node.name] = given if "body" in called else []
            for key in called * (1 + ("body" in called)):  # what a turn of a loop marks is given to the next one
                f, g = (library[n.attr[key].func.name] for library, n in zip(libraries, (node, twin), strict=True))
                inputs = known[node.name] if key == "body" else given[-len(f.signature.input_arg) :]
                arguments = {a.name: mark for a, mark in zip(f.signature.input_arg, inputs, strict=False)}
                returned = [f.ret[a.name] for a in f.signature.output_arg]
                found = _marks([f.node_def, g.node_def], arguments, returned, libraries)
                known[node.name] = list(itertools.starmap(max, itertools.zip_longest(known[node.name] or found, found)))
        else:
            known[node.name] = _result(node, given)
    return [of(name) for name in outputs]


def _are_equal_constants(pair: Sequence[Any], constants: Sequence[dict[str, Any]]) -> bool:
    try:
        one, other = (_evaluate(each, nodes).ravel() for each, nodes in zip(pair, constants, strict=True))
    except KeyError:
        return False
    one, other = one[: other.size], other[: one.size]
    return np.array_equal(one, other) or one.tobytes() == other.tobytes()  # NaN too


def _evaluate(node: Any, constants: dict[str, Any]) -> np.ndarray:
    """Returns the value of a constant, or the elements picked from one; KeyError for what `constants` lacks."""
    if constants[node.name].op == "Const":
        return tf.make_ndarray(node.attr["value"].tensor)
    inputs = [_evaluate(constants[name.partition(":")[0]], constants) for name in node.input if name[0] != "^"]
    pick = getattr(tf.raw_ops, node.op)
    names = inspect.signature(pick).parameters  # of inputs, then of attributes, which are numbers
    numbers = {name: node.attr[name].i for name in names if name in node.attr}
    with tf.init_scope():
        return pick(**dict(zip(names, inputs, strict=False)), **numbers).numpy()


def _result(node: tf.compat.v1.NodeDef, given: list[Mark]) -> Mark:
    """Returns the mark of an operation's results, from the marks of its inputs."""
    mark = max(given, default=_NOTHING)
    if node.op == "Range" or mark[0] != _INTEGER:
        return _NOTHING if node.op == "Range" else mark
    if node.op == "Cast":
        return _INTEGER + tf.as_dtype(node.attr["DstT"].type).is_floating, node.name
    if node.op in _COMPARISONS:
        return _VALUE, node.name
    return mark if node.op in _ARITHMETIC else given[0] if node.op in _OF_THE_FIRST else _NOTHING
