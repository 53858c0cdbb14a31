"""Errors of what XLA cannot compile, which name the layer or the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from fastaccum.adapters.losses import BoundLosses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model


def require(model: Model, instead: str = "pass jit_compile=False") -> None:
    """Raises ValueError for layers that declare that XLA cannot compile them.

    The error says what to do `instead`.
    """
    layers = [_with_type(layer) for layer in model.uncompilable_layers()]
    if layers:
        raise ValueError(
            f"XLA cannot compile these layers: {', '.join(layers)}. Move them into the input "
            f"pipeline (dataset.map), or {instead}."
        )


def require_recomputable(model: Model) -> None:
    """Raises ValueError for layers under a `keras.RematScope`.

    Keras would recompute them with other random numbers, or not at all.
    """
    layers = [_with_type(layer) for layer in model.recomputed_layers]
    if layers:
        raise ValueError(
            f"{', '.join(layers)} were made under keras.RematScope, which fails on TensorFlow, "
            "or draws other random numbers in the backward pass. Make them outside of it, and "
            "call fa.remat(model), which recomputes exactly."
        )


def list_python_callers(model: Model, losses: BoundLosses, metrics: Metrics) -> list[str]:
    """Lists the layers, losses and metrics that call Python, as by tf.py_function.

    These are known once the model is built.
    """
    layers: set[str] = set()
    for operation in model.effects.python_calls:
        layers_of_operation = _layers_on(operation, model.layers)
        if not layers_of_operation:
            layers_of_operation = [_with_type(model.model)]
        layers.update(layers_of_operation)

    names_by_kind = {
        "layers": sorted(layers),
        "loss": losses.calling_python,
        "metrics": metrics.calling_python,
    }
    return [f"{kind}={names}" for kind, names in names_by_kind.items() if names]


def require_no_python(callers: Sequence[str], instead: str) -> None:
    """Raises ValueError if there are `callers` of Python, with what to do `instead`."""
    if callers:
        raise ValueError(f"XLA cannot compile {', '.join(callers)}, which call Python: {instead}.")


# What a part of XLA's message means.
_REASONS = {
    "unsupported operations": "it has no such operation",
    "tf2xla conversion failed": "it cannot compile an operation",
}


@contextmanager
def translate_errors(model: Model | None, what: str = "this model") -> Iterator[None]:
    """Raises XLA's refusal of an operation as a ValueError that names the layer."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        why = None
        for part_of_message, reason in _REASONS.items():
            if why is None and part_of_message in str(error):
                why = reason
        if why is None:
            raise
        # After its first sentence XLA's message is a stack trace.
        before_node, _, _ = str(error.message).partition("{{node")
        first_line, _, _ = before_node.partition("\n")
        node = re.search(r"(?:{{node |node `)(?P<path>[^}`]*)", str(error))
        layers = []
        if model is not None and node is not None:
            layers = _layers_on(node["path"], model.layers)
        where = ""
        remedy = "Pass jit_compile=False."
        if layers:
            where = f" in {', '.join(layers)}"
            remedy = "Move that into the input pipeline (dataset.map), or pass jit_compile=False."
        raise ValueError(
            f"XLA cannot compile {what}: {why}{where}. {remedy} XLA says: {first_line.strip()}"
        ) from error


def _layers_on(path: str, layers: Sequence[keras.layers.Layer]) -> list[str]:
    """Lists the innermost layers on the path of a graph's node, as "name (Type)"."""
    innermost = -1  # the place of a layer's scope on the path
    names: list[str] = []
    for layer in layers:
        # Keras numbers the scopes of a layer that is called again.
        scope = re.compile(rf"{re.escape(layer.name)}(_\d+)?")
        for depth, part in enumerate(path.split("/")):
            if not scope.fullmatch(part) or depth < innermost:
                continue
            if depth > innermost:
                innermost = depth
                names = []
            names.append(_with_type(layer))
    return names


def _with_type(layer: keras.layers.Layer) -> str:
    return f"{layer.name} ({type(layer).__name__})"
