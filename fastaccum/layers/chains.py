"""Finds layers that code calls one after the other, as a Python loop in a layer's `call` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest, of_keras
from fastaccum.kernels import private, stackable
from fastaccum.layers import blocks
from fastaccum.layers.alike import Comparison, is_users_code
from fastaccum.layers.interceptors import Interceptor, Role

# A name, or the place among those without one.
Argument = int | str
# The name of a stand-in, which TensorFlow's error has where something is computed from one.
_STAND_IN = "runs_in_a_loop.pass_scan_layers_False"


class Chain(NamedTuple):
    """Layers that compute the same with other weights, each of what the one before gave.

    Whatever else they are called with is the same for all.
    """

    layers: list[keras.layers.Layer]
    x: Argument  # what each takes from the one before
    is_known: bool  # whether all code is Keras's or KerasHub's

    @property
    def layers_by_part(self) -> list[list[keras.layers.Layer]]:
        """The layers one by one, as `Repeat` has them."""
        return [[layer] for layer in self.layers]

    @property
    def name(self) -> str:
        """The names of the first and the last layer."""
        return _name(self.layers)

    def variables(self) -> list[list[keras.Variable]]:
        """Lists each layer's variables, in one order."""
        return [stackable.variables(layer) for layer in self.layers]


class _Run(NamedTuple):
    """Layers side by side in a layer, each of which would compute the same as the next."""

    layers: list[keras.layers.Layer]
    is_known: bool


class _Call(NamedTuple):
    """A call of a layer while a graph is traced."""

    arguments: dict[Argument, Any]
    output: Any
    start: int  # the operations of the graph before the call, and after it
    end: int


class ChainSearch:
    """Search for the chains of a model, by traces of its calls.

    Which layers follow each other is in the code that calls them. So the traces tell: inside
    `intercepting(interceptors)` it is noted what each layer is called with, and `note` then keeps
    the links that every trace so far has shown.
    """

    def __init__(self, model: keras.Model):
        self._runs = list(_find_runs(model))
        self._calls: dict[int, dict[int, list[_Call]]] = {}  # by the ids of the graph and the layer
        self._links: dict[tuple[int, int], Argument] | None = None
        self.interceptors: list[Interceptor] = []
        for run in self._runs:
            for layer in run.layers:
                watch = functools.partial(self._watch, layer)
                self.interceptors.append(Interceptor(layer, "call", watch, Role.OBSERVE))

    @property
    def chains(self) -> list[Chain]:
        """The chains of at least two layers."""
        links = self._links or {}
        chains = []
        for run in self._runs:
            linked = run.layers[:1]
            x: Argument | None = None
            for before, layer in zip(run.layers, [*run.layers[1:], None], strict=True):
                link = links.get((id(before), id(layer)))
                if link is not None and x in (None, link):
                    x = link
                    linked.append(layer)
                    continue
                if x is not None:
                    chains.append(Chain(linked, x, run.is_known))
                linked = [layer]
                x = None
        return chains

    @property
    def apart(self) -> list[str]:
        """The names of layers side by side that are alike, of which no two are in a chain.

        Those without layers in them are left out: few such are meant to follow each other.
        """
        chained = {id(layer) for chain in self.chains for layer in chain.layers}
        names = []
        for run in self._runs:
            has_inner = any(True for _ in private.flatten_layers(run.layers[0], include_self=False))
            if has_inner and not any(id(layer) in chained for layer in run.layers):
                names.append(_name(run.layers))
        return names

    def note(self, graph: tf.Graph) -> None:
        """Keeps the links that a trace shows, of those that earlier ones have shown."""
        calls_by_layer = self._calls.pop(id(graph), {})
        self._calls.clear()
        operations = graph.get_operations()
        places = {operation.name: k for k, operation in enumerate(operations)}
        links = {}
        for run in self._runs:
            for layer, following in zip(run.layers, run.layers[1:], strict=False):
                calls = calls_by_layer.get(id(layer), [])
                next_calls = calls_by_layer.get(id(following), [])
                if len(calls) != 1 or len(next_calls) != 1:
                    continue
                link = _link(calls[0], next_calls[0], places)
                if link is not None and not _compute_alike(calls[0], next_calls[0], operations):
                    link = None
                key = (id(layer), id(following))
                if link is not None and (self._links is None or self._links.get(key) == link):
                    links[key] = link
        self._links = links

    def _watch(
        self, layer: keras.layers.Layer, call: Callable[..., Nest], *args: Any, **kwargs: Any
    ) -> Nest:
        if tf.executing_eagerly():
            return call(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        output = call(*args, **kwargs)
        end = len(graph.get_operations())
        noted = _Call(by_argument(args, kwargs), output, start, end)
        self._calls.setdefault(id(graph), {}).setdefault(id(layer), []).append(noted)
        return output


class ChainedCalls:
    """The calls of a chain's layers in one trace, of which the last runs the loop.

    Until then each layer hands on a stand-in for what it would give. That nothing but the next
    layer takes it, the chain's search has found; it is an error where this trace differs.

    Args:
        chain: the layers.
        may_loop: tells of what the first layer takes if the layers run as a loop.
        run: runs the loop, given what the first layer takes, the call of one layer, and a function
            that calls all of them one after the other instead.
    """

    def __init__(
        self,
        chain: Chain,
        may_loop: Callable[[Any], bool],
        run: Callable[[Mapping[Argument, Any], Callable, Callable], tf.Tensor],
    ):
        self._chain = chain
        self._may_loop = may_loop
        self._run = run
        self._in_loop = False
        self._first: dict[Argument, Any] | None = None  # what the first layer takes
        self._given: tf.Tensor | None = None  # what the layer before has handed on
        self._count = 0  # of the layers so far

    def make_interceptors(self) -> list[Interceptor]:
        """Returns interceptors of the layers' calls."""
        interceptors = []
        for place, layer in enumerate(self._chain.layers):
            replacement = functools.partial(self._replace, place)
            interceptors.append(Interceptor(layer, "call", replacement, Role.LOOP))
        return interceptors

    def _replace(
        self, place: int, call: Callable[..., Nest], *args: Any, **kwargs: Any
    ) -> Nest | tf.Tensor:
        """Runs in place of a layer's `call`.

        The first layer's decides whether this trace loops, those behind it return stand-ins, and
        the last runs the loop, in which each is called as it is.
        """
        if self._in_loop:
            return call(*args, **kwargs)
        arguments = by_argument(args, kwargs)
        x: Any = arguments.get(self._chain.x)
        if place == 0:
            self._first = arguments if self._may_loop(x) else None
            self._given = x
            self._count = 0
        if self._first is None:
            return call(*args, **kwargs)
        is_next = place == self._count and x is self._given
        if not is_next or not _same_but(self._chain.x, arguments, self._first):
            raise ValueError(
                f"scan_layers: layer {self._chain.layers[place].name!r} is called otherwise than "
                "as the model was looked at before its first step. Pass Trainer(scan_layers=False)."
            )
        self._count += 1
        if place < len(self._chain.layers) - 1:
            # Of a graph that is no other's, so that TensorFlow lets nothing be computed from it.
            with tf.Graph().as_default():
                self._given = tf.compat.v1.placeholder(x.dtype, x.shape, _STAND_IN)
            return self._given
        first = self._first
        self._first = None
        return self._run(first, self._call_one, functools.partial(self._call_all, first, call))

    def _call_one(self, arguments: Mapping[Argument, Any]) -> tf.Tensor:
        """Calls the first layer, for whichever layer the loop is at."""
        args, kwargs = _as_arguments(arguments)
        self._in_loop = True
        try:
            return self._chain.layers[0](*args, **kwargs)
        finally:
            self._in_loop = False

    def _call_all(
        self, arguments: Mapping[Argument, Any], call_last: Callable[..., Nest]
    ) -> tf.Tensor:
        """Calls the layers one after the other, as the model's own code would."""
        y = arguments[self._chain.x]
        self._in_loop = True
        try:
            for layer in self._chain.layers[:-1]:
                args, kwargs = _as_arguments({**arguments, self._chain.x: y})
                y = layer(*args, **kwargs)
        finally:
            self._in_loop = False
        args, kwargs = _as_arguments({**arguments, self._chain.x: y})
        return call_last(*args, **kwargs)  # Keras is in the last layer's `__call__`


def _name(layers: Sequence[keras.layers.Layer]) -> str:
    return f"{layers[0].name!r} to {layers[-1].name!r}"


def by_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Argument, Any]:
    """Returns the arguments of a call by their names, or places."""
    arguments: dict[Argument, Any] = dict(enumerate(args))
    for name, value in kwargs.items():
        arguments[name] = value
    return arguments


def _as_arguments(arguments: Mapping[Argument, Any]) -> tuple[list[Any], dict[str, Any]]:
    args = [value for key, value in arguments.items() if isinstance(key, int)]
    kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
    return args, kwargs


def _find_runs(model: keras.Model) -> Iterator[_Run]:
    """Yields the runs of at least two layers in layers with code of their own.

    There are none in a model of tf_keras, which has no loops.
    """
    if not isinstance(model, keras.Model):
        return
    for owner in private.flatten_layers(model):
        if blocks.graph_of(owner) is not None or of_keras(type(owner)):
            continue
        children = {}
        for child in private.flatten_layers(owner, include_self=False, recursive=False):
            children[id(child)] = child
        owner_is_known = not is_users_code(owner)
        run: list[keras.layers.Layer] = []
        weights: set[int] = set()  # the ids of the variables of the run's layers
        is_known = owner_is_known
        for child in [*children.values(), None]:
            own = {id(v) for v in stackable.variables(child)} if child is not None else set()
            comparison = Comparison()
            if run and own and not own & weights and _are_alike(comparison, run[-1], child):
                run.append(child)
                weights |= own
                is_known = is_known and not comparison.meets_users_code
                continue
            if len(run) > 1:
                yield _Run(run, is_known)
            run = [child]
            weights = own
            is_known = owner_is_known


def _are_alike(
    comparison: Comparison, layer: keras.layers.Layer, other: keras.layers.Layer
) -> bool:
    if type(layer) is not type(other) or not layer.weights:
        return False
    try:
        return comparison.compare(layer, other, "") is None
    except Exception:  # of whatever kind: code of the user's may have run
        return False


def _link(call: _Call, following: _Call, places: Mapping[str, int]) -> Argument | None:
    """Returns the argument in which a layer takes what the one before gave; None for no link.

    There is a link if only the next layer takes it, and both take the same besides.
    """
    y = call.output
    if not isinstance(y, tf.Tensor):
        return None
    taking = [key for key, value in following.arguments.items() if value is y]
    if len(taking) != 1:
        return None
    (key,) = taking
    x = call.arguments.get(key)
    if not isinstance(x, tf.Tensor) or x.dtype != y.dtype or x.shape.rank != y.shape.rank:
        return None
    if not _same_but(key, call.arguments, following.arguments):
        return None
    taken_at = [places[operation.name] for operation in y.consumers()]
    if not all(following.start <= place < following.end for place in taken_at):
        return None
    return key


def _compute_alike(call: _Call, following: _Call, operations: Sequence[tf.Operation]) -> bool:
    """Tells if two calls have traced the same operations, of their own variables.

    What layers compute by, or hand on, that no attribute, argument or output tells shows here.
    """
    traced = _computing(operations[call.start : call.end])
    others = _computing(operations[following.start : following.end])
    if len(traced) != len(others):
        return False
    if _hands_on_more(call, traced) or _hands_on_more(following, others):
        return False
    # The tensors of the second call that stand for those of the first.
    counterparts = {}
    for key, value in call.arguments.items():
        for t, of_other in zip(
            keras.tree.flatten(value), keras.tree.flatten(following.arguments[key]), strict=True
        ):
            if isinstance(t, tf.Tensor):
                counterparts[t.ref()] = of_other
    for operation, other in zip(traced, others, strict=True):
        if operation.type != other.type or _settings(operation) != _settings(other):
            return False
        if len(operation.inputs) != len(other.inputs):
            return False
        for t, of_other in zip(operation.inputs, other.inputs, strict=True):
            if t.ref() in counterparts:
                is_same = counterparts[t.ref()] is of_other
            elif t.dtype == tf.resource:
                is_same = of_other.dtype == tf.resource
            else:
                # A loop would lose the gradient of what reaches a layer past its arguments.
                is_same = t is of_other and not t.dtype.is_floating
            if not is_same:
                return False
        for t, of_other in zip(operation.outputs, other.outputs, strict=True):
            counterparts[t.ref()] = of_other
    return True


def _hands_on_more(call: _Call, traced: Sequence[tf.Operation]) -> bool:
    """Tells if something else than a call's output is taken outside of the call."""
    within = {operation.name for operation in traced}
    for operation in traced:
        for t in operation.outputs:
            if t is not call.output and any(taking.name not in within for taking in t.consumers()):
                return True
    return False


def _computing(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Lists operations but placeholders, which are made where something is captured first."""
    return [operation for operation in operations if operation.type != "Placeholder"]


def _settings(operation: tf.Operation) -> dict[str, bytes]:
    """Returns what an operation computes by, besides its inputs and the functions that it calls."""
    settings = {}
    for name, value in operation.node_def.attr.items():
        calls = value.HasField("func") or value.list.func
        if not name.startswith("_") and not calls:
            settings[name] = value.SerializeToString(deterministic=True)
    return settings


def _same_but(key: Argument, a: Mapping[Argument, Any], b: Mapping[Argument, Any]) -> bool:
    """Tells if two calls have the same arguments, but for one."""
    if a.keys() != b.keys():
        return False
    for name in a.keys() - {key}:
        try:
            keras.tree.assert_same_structure(a[name], b[name])
        except (ValueError, TypeError):
            return False
        values = keras.tree.flatten(a[name])
        others = keras.tree.flatten(b[name])
        if not all(_are_same(value, other) for value, other in zip(values, others, strict=True)):
            return False
    return True


def _are_same(value: Any, other: Any) -> bool:
    if value is None or isinstance(value, tf.Tensor):
        return value is other
    # Of any other object it is not known what it holds at each call.
    is_plain = isinstance(value, (bool, int, float, str))
    return is_plain and type(value) is type(other) and value == other
