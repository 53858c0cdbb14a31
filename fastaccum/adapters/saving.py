"""Lets `keras.saving.load_model` find the layers of fastaccum after `import fastaccum` alone.

That import does not import Keras. So each layer gets a stand-in in Keras's table of saved layers,
which imports the layer's module once a saved layer is to be made.
"""

from __future__ import annotations

import importlib
from typing import Any

import wrapt

from fastaccum.basics import patches

# The layers of each module that a saved model may hold.
LAYERS = {
    "fastaccum.adapters.head": ("LinearCrossEntropy",),
    "fastaccum.kernels.fp32_layers": (
        "Fp32Conv1D",
        "Fp32Conv2D",
        "Fp32Dense",
        "Fp32EinsumDense",
        "Fp32GroupQueryAttention",
        "Fp32MultiHeadAttention",
        "Fp32ReversibleEmbedding",
    ),
    "fastaccum.kernels.layer_stack": ("LayerStack",),
    "fastaccum.transformer": (
        "CausalSelfAttention",
        "ContextLimit",
        "LearnedPositions",
        "TransformerBlock",
    ),
}


def register() -> None:
    """Enters the stand-ins in Keras's table as soon as Keras is imported, or now if it has been."""
    wrapt.register_post_import_hook(_register, "keras")


def _register(keras: Any) -> None:
    saved_layers = keras.saving.get_custom_objects()
    for module, names in LAYERS.items():
        for name in names:
            saved_layers.setdefault(f"fastaccum>{name}", _StandIn(module, name))
    patches.mark_skipped_state(keras.optimizers)


class _StandIn:
    """A layer's class that is imported late. It is hashable, since KerasHub puts it in a set."""

    def __init__(self, module: str, name: str):
        self._module = module
        self._name = name

    def from_config(self, config: dict[str, object]) -> object:
        """Imports the layer's class and makes a layer."""
        layer_class = getattr(importlib.import_module(self._module), self._name)
        return layer_class.from_config(config)
