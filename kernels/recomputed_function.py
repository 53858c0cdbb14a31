"""`RecomputedFunction`: a function traced once, whose forward pass and gradients are copied into
other graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checks import shown
from fastaccum.kernels.trace_context import Names

# Operations that pass an operand on as it is, and those that pass it on in another shape.
_ALIASES = ("Identity", "IdentityN", "PreventGradient", "StopGradient")
_RESHAPES = ("Reshape", "ExpandDims", "Squeeze")
_PRODUCTS = {
    "MatMul",
    "BatchMatMul",
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Einsum",
    "XlaEinsum",
    "XlaDot",
    "XlaDotV2",
}
_PRODUCTS |= {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "XlaConv", "XlaConvV2"}
# Draws from TensorFlow's own generators: another number each time.
DRAWS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
}
DRAWS |= {
    "RandomGamma",
    "RandomPoissonV2",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RngReadAndSkip",
}
_CALLS = {"While", "If", "Case", "StatefulPartitionedCall"}  # may do more than compute
_UNKEPT = (tf.variant, tf.resource, tf.string)

_REFUSED = (
    "What is to be computed again draws random numbers in {drawn}, which would be others then: "
    "draw them by keras.random with a SeedGenerator of the layer, or leave that layer out of "
    "what is recomputed or stacked."
)
POLICIES = "auto", "nothing_saveable", "everything_saveable"

# A gradient: None where no target depends on the source.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
Nest: TypeAlias = tf.Tensor | Sequence | Mapping | None  # of tensors or their specs
Fetches = TypeVar("Fetches")  # a nest of tensors
Policy: TypeAlias = "str | Sequence[str]"
Values = dict[str, tf.Tensor]  # what stands for tensors of the traced graph, by their names
# maps values that copies need to what the copies take in their place
PassIn = Callable[[Values], Values]


class RecomputedFunction:
    """A function traced once as a graph, of which copies compute the forward pass, and the
    gradients from `residuals`.

    At first these are the roots alone, from which the copies recompute whatever else the gradients
    read.
    """

    def __init__(
        self,
        function: tf.types.experimental.ConcreteFunction,
        names: Names,  # that `checkpoint_name` gave to values of the function
        roots: list[tf.Tensor],
        targets: Sequence[tf.Tensor],  # floating, to differentiate
        # with respect to which; None stands for one without a gradient
        sources: Sequence[tf.Tensor | None],
        # tensors that stand in for others, by the names of the others
        same: Mapping[str, tf.Tensor] | None = None,
    ):
        self.residuals = roots
        self._graph, self._targets, self._sources, self._same = (
            function.graph,
            targets,
            sources,
            same or {},
        )
        self._root_names = {t.name for t in roots}
        named = [
            (t, name)
            for t, name in names.values()
            if tf.is_symbolic_tensor(t) and t.graph is self._graph
        ]
        self._names = {self._source(t).name: name for t, name in named}

    def keep(self, policy: Policy) -> None:
        """Chooses the `residuals` by a policy of `LayerStack`; raises ValueError for a name that no
        value has.
        """
        chosen = set() if isinstance(policy, str) else {*policy}
        if unknown := sorted(
            chosen - (known := {"attention", "projection", *self._names.values()})
        ):
            raise ValueError(
                f"policy={list(policy)}: no value of a layer has the name {unknown[0]!r}. There "
                f"are {sorted(known)}; the layer's own call gives one, by checkpoint_name."
            )
        pending = [self._source(t) for t in self._read_by_gradients()]
        read = {_unshaped(t).name for t in pending}

        def is_kept(t):
            if t.dtype in _UNKEPT:
                return False
            if policy == "everything_saveable":
                return t.name in read
            name = self._names.get(t.name) or ("projection" if self._is_projection(t) else None)
            return name is not None and (policy == "auto" or name in chosen)

        kept, seen = [], set()
        while pending:
            t = self._source(pending.pop())
            if t.name in seen or t.name not in self._varying or _is_constant(t):
                continue
            seen.add(t.name)
            if t.name in self._root_names or is_kept(t):
                kept.append(t)
            else:
                pending.extend(t.op.inputs)
        self.residuals = sorted(kept, key=lambda t: t.name not in self._root_names)

    def feed(self, tensors: Nest, values: Nest) -> Values:
        """Returns the values of a nest of tensors of the graph, by the tensors' names."""
        pairs = zip(tf.nest.flatten(tensors), tf.nest.flatten(values), strict=True)
        return {self._source(t).name: value for t, value in pairs}

    def copy(
        self,
        scope: str,
        fetches: Fetches,
        fed: Values,
        effects: Sequence[tf.Operation] = (),
        pass_in: PassIn = dict,
    ) -> Fetches:
        """Computes a nest of tensors of the graph in the graph that is being traced, by copies in a
        name scope.

        Args:
            fed: values of tensors of the graph, by their names.
            effects: operations of the graph that are copied too, with what they need.
            pass_in: is given those values that the copies need.
        """
        fed = {**{inner.name: outer for outer, inner in self._graph.captures}, **fed}
        given = set(fed)
        needed = self._needed([*effects, *tf.nest.flatten(fetches)], fed)
        definition = self._graph.as_graph_def()
        nodes = [node for node in definition.node if node.name in needed]
        del definition.node[:]
        for node in nodes:
            op = needed[node.name]
            node.attr.pop(private.PLACED_WITH, None)  # where it is to be placed
            node.input[:] = [self._source(t).name for t in op.inputs]
            node.input.extend(
                f"^{before.name}" for before in op.control_inputs if before.name in needed
            )
            definition.node.append(node)
        used = {name for node in definition.node for name in node.input}
        fed |= pass_in({name: t for name, t in fed.items() if name in used & given})
        wanted = [self._source(t) for t in tf.nest.flatten(fetches)]
        names = list(dict.fromkeys(t.name for t in wanted if t.name not in fed))
        copies = tf.graph_util.import_graph_def(
            definition,
            {name: tf.identity(t) for name, t in fed.items() if name in used},
            names,
            name=scope,
        )
        found = {**fed, **dict(zip(names, copies, strict=True))}
        for t in wanted:
            found[t.name].set_shape(t.shape)
        return tf.nest.pack_sequence_as(fetches, [found[t.name] for t in wanted])

    def gradients(
        self, dy: Sequence[tf.Tensor], fed: Values, pass_in: PassIn = dict
    ) -> list[Gradient]:
        """Computes the gradients of the sources from those of the targets, `dy`, and from residuals
        that are `fed`.

        Raises ValueError if the recomputation would draw other random numbers. `pass_in` is as in
        `copy`.
        """
        d_targets, gradients = self._gradients
        fed = {**fed, **self.feed(d_targets, dy)}
        connected = [g for g in gradients if g is not None]
        parts = tf.nest.flatten(connected, expand_composites=True)
        if drawn := self._draws(self._needed(parts, dict(fed)).values()):
            raise ValueError(_REFUSED.format(drawn=drawn))
        parts = self.copy("backward", parts, fed, pass_in=pass_in)
        found = iter(tf.nest.pack_sequence_as(connected, parts, expand_composites=True))
        return [None if g is None else next(found) for g in gradients]

    @functools.cached_property
    def _gradients(self) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Placeholders for the gradients of the targets, and the gradients of the sources, in the
        graph.
        """
        with self._graph.as_default():
            self._forward_operations = {op.name for op in self._graph.get_operations()}
            d_targets = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in self._targets]
            found = iter(
                tf.gradients(self._targets, [t for t in self._sources if t is not None], d_targets)
            )
        return d_targets, [None if t is None else next(found) for t in self._sources]

    def _read_by_gradients(self) -> list[tf.Tensor]:
        """Returns the tensors of the forward pass that the gradients read."""
        d_targets, gradients = self._gradients
        parts = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
        needed, forward = (
            self._needed(parts, self.feed(d_targets, d_targets)).values(),
            self._forward_operations,
        )
        return [
            t for op in needed if op.name not in forward for t in op.inputs if t.op.name in forward
        ]

    def _needed(
        self, fetches: Sequence[tf.Tensor | tf.Operation], fed: Values
    ) -> dict[str, tf.Operation]:
        """Returns the operations, by name, that compute tensors, or are these, from what is fed;
        feeds known sizes.
        """
        needed: dict[str, tf.Operation] = {}
        pending = [self._source(each) if tf.is_tensor(each) else each for each in fetches]
        while pending:
            each = pending.pop()
            if tf.is_tensor(each):
                if each.name not in fed and _is_constant(each):
                    fed[each.name] = tf.constant(tf.get_static_value(each), each.dtype)
                if each.name in fed:
                    continue
                each = each.op
            if each.name not in needed:
                needed[each.name] = each
                pending.extend(map(self._source, each.inputs))
        return needed

    def _draws(self, operations: Iterable[tf.Operation]) -> list[str]:
        """Returns the names of operations that draw from TensorFlow's own generators, or call
        functions that do.
        """
        operations = [op for op in operations if op.type in DRAWS | _CALLS]
        library = (
            self._graph.as_graph_def().library.function
            if any(op.type in _CALLS for op in operations)
            else ()
        )
        bodies = {each.signature.name: each.node_def for each in library}

        def draws(kind, attributes, seen):
            called = {
                f.name for a in attributes.values() for f in (a.func, *a.list.func)
            } & bodies.keys() - seen
            return kind in DRAWS or any(
                draws(n.op, n.attr, seen | called) for name in called for n in bodies[name]
            )

        return [op.name for op in operations if draws(op.type, op.node_def.attr, set())]

    def _source(self, t: tf.Tensor) -> tf.Tensor:
        return _source(t, self._same)

    @functools.cached_property
    def _varying(self) -> set[str]:
        """The names of the tensors that are computed from the roots, unlike what is captured, as
        weights' casts.
        """
        varying = {*self._root_names}
        for op in self._graph.get_operations():
            for t in op.outputs:
                inputs = [op.inputs[t.value_index]] if op.type == "IdentityN" else op.inputs
                if any(i.name in varying for i in inputs):
                    varying.add(t.name)
        return varying

    def _is_projection(self, t: tf.Tensor) -> bool:
        """Returns whether a tensor is a product, rounded or not, of a varying tensor with one that
        does not vary.
        """
        if t.op.type == "Cast" and t.dtype.size < t.op.inputs[0].dtype.size:
            t = self._source(t.op.inputs[0])
        return t.op.type in _PRODUCTS and sum(i.name in self._varying for i in t.op.inputs) == 1


def _source(t: tf.Tensor, same: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Follows a tensor to the one whose value it has, or to the one that stands in for it."""
    while True:
        if t.name in same:
            t = same[t.name]
        elif t.op.type in _ALIASES:
            t = t.op.inputs[t.value_index]
        else:
            return t


def _unshaped(t: tf.Tensor) -> tf.Tensor:
    """Follows a tensor to the smallest one that it is in another shape or a wider dtype."""
    t = _source(t, {})
    while t.op.type in _RESHAPES or (
        t.op.type == "Cast" and t.op.inputs[0].dtype.size <= t.dtype.size
    ):
        t = _source(t.op.inputs[0], {})
    return t


def _is_constant(t: tf.Tensor) -> bool:
    """Returns whether a tensor is a size that is known."""
    return t.op.type in ("Shape", "Size", "Rank") and t.op.inputs[0].shape.is_fully_defined()


def require_policy(policy: object) -> Policy:
    """Returns `policy`, one of POLICIES or a list of names."""
    if isinstance(policy, (list, tuple)) and all(isinstance(name, str) for name in policy):
        return list(policy)
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    choices = " or ".join(map(repr, POLICIES))
    raise ValueError(
        f'policy={shown(policy)} must be {choices} or a list of names, as ["attention"].'
    )
