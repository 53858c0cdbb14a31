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
    """Raises ValueError for layers that declare that XLA cannot compile them, with what to do
    `instead`.
    """
    if layers := model.uncompilable_layers():
        raise ValueError(
            f"XLA cannot compile these layers: {', '.join(map(_called, layers))}. Move them into "
            f"the input pipeline (dataset.map), or {instead}."
        )


def require_recomputable(model: Model) -> None:
    """Raises ValueError for layers under a `keras.RematScope`: Keras would recompute them
    otherwise, or not at all.
    """
    if layers := [_called(layer) for layer in model.recomputed_layers]:
        raise ValueError(
            f"{', '.join(layers)} were made under keras.RematScope, which fails on TensorFlow, "
            "or draws other random numbers in the backward pass. Make them outside of it, and "
            "call fa.remat(model), which recomputes exactly."
        )


def list_python_callers(model: Model, losses: BoundLosses, metrics: Metrics) -> list[str]:
    """Lists the layers, losses and metrics that call Python, as by tf.py_function; known once they
    are built.
    """
    layers: set[str] = set()
    for operation in model.python_calls:
        layers.update(_layers_on(operation, model.layers) or [_called(model.model)])
    names = {
        "layers": sorted(layers),
        "loss": losses.calling_python,
        "metrics": metrics.calling_python,
    }
    return [f"{kind}={each}" for kind, each in names.items() if each]


def require_no_python(callers: Sequence[str], instead: str) -> None:
    """Raises ValueError if there are `callers` of Python, with what to do `instead`."""
    if callers:
        raise ValueError(f"XLA cannot compile {', '.join(callers)}, which call Python: {instead}.")


_SIGNS = {
    "unsupported operations": "it has no such operation",
    "tf2xla conversion failed": "it cannot compile an operation",
}


@contextmanager
def translate_errors(model: Model | None, what: str = "this model") -> Iterator[None]:
    """Raises XLA's refusal of an operation inside the block as a ValueError that names the
    layer.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        why = next((why for sign, why in _SIGNS.items() if sign in str(error)), None)
        if why is None:
            raise
        # After its first sentence XLA's message is a stack trace.
        reason = str(error.message).partition("{{node")[0].partition("\n")[0].strip()
        path = re.search(r"(?:{{node |node `)([^}`]*)", str(error))
        layers = _layers_on(path.group(1), model.layers) if model and path else []
        where = ""
        remedy = "Pass jit_compile=False."
        if layers:
            where = f" in {', '.join(layers)}"
            remedy = "Move that into the input pipeline (dataset.map), or pass jit_compile=False."
        raise ValueError(
            f"XLA cannot compile {what}: {why}{where}. {remedy} XLA says: {reason}"
        ) from error


def _layers_on(path: str, layers: Sequence[keras.layers.Layer]) -> list[str]:
    """Lists the innermost layers on the path of a graph's node, as "name (Type)"."""
    parts = path.split("/")

    def depth(layer: keras.layers.Layer) -> int:
        # Keras numbers the scopes of a layer that is called again.
        scope = re.compile(rf"{re.escape(layer.name)}(_\d+)?")
        return max((i for i, part in enumerate(parts) if scope.fullmatch(part)), default=-1)

    depths = [(depth(layer), layer) for layer in layers]
    innermost = max((d for d, _ in depths), default=-1)
    return [_called(layer) for d, layer in depths if d == innermost >= 0]


def _called(layer: keras.layers.Layer) -> str:
    return f"{layer.name} ({type(layer).__name__})"
