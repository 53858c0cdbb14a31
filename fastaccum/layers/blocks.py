"""Parts of a model to be computed again: layers that repeat, and segments of flat graphs."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from fastaccum.basics.attributes import kinds, of_keras, package
from fastaccum.kernels import private
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.layers.lookups import find_lookups

_INPUTS = {"keras.InputLayer", "tf_keras.InputLayer"}
_MODELS = {"keras.Model", "tf_keras.Model"}
_SPECTRAL = {"keras.SpectralNormalization", "tf_keras.SpectralNormalization"}
# Recompute the blocks inside a layer, not the layer, if they hold at least this share of its
# weights.
_MIN_SHARE_IN_BLOCKS = 0.75
# The length that stands for one that is not known, of an axis other than the rows'.
_LENGTH = 128
# A graph is cut if that leaves less than this share of its memory; else a cut is not worth the
# arithmetic.
_WORTH = 0.8
# The factor from one bound on the insides of segments to the next that is tried: small enough to
# come near the least memory, and large enough for few tries.
_BOUND_GROWTH = 1.3


class Segment(NamedTuple):
    """Nodes of a functional graph that are called one after the other."""

    nodes: list[Any]
    inputs: list[keras.KerasTensor]  # that other nodes give
    outputs: list[keras.KerasTensor]  # that other nodes take
    recomputed: bool

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers among the operations, with the layers inside them."""
        layers = []
        for node in self.nodes:
            if isinstance(node.operation, keras.layers.Layer):
                layers.extend(private.flatten_layers(node.operation))
        return layers


class Block(NamedTuple):
    """Layer whose `call` is recomputed; or, with `segments`, a functional model that is cut."""

    layer: keras.layers.Layer | keras.Function
    segments: list[Segment] | None = None

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers that are recomputed."""
        if self.segments is None:
            return [self.layer]
        layers = []
        for segment in self.segments:
            if segment.recomputed:
                layers.extend(segment.layers)
        return layers


def find(model: keras.Model) -> list[Block]:
    """Finds the blocks of a model: layers of one class side by side.

    Blocks inside such a layer are taken instead of it if they hold most of its weights. A
    functional or Sequential model whose blocks hold less than that is cut into segments itself, if
    that is worth it.
    """
    blocks = _search(model, {}, root=model)
    graph = graph_of(model)
    if blocks or graph is None:
        return blocks
    segments = _cut(graph, is_last=True, worth=1.0)
    if segments is None:
        return []
    return [Block(graph, segments)]


def refusal(layer: keras.layers.Layer) -> str | None:
    """Returns why a layer cannot be recomputed, as a predicate of the layer; None where it can."""
    parts = list(private.flatten_layers(layer))
    if hasattr(layer, "update_state"):
        return "is a metric"
    lookups = find_lookups(parts)
    if lookups:
        embedding, _ = lookups[0]
        return (
            f"holds the embedding {embedding.name!r}, whose ids are checked as they are looked up"
        )
    if any(isinstance(part, LayerStack) for part in parts):
        return "holds a LayerStack, which recomputes by a policy of its own"
    if any(kinds(part).keys() & _SPECTRAL for part in parts):
        return "holds a SpectralNormalization, which reads in a branch the kernel that it assigns"
    if kinds(layer).keys() & _INPUTS:
        return "is an input"
    return None


def _search(
    layer: keras.layers.Layer, known: dict[int, list[Block]], root: keras.layers.Layer
) -> list[Block]:
    """Finds the blocks in a layer; `known` has those of the layers that were searched before."""
    if id(layer) in known:
        return known[id(layer)]
    known[id(layer)] = []  # for a layer that holds itself

    distinct = {}
    for child in private.flatten_layers(layer, include_self=False, recursive=False):
        distinct[id(child)] = child
    children = [child for child in distinct.values() if _is_composite(child)]
    count_by_class = collections.Counter(type(child) for child in children)

    blocks: list[Block] = []
    for child in children:
        blocks_within = _search(child, known, root)
        count = count_by_class[type(child)]
        can_be_block = count > 1 and refusal(child) is None
        # Models of a few layers each that repeat are blocks; a few models of many layers are cut.
        is_small_model = count > 2 and all(block.segments is not None for block in blocks_within)
        if can_be_block and (is_small_model or not _hold_most(blocks_within, child)):
            blocks.append(Block(child))
        else:
            blocks.extend(blocks_within)

    graph = graph_of(layer)
    if graph is not None and not _hold_most(blocks, layer):
        segments = _cut(graph, is_last=layer is root)
        if segments is not None:
            blocks = [Block(graph, segments)]
    known[id(layer)] = blocks
    return blocks


def _is_composite(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is made of layers; of Keras's own, only models count as such."""
    if of_keras(type(layer)) and not _MODELS & kinds(layer).keys():
        return False
    if not layer.weights:
        return False
    return any(part.weights for part in private.flatten_layers(layer, include_self=False))


def _hold_most(blocks: list[Block], layer: keras.layers.Layer) -> bool:
    """Returns whether blocks hold most of a layer's weights, those of embeddings left out."""
    in_blocks: set[int] = set()
    for block in blocks:
        for part in block.layers:
            in_blocks.update(id(weight) for weight in part.weights)
    if not in_blocks:
        return False
    of_layer = {id(weight) for weight in layer.weights}
    for embedding, _ in find_lookups(private.flatten_layers(layer)):
        of_layer.difference_update(id(weight) for weight in embedding.weights)
    return len(in_blocks & of_layer) >= _MIN_SHARE_IN_BLOCKS * len(of_layer)


def graph_of(layer: keras.layers.Layer) -> keras.Function | None:
    """Returns the node graph of a functional or Sequential model.

    Returns None for a model with a `call` of its own.
    """
    if isinstance(layer, keras.Sequential):
        layer = private.functional(layer)
    if isinstance(layer, keras.Function) and package(type(layer).call) == "keras":
        return layer
    return None


def _cut(graph: keras.Function, is_last: bool, worth: float = _WORTH) -> list[Segment] | None:
    """Cuts a graph where that takes the least memory; None if that is not under `worth` of it.

    The memory is what is kept at the boundaries, and the largest inside of a segment. The last
    segment of a graph that `is_last` before the loss is kept, as the way back begins there.
    """
    nodes, apart = ordered(graph)
    last_use = {id(t): len(nodes) for t in graph.outputs}
    for place in reversed(range(len(nodes))):
        for t in nodes[place].input_tensors:
            last_use.setdefault(id(t), place)

    costs = []
    for place, node in enumerate(nodes):
        outputs = [(last_use.get(id(t), place), _size(t)) for t in node.outputs]
        costs.append(_Cost(_inside(node), outputs))
    cut = _least(costs, apart)
    uncut_memory = sum(cost.inside for place, cost in enumerate(costs) if place not in apart)
    if cut.memory >= worth * uncut_memory:
        return None

    segments = []
    for start, end in itertools.pairwise([0, *cut.ends]):
        recomputed = start not in apart
        segments.append(make_segment(nodes[start:end], graph.outputs, nodes, recomputed))
    if is_last:
        last = max(place for place, segment in enumerate(segments) if segment.recomputed)
        segments[last] = segments[last]._replace(recomputed=False)
    return segments


def ordered(graph: keras.Function) -> tuple[list[Any], set[int]]:
    """Returns the nodes that a call runs, and the places of those apart, which no block may hold.

    The nodes are in Keras's order, but those apart come first if they need none of the others.
    """
    nodes_by_depth = private.nodes_by_depth(graph)
    nodes = []
    for depth in sorted(nodes_by_depth, reverse=True):
        for node in nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                nodes.append(node)
    nodes = list(_callable(nodes, graph))

    outputs = {id(t) for t in graph.outputs}
    apart = [node for node in nodes if _is_apart(node, outputs)]
    # what these do to ids and masks would part what others compute
    first = list(_callable(apart, graph))
    later = [node for node in nodes if node not in first]
    nodes = [*first, *later]
    return nodes, {place for place, node in enumerate(nodes) if node in apart}


def _callable(nodes: list[Any], graph: keras.Function) -> Iterator[Any]:
    """Yields the nodes whose inputs are there.

    As in Keras, what hangs on inputs of other graphs is not called.
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


class _Cut(NamedTuple):
    ends: list[int]  # of the segments: the place after the last node of each
    memory: float  # bytes of the boundaries and of the largest inside


class _Prefix(NamedTuple):
    """Best way to cut the first nodes; of two ways, the lesser tuple is the better one."""

    kept: float  # bytes of the boundaries
    start: int  # of the last segment
    largest: float  # bytes of the largest inside


def _least(costs: list[_Cost], apart: set[int]) -> _Cut:
    """Returns the cut that takes the least memory; a node apart is a segment of its own."""
    total = sum(cost.inside for cost in costs)
    insides = [cost.inside for place, cost in enumerate(costs) if place not in apart]
    bound = max(insides, default=0.0)
    best = _Cut([len(costs)], math.inf)
    while 0.0 < bound < 2 * total:
        cut = _within(bound, costs, apart)
        if cut.memory < best.memory:
            best = cut
        bound *= _BOUND_GROWTH
    return best


def _within(bound: float, costs: list[_Cost], apart: set[int]) -> _Cut:
    """Returns the cut with the least boundaries where no inside is larger than `bound`."""
    # For each number of first nodes, from 0 on, the best way to cut them.
    prefixes = [_Prefix(0.0, 0, 0.0)]
    for end in range(1, len(costs) + 1):
        best = _Prefix(math.inf, 0, 0.0)
        inside = 0.0
        crossing = 0.0
        # The last segment grows to the front, from a single node, which may be over the bound.
        for start in range(end - 1, -1, -1):
            inside += costs[start].inside
            has_several_nodes = start < end - 1
            if has_several_nodes and (inside > bound or start in apart or end - 1 in apart):
                break
            crossing += sum(size for last_use, size in costs[start].outputs if last_use >= end)
            before = prefixes[start]
            largest = before.largest
            if start not in apart:
                largest = max(largest, inside)
            best = min(best, _Prefix(before.kept + crossing, start, largest))
        prefixes.append(best)

    ends = [len(costs)]
    start = prefixes[-1].start
    while start > 0:
        ends.insert(0, start)
        start = prefixes[start].start
    return _Cut(ends, prefixes[-1].kept + prefixes[-1].largest)


def make_segment(
    part: list[Any], outputs: list[keras.KerasTensor], nodes: list[Any], recomputed: bool
) -> Segment:
    """Makes a segment of a part of a graph's nodes; `outputs` are the graph's."""
    made = {}
    for node in part:
        for t in node.outputs:
            made[id(t)] = t
    taken = {}
    for node in part:
        for t in node.input_tensors:
            if id(t) not in made:
                taken[id(t)] = t

    in_part = {id(node) for node in part}
    needed = {id(t) for t in outputs}
    for node in nodes:
        if id(node) not in in_part:
            needed.update(id(t) for t in node.input_tensors)
    handed_on = [t for key, t in made.items() if key in needed]
    return Segment(part, list(taken.values()), handed_on, recomputed)


def _size(t: keras.KerasTensor) -> float:
    """Returns the bytes of a KerasTensor for one row."""
    bytes_per_value = 2 if "16" in str(t.dtype) else 4
    shape = t.shape or (1,)
    rows = shape[0] or 1
    values_per_row = math.prod(size or _LENGTH for size in shape[1:])
    return float(bytes_per_value * rows * values_per_row)


def _inside(node: Any) -> float:
    """Estimates the bytes that a node's gradient reads.

    They are an output for each layer within, and attention's scores.
    """
    layer = node.operation
    output_size = sum(_size(t) for t in node.outputs)
    if not isinstance(layer, keras.layers.Layer):
        return output_size
    graph = graph_of(layer)
    if graph is not None:
        nodes, _ = ordered(graph)
        return sum(_inside(inner) for inner in nodes)

    shape = node.outputs[0].shape
    heads = getattr(layer, "num_heads", getattr(layer, "num_query_heads", None))
    scores = 0.0
    if heads and len(shape) == 3:
        tokens = shape[1] or _LENGTH
        scores = 3.0 * heads * tokens**2 * 4  # three matrices of scores in float32
    layers = list(private.flatten_layers(layer))
    return output_size * len(layers) + scores
