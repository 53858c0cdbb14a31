"""Finds layers that code calls one after the other, as a Python loop in a layer's `call` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Chain(NamedTuple):
    """Layers that compute the same with other weights, each of what the one before gave.

    Whatever else they are called with is the same for all.
    """

    layers: list[keras.layers.Layer]
    x: Argument  # what each takes from the one before
    is_known: bool  # whether all code is Keras's or KerasHub's

    @property
    def layers_by_part(self) -> list[list[keras.layers.Layer]]:
        return [[layer] for layer in self.layers]

    @property
    def name(self) -> str:
        """The names of the first and the last layer."""
        return f"{self.layers[0].name!r} to {self.layers[-1].name!r}"

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

    def note(self, graph: tf.Graph) -> None:
        """Keeps the links that a trace shows, of those that earlier ones have shown."""
        calls_by_layer = self._calls.pop(id(graph), {})
        self._calls.clear()
        places = {operation.name: k for k, operation in enumerate(graph.get_operations())}
        links = {}
        for run in self._runs:
            for layer, following in zip(run.layers, run.layers[1:], strict=False):
                calls = calls_by_layer.get(id(layer), [])
                next_calls = calls_by_layer.get(id(following), [])
                if len(calls) != 1 or len(next_calls) != 1:
                    continue
                link = _link(calls[0], next_calls[0], places)
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
        self._calls: list[Callable[..., Nest]] = []  # of the layers so far

    def make_interceptors(self) -> list[Interceptor]:
        interceptors = []
        for place, layer in enumerate(self._chain.layers):
            replacement = functools.partial(self._replace, place)
            interceptors.append(Interceptor(layer, "call", replacement, Role.LOOP))
        return interceptors

    def _replace(
        self, place: int, call: Callable[..., Nest], *args: Any, **kwargs: Any
    ) -> Nest | tf.Tensor:
        if self._in_loop:
            return call(*args, **kwargs)
        arguments = by_argument(args, kwargs)
        x: Any = arguments.get(self._chain.x)
        if place == 0:
            self._first = arguments if self._may_loop(x) else None
            self._given = x
            self._calls = []
        if self._first is None:
            return call(*args, **kwargs)
        is_next = place == len(self._calls) and x is self._given
        if not is_next or not _same_but(self._chain.x, arguments, self._first):
            raise ValueError(
                f"scan_layers: layer {self._chain.layers[place].name!r} is called otherwise than "
                "as the model was looked at before its first step. Pass Trainer(scan_layers=False)."
            )
        self._calls.append(call)
        if place < len(self._chain.layers) - 1:
            # Of a graph that is no other's, so that TensorFlow lets nothing be computed from it.
            with tf.Graph().as_default():
                self._given = tf.compat.v1.placeholder(x.dtype, x.shape, "runs_in_a_loop")
            return self._given
        first = self._first
        self._first = None
        return self._run(first, self._call_one, functools.partial(self._call_all, first))

    def _call_one(self, arguments: Mapping[Argument, Any]) -> tf.Tensor:
        """Calls the first layer, for whichever layer the loop is at."""
        args, kwargs = _as_arguments(arguments)
        self._in_loop = True
        try:
            return self._chain.layers[0](*args, **kwargs)
        finally:
            self._in_loop = False

    def _call_all(self, arguments: Mapping[Argument, Any]) -> tf.Tensor:
        """Calls the layers one after the other."""
        y = arguments[self._chain.x]
        for call in self._calls:
            args, kwargs = _as_arguments({**arguments, self._chain.x: y})
            y = call(*args, **kwargs)
        return y


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
    """Yields the runs of at least two layers in layers with code of their own."""
    for owner in private.flatten_layers(model):
        if blocks.graph_of(owner) is not None or of_keras(type(owner)):
            continue
        children = {}
        for child in private.flatten_layers(owner, include_self=False, recursive=False):
            children[id(child)] = child
        owner_is_known = not is_users_code(owner)
        run: list[keras.layers.Layer] = []
        is_known = owner_is_known
        for child in [*children.values(), None]:
            comparison = Comparison()
            if run and child is not None and _are_alike(comparison, run[-1], child):
                run.append(child)
                is_known = is_known and not comparison.meets_users_code
                continue
            if len(run) > 1:
                yield _Run(run, is_known)
            run = [child]
            is_known = owner_is_known


def _are_alike(
    comparison: Comparison, layer: keras.layers.Layer, other: keras.layers.Layer
) -> bool:
    if type(layer) is not type(other) or not layer.weights:
        return False
    ids = {id(variable) for variable in stackable.variables(layer)}
    if any(id(variable) in ids for variable in stackable.variables(other)):
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


def _same_but(key: Argument, a: Mapping[Argument, Any], b: Mapping[Argument, Any]) -> bool:
    """Tells if two calls have the same arguments, but for one."""
    if a.keys() != b.keys():
        return False
    for name in a.keys() - {key}:
        values = keras.tree.flatten(a[name])
        others = keras.tree.flatten(b[name])
        if len(values) != len(others):
            return False
        if not all(_are_same(value, other) for value, other in zip(values, others, strict=True)):
            return False
    return True


def _are_same(value: Any, other: Any) -> bool:
    if isinstance(value, (bool, int, float, str)):
        return type(value) is type(other) and value == other
    return value is other
