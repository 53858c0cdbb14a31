"""Custom gradients that are freed with the graphs that they are part of."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from fastaccum.kernels import private

R = TypeVar("R")
# A function that returns outputs and their gradient function.
Differentiated = Callable[..., tuple[R, Callable[..., object]]]


def custom_gradient(function: Differentiated[R]) -> Callable[..., R]:
    """Decorates as `tf.custom_gradient` does, inside `graph_scoped_gradients`.

    The gradient's operations are named after the call, as TensorFlow's are, so that a profile tells
    where they belong.
    """

    @tf.custom_gradient
    @functools.wraps(function)
    def named(*args: tf.Tensor) -> tuple[R, Callable[..., object]]:
        scope = "gradient_tape"
        if tf.get_current_name_scope():
            scope = f"gradient_tape/{tf.get_current_name_scope()}"
        outputs, gradient = function(*args)

        def in_scope(*upstream: tf.Tensor, **variables: Sequence[tf.Variable]) -> object:
            with tf.name_scope(f"{scope}/"):
                return gradient(*upstream, **variables)

        return outputs, in_scope

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def freed_with_graph(*args: tf.Tensor) -> R:
        if tf.executing_eagerly():
            return named(*args)
        with graph_scoped_gradients():
            return named(*args)

    return freed_with_graph


@contextlib.contextmanager
def graph_scoped_gradients() -> Iterator[None]:
    """Lets graphs that are traced inside the block be freed with their custom gradients.

    `tf.custom_gradient` registers a function for each call in a graph, which holds that graph as
    long as the process lives. Here the graph holds the function, the registry a weak reference.
    """
    if not private.has("gradient_registry"):
        yield
        return
    registered = private.gradients_by_name(private.gradient_registry)
    before = set(registered)
    try:
        yield
    finally:
        for name in registered.keys() - before:
            _hand_over(registered, name)


def _hand_over(registered: dict[str, dict[str, object]], name: str) -> None:
    """Moves a gradient function from the registry to the graph that it differentiates."""
    gradient = registered[name]["type"]
    graph = _graph_of(gradient)
    if graph is None:  # handed over before, or registered under a name of its own
        return
    graph.custom_gradients = [*getattr(graph, "custom_gradients", []), gradient]
    reference: Any = weakref.ref(gradient)
    registered[name] = {**registered[name], "type": lambda *args: reference()(*args)}
    weakref.finalize(graph, registered.pop, name, None).atexit = False


def _graph_of(gradient: Any) -> Any:
    """Returns the graph of the tensors that a registered gradient function differentiates."""
    # TensorFlow's closures hold them: `tape_grad_fn`, and in it `result`.
    result = _closure_value(_closure_value(gradient, "tape_grad_fn"), "result")
    for t in tf.nest.flatten(result):
        if tf.is_tensor(t) and hasattr(t, "graph"):
            return t.graph
    return None


def _closure_value(function: Any, name: str) -> Any:
    """Returns the value of a variable that a function closes over, or None."""
    if not inspect.isfunction(function):
        return None
    return inspect.getclosurevars(function).nonlocals.get(name)
