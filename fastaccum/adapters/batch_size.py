"""Finds where a traced function computes with the number of rows of its batch, and by which power of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.adapters.coupling import traced

OTHER_ROWS = 1543  # beside `coupling.TELLING_ROWS`: as telling, and a factor away that bfloat16 shows

_ARITHMETIC = {"Add", "AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Neg", "Pack", "ConcatV2"}
_OF_THE_FIRST = {"StridedSlice", "Slice", "GatherV2", "Reshape", "Squeeze", "ExpandDims", "Identity", "Prod", "Sum"}
_COMPARISONS = {"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"}

# How far the number of rows has come: nowhere, to an integer, which may be a shape, or to a value; and by which node.
Mark = tuple[int, str]
_NOTHING, _INTEGER, _VALUE = (0, ""), 1, 2


def row_counter(one: Any, function: Callable, specs: Any) -> str | None:
    """Names what brings the number of rows into a function's results, beyond shapes and indices; `one` is its trace."""
    graphs = [each.graph.as_graph_def() for each in (one, traced(function, specs, OTHER_ROWS))]
    libraries = [{f.signature.name: f for f in graph.library.function} for graph in graphs]
    level, name = max(_marks([g.node for g in graphs], {}, [t.name for t in one.outputs], libraries), default=_NOTHING)
    return name if level == _VALUE else None


def power_of_rows(function: Callable, specs: Any) -> float | None:
    """Finds p, a multiple of 1/4 but not 0, where a row's result is `rows**p` times what follows from the row alone."""
    drawn, few, more = np.random.default_rng(0).uniform, 8, 12

    def results(rows: int) -> np.ndarray:
        batch = tf.nest.map_structure(lambda t: t[:rows], batches)
        return traced(function, specs, rows)(batch).numpy()[:few].ravel()

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


def _marks(
    nodes: Sequence[Any], known: dict[str, Any], outputs: Sequence[str], libraries: Sequence[dict]
) -> list[Mark]:
    """The marks of `outputs`, from the `known` ones of arguments; `nodes` are those of both traces."""

    def of(name: str) -> Mark:
        node, _, output = name.partition(":")
        found = known.get(node, _NOTHING)
        return found[int(output.rpartition(":")[2] or 0)] if isinstance(found, list) else found

    for node, twin in itertools.zip_longest(*nodes):
        if node is None or twin is None or node.op != twin.op:
            return [(_VALUE, (node or twin).name)] * len(outputs)
        given = [of(name) for name in node.input if name[0] != "^"]
        called = [key for key in ("f", "body", "then_branch", "else_branch") if key in node.attr]
        if node.op == "Const":
            one, other = (tf.make_ndarray(each.attr["value"].tensor).ravel() for each in (node, twin))
            one, other = one[: other.size], other[: one.size]
            same = np.array_equal(one, other) or one.tobytes() == other.tobytes()  # NaN too
            known[node.name] = _NOTHING if same else (_INTEGER + tf.as_dtype(one.dtype).is_floating, node.name)
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


def _result(node: Any, given: list[Mark]) -> Mark:
    """The mark of an operation's results, from those of its inputs."""
    mark = max(given, default=_NOTHING)
    if node.op == "Range" or mark[0] != _INTEGER:
        return _NOTHING if node.op == "Range" else mark
    if node.op == "Cast":
        return _INTEGER + tf.as_dtype(node.attr["DstT"].type).is_floating, node.name
    if node.op in _COMPARISONS:
        return _VALUE, node.name
    return mark if node.op in _ARITHMETIC else given[0] if node.op in _OF_THE_FIRST else _NOTHING
