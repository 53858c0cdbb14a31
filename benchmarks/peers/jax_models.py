"""The models in plain JAX: parameters are tuples whose leaves lie in the Keras model's order.

Shape suffixes as in `fastaccum.transformer`: B batch, T time, D width, H heads, K width per head. Imports JAX alone, so
that a machine without TensorFlow can use it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Dense(NamedTuple):
    kernel: Any
    bias: Any


class Block(NamedTuple):
    attention_norm: Any
    qkv: Any
    out: Any
    mlp_norm: Any
    mlp_in: Any
    mlp_out: Any


class GPT(NamedTuple):
    embedding: Any
    blocks: list[Block]
    final_norm: Any
    head: Any


def mlp_params(weights):
    """The parameters of a multilayer perceptron: `Dense` layers, from arrays in Keras's order."""
    return [Dense(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]


def gpt_params(weights):
    """The parameters of `fa.gpt` with rotary positions and a head of its own, from arrays in Keras's order."""
    embedding, *inner, final_norm, head = weights
    size = len(Block._fields)
    return GPT(embedding, [Block(*inner[i : i + size]) for i in range(0, len(inner), size)], final_norm, head)


def mlp(params, x):
    """Logits of a multilayer perceptron with ReLU between its layers."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer.kernel + layer.bias)
    return x @ last.kernel + last.bias


def gpt(params, ids_BT, heads):
    """Logits `[B, T, V]` of the decoder-only transformer `fa.gpt`."""
    x_BTD = params.embedding[ids_BT]
    for block in params.blocks:
        x_BTD += _attention(block, _layer_norm(x_BTD, block.attention_norm), heads)
        h_BTF = jax.nn.gelu(_layer_norm(x_BTD, block.mlp_norm) @ block.mlp_in, approximate=True)
        x_BTD += h_BTF @ block.mlp_out
    return _layer_norm(x_BTD, params.final_norm) @ params.head


def _attention(block, x_BTD, heads):
    batch, time, _ = x_BTD.shape
    q_BTHK, k_BTHK, v_BTHK = jnp.split((x_BTD @ block.qkv).reshape(batch, time, 3 * heads, -1), 3, axis=2)
    mixed_BTHK = jax.nn.dot_product_attention(_rotate(q_BTHK), _rotate(k_BTHK), v_BTHK, is_causal=True)
    return mixed_BTHK.reshape(x_BTD.shape) @ block.out


def _rotate(t_BTHK):
    """Rotary positions, halves of K paired."""
    time, width = t_BTHK.shape[1], t_BTHK.shape[3]
    inverse = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles_T1K = jnp.tile(jnp.arange(time, dtype=jnp.float32)[:, None, None] * inverse, 2)
    first, second = jnp.split(t_BTHK, 2, axis=-1)
    turned_BTHK = jnp.concatenate([-second, first], axis=-1)
    return t_BTHK * jnp.cos(angles_T1K) + turned_BTHK * jnp.sin(angles_T1K)


def _layer_norm(x, scale):
    """Keras's layer norm without an offset; 1e-3 is Keras's epsilon."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-3) * scale
