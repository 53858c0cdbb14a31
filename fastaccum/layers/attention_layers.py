"""Layers of Keras and KerasHub whose attention formula is the one that the kernels compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from fastaccum.basics.attributes import known_name, package
from fastaccum.kernels import private


class AttentionForm(NamedTuple):
    """Form of a layer whose `_compute_attention` is `softmax(scale * query @ key) @ value`.

    All fields but `scale` are names of attributes of the layer.
    """

    # each adds to the formula what the kernels lack, if it is set
    unsupported: tuple[str, ...] = ()
    dropout: str | None = None  # the Dropout layer of the weights
    window: str | None = None  # turns on a symmetric window of `sliding_window_size`
    # computes the factor of the scores
    scale: Callable[[Any], float] = private.inv_norm_factor


def _gemma_scale(layer: Any) -> float:
    if layer.query_head_dim_normalize:
        width = layer.head_dim
    else:
        width = layer.hidden_dim // layer.num_query_heads
    return 1 / math.sqrt(width)


_WINDOW_FLAG = "use_sliding_window_attention"
_GEMMA = AttentionForm(dropout="dropout_layer", window=_WINDOW_FLAG, scale=_gemma_scale)
# Keras's own with dropout; those without call `dot_product_attention`.
_KERAS_LAYERS = {
    keras.layers.MultiHeadAttention: AttentionForm(
        dropout=private.dropout_layer.name, scale=private.inverse_sqrt_key_dim
    ),
    keras.layers.GroupQueryAttention: AttentionForm(
        dropout=private.dropout_layer.name, scale=private.inverse_sqrt_head_dim
    ),
}
# By module and class. Llama's also serves Llama 3; windows of Mistral and Mixtral come in the mask.
_HUB_LAYERS = {
    "llama.llama_attention.LlamaAttention": AttentionForm(),
    "mistral.mistral_attention.CachedMistralAttention": AttentionForm(),
    "mixtral.mixtral_attention.CachedMixtralAttention": AttentionForm(),
    "phi3.phi3_attention.Phi3Attention": AttentionForm(),
    "smollm3.smollm3_layers.SmolLM3Attention": AttentionForm(),
    "gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": AttentionForm(
        dropout=private.attn_dropout_layer.name
    ),
    "qwen.qwen_attention.QwenAttention": AttentionForm(window=_WINDOW_FLAG),
    "qwen_moe.qwen_moe_attention.QwenMoeAttention": AttentionForm(window=_WINDOW_FLAG),
    "qwen3.qwen3_attention.Qwen3Attention": AttentionForm(window="sliding_window_size"),
    "qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention": AttentionForm(window="sliding_window_size"),
    "gemma.gemma_attention.CachedGemmaAttention": _GEMMA,
    "gemma3.gemma3_attention.CachedGemma3Attention": _GEMMA._replace(
        unsupported=("use_bidirectional_attention",)
    ),
}

# The methods of a layer that make up its formula.
_FORMULA = (private.compute_attention.name, private.masked_softmax.name)


def attends(layer: keras.layers.Layer) -> bool:
    """Tells by name if a layer of Keras's or KerasHub's has attention of another kind."""
    owner, _, name = known_name(type(layer)).partition(".")
    return owner in ("keras", "keras_hub") and "Attention" in name and "Mask" not in name


def find_hub_form(layer: Any) -> AttentionForm | None:
    """Returns the form of a layer of KerasHub's; None if a subclass changed a part."""
    kind = type(layer)
    bases = [base for base in kind.__mro__ if private.compute_attention.name in vars(base)]
    if not bases:
        return None
    base = bases[0]  # whose `_compute_attention` the layer has

    is_unchanged = all(getattr(kind, name, None) is getattr(base, name, None) for name in _FORMULA)
    if not is_unchanged or package(base) != "keras_hub":
        return None
    _, _, name_in_hub = f"{base.__module__}.{base.__qualname__}".partition(".src.models.")
    return _HUB_LAYERS.get(name_in_hub)


def find_keras_form(layer: Any) -> AttentionForm | None:
    """Returns the form of a layer of Keras's with dropout; None if a subclass changed a part."""
    kind = type(layer)
    for base, form in _KERAS_LAYERS.items():
        is_unchanged = all(getattr(kind, name, None) is getattr(base, name) for name in _FORMULA)
        if not is_unchanged or not layer.dropout:
            continue
        softmax_kind = type(private.softmax(layer))
        dropout_kind = type(private.dropout_layer(layer))
        if softmax_kind is keras.layers.Softmax and dropout_kind is keras.layers.Dropout:
            return form
        return None
    return None
