"""Custom gradients that are freed with the graphs that they are part of."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

R = TypeVar("R")
Differentiated = Callable[..., tuple[R, Callable[..., object]]]  # returns outputs and their gradient function


def custom_gradient(function: Differentiated[R]) -> Callable[..., R]:
    """Decorates as `tf.custom_gradient` does, inside `graph_scoped_gradients`.

    A gradient's operations are named after the call that it belongs to, as those of TensorFlow's own gradients are, so
    that a profile tells where a kernel comes from.
    """
    call = tf.custom_gradient(_name_gradient(function))

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def owned(*args: tf.Tensor) -> R:
        if tf.executing_eagerly():
            return call(*args)
        with graph_scoped_gradients():
            return call(*args)

    return owned


def _name_gradient(function: Differentiated[R]) -> Differentiated[R]:
    @functools.wraps(function)
    def named(*args: tf.Tensor) -> tuple[R, Callable[..., object]]:
        scope = "/".join(filter(None, ("gradient_tape", tf.get_current_name_scope())))
        outputs, gradient = function(*args)

        def in_scope(*upstream: tf.Tensor, **variables: Sequence[tf.Variable]) -> object:
            with tf.name_scope(f"{scope}/"):
                return gradient(*upstream, **variables)

        return outputs, in_scope

    return named


@contextlib.contextmanager
def graph_scoped_gradients() -> Iterator[None]:
    """Lets graphs that are traced inside the block be freed with their custom gradients.

    `tf.custom_gradient` registers a function for each of its calls in a graph, for as long as the process lives, and
    the function holds that graph. A Keras optimizer makes such a call in each of its updates, so every model trained
    would leave its graphs behind, megabytes of them, and some its weights. Here the graph holds the function, and
    the registry only a weak reference.
    """
    registered = gradient_registry._registry
    before = set(registered)
    try:
        yield
    finally:
        for name in registered.keys() - before:
            _hand_over(registered, name)


def _hand_over(registered: dict[str, dict[str, object]], name: str) -> None:
    gradient = registered[name]["type"]
    graph = _find_graph(gradient)
    if graph is None:  # handed over before, or registered under a name of its own
        return
    graph.custom_gradients = [*getattr(graph, "custom_gradients", []), gradient]
    reference: Any = weakref.ref(gradient)
    registered[name] = {**registered[name], "type": lambda *args: reference()(*args)}
    weakref.finalize(graph, registered.pop, name, None).atexit = False


def _find_graph(gradient: object) -> tf.Graph | None:
    """Returns the graph of the tensors that a gradient function differentiates."""
    results = tf.nest.flatten(_get_nonlocals(_get_nonlocals(gradient).get("tape_grad_fn")).get("result"))
    return next((t.graph for t in results if tf.is_tensor(t) and hasattr(t, "graph")), None)


def _get_nonlocals(function: object) -> Mapping[str, object]:
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
