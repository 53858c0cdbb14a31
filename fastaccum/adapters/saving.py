"""Lets `keras.saving.load_model` find the layers of fastaccum after `import fastaccum` alone, which
imports no Keras.

In Keras's table of saved layers each gets a stand-in, which imports the module once a saved layer
is to be made.
"""

from __future__ import annotations

import importlib
from typing import Any

import wrapt

from fastaccum.basics import patches

LAYERS = {
    "fastaccum.adapters.head": ("LinearCrossEntropy",),
    "fastaccum.kernels.fp32_layers": (
        *("Fp32Conv1D", "Fp32Conv2D", "Fp32Dense", "Fp32EinsumDense"),
        *("Fp32GroupQueryAttention", "Fp32MultiHeadAttention", "Fp32ReversibleEmbedding"),
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
    """Enters the stand-ins in Keras's table: now if Keras has been imported, otherwise as soon as
    it is.
    """
    wrapt.register_post_import_hook(_register, "keras")


def _register(keras: Any) -> None:
    for module, names in LAYERS.items():
        for name in names:
            keras.saving.get_custom_objects().setdefault(
                f"fastaccum>{name}", _StandIn(module, name)
            )
    patches.mark_skipped_state(keras.optimizers)


class _StandIn:
    """A layer's class that is imported late. Others put it in sets, as KerasHub does."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def from_config(self, config: dict[str, object]) -> object:
        return getattr(importlib.import_module(self._module), self._name).from_config(config)
