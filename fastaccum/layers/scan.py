"""`scan_layers`: layers that repeat run as one loop, which is traced and compiled once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.basics.warnings import warn
from fastaccum.kernels import hoisted_casts, private, trace_context
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.layer_loop import Body, LoopOptions, NotStackable, run_loops
from fastaccum.kernels.recomputed_function import Policy, list_draws
from fastaccum.kernels.variable_stack import VariableStack
from fastaccum.kernels.xla_ops import in_xla
from fastaccum.layers import blocks, walks
from fastaccum.layers.alike import Comparison
from fastaccum.layers.chains import Argument, Chain, ChainedCalls
from fastaccum.layers.interceptors import Interceptor, Role, installed
from fastaccum.layers.repeats import Repeat, find_repeats

ScanLayers = Literal["auto"] | bool

# The fewest layers that the mode "auto" runs in a loop: of fewer, little is not compiled again.
_FEWEST = 4
# The most elements, rows included, that a layer of such a loop hands on to the next. What a loop
# keeps for the way back is written to memory; so little of it stays in a cache. On two CPU cores,
# steps of 12 layers took 0.93 to 0.95 of the time of unrolled ones up to here, and 1.09 to 1.11
# from four times as many elements on.
_MOST_HANDED_ON = 2**13
_OF_USER = "code of your own may compute by more than its attributes (scan_layers=True)"
_APART = (
    "they are not called one after the other, each with what the one before gave and all else "
    "the same; or they compute by more than attributes and arguments, or hand on more than outputs"
)
_SLOWER = "as a loop they would compile sooner, and run slower (scan_layers=True)"


class ProbedLayers(NamedTuple):
    """Stand-ins for layers that repeat, for traces which only ask what a model's layers do.

    A trace inside `intercepting(interceptors)` has the first part of each repeat in place of all of
    them.
    """

    interceptors: list[Interceptor]
    repeats: list[Repeat]

    def expand_variables(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Returns variables of the parts that were traced, and those at their places in others."""
        copies_by_id = {}
        for repeat in self.repeats:
            for copies in zip(*repeat.variables(), strict=True):
                copies_by_id[id(copies[0])] = copies
        expanded: dict[int, keras.Variable] = {}
        for variable in variables:
            for copy in copies_by_id.get(id(variable), [variable]):
                expanded[id(copy)] = copy
        return list(expanded.values())


def probe_layers(model: keras.Model) -> ProbedLayers:
    """Finds the layers of a model that repeat, to be traced once."""
    method = private.run_through_graph.name
    interceptors = []
    repeats = []
    in_repeats: set[int] = set()  # the ids of graphs that are a part of a repeat
    for graph in _graphs(model):
        if id(graph) in in_repeats:
            continue
        found = find_repeats(graph, fewest=2).repeats
        repeats_of_graph = [repeat for repeat in found if repeat.is_known]
        if repeats_of_graph:
            replacement = functools.partial(
                _walk, graph, _segments(graph, repeats_of_graph), _run_once
            )
            interceptors.append(Interceptor(graph, method, replacement, Role.LOOP))
            repeats += repeats_of_graph
            for repeat in repeats_of_graph:
                in_repeats.update(id(blocks.graph_of(layer)) for layer in _layers(repeat))
    return ProbedLayers(interceptors, repeats)


class _Stacks(NamedTuple):
    """The variables of a repeat's parts, those at one place together."""

    learned: list[VariableStack]
    state: list[VariableStack]  # statistics, seeds and frozen weights


class ScannedLayers:
    """Layers of a model that run as loops in the programs of its step.

    Equal, to rounding, to the layers one after the other. The weights of layers at one place in
    their blocks are stacked, in each program, and the model stays as it is.

    Args:
        model: a built Keras 3 model.
        mode: False for no loops, True for every repeat of two layers or more; "auto" for those of
            four or more without code of the user's, on a CPU where each layer hands on so little
            that a loop is no slower.
        trained: the variables that the step trains.
        assigned: the variables that a call may assign.
        chains: layers that code calls one after the other.
        apart: the names of layers that are alike, and that it calls otherwise.

    Attributes:
        weight_stacks: the stacks of weights that no call assigns.
        choices: what runs as a loop, and why other layers of one kind do not.
    """

    def __init__(
        self,
        model: keras.Model,
        mode: ScanLayers,
        trained: Collection[keras.Variable],
        assigned: Collection[tf.Variable],
        chains: Sequence[Chain] = (),
        apart: Sequence[str] = (),
    ):
        self.weight_stacks: list[VariableStack] = []
        self.choices: dict[str, str] = {}
        self._repeats_by_graph: list[tuple[keras.Function, list[Repeat]]] = []
        self._chains: list[Chain] = []
        self._stacks: dict[int, _Stacks] = {}  # by the ids of repeats and chains
        self._refused: set[int] = set()  # the same ids, of what runs unrolled
        self._mode = mode
        self._learned_ids = {id(variable) for variable in trained}
        self._assigned_ids = {id(variable) for variable in assigned}
        if mode is False:
            return
        fewest = 2 if mode is True else _FEWEST
        in_loops: set[int] = set()  # the ids of layers, and of their graphs, in a loop
        for graph in _graphs(model):
            if id(graph) in in_loops:
                continue
            found = find_repeats(graph, fewest)
            repeats = [repeat for repeat in found.repeats if self._admit(repeat)]
            for repeat in repeats:
                for layer in _layers(repeat):
                    in_loops.add(id(layer))
                    graph_of_layer = blocks.graph_of(layer)
                    if graph_of_layer is not None:
                        in_loops.add(id(graph_of_layer))
            if repeats:
                self._repeats_by_graph.append((graph, repeats))
            if not found.repeats:
                for reason in found.reasons[:1]:
                    self.choices[graph.name] = f"unrolled: {reason}"
        for name in apart:
            self.choices[name] = f"unrolled: {_APART}"
        for chain in chains:  # those of an outer layer come before those of an inner
            is_inside = any(id(layer) in in_loops for layer in chain.layers)
            if len(chain.layers) >= fewest and not is_inside and self._admit(chain):
                self._chains.append(chain)
                in_loops.update(id(layer) for layer in _layers(chain))

    def _admit(self, repeat: Repeat | Chain) -> bool:
        """Stacks the variables of layers that may run in a loop; notes why others may not."""
        reason = _refusal(repeat)
        if reason is not None:
            self._say_unrolled(repeat, reason)
            return False
        if self._mode == "auto" and not repeat.is_known:
            self.choices[repeat.name] = f"unrolled: {_OF_USER}"
            return False
        if self._mode == "auto" and has_gpu():
            self.choices[repeat.name] = f"unrolled: {_SLOWER}"
            return False
        stacks = _stack(repeat, self._learned_ids)
        self._stacks[id(repeat)] = stacks
        for stack in (*stacks.learned, *stacks.state):
            if not any(id(v.value) in self._assigned_ids for v in stack.variables):
                self.weight_stacks.append(stack)
        return True

    def _refuse(self, repeat: Repeat | Chain, reason: str) -> None:
        """Has layers run one after the other from now on."""
        self._refused.add(id(repeat))
        self._say_unrolled(repeat, reason)

    def _say_unrolled(self, repeat: Repeat | Chain, reason: str) -> None:
        self.choices[repeat.name] = f"unrolled: {reason}"
        if self._mode is True:
            warn(
                f"scan_layers=True: {repeat.name} run one after the other, not in a loop. {reason} "
                "Pass scan_layers='auto' to leave out this warning.",
                UserWarning,
            )

    def make_loops(self) -> list[Interceptor]:
        """Returns interceptors that run the loops."""
        method = private.run_through_graph.name
        interceptors = []
        for repeat in self._loops():
            # What an attribute says may have changed since the last program was traced.
            if not repeat.is_known and id(repeat) not in self._refused:
                reason = _difference(repeat)
                if reason is not None:
                    self._refuse(repeat, f"They differ by now: {reason}.")
        for graph, repeats in self._repeats_by_graph:
            segments = _segments(graph, repeats)
            replacement = functools.partial(_walk, graph, segments, self._run_repeat)
            interceptors.append(Interceptor(graph, method, replacement, Role.LOOP))
        for chain in self._chains:
            may_loop = functools.partial(self._may_loop, chain)
            calls = ChainedCalls(chain, may_loop, functools.partial(self._run_chain, chain))
            interceptors += calls.make_interceptors()
        return interceptors

    def _loops(self) -> list[Repeat | Chain]:
        loops: list[Repeat | Chain] = [*self._chains]
        for _, repeats in self._repeats_by_graph:
            loops += repeats
        return loops

    def expand_choices(self, choices: Mapping[str, str]) -> dict[str, str]:
        """Returns choices by layers' paths, with those of the layers that a loop runs alike."""
        copies_of_path: dict[str, list[str]] = {}
        for repeat in self._loops():
            layers_by_part = [list(_flattened(part)) for part in repeat.layers_by_part]
            for copies in zip(*layers_by_part, strict=True):
                copies_of_path[copies[0].path] = [layer.path for layer in copies]
        with_copies = {}
        for path, choice in choices.items():
            for copy in copies_of_path.get(path, [path]):
                with_copies[copy] = choice
        return with_copies

    def _run_repeat(
        self, repeat: Repeat, operation_fn: Callable, values: list[tf.Tensor], policy: Policy | None
    ) -> tf.Tensor:
        """Runs the layers of a repeat, and returns what the last one gives."""
        place = repeat.x
        if not self._may_loop(repeat, values[place]):
            return _run_unrolled(repeat, operation_fn, values)
        for node in repeat.body.nodes:
            if isinstance(node.operation, keras.layers.Layer) and policy is None:
                policy = _policy(installed(node.operation, Role.RECOMPUTE))

        def call_layers(x: tf.Tensor, shared: list[tf.Tensor]) -> tf.Tensor:
            inputs = [*shared[:place], x, *shared[place:]]
            (y,) = walks.run_nodes(repeat.body, operation_fn, inputs)
            return y

        return self._run_loop(
            repeat,
            policy,
            values[place],
            [*values[:place], *values[place + 1 :]],
            call_layers,
            lambda: _run_unrolled(repeat, operation_fn, values),
        )

    def _run_chain(
        self,
        chain: Chain,
        arguments: Mapping[Argument, Any],
        call_one: Callable[[Mapping[Argument, Any]], tf.Tensor],
        call_all: Callable[[], tf.Tensor],
    ) -> tf.Tensor:
        """Runs the layers of a chain, and returns what the last one gives."""
        others = {key: value for key, value in arguments.items() if key != chain.x}
        flat = keras.tree.flatten(others)
        shared_places = [k for k, value in enumerate(flat) if isinstance(value, tf.Tensor)]

        def call_layers(x: tf.Tensor, shared: list[tf.Tensor]) -> tf.Tensor:
            values = list(flat)
            for k, value in zip(shared_places, shared, strict=True):
                values[k] = value
            packed = keras.tree.pack_sequence_as(others, values)
            # In the order of the call: arguments without a name are told apart by their place.
            return call_one({key: x if key == chain.x else packed[key] for key in arguments})

        return self._run_loop(
            chain,
            _policy(installed(chain.layers[0], Role.RECOMPUTE)),
            arguments[chain.x],
            [flat[k] for k in shared_places],
            call_layers,
            call_all,
        )

    def _may_loop(self, repeat: Repeat | Chain, x: Any) -> bool:
        """Tells if layers run as a loop where the first of them takes `x`."""
        if id(repeat) in self._refused or not in_xla() or not isinstance(x, tf.Tensor):
            return False
        handed_on = x.shape.num_elements()
        if self._mode == "auto" and (handed_on is None or handed_on > _MOST_HANDED_ON):
            self.choices[repeat.name] = f"unrolled: {_SLOWER}"
            return False
        return True

    def _run_loop(
        self,
        repeat: Repeat | Chain,
        policy: Policy | None,
        x: tf.Tensor,
        shared: list[tf.Tensor],
        call_layers: Callable[[tf.Tensor, list[tf.Tensor]], tf.Tensor],
        call_unrolled: Callable[[], tf.Tensor],
    ) -> tf.Tensor:
        """Runs layers as a loop, and returns what the last one gives.

        Layers that turn out to do what no loop would are run one after the other.
        """
        if not all(isinstance(t, (tf.Tensor, type(None))) for t in shared):
            self._refuse(repeat, "They take a sparse or ragged tensor.")
            return call_unrolled()
        if policy is None:
            # XLA computes norms and activations again in layers that are no loop, too.
            policy = "auto"
        mask = private.keras_mask(x, None)
        masks = [private.keras_mask(t, None) for t in shared]

        def call_masked(
            x: tf.Tensor, shared: list[tf.Tensor], masks: list[tf.Tensor | None]
        ) -> tf.Tensor:
            for t, mask_of_shared in zip(shared, masks, strict=True):
                if mask_of_shared is not None:
                    private.keras_mask.set(t, mask_of_shared)
            return call_layers(x, shared)

        stacks = self._stacks[id(repeat)]
        body = Body(
            name=f"layers {repeat.name}",
            layer=call_masked,
            weights=[stack.variables[0] for stack in stacks.learned],
            stacks=stacks.learned,
            state=[stack.variables[0] for stack in stacks.state],
            training=private.record.could_possibly_record(),
            arguments=[mask, {"shared": shared, "masks": masks}],
            check=_require_loopable,
        )
        try:
            y, assigned = run_loops(
                body,
                len(repeat.layers_by_part),
                LoopOptions(policy, unroll=False),
                x,
                [self._read(stack) for stack in stacks.learned],
                [self._read(stack) for stack in stacks.state],
            )
        except NotStackable as reason:
            self._refuse(repeat, str(reason))
            return call_unrolled()
        self.choices[repeat.name] = f"one loop of {len(repeat.layers_by_part)}"
        for k, new_values in assigned.items():
            stacks.state[k].assign(new_values)
        if mask is not None:
            private.keras_mask.set(y, mask)
        return y

    def _read(self, stack: VariableStack) -> tf.Tensor:
        if stack in self.weight_stacks:
            return trace_context.current().read_stack(stack)
        return stack.read()


def _run_unrolled(repeat: Repeat, operation_fn: Callable, values: list[tf.Tensor]) -> tf.Tensor:
    """Runs the layers of a repeat one after the other."""
    (y,) = walks.run_nodes(repeat.whole, operation_fn, values)
    return y


def _require_loopable(mask: tf.Tensor | None, y: tf.Tensor) -> None:
    """Raises NotStackable for layers that no loop runs as they are.

    They were traced now, of a tensor with this mask, and returned y.
    """
    if private.keras_mask(y, None) is not mask:
        raise NotStackable("They change the mask of their input.")
    graph = tf.compat.v1.get_default_graph()
    variables = {id(variable.handle): variable.name for variable in graph.variables}
    captured = []
    for outer, inner in graph.captures:
        if inner.dtype == tf.resource:
            captured.append(variables.get(id(outer), "a resource"))
    if captured:
        raise NotStackable(f"They use {captured}, which are not among their weights.")
    drawn = list_draws(graph, graph.get_operations())
    if drawn:
        raise NotStackable(f"They draw random numbers in {drawn} that no seed of theirs says.")


def _graphs(model: keras.Model) -> list[keras.Function]:
    """Lists the graph of a model and those that are its nodes, an outer one before an inner.

    A graph that other code calls may be called anywhere: in a loop, or for derivatives.
    """
    graphs: dict[int, keras.Function] = {}
    pending = [model]
    while pending:
        graph = blocks.graph_of(pending.pop(0))
        if graph is None or id(graph) in graphs:
            continue
        graphs[id(graph)] = graph
        nodes, _ = blocks.ordered(graph)
        for node in nodes:
            if isinstance(node.operation, keras.layers.Layer):
                pending.append(node.operation)
    return list(graphs.values())


def _layers(repeat: Repeat | Chain) -> Iterator[keras.layers.Layer]:
    """Yields the layers of a repeat or a chain, with those within them."""
    for part in repeat.layers_by_part:
        yield from _flattened(part)


def _flattened(layers: Iterable[keras.layers.Layer]) -> Iterator[keras.layers.Layer]:
    for layer in layers:
        yield from private.flatten_layers(layer)


def _refusal(repeat: Repeat | Chain) -> str | None:
    """Says why layers that repeat cannot run in a loop, as a sentence; None if they can."""
    for layer in _layers(repeat):
        if isinstance(layer, keras.layers.InputLayer):
            continue  # of a block that is a functional model
        reason = blocks.refusal(layer)
        if reason is None and private.metrics(layer):
            reason = "holds metrics"
        if reason is None and getattr(layer, "activity_regularizer", None) is not None:
            reason = "has an activity regularizer"
        if reason is not None:
            return f"{layer.name!r} {reason}."
    return None


def _difference(repeat: Repeat | Chain) -> str | None:
    """Says where layers of neighbouring parts differ; None if none do."""
    for part, following in itertools.pairwise(repeat.layers_by_part):
        for layer, other in zip(part, following, strict=True):
            found = Comparison().compare(layer, other, layer.name)
            if found is not None:
                return found
    return None


def _stack(repeat: Repeat | Chain, learned_ids: Collection[int]) -> _Stacks:
    stacks = _Stacks([], [])
    for copies in zip(*repeat.variables(), strict=True):
        if id(copies[0]) in learned_ids:
            stacks.learned.append(VariableStack(copies))
        else:
            stacks.state.append(VariableStack(copies))
    return stacks


def _segments(graph: keras.Function, repeats: Sequence[Repeat]) -> list[blocks.Segment | Repeat]:
    """Cuts a graph into repeats and the nodes between them, in the order of a call."""
    nodes, _ = blocks.ordered(graph)
    repeat_by_first_node = {id(repeat.whole.nodes[0]): repeat for repeat in repeats}
    segments: list[blocks.Segment | Repeat] = []
    between: list[Any] = []

    def end_segment() -> None:
        if between:
            segments.append(blocks.make_segment([*between], graph.outputs, nodes, False))
            between.clear()

    remaining = iter(nodes)
    for node in remaining:
        repeat = repeat_by_first_node.get(id(node))
        if repeat is None:
            between.append(node)
            continue
        end_segment()
        segments.append(repeat)
        for _ in repeat.whole.nodes[1:]:
            next(remaining)
    end_segment()
    return segments


def _walk(
    graph: keras.Function,
    segments: Sequence[blocks.Segment | Repeat],
    run_repeat: Callable[[Repeat, Callable, list[tf.Tensor], Policy | None], tf.Tensor],
    call: Callable,
    inputs: Nest,
    operation_fn: Callable = lambda operation: operation,
    **options: object,
) -> Nest:
    """Runs a graph, its repeats by `run_repeat`, in place of Keras's method."""
    if not walks.may_walk(inputs, options) or hoisted_casts.stateless_scope() is not None:
        return call(inputs, operation_fn, **options)
    policy = _policy(installed(graph, Role.RECOMPUTE))

    def run(segment: blocks.Segment | Repeat, values: list[tf.Tensor]) -> list[tf.Tensor]:
        if isinstance(segment, Repeat):
            return [run_repeat(segment, operation_fn, values, policy)]
        return walks.run_nodes(segment, operation_fn, values)

    return walks.run_segments(graph, segments, inputs, run)


def _policy(recomputing: Sequence[Interceptor]) -> Policy | None:
    """Returns the policy of what `fa.remat` has put there; None if that is nothing."""
    for interceptor in recomputing:
        return interceptor.policy
    return None


def _run_once(
    repeat: Repeat, operation_fn: Callable, values: list[tf.Tensor], policy: Policy | None
) -> tf.Tensor:
    """Runs the first part of a repeat in place of all."""
    (y,) = walks.run_nodes(repeat.body, operation_fn, values)
    return y
