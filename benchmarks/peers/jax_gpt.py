"""`fa.gpt` with a tied head in plain JAX: float32 weights, half-precision compute.

Shape suffixes are those of `fastaccum.transformer`. The module imports JAX and optax alone, so that
a machine without TensorFlow can use it. The named scopes change nothing that is computed: they
stand in the metadata of compiled programs.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.jax_models import Block, layer_norm, rotate


class TiedGPT(NamedTuple):
    """Weights in float32.

    `blocks` is a list of `Block`, or one `Block` of stacks with a leading axis of layers.
    """

    embedding: Any
    blocks: Any
    final_norm: Any


def from_stacked(weights):
    """Takes the parameters from `{path: array}` of `fa.gpt(tied=True, stacked=True)`'s weights."""
    blocks = Block(
        attention_norm=weights["blocks/attention_norm.gamma"],
        qkv=weights["blocks/attention.qkv.kernel"],
        out=weights["blocks/attention.out.kernel"],
        mlp_norm=weights["blocks/mlp_norm.gamma"],
        mlp_in=weights["blocks/mlp_in.kernel"],
        mlp_out=weights["blocks/mlp_out.kernel"],
    )
    return TiedGPT(weights["embedding/embeddings"], blocks, weights["final_norm/gamma"])


def shapes(vocabulary, width, layers, stacked):
    """Returns the parameters' shapes and dtypes, without values."""

    def parameter(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def block(*lead):
        return Block(
            attention_norm=parameter(*lead, width),
            qkv=parameter(*lead, width, 3 * width),
            out=parameter(*lead, width, width),
            mlp_norm=parameter(*lead, width),
            mlp_in=parameter(*lead, width, 4 * width),
            mlp_out=parameter(*lead, 4 * width, width),
        )

    blocks = block(layers) if stacked else [block() for _ in range(layers)]
    return TiedGPT(parameter(vocabulary, width), blocks, parameter(width))


def loss_fn(
    params,
    ids_BT,
    labels_BT,
    *,
    heads,
    attention="cudnn",
    remat=False,
    logits=jnp.float32,
    compute=jnp.bfloat16,
):
    """Computes the mean cross-entropy of one micro-batch.

    Args:
        params: `TiedGPT`; stacked blocks are scanned over, a list of them is unrolled.
        ids_BT: ids, int32.
        labels_BT: the next ids.
        heads: attention heads.
        attention: the `implementation` of `jax.nn.dot_product_attention`: "cudnn" or "xla".
        remat: puts each block under `jax.checkpoint`, which keeps its input alone.
        logits: the dtype that the logits are held in; the loss is computed in float32.
        compute: the dtype of activations, and of weights in products.
    """
    with jax.named_scope("embedding"):
        table_VD = params.embedding.astype(compute)
        x_BTD = table_VD[ids_BT] * (2 * math.sqrt(table_VD.shape[1]))
    layer = functools.partial(_block, heads=heads, attention=attention)
    with jax.named_scope("blocks"):
        if isinstance(params.blocks, list):
            if remat:
                layer = jax.checkpoint(layer)
            for block in params.blocks:
                x_BTD = layer(x_BTD, block)
        else:
            if remat:
                # In a scan XLA does not merge operations with their recomputation.
                layer = jax.checkpoint(layer, prevent_cse=False)
            x_BTD, _ = jax.lax.scan(
                lambda x_BTD, block: (layer(x_BTD, block), None), x_BTD, params.blocks
            )
    with jax.named_scope("final_norm"):
        x_BTD = layer_norm(x_BTD, params.final_norm)
    with jax.named_scope("loss"):
        logits_BTV = jnp.einsum(
            "btd,vd->btv", x_BTD, table_VD, preferred_element_type=logits
        ).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()


def _block(x_BTD, block, heads, attention):
    kernels = jax.tree.map(lambda weight: weight.astype(x_BTD.dtype), block)
    with jax.named_scope("attention_norm"):
        h_BTD = layer_norm(x_BTD, block.attention_norm)
    with jax.named_scope("attention"):
        qkv_BTHK = (h_BTD @ kernels.qkv).reshape(*x_BTD.shape[:2], 3 * heads, -1)
        q_BTHK, k_BTHK, v_BTHK = jnp.split(qkv_BTHK, 3, axis=2)
        with jax.named_scope("rotary"):
            q_BTHK = rotate(q_BTHK)
            k_BTHK = rotate(k_BTHK)
        with jax.named_scope("dot_product"):
            mixed_BTHK = jax.nn.dot_product_attention(
                q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation=attention
            )
        x_BTD += mixed_BTHK.reshape(x_BTD.shape) @ kernels.out
    with jax.named_scope("mlp_norm"):
        h_BTD = layer_norm(x_BTD, block.mlp_norm)
    with jax.named_scope("mlp"):
        return x_BTD + jax.nn.gelu(h_BTD @ kernels.mlp_in, approximate=True) @ kernels.mlp_out
