"""Parts of a model to be computed again in the backward pass: layers that repeat, and segments of
flat graphs.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from fastaccum.adapters.attributes import kinds, of_keras, package
from fastaccum.adapters.layers import find_lookups
from fastaccum.kernels import private
from fastaccum.kernels.layer_stack import LayerStack

_INPUTS = {"keras.InputLayer", "tf_keras.InputLayer"}
_SPECTRAL = {"keras.SpectralNormalization", "tf_keras.SpectralNormalization"}
# Recompute the blocks inside a layer, not the layer, if they hold at least this share of its
# weights.
_MIN_SHARE_IN_BLOCKS = 0.75
# What stands for a length that is not known, of an axis other than the rows'.
_LENGTH = 128
# What cutting a graph is to leave of its memory at most, for it to be worth the arithmetic.
_WORTH = 0.8


class Segment(NamedTuple):
    """Nodes of a functional graph that are called one after the other."""

    nodes: list[Any]
    inputs: list[keras.KerasTensor]  # that other nodes give
    outputs: list[keras.KerasTensor]  # that other nodes take
    recomputed: bool

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers among the operations, with the layers inside them."""
        layers = [
            node.operation for node in self.nodes if isinstance(node.operation, keras.layers.Layer)
        ]
        return [part for layer in layers for part in private.flatten_layers(layer)]


class Block(NamedTuple):
    """Layer whose whole `call` is recomputed; or, with `segments`, a functional model that is
    cut.
    """

    layer: keras.layers.Layer | keras.Function
    segments: list[Segment] | None = None

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers that are recomputed."""
        if self.segments is None:
            return [self.layer]
        return [
            layer for segment in self.segments if segment.recomputed for layer in segment.layers
        ]


def find(model: keras.Model) -> list[Block]:
    """Finds the blocks of a model: layers of one class side by side, unless most of each is in
    blocks of its own.

    A functional or Sequential model whose blocks hold less than that is cut into segments itself,
    if that is worth it.
    """
    found = _search(model, {}, root=model)
    graph = graph_of(model)
    segments = None if found or graph is None else _cut(graph, is_last=True, worth=1.0)
    return found if segments is None else [Block(graph, segments)]


def refusal(layer: keras.layers.Layer) -> str | None:
    """Returns why a layer cannot be recomputed, as a predicate of the layer; None where it can."""
    parts = list(private.flatten_layers(layer))
    if hasattr(layer, "update_state"):
        return "is a metric"
    if found := find_lookups(parts):
        return (
            f"holds the embedding {found[0][0].name!r}, whose ids are checked as they are looked up"
        )
    if any(isinstance(part, LayerStack) for part in parts):
        return "holds a LayerStack, which recomputes by a policy of its own"
    if any(kinds(part).keys() & _SPECTRAL for part in parts):
        return "holds a SpectralNormalization, which reads in a branch the kernel that it assigns"
    return "is an input" if kinds(layer).keys() & _INPUTS else None


def _search(
    layer: keras.layers.Layer, known: dict[int, list[Block]], root: keras.layers.Layer
) -> list[Block]:
    if id(layer) in known:
        return known[id(layer)]
    known[id(layer)] = []  # for a layer that holds itself
    children = list(
        {
            id(c): c for c in private.flatten_layers(layer, include_self=False, recursive=False)
        }.values()
    )
    children = [child for child in children if _is_composite(child)]
    number = collections.Counter(map(type, children))
    found: list[Block] = []
    for child in children:
        within = _search(child, known, root)
        repeats = number[type(child)] > 1 and refusal(child) is None
        # Models of a few layers each that repeat are blocks; a few models of many layers are cut.
        small = number[type(child)] > 2 and all(block.segments is not None for block in within)
        found += [Block(child)] if repeats and (small or not _holds_most(within, child)) else within
    graph = graph_of(layer)
    if graph is not None and not _holds_most(found, layer):
        segments = _cut(graph, is_last=layer is root)
        found = found if segments is None else [Block(graph, segments)]
    known[id(layer)] = found
    return found


def _is_composite(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is made of layers, and not one of Keras's own layers that happens to
    be.
    """
    if of_keras(type(layer)) and not {"keras.Model", "tf_keras.Model"} & kinds(layer).keys():
        return False
    return bool(layer.weights) and any(
        part.weights for part in private.flatten_layers(layer, include_self=False)
    )


def _holds_most(blocks: list[Block], layer: keras.layers.Layer) -> bool:
    within = {id(w) for block in blocks for part in block.layers for w in part.weights}
    others = {
        id(w)
        for embedding, _ in find_lookups(private.flatten_layers(layer))
        for w in embedding.weights
    }
    own = {id(w) for w in layer.weights} - others
    return bool(within) and len(within & own) >= _MIN_SHARE_IN_BLOCKS * len(own)


def graph_of(layer: keras.layers.Layer) -> keras.Function | None:
    """Returns the node graph of a functional or Sequential model; None for a model with a `call` of
    its own.
    """
    if isinstance(layer, keras.Sequential):
        layer = private.functional(layer)
    return (
        layer
        if isinstance(layer, keras.Function) and package(type(layer).call) == "keras"
        else None
    )


def _cut(graph: keras.Function, is_last: bool, worth: float = _WORTH) -> list[Segment] | None:
    """Cuts a graph where kept boundaries and the largest inside of a segment take the least memory,
    if `worth` of it.

    The last segment of a graph that `is_last` before the loss is kept, as the way back begins
    there.
    """
    nodes, apart = _ordered(graph)
    last_use = {id(t): len(nodes) for t in graph.outputs}
    for k, node in reversed(list(enumerate(nodes))):
        for t in node.input_tensors:
            last_use.setdefault(id(t), k)
    uses = [
        [(last_use.get(id(t), k), _size(t)) for t in node.outputs] for k, node in enumerate(nodes)
    ]
    costs = [_Cost(_inside(node), outputs) for node, outputs in zip(nodes, uses, strict=True)]
    ends, least = _least(costs, apart)
    if least >= worth * sum(cost.inside for k, cost in enumerate(costs) if k not in apart):
        return None
    parts = [nodes[i:j] for i, j in itertools.pairwise([0, *ends])]
    segments = [
        _segment(part, graph.outputs, nodes, nodes.index(part[0]) not in apart) for part in parts
    ]
    if is_last:
        last = max(k for k, segment in enumerate(segments) if segment.recomputed)
        segments[last] = segments[last]._replace(recomputed=False)
    return segments


def _ordered(graph: keras.Function) -> tuple[list[Any], set[int]]:
    """Returns the nodes that a call runs, in Keras's order, and the places of those apart, which no
    block may hold.
    """
    by_depth = private.nodes_by_depth(graph)
    nodes = [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation
    ]
    nodes = [*_callable([node for node in nodes if not node.is_input], graph)]
    outputs = {id(t) for t in graph.outputs}
    apart = [node for node in nodes if _is_apart(node, outputs)]
    # what these do to ids and masks would part what others compute
    first = [*_callable(apart, graph)]
    nodes = [*first, *(node for node in nodes if node not in first)]
    return nodes, {k for k, node in enumerate(nodes) if node in apart}


def _callable(nodes: list[Any], graph: keras.Function) -> Iterator[Any]:
    """Yields the nodes whose inputs are there: as in Keras, what hangs on inputs of other graphs is
    not called.
    """
    ready = {id(t) for t in graph.inputs}
    for node in nodes:
        if all(id(t) in ready for t in node.input_tensors):
            ready.update(id(t) for t in node.outputs)
            yield node


def _is_apart(node: Any, outputs: set[int]) -> bool:
    layer = node.operation
    if not any("float" in str(t.dtype) for t in node.outputs):
        return True
    if not isinstance(layer, keras.layers.Layer):
        return False
    # A LinearCrossEntropy takes over such a layer.
    is_head = hasattr(layer, "kernel") and any(id(t) in outputs for t in node.outputs)
    return is_head or refusal(layer) is not None


class _Cost(NamedTuple):
    inside: float  # what a node's gradient reads
    # of each the place of the last node that takes it, and its size
    outputs: list[tuple[int, float]]


def _least(costs: list[_Cost], apart: set[int]) -> tuple[list[int], float]:
    """Returns where segments end and their bytes, boundaries and largest inside; a node apart is a
    segment.
    """
    total = sum(cost.inside for cost in costs)
    bound = max((cost.inside for k, cost in enumerate(costs) if k not in apart), default=0.0)
    best: tuple[list[int], float] = [len(costs)], math.inf
    while bound and bound < 2 * total:
        best = min(best, _within(bound, costs, apart), key=lambda found: found[1])
        bound *= 1.3
    return best


def _within(bound: float, costs: list[_Cost], apart: set[int]) -> tuple[list[int], float]:
    """Returns what `_least` does, with the least boundaries where no inside is larger than
    `bound`.
    """
    # Of the first j nodes: what is kept at least, where the last segment of them begins, and the
    # largest inside.
    best: list[tuple[float, int, float]] = [(0.0, 0, 0.0)]
    for j in range(1, len(costs) + 1):
        found = (math.inf, 0, 0.0)
        inside = out = 0.0
        for i in range(j - 1, -1, -1):
            inside += costs[i].inside
            if i < j - 1 and (inside > bound or i in apart or j - 1 in apart):
                break
            out += sum(size for use, size in costs[i].outputs if use >= j)
            kept, _, largest = best[i]
            found = min(found, (kept + out, i, largest if i in apart else max(largest, inside)))
        best.append(found)
    ends = [len(costs)]
    while begins := best[ends[0]][1]:
        ends.insert(0, begins)
    kept, _, largest = best[-1]
    return ends, kept + largest


def _segment(
    part: list[Any], outputs: list[keras.KerasTensor], nodes: list[Any], recomputed: bool
) -> Segment:
    made = {id(t): t for node in part for t in node.outputs}
    taken = {id(t): t for node in part for t in node.input_tensors if id(t) not in made}
    inside = {id(node) for node in part}
    elsewhere = {id(t) for node in nodes if id(node) not in inside for t in node.input_tensors}
    given = [
        t for key, t in made.items() if key in elsewhere or any(t is output for output in outputs)
    ]
    return Segment(part, list(taken.values()), given, recomputed)


def _size(t: keras.KerasTensor) -> float:
    """Returns the bytes of a KerasTensor for one row."""
    rows, *sizes = t.shape or (1,)
    width = 2 if "16" in str(t.dtype) else 4
    return float(width * (rows or 1) * math.prod(size or _LENGTH for size in sizes))


def _inside(node: Any) -> float:
    """Estimates the bytes that a node's gradient reads: an output for each layer within, and
    attention's scores.
    """
    layer, out = node.operation, sum(map(_size, node.outputs))
    if not isinstance(layer, keras.layers.Layer):
        return out
    if (graph := graph_of(layer)) is not None:
        return sum(map(_inside, _ordered(graph)[0]))
    shape, heads = (
        node.outputs[0].shape,
        getattr(layer, "num_heads", getattr(layer, "num_query_heads", None)),
    )
    scores = 3.0 * heads * (shape[1] or _LENGTH) ** 2 * 4 if heads and len(shape) == 3 else 0.0
    return out * len(list(private.flatten_layers(layer))) + scores
