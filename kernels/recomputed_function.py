"""Traces a function once, and copies its forward pass and its gradients into other graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checks import shown
from fastaccum.kernels.trace_context import Names

# Operations that pass an operand on as it is, and those that pass it on in another shape.
_ALIASES = ("Identity", "IdentityN", "PreventGradient", "StopGradient")
_RESHAPES = ("Reshape", "ExpandDims", "Squeeze")
# Operations that multiply values with weights: matrix products and convolutions.
_PRODUCTS = {
    "MatMul",
    "BatchMatMul",
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Einsum",
    "XlaEinsum",
    "XlaDot",
    "XlaDotV2",
    "Conv2D",
    "Conv3D",
    "DepthwiseConv2dNative",
    "XlaConv",
    "XlaConvV2",
}
# Draws from TensorFlow's own generators: another number each time.
DRAWS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RngReadAndSkip",
}
# Operations that call functions, which may do more than compute.
_CALLS = {"While", "If", "Case", "StatefulPartitionedCall"}
# Dtypes of values that are always computed again: they are no arrays of numbers.
_UNKEPT = (tf.variant, tf.resource, tf.string)

_REFUSED = (
    "What is to be computed again draws random numbers in {drawn}, which would be others then: "
    "draw them by keras.random with a SeedGenerator of the layer, or leave that layer out of "
    "what is recomputed or stacked."
)
POLICIES = ("auto", "nothing_saveable", "everything_saveable")

# A gradient: None where no target depends on the source.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
Nest: TypeAlias = tf.Tensor | Sequence | Mapping | None  # of tensors or their specs
Fetches = TypeVar("Fetches")  # a nest of tensors
Policy: TypeAlias = "str | Sequence[str]"
Values = dict[str, tf.Tensor]  # what stands for tensors of the traced graph, by their names
# maps values that copies need to what the copies take in their place
PassIn = Callable[[Values], Values]


class _GradientGraph(NamedTuple):
    """The gradients of a traced function, computed in its own graph."""

    d_targets: list[tf.Tensor]  # placeholders for the gradients of the targets
    d_sources: list[Gradient]
    forward_operations: set[str]  # the names of the graph's operations before these were added

    def components(self) -> list[tf.Tensor]:
        """Returns the tensors that the gradients of the sources consist of."""
        return tf.nest.flatten(_present(self.d_sources), expand_composites=True)


class RecomputedFunction:
    """Function traced once, whose copies compute the forward pass and, from `residuals`, gradients.

    At first the residuals are the roots alone, from which the copies recompute whatever else the
    gradients read.
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
        self._graph = function.graph
        self._targets = targets
        self._sources = sources
        self._same = same or {}
        self._root_names = {t.name for t in roots}

        # The names that `checkpoint_name` gave, by the names of the tensors.
        self._names: dict[str, str] = {}
        for t, name in names.values():
            if tf.is_symbolic_tensor(t) and t.graph is self._graph:
                self._names[self._source(t).name] = name

    def keep(self, policy: Policy) -> None:
        """Chooses the `residuals` by a policy of `LayerStack`.

        Raises ValueError for a name that no value has.
        """
        chosen = set() if isinstance(policy, str) else {*policy}
        known = {"attention", "projection", *self._names.values()}
        unknown = sorted(chosen - known)
        if unknown:
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
            name = self._names.get(t.name)
            if name is None and self._is_projection(t):
                name = "projection"
            if name is None:
                return False
            return policy == "auto" or name in chosen

        # From what the gradients read, back to the nearest values that are kept.
        kept: list[tf.Tensor] = []
        seen: set[str] = set()
        while pending:
            t = self._source(pending.pop())
            if t.name in seen or t.name not in self._varying or _is_constant(t):
                continue
            seen.add(t.name)
            if t.name in self._root_names or is_kept(t):
                kept.append(t)
            else:
                pending.extend(t.op.inputs)
        roots = [t for t in kept if t.name in self._root_names]
        beside_roots = [t for t in kept if t.name not in self._root_names]
        self.residuals = [*roots, *beside_roots]

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
        """Computes a nest of the graph's tensors by copies in the graph that is being traced.

        Args:
            scope: the name scope of the copies.
            fetches: the nest of tensors.
            fed: values of tensors of the graph, by their names.
            effects: operations of the graph that are copied too, with what they need.
            pass_in: is given those values that the copies need.
        """
        captured = {inner.name: outer for outer, inner in self._graph.captures}
        fed = {**captured, **fed}
        passed_names = set(fed)  # before known sizes are added
        needed = self._needed([*effects, *tf.nest.flatten(fetches)], fed)
        definition = self._definition(needed)
        read = set()
        for node in definition.node:
            read.update(node.input)

        passed = {}
        for name, value in fed.items():
            if name in read and name in passed_names:
                passed[name] = value
        fed.update(pass_in(passed))

        fetched = [self._source(t) for t in tf.nest.flatten(fetches)]
        unfed_names = [t.name for t in fetched if t.name not in fed]
        computed_names = list(dict.fromkeys(unfed_names))  # each of them once
        inputs = {name: tf.identity(t) for name, t in fed.items() if name in read}
        copies = tf.graph_util.import_graph_def(definition, inputs, computed_names, name=scope)
        values = {**fed, **dict(zip(computed_names, copies, strict=True))}
        for t in fetched:
            values[t.name].set_shape(t.shape)
        return tf.nest.pack_sequence_as(fetches, [values[t.name] for t in fetched])

    def _definition(self, needed: Mapping[str, tf.Operation]) -> tf.compat.v1.GraphDef:
        """Returns the definition of the graph with these operations alone, past the aliases."""
        definition = self._graph.as_graph_def()
        nodes = [node for node in definition.node if node.name in needed]
        del definition.node[:]
        for node in nodes:
            op = needed[node.name]
            node.attr.pop(private.PLACED_WITH, None)  # where it is to be placed
            node.input[:] = [self._source(t).name for t in op.inputs]
            for before in op.control_inputs:
                if before.name in needed:
                    node.input.append(f"^{before.name}")
            definition.node.append(node)
        return definition

    def gradients(
        self, dy: Sequence[tf.Tensor], fed: Values, pass_in: PassIn = dict
    ) -> list[Gradient]:
        """Computes the sources' gradients from the targets', `dy`, and from residuals in `fed`.

        Raises ValueError if the recomputation would draw other random numbers. `pass_in` is as in
        `copy`.
        """
        graph = self._gradients
        fed = {**fed, **self.feed(graph.d_targets, dy)}
        components = graph.components()
        drawn = list_draws(self._graph, self._needed(components, dict(fed)).values())
        if drawn:
            raise ValueError(_REFUSED.format(drawn=drawn))
        copies = self.copy("backward", components, fed, pass_in=pass_in)
        copied = tf.nest.pack_sequence_as(_present(graph.d_sources), copies, expand_composites=True)
        return _filled(graph.d_sources, copied)

    @functools.cached_property
    def _gradients(self) -> _GradientGraph:
        """The gradients of the sources, added to the graph."""
        with self._graph.as_default():
            forward_operations = {op.name for op in self._graph.get_operations()}
            d_targets = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in self._targets]
            gradients = tf.gradients(self._targets, _present(self._sources), d_targets)
        return _GradientGraph(d_targets, _filled(self._sources, gradients), forward_operations)

    def _read_by_gradients(self) -> list[tf.Tensor]:
        """Returns the tensors of the forward pass that the gradients read."""
        graph = self._gradients
        needed = self._needed(graph.components(), self.feed(graph.d_targets, graph.d_targets))
        read = []
        for op in needed.values():
            if op.name not in graph.forward_operations:
                read += [t for t in op.inputs if t.op.name in graph.forward_operations]
        return read

    def _needed(
        self, fetches: Sequence[tf.Tensor | tf.Operation], fed: Values
    ) -> dict[str, tf.Operation]:
        """Returns the operations, by name, that compute `fetches`, or are these, from `fed`.

        Sizes that are known are added to `fed`, as constants.
        """
        needed: dict[str, tf.Operation] = {}
        pending = []
        for item in fetches:
            pending.append(self._source(item) if tf.is_tensor(item) else item)
        while pending:
            item = pending.pop()
            if tf.is_tensor(item):
                if item.name not in fed and _is_constant(item):
                    fed[item.name] = tf.constant(tf.get_static_value(item), item.dtype)
                if item.name in fed:
                    continue
                op = item.op
            else:
                op = item
            if op.name not in needed:
                needed[op.name] = op
                pending.extend(self._source(t) for t in op.inputs)
        return needed

    def _source(self, t: tf.Tensor) -> tf.Tensor:
        return _source(t, self._same)

    @functools.cached_property
    def _varying(self) -> set[str]:
        """The names of the tensors that are computed from the roots.

        What is computed from captured tensors alone, such as casts of weights, does not vary.
        """
        varying = {*self._root_names}
        for op in self._graph.get_operations():
            for t in op.outputs:
                inputs = op.inputs
                if op.type == "IdentityN":
                    inputs = [op.inputs[t.value_index]]
                if any(operand.name in varying for operand in inputs):
                    varying.add(t.name)
        return varying

    def _is_projection(self, t: tf.Tensor) -> bool:
        """Returns whether a tensor is a product, rounded or not, of which one operand varies."""
        if t.op.type == "Cast" and t.dtype.size < t.op.inputs[0].dtype.size:
            t = self._source(t.op.inputs[0])
        if t.op.type not in _PRODUCTS:
            return False
        varying_operands = [operand for operand in t.op.inputs if operand.name in self._varying]
        return len(varying_operands) == 1


def list_draws(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[str]:
    """Returns the names of operations of a graph that draw from TensorFlow's own generators.

    Those that call functions which do are among them.
    """
    suspects = [op for op in operations if op.type in DRAWS | _CALLS]
    bodies = {}  # the nodes of the graph's functions, by name
    if any(op.type in _CALLS for op in suspects):
        for function in graph.as_graph_def().library.function:
            bodies[function.signature.name] = function.node_def

    def draws(kind, attributes, seen):
        if kind in DRAWS:
            return True
        called = set()
        for attribute in attributes.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in bodies and function.name not in seen:
                    called.add(function.name)
        for name in called:
            if any(draws(node.op, node.attr, seen | called) for node in bodies[name]):
                return True
        return False

    return [op.name for op in suspects if draws(op.type, op.node_def.attr, set())]


def _present(values: Iterable[tf.Tensor | None]) -> list[tf.Tensor]:
    return [value for value in values if value is not None]


def _filled(places: Iterable[object], values: Iterable[Gradient]) -> list[Gradient]:
    """Returns `values` in turn, at the places that are not None, and None at the others."""
    remaining = iter(values)
    return [None if place is None else next(remaining) for place in places]


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
    while t.op.type in _RESHAPES or _widens(t):
        t = _source(t.op.inputs[0], {})
    return t


def _widens(t: tf.Tensor) -> bool:
    """Returns whether a tensor is a cast to a dtype that is not narrower."""
    return t.op.type == "Cast" and t.op.inputs[0].dtype.size <= t.dtype.size


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
