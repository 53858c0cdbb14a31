"""The layer that makes a model's logits: finds it, and requires that it is linear."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.label_metrics import KERAS_LOSS
from fastaccum.adapters.models import Model
from fastaccum.basics.attributes import kinds, known_name, of_keras, package
from fastaccum.kernels import fp32_layers, private
from fastaccum.layers.interceptors import is_users

_REVERSIBLE = (keras.layers.ReversibleEmbedding, fp32_layers.Fp32ReversibleEmbedding)


def find_head(model: Model, name: str | None, output: str) -> keras.layers.Layer:
    """Returns the layer of this name, or without a name the one that makes the output.

    Raises ValueError if there is none.
    """
    layers = model.layers
    if name is None:
        # Only layers are taken of which it is known what they compute.
        candidates = [layer for layer in layers if layer.name == output and _is_known(layer)]
        if not candidates:
            candidates = [layer for layer in layers if is_dense(layer)]
        problem = (
            "LinearCrossEntropy finds no Dense layer in the model. Pass head=..., the name of "
            "the layer that makes the logits; it needs a `kernel` [width, classes]."
        )
    else:
        candidates = [layer for layer in layers if layer.name == name]
        names = [layer.name for layer in layers]
        problem = f"head={name!r} names no layer of the model: it has {names}."
    if not candidates:
        raise ValueError(problem)
    return candidates[-1]


def _is_known(layer: keras.layers.Layer) -> bool:
    """Tells if a layer is of a class whose `call` is known, and no user has changed its own."""
    has_known_class = is_dense(layer) or is_reversible(layer) or is_masked_lm_head(layer)
    return has_known_class and not is_users(layer, "call")


def is_reversible(layer: keras.layers.Layer) -> bool:
    if type(layer) in _REVERSIBLE:
        return True
    if not isinstance(layer, keras.layers.ReversibleEmbedding):
        return False
    return package(type(layer).call) in ("keras", "keras_hub")


def is_masked_lm_head(layer: keras.layers.Layer) -> bool:
    """Tells if a layer is KerasHub's MaskedLMHead, with layers of its own before the linear one."""
    return "keras_hub.MaskedLMHead" in kinds(layer) and package(type(layer).call) == "keras_hub"


def is_dense(layer: keras.layers.Layer) -> bool:
    if type(layer) is fp32_layers.Fp32Dense:
        return True
    if {"keras.Dense", "tf_keras.Dense"}.isdisjoint(kinds(layer)):
        return False
    return of_keras(type(layer).call)


class _Kernel(NamedTuple):
    """The kernel of a layer."""

    variable: Any  # None if the layer has none
    is_transposed: bool  # its shape is [V, D], not [D, V]


def kernel_of(layer: keras.layers.Layer) -> _Kernel:
    if is_reversible(layer):
        if layer.tie_weights:
            return _Kernel(layer.embeddings, is_transposed=True)
        return _Kernel(layer.reverse_embeddings, is_transposed=False)
    if is_masked_lm_head(layer):
        if layer.token_embedding is not None:
            return kernel_of(layer.token_embedding)
        return _Kernel(private.kernel(layer), is_transposed=False)
    return _Kernel(getattr(layer, "kernel", None), is_transposed=False)


def bias_of(layer: keras.layers.Layer) -> Any:
    if is_masked_lm_head(layer):
        return private.bias(layer)
    return getattr(layer, "bias", None)


def require_linear(layer: keras.layers.Layer, classes: int | None) -> None:
    """Raises ValueError unless a layer returns `x @ kernel + bias`, of so many classes."""
    what = f"The head {layer.name!r} ({type(layer).__name__})"
    mode = getattr(layer, "quantization_mode", None)
    if mode is not None:
        raise ValueError(
            f"{what} is quantised to {mode}, and LinearCrossEntropy would compute its logits from "
            f"a kernel that is not quantised. Use {KERAS_LOSS}, or quantise the model after "
            "training."
        )

    kernel, is_transposed = kernel_of(layer)
    bias = bias_of(layer)
    axis_of_classes = 0 if is_transposed else 1
    if kernel is None or len(kernel.shape) != 2 or kernel.shape[axis_of_classes] != classes:
        shape = None if kernel is None else tuple(kernel.shape)
        raise ValueError(
            f"{what} has kernel shape {shape}; LinearCrossEntropy needs a `kernel` [width, "
            f"{classes}], for the model's output of {classes} classes. Pass head=..., the name "
            "of the layer that makes the logits, or, for a head of several layers other than "
            f"KerasHub's MaskedLMHead, use {KERAS_LOSS}."
        )

    function = getattr(layer, "activation", None)
    is_linear = function is None or known_name(function) in ("keras.linear", "tf_keras.linear")
    # The loss computes the soft cap of a ReversibleEmbedding, but not the cap that a MaskedLMHead
    # takes from its token embedding.
    soft_cap = getattr(getattr(layer, "token_embedding", layer), "logit_soft_cap", None)
    has_other_cap = soft_cap and not is_reversible(layer)
    is_regularised = getattr(layer, "activity_regularizer", None) is not None
    if not is_linear or has_other_cap or is_regularised:
        activation = getattr(function, "__name__", function)
        if not of_keras(function):
            activation = f"{activation} of your own"
        raise ValueError(
            f"{what} has activation={activation!r}, a soft cap of its own or an activity "
            "regulariser; LinearCrossEntropy needs the plain logits, or the soft cap of a "
            "ReversibleEmbedding. Leave them out."
        )

    # The `call` of a user's layer may do more with its kernel than its shape tells.
    if not _is_known(layer) and not _returns_product(layer, kernel, bias):
        raise ValueError(
            f"{what} does not return `x @ kernel + bias`, as LinearCrossEntropy does: use "
            f"{KERAS_LOSS}."
        )


def _returns_product(layer: keras.layers.Layer, kernel: Any, bias: Any) -> bool:
    """Tells if a layer returns `x @ kernel + bias` for two random rows, up to its rounding."""
    hidden = tf.random.stateless_normal([2, kernel.shape[0]], seed=(0, 0))
    offset = 0.0 if bias is None else bias
    logits = tf.matmul(hidden, tf.convert_to_tensor(kernel)) + offset
    returned = tf.cast(layer(hidden), tf.float32)
    return np.allclose(returned, logits, rtol=0.05, atol=0.05)
