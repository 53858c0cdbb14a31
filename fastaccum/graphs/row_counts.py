"""Finds where the number of a batch's rows reaches a function's results, and by which power.

A result that depends on how many rows a micro-batch has is another one in the full batch. There are
two ways to see it, since each sees what the other cannot:

- `find_row_counter` compares two traces, for two numbers of rows, and names the operation. A
  constant that differs between them holds the number of rows. Marks follow it from operation to
  operation to the results. This serves models, losses and metrics: whatever they draw, compare or
  hold behind a gate, and without running a user's Python.
- `find_power_of_rows` computes a loss for two numbers of rows. A loss that is divided by their
  number is exact then, as docs/models.md promises. A trace does not show this power where Python
  has computed with the number, or where a little is added to it.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.graphs.traces import drawn_batch, trace

# The rows of the second trace, beside TELLING_ROWS: a prime number too, and so far from it that
# constants of bfloat16 differ.
OTHER_ROWS = 1543
# The rows of two drawn batches, of which the first holds the first rows of the second.
FEW_ROWS = 8
MORE_ROWS = 12
# A power is a multiple of 1/4, as of roots of roots, within the rounding of float32.
POWERS_IN_ONE = 4
POWER_TOLERANCE = 1e-3

# An integer that follows from the number of rows is still only a size after these operations.
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
# Operations that pick elements, such as one size of a shape.
_PICKS = {"StridedSlice", "Slice", "GatherV2"}
# Operations whose result holds the elements of the first input. Other inputs are shapes and places.
_OF_FIRST_INPUT = {*_PICKS, "Reshape", "Squeeze", "ExpandDims", "Identity", "Prod", "Sum"}
_COMPARISONS = {"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"}
# The attributes of a node by which it calls functions.
_CALLS = ("f", "body", "then_branch", "else_branch")

Node: TypeAlias = "tf.compat.v1.NodeDef"
Function: TypeAlias = "tf.compat.v1.FunctionDef"


class Reach(enum.IntEnum):
    """How far the number of rows has come in a graph.

    Every graph has the number as an integer in its shapes, which changes no result. It reaches
    values where an integer is cast to a float or compared.
    """

    NOWHERE = 0
    INTEGER = 1  # which may be a part of a shape
    VALUE = 2


class Mark(NamedTuple):
    """How far the number of rows has come to a tensor, and by which node.

    Marks compare by their reach first, so `max` of some is one that reaches furthest.
    """

    reach: Reach
    node: str = ""


_UNMARKED = Mark(Reach.NOWHERE)


class _Pair(NamedTuple):
    """The same node in two traces that differ in their number of rows alone."""

    one: Node
    other: Node


def find_row_counter(
    one: tf.types.experimental.ConcreteFunction, function: Callable, specs: Nest
) -> str | None:
    """Names the operation by which the number of rows reaches results of a function.

    `one` is a trace of it with TELLING_ROWS. The result is None if there is no such operation.
    """
    other = trace(function, specs, OTHER_ROWS)
    marker = _Marker(one.graph.as_graph_def(), other.graph.as_graph_def())
    marks = marker.mark_outputs([tensor.name for tensor in one.outputs])
    mark = max(marks, default=_UNMARKED)
    return mark.node if mark.reach == Reach.VALUE else None


def find_power_of_rows(function: Callable, specs: Nest) -> float | None:
    """Finds p where a row's result is `rows**p` times what follows from the row alone.

    p is a multiple of 1/4, and not 0. The result is None if there is no such power.
    """

    def results(batch: Nest, rows: int) -> np.ndarray:
        first_rows = tf.nest.map_structure(lambda tensor: tensor[:rows], batch)
        return trace(function, specs, rows)(first_rows).numpy()[:FEW_ROWS].ravel()

    try:
        batch = drawn_batch(specs, MORE_ROWS, seed=0)
        with_few = results(batch, FEW_ROWS)
        with_more = results(batch, MORE_ROWS)
    except Exception:  # it takes no such numbers
        return None
    with np.errstate(all="ignore"):
        powers = np.log(with_more / with_few) / np.log(MORE_ROWS / FEW_ROWS)
        powers = powers[(with_few != 0) | (with_more != 0)]
        power = np.round(powers.mean() * POWERS_IN_ONE) / POWERS_IN_ONE
    if power and (np.abs(powers - power) < POWER_TOLERANCE).all():
        return float(power)
    return None


class _Marker:
    """Marks, node by node, how far the number of rows comes in a pair of traces.

    The marks begin at constants that differ between the traces. A node has the mark that its inputs
    and its operation give it, and passes it on to the nodes that take its results.
    """

    def __init__(self, one: tf.compat.v1.GraphDef, other: tf.compat.v1.GraphDef):
        self._graphs = one, other
        self._functions_of_one = _functions_by_name(one)
        self._functions_of_other = _functions_by_name(other)

    def mark_outputs(self, outputs: list[str]) -> list[Mark]:
        """Returns the marks of the graphs' tensors of these names."""
        one, other = self._graphs
        return self._mark_nodes(one.node, other.node, {}, outputs)

    def _mark_nodes(
        self,
        nodes: Sequence[Node],
        other_nodes: Sequence[Node],
        arguments: dict[str, Mark],
        outputs: list[str],
    ) -> list[Mark]:
        """Returns the marks of `outputs`, from those of the arguments and from both traces."""
        # A node that calls functions has a list: the mark of each of its results.
        marks: dict[str, Mark | list[Mark]] = dict(arguments)
        constants = _constants(nodes)
        other_constants = _constants(other_nodes)
        for one, other in itertools.zip_longest(nodes, other_nodes):
            if one is None or other is None or one.op != other.op:
                # The function computes otherwise for another number of rows.
                name = other.name if one is None else one.name
                return [Mark(Reach.VALUE, name)] * len(outputs)
            inputs = [_find(name, marks) for name in one.input if name[0] != "^"]
            if _is_same_constant(one, other, constants, other_constants):
                marks[one.name] = _UNMARKED
            elif one.op == "Const":
                marks[one.name] = Mark(_reach_of(one.attr["dtype"].type), one.name)
            elif any(key in one.attr for key in _CALLS):
                marks[one.name] = self._mark_call(_Pair(one, other), inputs)
            else:
                marks[one.name] = _mark_result(one, inputs)
        return [_find(name, marks) for name in outputs]

    def _mark_call(self, pair: _Pair, inputs: list[Mark]) -> list[Mark]:
        """Returns the marks of a call's results: those that any of the functions gives them."""
        if "body" in pair.one.attr:
            return self._mark_loop(pair, inputs)
        results: list[Mark] = []
        for key in _CALLS:
            if key in pair.one.attr:
                returned = self._mark_function(pair, key, inputs)
                results = _mark_both(results, returned)
        return results

    def _mark_loop(self, pair: _Pair, inputs: list[Mark]) -> list[Mark]:
        """Returns the marks of a loop's variables after it."""
        variables = inputs
        # Two turns, as the second is given what the first has marked.
        for _ in range(2):
            returned = self._mark_function(pair, "body", variables)
            variables = _mark_both(variables, returned)
        return variables

    def _mark_function(self, pair: _Pair, key: str, inputs: list[Mark]) -> list[Mark]:
        """Returns the marks of the results of the function that an attribute names."""
        function = self._functions_of_one[pair.one.attr[key].func.name]
        other = self._functions_of_other[pair.other.attr[key].func.name]
        names = [argument.name for argument in function.signature.input_arg]
        # What comes before them decides which of the branches is taken.
        inputs_of_function = inputs[-len(names) :]
        arguments = dict(zip(names, inputs_of_function, strict=False))
        outputs = [function.ret[output.name] for output in function.signature.output_arg]
        return self._mark_nodes(function.node_def, other.node_def, arguments, outputs)


def _functions_by_name(graph: tf.compat.v1.GraphDef) -> dict[str, Function]:
    return {function.signature.name: function for function in graph.library.function}


def _find(tensor: str, marks: Mapping[str, Mark | list[Mark]]) -> Mark:
    """Returns the mark of a tensor, which is named as in a graph or in a function.

    A graph's nodes name it "node" or "node:1", and a function's "node:output:1".
    """
    node, _, output = tensor.partition(":")
    mark = marks.get(node, _UNMARKED)
    if isinstance(mark, Mark):
        return mark
    index = output.rpartition(":")[2]
    return mark[int(index or 0)]


def _mark_both(marks: list[Mark], other_marks: list[Mark]) -> list[Mark]:
    """Returns what reaches further, result by result."""
    pairs = itertools.zip_longest(marks, other_marks, fillvalue=_UNMARKED)
    return [max(mark, other) for mark, other in pairs]


def _mark_result(node: Node, inputs: list[Mark]) -> Mark:
    """Returns the mark of an operation's results, from the marks of its inputs."""
    if node.op == "Range":  # more rows make it longer, and leave its elements as they are
        return _UNMARKED
    mark = max(inputs, default=_UNMARKED)
    if mark.reach != Reach.INTEGER:
        return mark
    if node.op == "Cast":
        return Mark(_reach_of(node.attr["DstT"].type), node.name)
    if node.op in _COMPARISONS:
        return Mark(Reach.VALUE, node.name)
    if node.op in _ARITHMETIC:
        return mark
    if node.op in _OF_FIRST_INPUT:
        return inputs[0]
    return _UNMARKED  # the integer is a shape here, or an index


def _reach_of(dtype: int) -> Reach:
    """Returns the reach of the number of rows where a tensor of this dtype holds it."""
    return Reach.VALUE if tf.as_dtype(dtype).is_floating else Reach.INTEGER


def _constants(nodes: Sequence[Node]) -> dict[str, Node]:
    """Returns the nodes that are constants, or may pick from one, by name."""
    return {node.name: node for node in nodes if node.op == "Const" or node.op in _PICKS}


def _is_same_constant(
    one: Node, other: Node, constants: dict[str, Node], other_constants: dict[str, Node]
) -> bool:
    """Tells if both are constants, or picked from some, and equal as far as both go.

    Of a shape that is a constant, the size of another axis than that of the rows is equal in both.
    A constant that holds something for each row is longer in one.
    """
    try:
        value = _evaluate(one, constants).ravel()
        other_value = _evaluate(other, other_constants).ravel()
    except KeyError:
        return False
    size = min(value.size, other_value.size)
    value = value[:size]
    other_value = other_value[:size]
    return np.array_equal(value, other_value) or value.tobytes() == other_value.tobytes()  # NaN


def _evaluate(node: Node, constants: dict[str, Node]) -> np.ndarray:
    """Returns the value of a constant, or the elements picked from one.

    Raises:
        KeyError: raised for a node that `constants` does not have.
    """
    if constants[node.name].op == "Const":
        return tf.make_ndarray(node.attr["value"].tensor)
    inputs = []
    for name in node.input:
        if name[0] != "^":
            inputs.append(_evaluate(constants[name.partition(":")[0]], constants))
    pick = getattr(tf.raw_ops, node.op)
    # Names of the operation's inputs, then those of its attributes, which are numbers.
    names = inspect.signature(pick).parameters
    attributes = {name: node.attr[name].i for name in names if name in node.attr}
    with tf.init_scope():
        return pick(**dict(zip(names, inputs, strict=False)), **attributes).numpy()
