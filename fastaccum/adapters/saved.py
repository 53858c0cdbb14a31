"""Lets `keras.saving.load_model` find the layers of fastaccum after `import fastaccum` alone, which
imports no Keras.

In Keras's table of saved layers each gets a stand-in, which imports the module once a saved layer
is to be made. An optimizer whose state Keras skips, as of other variables, is marked: a Trainer
warns of it, long after Keras did.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import wrapt

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
# on an optimizer: whether Keras has skipped its state in a file, as one of others
SKIPPED = "fastaccum_skipped"


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
    load = keras.optimizers.Optimizer.load_own_variables

    @functools.wraps(load)
    def load_own_variables(optimizer: Any, store: Any) -> None:
        vars(optimizer)[SKIPPED] = len(store.keys()) != len(optimizer.variables)
        load(optimizer, store)

    keras.optimizers.Optimizer.load_own_variables = load_own_variables


class _StandIn:
    """A layer's class that is imported late. Others put it in sets, as KerasHub does."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def from_config(self, config: dict[str, object]) -> object:
        return getattr(importlib.import_module(self._module), self._name).from_config(config)
