"""One layer traced as two graphs, forward and backward, and what is kept between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from fastaccum.kernels.checkpoint_name import Names, collected_names
from fastaccum.kernels.checks import shown

# What hands an operand on as it is; and in another shape.
_ALIASES = ("Identity", "IdentityN", "PreventGradient", "StopGradient")
_RESHAPES = ("Reshape", "ExpandDims", "Squeeze")
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "XlaEinsum", "XlaDot", "XlaDotV2"}
_PRODUCTS |= {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "XlaConv", "XlaConvV2"}
# From TensorFlow's own generators: another number each time.
DRAWS = {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"}
DRAWS |= {"RandomGamma", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal", "RngReadAndSkip"}
_CALLS = {"While", "If", "Case", "StatefulPartitionedCall"}  # those that may do more than compute
_UNKEPT = (tf.variant, tf.resource, tf.string)

POLICIES = "auto", "nothing_saveable", "everything_saveable"


class Keeping:
    """What of a traced function is kept for its gradient; the rest is computed again.

    Args:
        graph: the function's.
        roots: the tensors of it from which all that may be kept is computed.
        names: those that values have been given, by `checkpoint_name`.
        same: by names, tensors that others stand in for.

    Attributes:
        kept: tensors of the graph: at first the roots alone, from which all else follows.
    """

    def __init__(self, graph: Any, roots: list[tf.Tensor], names: Names, same: dict[str, tf.Tensor] | None = None):
        self.kept = roots
        self._graph, self._roots, self._same = graph, {t.name for t in roots}, same or {}
        self._names = {self._source(t).name: name for t, name in names.values() if self._owns(t)}

    def keep(self, policy: str | Sequence[str]) -> None:
        """Chooses what is `kept`, by the words of `LayerStack`; "auto" keeps whatever has a name; ValueError for a name
        that no value has.
        """
        known = {"attention", "projection", *self._names.values()}
        if not isinstance(policy, str) and (unknown := sorted({*policy} - known)):
            raise ValueError(
                f"policy={list(policy)}: no value of a layer has the name {unknown[0]!r}. There are {sorted(known)}; "
                "the layer's own call gives one, by checkpoint_name."
            )
        residuals = [self._source(t) for t in self._own_residuals]
        read = {_unshaped(t).name for t in residuals}

        def is_kept(t):
            if t.dtype in _UNKEPT:
                return False
            if policy == "everything_saveable":
                return t.name in read
            name = self._names.get(t.name) or ("projection" if self._is_projection(t) else None)
            return name is not None and (policy == "auto" or name in policy)

        kept, seen, pending = [], set(), residuals
        while pending:
            t = self._source(pending.pop())
            if t.name in seen or t.name not in self._varying or _is_constant(t):
                continue
            seen.add(t.name)
            if t.name in self._roots or is_kept(t):
                kept.append(t)
            else:
                pending.extend(t.op.inputs)
        self.kept = sorted(kept, key=lambda t: t.name not in self._roots)

    @property
    def _own_residuals(self) -> list[tf.Tensor]:
        """What the gradient reads of the function."""
        raise NotImplementedError

    def _source(self, t: tf.Tensor) -> tf.Tensor:
        return _source(t, self._same)

    def _owns(self, t: tf.Tensor) -> bool:
        return tf.is_symbolic_tensor(t) and t.graph is self._graph

    @functools.cached_property
    def _varying(self) -> set[str]:
        """The names of the tensors that the roots have a part in."""
        varying = {*self._roots}
        for op in self._graph.get_operations():
            for t in op.outputs:
                inputs = [op.inputs[t.value_index]] if op.type == "IdentityN" else op.inputs
                if any(i.name in varying for i in inputs):
                    varying.add(t.name)
        return varying

    def _is_projection(self, t: tf.Tensor) -> bool:
        """Whether it is a product of the roots' part with what they have no part in, or one that is rounded."""
        if t.op.type == "Cast" and t.dtype.size < t.op.inputs[0].dtype.size:
            t = self._source(t.op.inputs[0])
        return t.op.type in _PRODUCTS and sum(i.name in self._varying for i in t.op.inputs) == 1


class LayerGraph(Keeping):
    """`call(i, x, shared, weights, state) -> (y, after)`, traced once, to be copied into loops over many such layers.

    The way back reads residuals of the way forward. Each of these is kept, or is computed again from the arguments and
    from what is kept.

    Args:
        call: `i` is the layer's number, `after` a dict of tensors; `shared`, `weights` and `state` are lists of them.
        specs: of the arguments.

    Attributes:
        after: the new states, as tensors of the graph.
    """

    def __init__(self, call: Callable[..., tuple[tf.Tensor, dict[int, tf.Tensor]]], specs: list[Any]):
        def watched(*arguments):
            tape.watch([t for t in tf.nest.flatten(arguments[1:4]) if t.dtype.is_floating])
            return call(*arguments)

        with tf.GradientTape(watch_accessed_variables=False) as tape, collected_names() as names:
            self._forward = tf.function(watched, autograph=False).get_concrete_function(*specs)
        self._tape = tape
        self._y, self.after = self._forward.structured_outputs
        self._inputs = tf.nest.pack_sequence_as(specs, self._forward.inputs[: len(tf.nest.flatten(specs))])
        super().__init__(self._forward.graph, [self._x], names)

    @property
    def keeps_input(self) -> bool:
        """Whether x is kept, and then the first of what is."""
        return any(t.name == self._x.name for t in self.kept)

    @property
    def _x(self) -> tf.Tensor:
        return self._inputs[1]

    @property
    def kept_bytes(self) -> float:
        """What one layer keeps; infinite where a size is not known."""
        return sum(t.dtype.size * (math.inf if None in t.shape else math.prod(t.shape)) for t in self.kept)

    def forward(self, *arguments: Any) -> Any:
        """y, the new states and what is kept, for these arguments."""
        fed = fed_by_name(self._inputs, arguments)
        effects = self._forward.graph.control_outputs
        return copied("forward", self._forward, [self._y, self.after, self.kept], fed, effects)

    def backward(self, dy: tf.Tensor, kept: list[tf.Tensor], *arguments: Any) -> Any:
        """The gradients of x, of the floating tensors that are shared, and of the weights, from that of y, what
        `forward` kept and its arguments without x; ValueError if what is computed again draws other random numbers.
        """
        number, _, *others = self._inputs
        fed = fed_by_name([number, *others, self.kept], [*arguments, kept])
        if drawn := drawing(self._graph, needed_for(self._own_residuals, dict(fed)).values()):
            raise ValueError(
                f"A layer of a LayerStack draws random numbers, in {drawn}, that would be others when it is computed "
                "again: draw them by keras.random with a SeedGenerator of the layer, or outside of the stack."
            )
        own = copied("recomputed", self._forward, self._own_residuals, fed)
        given = dict(zip((t.name for t in self._own_residuals), own, strict=True))
        gradient, (placeholder, *residuals) = self._backward, self._backward.inputs
        captured = [given[t.name] if self._owns(t) else t for t in gradient.captured_inputs]
        fed = fed_by_name([placeholder, residuals], [dy, captured])
        return copied("backward", gradient, gradient.structured_outputs, fed)

    @functools.cached_property
    def _backward(self) -> Any:
        """A function of dy, which captures the residuals."""
        _, x, shared, weights, _ = self._inputs
        sources = [x, [t for t in shared if t.dtype.is_floating], weights]

        def gradient(dy):
            zero = tf.UnconnectedGradients.ZERO
            found = self._tape.gradient(self._y, sources, dy, unconnected_gradients=zero)
            return tf.nest.map_structure(tf.convert_to_tensor, found)

        with self._forward.graph.as_default():
            spec = tf.TensorSpec.from_tensor(self._y)
            return tf.function(gradient, autograph=False).get_concrete_function(spec)

    @property
    def _own_residuals(self) -> list[tf.Tensor]:
        return [t for t in self._backward.captured_inputs if self._owns(t)]


def copied(
    scope: str,
    function: Any,
    fetches: Any,
    fed: dict[str, tf.Tensor],
    effects: Sequence[Any] = (),
    same: dict[str, tf.Tensor] | None = None,
    handed_in: Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]] = lambda given: given,
) -> Any:
    """A nest of tensors of a traced function's graph, computed in the graph that is being traced.

    Only the operations that they need are copied, and `effects`, with theirs.

    Args:
        fed: by their names, tensors of the function that are given.
        same: by their names, tensors of the function that others of it stand in for.
        handed_in: what the copies take of `fed`, from those that they need.
    """
    fed = {**{inner.name: outer for outer, inner in function.graph.captures}, **fed}
    given, same = set(fed), same or {}
    needed = needed_for([*effects, *tf.nest.flatten(fetches)], fed, same)
    definition = function.graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in needed]
    del definition.node[:]
    for node in nodes:
        op = needed[node.name]
        node.attr.pop("_class", None)  # where it is to be placed
        node.input[:] = [_source(t, same).name for t in op.inputs]
        node.input.extend(f"^{before.name}" for before in op.control_inputs if before.name in needed)
        definition.node.append(node)
    used = {name for node in definition.node for name in node.input}
    fed |= handed_in({name: t for name, t in fed.items() if name in used & given})
    wanted = [_source(t, same) for t in tf.nest.flatten(fetches)]
    names = list(dict.fromkeys(t.name for t in wanted if t.name not in fed))
    copies = tf.graph_util.import_graph_def(
        definition, {name: tf.identity(t) for name, t in fed.items() if name in used}, names, name=scope
    )
    found = {**fed, **dict(zip(names, copies, strict=True))}
    for t in wanted:
        found[t.name].set_shape(t.shape)
    return tf.nest.pack_sequence_as(fetches, [found[t.name] for t in wanted])


def needed_for(
    fetches: Sequence[Any], fed: dict[str, tf.Tensor], same: dict[str, tf.Tensor] | None = None
) -> dict[str, Any]:
    """The operations that compute tensors, or are these, from those that are fed, by name; sizes are fed on the way."""
    needed: dict[str, Any] = {}
    pending = [_source(each, same) if tf.is_tensor(each) else each for each in fetches]
    while pending:
        each = pending.pop()
        if tf.is_tensor(each):
            if each.name in fed:
                continue
            if _is_constant(each):
                fed[each.name] = tf.constant(tf.get_static_value(each), each.dtype)
                continue
            each = each.op
        if each.name not in needed:
            needed[each.name] = each
            pending.extend(_source(t, same) for t in each.inputs)
    return needed


def drawing(graph: Any, operations: Iterable[Any]) -> list[str]:
    """The names of the operations of a graph that draw from TensorFlow's own generators, or call what does."""
    operations = [op for op in operations if op.type in DRAWS | _CALLS]
    calls = any(op.type in _CALLS for op in operations)
    library = graph.as_graph_def().library.function if calls else ()
    bodies = {each.signature.name: each.node_def for each in library}

    def draws(kind, attributes, seen):
        called = {f.name for each in attributes.values() for f in (each.func, *each.list.func)} & bodies.keys() - seen
        return kind in DRAWS or any(draws(n.op, n.attr, seen | called) for name in called for n in bodies[name])

    return [op.name for op in operations if draws(op.type, op.node_def.attr, set())]


def fed_by_name(tensors: Any, values: Any, same: dict[str, tf.Tensor] | None = None) -> dict[str, tf.Tensor]:
    pairs = zip(tf.nest.flatten(tensors), tf.nest.flatten(values), strict=True)
    return {_source(t, same).name: value for t, value in pairs}


def _source(t: tf.Tensor, same: dict[str, tf.Tensor] | None = None) -> tf.Tensor:
    """The tensor that this one is, under other names, or that `same` has in its place."""
    while True:
        if same and t.name in same:
            t = same[t.name]
        elif t.op.type in _ALIASES:
            t = t.op.inputs[t.value_index]
        else:
            return t


def _unshaped(t: tf.Tensor) -> tf.Tensor:
    """The smallest tensor that this one is, in another shape or a wider dtype."""
    t = _source(t)
    while t.op.type in _RESHAPES or (t.op.type == "Cast" and t.op.inputs[0].dtype.size <= t.dtype.size):
        t = _source(t.op.inputs[0])
    return t


def _is_constant(t: tf.Tensor) -> bool:
    """Whether it is a size that is known."""
    return t.op.type in ("Shape", "Size", "Rank") and t.op.inputs[0].shape.is_fully_defined()


def require_policy(policy: Any) -> str | list[str]:
    """`policy`, one of POLICIES or a list of names."""
    if isinstance(policy, (list, tuple)) and all(isinstance(name, str) for name in policy):
        return list(policy)
    if not isinstance(policy, str) or policy not in POLICIES:
        choices = " or ".join(map(repr, POLICIES))
        raise ValueError(f'policy={shown(policy)} must be {choices} or a list of names, as ["attention"].')
    return policy
