"""What XLA cannot compile, said by the name of the layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from fastaccum.adapters.models import Model


def require(model: Model) -> None:
    """Raises ValueError for a model with layers that say that XLA cannot compile them."""
    layers = model.uncompilable_layers()
    if layers:
        raise ValueError(
            f"XLA cannot compile these layers: {', '.join(layers)}. Move them into the input pipeline "
            "(dataset.map), or pass jit_compile=False."
        )


@contextmanager
def explained(model: Model) -> Iterator[None]:
    """Within the scope, XLA's refusal of an operation becomes a ValueError that names the layer."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "unsupported operations" not in str(error):
            raise
        # After its first sentence XLA's message is a stack trace.
        reason = str(error.message).partition("{{node")[0].partition("\n")[0].strip()
        where = f" in {', '.join(layers)}" if (layers := _layers_in(str(error), model)) else ""
        raise ValueError(
            f"XLA cannot compile this model: it has no such operation{where}. Move that into the input pipeline "
            f"(dataset.map), or pass jit_compile=False. XLA says: {reason}"
        ) from error


def _layers_in(message: str, model: Model) -> list[str]:
    """The innermost layers on the path of the graph node that an error names, as "name (Type)"."""
    path = re.search(r"{{node ([^}]*)}}", message)
    parts = path.group(1).split("/") if path else []

    def depth(layer: Any) -> int:
        # Keras numbers the scopes of a layer that is called again.
        scope = re.compile(rf"{re.escape(layer.name)}(_\d+)?")
        return max((i for i, part in enumerate(parts) if scope.fullmatch(part)), default=-1)

    depths = [(depth(layer), layer) for layer in model.layers]
    innermost = max((d for d, _ in depths), default=-1)
    return [f"{layer.name} ({type(layer).__name__})" for d, layer in depths if d == innermost >= 0]
