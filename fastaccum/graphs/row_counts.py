"""The number of a batch's rows: where a function computes with it, and by which power.

A result that depends on how many rows a micro-batch has is another one in the full batch.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.graphs.traces import drawn_batch, trace

OTHER_ROWS = 1543  # beside TELLING_ROWS: as telling, and a factor away that bfloat16 shows

_ARITHMETIC = {
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "FloorDiv",
    "FloorMod",
    "Maximum",
    "Minimum",
    "Neg",
    "Pack",
    "ConcatV2",
}
_PICKS = {"StridedSlice", "Slice", "GatherV2"}
_OF_THE_FIRST = {*_PICKS, "Reshape", "Squeeze", "ExpandDims", "Identity", "Prod", "Sum"}
_COMPARISONS = {"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"}

# How far the number of rows has come: nowhere, to an integer, which may be a shape, or to a value;
# and by which node.
Mark = tuple[int, str]
_NOTHING, _INTEGER, _VALUE = (0, ""), 1, 2


def find_row_counter(
    one: tf.types.experimental.ConcreteFunction, function: Callable, specs: Nest
) -> str | None:
    """Names the operation by which the number of rows reaches results of a function, of which `one`
    is a trace.
    """
    graphs = [each.graph.as_graph_def() for each in (one, trace(function, specs, OTHER_ROWS))]
    libraries = [{f.signature.name: f for f in graph.library.function} for graph in graphs]
    level, name = max(
        _marks([g.node for g in graphs], {}, [t.name for t in one.outputs], libraries),
        default=_NOTHING,
    )
    return name if level == _VALUE else None


def find_power_of_rows(function: Callable, specs: Nest) -> float | None:
    """Finds p, a multiple of 1/4 but not 0, where a row's result is `rows**p` times what follows
    from the row alone.
    """
    few, more = 8, 12

    def results(rows: int) -> np.ndarray:
        batch = tf.nest.map_structure(lambda t: t[:rows], batches)
        return trace(function, specs, rows)(batch).numpy()[:few].ravel()

    try:
        batches = drawn_batch(specs, more, seed=0)
        one, other = results(few), results(more)
    except Exception:  # it takes no such numbers
        return None
    with np.errstate(all="ignore"):
        powers = (np.log(other / one) / np.log(more / few))[(one != 0) | (other != 0)]
        found = np.round(powers.mean() * 4) / 4
    return float(found) if found and (np.abs(powers - found) < 1e-3).all() else None


def _marks(
    nodes: Sequence[Any], known: dict[str, Any], outputs: list[str], libraries: list[dict]
) -> list[Mark]:
    """Returns the marks of `outputs`, from the `known` marks of arguments and the nodes of both
    traces.
    """

    def of(name: str) -> Mark:
        node, _, output = name.partition(":")
        found = known.get(node, _NOTHING)
        return found[int(output.rpartition(":")[2] or 0)] if isinstance(found, list) else found

    constants = [
        {node.name: node for node in each if node.op in {"Const", *_PICKS}} for each in nodes
    ]
    for node, twin in itertools.zip_longest(*nodes):
        if node is None or twin is None or node.op != twin.op:
            return [(_VALUE, (node or twin).name)] * len(outputs)
        given = [of(name) for name in node.input if name[0] != "^"]
        called = [key for key in ("f", "body", "then_branch", "else_branch") if key in node.attr]
        if _are_equal_constants((node, twin), constants):
            known[node.name] = _NOTHING
        elif node.op == "Const":
            known[node.name] = (
                _INTEGER + tf.as_dtype(node.attr["dtype"].type).is_floating,
                node.name,
            )
        elif called:
            known[node.name] = given if "body" in called else []
            # what a turn of a loop marks is given to the next one
            for key in called * (1 + ("body" in called)):
                f, g = (
                    library[n.attr[key].func.name]
                    for library, n in zip(libraries, (node, twin), strict=True)
                )
                inputs = known[node.name] if key == "body" else given[-len(f.signature.input_arg) :]
                arguments = {
                    a.name: mark for a, mark in zip(f.signature.input_arg, inputs, strict=False)
                }
                returned = [f.ret[a.name] for a in f.signature.output_arg]
                found = _marks([f.node_def, g.node_def], arguments, returned, libraries)
                known[node.name] = list(
                    itertools.starmap(max, itertools.zip_longest(known[node.name] or found, found))
                )
        else:
            known[node.name] = _result(node, given)
    return [of(name) for name in outputs]


def _are_equal_constants(pair: Sequence[Any], constants: Sequence[dict[str, Any]]) -> bool:
    try:
        one, other = (
            _evaluate(each, nodes).ravel() for each, nodes in zip(pair, constants, strict=True)
        )
    except KeyError:
        return False
    one, other = one[: other.size], other[: one.size]
    return np.array_equal(one, other) or one.tobytes() == other.tobytes()  # NaN too


def _evaluate(node: Any, constants: dict[str, Any]) -> np.ndarray:
    """Returns the value of a constant, or the elements picked from one; KeyError for what
    `constants` lacks.
    """
    if constants[node.name].op == "Const":
        return tf.make_ndarray(node.attr["value"].tensor)
    inputs = [
        _evaluate(constants[name.partition(":")[0]], constants)
        for name in node.input
        if name[0] != "^"
    ]
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
