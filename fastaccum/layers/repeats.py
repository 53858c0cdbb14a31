"""Finds parts of a functional model's graph that repeat: the same layers with other weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import keras

from fastaccum.kernels import stackable
from fastaccum.layers.alike import Comparison
from fastaccum.layers.blocks import Segment, make_segment, ordered

# The most nodes of a part that may repeat. A block of a convolutional network written node by node
# has some ten, one of a transformer some twenty.
_LONGEST = 64


class Repeat(NamedTuple):
    """Parts of a graph that follow each other, and compute the same with other weights.

    Each part takes what the one before gave, and tensors that all of them share.
    """

    parts: list[list[Any]]  # the nodes of each part
    whole: Segment  # the nodes of all parts
    body: Segment  # the nodes of the first part
    is_known: bool  # whether all code is Keras's or KerasHub's

    @property
    def inputs(self) -> list[keras.KerasTensor]:
        return self.whole.inputs

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        return self.whole.outputs

    @property
    def x(self) -> int:
        """The place among the inputs of the tensor that each part takes from the one before."""
        second = make_segment(self.parts[1], [], self.parts[1], False)
        (place,) = [k for k, t in enumerate(self.body.inputs) if t is not second.inputs[k]]
        return place

    @property
    def layers_by_part(self) -> list[list[keras.layers.Layer]]:
        """The layers that each part calls."""
        layers_by_part = []
        for part in self.parts:
            operations = [node.operation for node in part]
            layers_by_part.append([op for op in operations if isinstance(op, keras.layers.Layer)])
        return layers_by_part

    @property
    def name(self) -> str:
        """The names of the first and the last part's first layers."""
        return f"{_name(self.parts[0])} to {_name(self.parts[-1])}"

    def variables(self) -> list[list[keras.Variable]]:
        """Lists each part's variables, in one order."""
        return [_variables(part) for part in self.parts]


class Found(NamedTuple):
    """The repeats of a graph, and why layers of one kind that follow each other are none."""

    repeats: list[Repeat]
    reasons: list[str]


def find_repeats(graph: keras.Function, fewest: int) -> Found:
    """Finds repeats of at least `fewest` parts: from each node on, that of the most nodes."""
    fewest = max(fewest, 2)
    search = _Search(graph)
    repeats: list[Repeat] = []
    reasons: list[str] = []
    start = 0
    while start < len(search.nodes):
        parts, reasons_here = search.longest_from(start, fewest)
        if not parts:
            reasons += reasons_here
            start += 1
            continue
        end = start + len(parts) * len(parts[0])
        span = search.nodes[start:end]
        whole = make_segment(span, graph.outputs, search.nodes, False)
        body = make_segment(parts[0], graph.outputs, search.nodes, False)
        repeats.append(Repeat(parts, whole, body, search.is_known(parts)))
        start = end
    return Found(repeats, list(dict.fromkeys(reasons)))


class _Search:
    """Search for repeats in the nodes of a graph, in the order of a call."""

    def __init__(self, graph: keras.Function):
        self.nodes, apart = ordered(graph)
        self._kinds = [_kind(node, k in apart) for k, node in enumerate(self.nodes)]
        self._differences: dict[tuple[int, int], str | None] = {}  # by the ids of two operations
        self._of_user: set[int] = set()  # the ids of operations with code of a user's
        # The places of the nodes that take a tensor; that behind the last stands for an output.
        self._consumers: dict[int, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for t in node.input_tensors:
                self._consumers.setdefault(id(t), []).append(k)
        for t in graph.outputs:
            self._consumers.setdefault(id(t), []).append(len(self.nodes))

    def longest_from(self, start: int, fewest: int) -> tuple[list[list[Any]], list[str]]:
        """Returns the parts of the longest repeat that starts at a node, and why others end.

        There are at least `fewest`, or none.
        """
        longest: list[list[Any]] = []
        reasons = []
        for length in range(1, min(_LONGEST, (len(self.nodes) - start) // 2) + 1):
            middle = start + length
            if self._kinds[start:middle] != self._kinds[middle : middle + length]:
                continue
            if longest and length % len(longest[0]) == 0 and 2 * length <= _count(longest):
                continue  # each of these parts would be several of the longest's
            parts, reason = self._parts_from(start, length)
            if len(parts) >= fewest and _count(parts) > _count(longest):
                longest = parts
            if reason is not None:
                reasons.append(reason)
        return longest, reasons

    def _parts_from(self, start: int, length: int) -> tuple[list[list[Any]], str | None]:
        """Returns the parts of `length` nodes from `start` on, and how the next layer differs."""
        first = self.nodes[start : start + length]
        parts = [first]
        known = {id(variable) for variable in _variables(first)}
        shared: set[int] | None = None
        reason = None
        while known:  # without weights there is nothing to be compiled once
            place = start + len(parts) * length
            part = self.nodes[place : place + length]
            if self._kinds[place : place + length] != self._kinds[start : start + length]:
                break
            before = parts[-1]
            comparison = Comparison()
            difference = self._layer_difference(before, part)
            if difference is None:
                difference = _compared(comparison.compare_nodes, before, part)
            if difference is not None:
                reason = f"{_name(part)} differs from {_name(before)}: {difference}"
                break
            ids = {id(variable) for variable in _variables(part)}
            if known & ids:
                reason = f"{_name(part)} shares weights with layers before it"
                break
            pairs = comparison.inputs(before)
            shared_here = {id(t) for t, other in pairs if t is other}
            taken = [other for t, other in pairs if t is not other]
            given = self._given(before, place - length)
            if taken != given or not self._only_within(given, place, place + length):
                break
            if shared is not None and shared != shared_here:
                break
            shared = shared_here
            known |= ids
            parts.append(part)

        # What follows may take more than one tensor of the last part.
        last_place = start + (len(parts) - 1) * length
        if len(parts) > 1 and len(self._given(parts[-1], last_place)) != 1:
            parts.pop()
        return parts, reason

    def is_known(self, parts: Sequence[Sequence[Any]]) -> bool:
        """Tells if no code of a user's was met as the layers of these parts were compared."""
        return not any(id(node.operation) in self._of_user for part in parts for node in part)

    def _layer_difference(self, part: Sequence[Any], other: Sequence[Any]) -> str | None:
        """Says how a layer of a part differs from that at its place in another; None if none does.

        Each two layers are compared once in a search, which comes by them many times.
        """
        for node, node_of_other in zip(part, other, strict=True):
            layers = (node.operation, node_of_other.operation)
            key = (id(layers[0]), id(layers[1]))
            if key not in self._differences:
                comparison = Comparison()
                self._differences[key] = _compared(comparison.compare, *layers)
                if comparison.meets_users_code:
                    self._of_user.add(id(layers[0]))
            if self._differences[key] is not None:
                return self._differences[key]
        return None

    def _given(self, part: Sequence[Any], place: int) -> list[keras.KerasTensor]:
        """Lists the tensors of a part, which starts at a place, that nodes outside of it take."""
        given = []
        for node in part:
            for t in node.outputs:
                consumers = self._consumers.get(id(t), [])
                if any(not place <= k < place + len(part) for k in consumers):
                    given.append(t)
        return given

    def _only_within(self, given: Sequence[keras.KerasTensor], place: int, end: int) -> bool:
        """Tells if one tensor is given, and beside its own part the next alone takes it."""
        if len(given) != 1:
            return False
        return all(k < end for k in self._consumers[id(given[0])])


def _compared(compare: Callable[..., str | None], a: Any, b: Any) -> str | None:
    """Compares two values that may hold anything."""
    try:
        return compare(a, b, "")
    except Exception as error:  # of whatever kind: code of the user's may have run
        return f"they cannot be compared: {type(error)}"


def _count(parts: Sequence[Sequence[Any]]) -> int:
    """Returns the number of nodes in all parts."""
    return sum(len(part) for part in parts)


def _kind(node: Any, is_apart: bool) -> Hashable:
    """Returns what alike nodes have in common, as far as that is quick to tell."""
    operation = node.operation
    if is_apart:
        return id(node)  # like no other
    if not isinstance(operation, keras.layers.Layer):
        return (type(operation),)
    shapes = [tuple(variable.shape) for variable in operation.weights]
    return type(operation), tuple(shapes)


def _variables(part: Sequence[Any]) -> list[keras.Variable]:
    """Lists the variables of a part's layers, once each, with the states of seeds."""
    by_id = {}
    for node in part:
        if isinstance(node.operation, keras.layers.Layer):
            for variable in stackable.variables(node.operation):
                by_id[id(variable)] = variable
    return list(by_id.values())


def _name(part: Sequence[Any]) -> str:
    """Returns the name of a part's first layer that has weights."""
    for node in part:
        if getattr(node.operation, "weights", None):
            return repr(node.operation.name)
    return repr(part[0].operation.name)
