"""The reference model: a decoder-only transformer over token ids, built from the kernels.

Shape suffixes: B batch, T time, D width, H heads, G heads of keys and values, K width per head, F
width of the MLP (4 D), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from keras import ops

from fastaccum.checks import naming, object_name, one_of, shown, true_or_false, whole_number
from fastaccum.kernels import trace_context
from fastaccum.kernels.attention import attention
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.hoisted_casts import table
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.kernels.norms import gelu
from fastaccum.kernels.xla_ops import unfused

_DEFAULTS = {
    "vocabulary_size": 256,
    "context": 128,
    "width": 256,
    "layers": 4,
    "heads": 4,
    "tied": False,
    "stacked": False,
}
_GPT2 = {"vocabulary_size": 50257, "tied": True, "stacked": True}

# What `gpt` is called with, by name; what is not named keeps its default.
PRESETS = {
    # What two CPU cores train on text in about two minutes.
    "nano": {"width": 128, "layers": 3, "heads": 4, "context": 128},
    # What the benchmarks time.
    "micro": {"width": 256, "layers": 4, "heads": 4, "context": 128},
    # The sizes of GPT-2 small and medium, and of GPT-3 XL; 16 heads of 128, as kernels like them.
    "124m": {"width": 768, "layers": 12, "heads": 12, "context": 1024, **_GPT2},
    "350m": {"width": 1024, "layers": 24, "heads": 16, "context": 1024, **_GPT2},
    "1.3b": {"width": 2048, "layers": 24, "heads": 16, "context": 2048, **_GPT2},
}

_register = keras.saving.register_keras_serializable("fastaccum")
Shape = Sequence[Any]  # None where a size is not known


@_register
class ContextLimit(keras.layers.Layer):
    """Passes on ids `[B, T]`; a ValueError is raised if they have more than `context` positions."""

    def __init__(self, context: int, **kwargs: object):
        super().__init__(**kwargs)
        self.context = context

    def call(self, ids_BT: tf.Tensor) -> tf.Tensor:
        time = ids_BT.shape[1]
        if time is not None and time > self.context:
            raise ValueError(
                f"{time} positions do not fit context={self.context}: cut the ids, or use a "
                "larger one."
            )
        return ids_BT

    def compute_output_shape(self, ids_shape: Shape) -> Shape:
        return ids_shape

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "context": self.context}


@_register
class LearnedPositions(ContextLimit):
    """Adds a learned vector for each position: `x + table[:T]`, `[B, T, D] -> [B, T, D]`.

    T is at most `context`.
    """

    def build(self, x_shape: Shape) -> None:
        self.table_TD = self.add_weight((self.context, x_shape[-1]), _normal(1, 0.5), name="table")

    def call(self, x_BTD: tf.Tensor) -> tf.Tensor:
        x_BTD = super().call(x_BTD)
        documents = trace_context.current().documents
        if documents is not None:
            return x_BTD + tf.gather(self.table_TD, documents.positions)
        return x_BTD + self.table_TD[: ops.shape(x_BTD)[1]]


class _AttentionLayer(keras.layers.Layer):
    """Configures attention and the block around it; both map `[B, T, D] -> [B, T, D]`."""

    def __init__(
        self,
        heads: int,  # of queries; must divide the width
        key_value_heads: int | None = None,  # fewer for grouped-query attention; by default `heads`
        # turn queries and keys by their position (RoPE, Su et al. 2021; halves paired)
        rotary: bool = True,
        # factor on the spread of the output projection's initial values
        residual_scale: float = 1.0,
        **kwargs: object,
    ):
        super().__init__(**kwargs)
        self.heads = heads
        self.key_value_heads = key_value_heads or heads
        self.rotary = rotary
        self.residual_scale = residual_scale

    def compute_output_shape(self, x_shape: Shape) -> Shape:
        return x_shape

    def get_config(self) -> dict[str, object]:
        return {
            **super().get_config(),
            "heads": self.heads,
            "key_value_heads": self.key_value_heads,
            "rotary": self.rotary,
            "residual_scale": self.residual_scale,
        }


@_register
class CausalSelfAttention(_AttentionLayer):
    """Multi-head causal self-attention: `[B, T, D] -> [B, T, D]`, by `fastaccum.kernels.attention`.

    Queries, keys and values come from one fused projection.
    """

    def build(self, x_shape: Shape) -> None:
        width = x_shape[-1]
        policy = self.dtype_policy
        self.head_width = width // self.heads
        key_value_width = self.key_value_heads * self.head_width
        self.qkv = _dense(width + 2 * key_value_width, width, "qkv", policy)
        self.out = _dense(width, width, "out", policy, self.residual_scale)
        self.qkv.build(x_shape)
        self.out.build(x_shape)

    def call(self, x_BTD: tf.Tensor) -> tf.Tensor:
        batch, time = ops.shape(x_BTD)[:2]
        first_key_head = self.heads
        first_value_head = first_key_head + self.key_value_heads
        all_heads = first_value_head + self.key_value_heads
        qkv_BTHK = ops.reshape(self.qkv(x_BTD), (batch, time, all_heads, self.head_width))
        q_BTHK, k_BTGK, v_BTGK = ops.split(qkv_BTHK, [first_key_head, first_value_head], axis=2)
        if self.rotary:
            dtype = q_BTHK.dtype
            cos_T1K = table(_rotary, time, self.head_width, False, dtype=dtype)
            sin_T1K = table(_rotary, time, self.head_width, True, dtype=dtype)
            q_BTHK = _rotate(q_BTHK, cos_T1K, sin_T1K)
            k_BTGK = _rotate(k_BTGK, cos_T1K, sin_T1K)
        documents = trace_context.current().documents
        segment_ids = None if documents is None else documents.ids
        output_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, causal=True, segment_ids=segment_ids)
        return self.out(ops.reshape(output_BTHK, ops.shape(x_BTD)))


@_register
class TransformerBlock(_AttentionLayer):
    """One pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    It maps `[B, T, D] -> [B, T, D]`. The MLP is `gelu(x W_1) W_2`, four times as wide inside.
    """

    def build(self, x_shape: Shape) -> None:
        width = x_shape[-1]
        policy = self.dtype_policy
        scale = self.residual_scale
        self.attention_norm = _norm("attention_norm", policy)
        self.attention = CausalSelfAttention(
            self.heads, self.key_value_heads, self.rotary, scale, dtype=policy, name="attention"
        )
        self.mlp_norm = _norm("mlp_norm", policy)
        self.mlp_in = _dense(4 * width, width, "mlp_in", policy)
        self.mlp_out = _dense(width, 4 * width, "mlp_out", policy, scale)
        for layer in (self.attention_norm, self.attention, self.mlp_norm, self.mlp_in):
            layer.build(x_shape)
        self.mlp_out.build((*x_shape[:-1], 4 * width))

    def call(self, x_BTD: tf.Tensor) -> tf.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        hidden_BTF = gelu(self.mlp_in(self.mlp_norm(x_BTD)))
        return x_BTD + self.mlp_out(hidden_BTF)


def gpt(
    vocabulary_size: int | None = None,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    *,
    key_value_heads: int | None = None,
    positions: Literal["rotary", "learned"] = "rotary",
    tied: bool | None = None,
    stacked: bool | None = None,
    policy: str | Sequence[str] = "auto",
    preset: str | None = None,
    dtype: str | keras.DTypePolicy | None = None,
    name: str = "gpt",
) -> keras.Model:
    """Builds a decoder-only transformer, from token ids to the logits of each next token.

    It consists of an embedding, `layers` pre-norm blocks with causal attention, a final norm, and a
    linear head in float32, without biases. Train it with `fastaccum.LinearCrossEntropy`, which
    holds a part of large logits at a time.

    Args:
        vocabulary_size: ids are in `[0, vocabulary_size)`; 256, for bytes, unless the preset says
            otherwise.
        context: the most positions that the model takes (128); fewer work too.
        width: size of a token's vector (256).
        layers: number of blocks (4).
        heads: attention heads (4).
        key_value_heads: heads of keys and values, fewer for grouped-query attention; by default
            `heads`.
        positions: "rotary" (then `width / heads` must be even), or "learned", a vector added for
            each position.
        tied: the head is the embedding's table, transposed (False).
        stacked: make the blocks one `fastaccum.kernels.LayerStack` (False). It keeps only those
            activations of each block that `policy` names, and compile time and program size do not
            grow with depth.
        policy: of that LayerStack: what is kept for the backward pass. By default it is chosen by
            size. On a GPU that has memory for everything, the blocks are unrolled: the step is
            faster, and takes longer to compile.
        preset: sizes by name, "nano", "micro", "124m", "350m" or "1.3b"; those given as arguments
            override it.
        dtype: a Keras dtype or policy for every layer but the head, such as "mixed_float16"; by
            default the global one (`keras.config.dtype_policy()`).

    Returns:
        A `keras.Model`, int32 `[batch, time]` -> float32 `[batch, time, vocabulary_size]`.

    >>> model = gpt(width=32, layers=1, heads=2, context=16)
    >>> model.output_shape
    (None, None, 256)
    >>> model.count_params() == 2 * 256 * 32 + 1 * (12 * 32**2 + 2 * 32) + 32
    True
    """
    one_of("positions", positions, ("rotary", "learned"))
    object_name(name)
    settings: dict[str, Any] = dict(_DEFAULTS)
    if preset is not None:
        settings |= PRESETS[one_of("preset", preset, tuple(PRESETS))]
    if isinstance(vocabulary_size, str) and vocabulary_size in PRESETS:
        raise ValueError(
            f"vocabulary_size={vocabulary_size!r} is a preset: did you mean "
            f"preset={vocabulary_size!r}?"
        )
    arguments = {
        "vocabulary_size": vocabulary_size,
        "context": context,
        "width": width,
        "layers": layers,
        "heads": heads,
        "tied": tied,
        "stacked": stacked,
    }
    settings |= {key: value for key, value in arguments.items() if value is not None}
    tied = true_or_false("tied", settings["tied"])
    stacked = true_or_false("stacked", settings["stacked"])
    if policy != "auto" and not stacked:
        raise ValueError(
            f"policy={shown(policy)} is for stacked=True: blocks that are not stacked keep "
            "everything."
        )
    with naming("dtype"):
        dtype_policy = keras.config.dtype_policy() if dtype is None else dtype
        compute_dtype = keras.dtype_policies.get(dtype_policy).compute_dtype
    if compute_dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"dtype={dtype!r} computes in {compute_dtype}: attention takes float32, float16 and "
            "bfloat16."
        )
    vocabulary_size = whole_number("vocabulary_size", settings["vocabulary_size"])
    context = whole_number("context", settings["context"])
    width = whole_number("width", settings["width"])
    layers = whole_number("layers", settings["layers"])
    heads = whole_number("heads", settings["heads"])
    if key_value_heads is None:
        key_value_heads = heads
    key_value_heads = whole_number("key_value_heads", key_value_heads)
    rotary = positions == "rotary"
    if rotary and width % (2 * heads):
        raise ValueError(
            f"width={width} must be divisible by 2 * heads={2 * heads}: rotary positions turn "
            "pairs in a head."
        )
    if width % heads:
        raise ValueError(
            f"width={width} must be divisible by heads={heads}: each head takes an equal part."
        )
    if heads % key_value_heads:
        raise ValueError(
            f"heads={heads} must be divisible by key_value_heads={key_value_heads}: each serves "
            "a group."
        )

    if tied:
        # As a head it starts small; what it embeds is scaled up to unit spread.
        embedding = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            width,
            embeddings_initializer=_normal(width, 0.5),
            reverse_dtype="float32",
            dtype=dtype,
            name="embedding",
        )
    else:
        embedding = keras.layers.Embedding(
            vocabulary_size, width, _normal(1), dtype=dtype, name="embedding"
        )

    def block(name=None):
        # Each block adds two terms to the residual: this keeps its spread the same at any depth.
        residual_scale = 1 / math.sqrt(2 * layers)
        return TransformerBlock(
            heads, key_value_heads, rotary, residual_scale, dtype=dtype, name=name
        )

    ids_BT = keras.Input((None,), dtype="int32", name="ids")
    x_BTD = embedding(ContextLimit(context, name="context")(ids_BT))
    if tied:
        scale = 2 * math.sqrt(width)
        x_BTD = keras.layers.Rescaling(scale, dtype=dtype, name="embedding_scale")(x_BTD)
    if not rotary:
        x_BTD = LearnedPositions(context, dtype=dtype, name="positions")(x_BTD)
    if stacked:
        unroll: bool | Literal["auto"] = "auto" if policy == "auto" else False
        x_BTD = LayerStack(block, layers, policy=policy, unroll=unroll, name="blocks")(x_BTD)
    else:
        for i in range(layers):
            x_BTD = block(f"block_{i}")(x_BTD)
    x_BTD = _norm("final_norm", dtype)(x_BTD)
    if tied:
        logits_BTV = embedding(x_BTD, reverse=True)
    else:
        logits_BTV = _dense(vocabulary_size, width, "head", "float32", 0.5)(x_BTD)
    return keras.Model(ids_BT, logits_BTV, name=name)


def _norm(name, dtype):
    return keras.layers.LayerNormalization(center=False, dtype=dtype, name=name)


def _dense(units, fan_in, name, dtype, scale=1.0):
    return keras.layers.Dense(
        units, use_bias=False, kernel_initializer=_normal(fan_in, scale), dtype=dtype, name=name
    )


def _normal(fan_in, scale=1.0):
    """Makes initial values that keep the spread of a matmul's inputs, times `scale`."""
    return keras.initializers.RandomNormal(stddev=scale / math.sqrt(fan_in))


def _rotary(time, head_width, sine):
    """Returns cosines of the angles `t * 10000**(-2 i / K)`, or sines, `[T, 1, K]`.

    The cosines multiply both halves of K. The sines, of which the first half is negative, multiply
    the halves in the other order.
    """
    inverse = ops.power(10000.0, -ops.arange(0, head_width, 2, dtype="float32") / head_width)
    angles_T1K = ops.cast(unfused(ops.arange(time)), "float32")[:, None, None] * inverse
    if sine:
        half_T1K = ops.sin(angles_T1K)
        return ops.concatenate([-half_T1K, half_T1K], axis=-1)
    half_T1K = ops.cos(angles_T1K)
    return ops.concatenate([half_T1K, half_T1K], axis=-1)


def _rotate(t_BTHK, cos_T1K, sin_T1K):
    *sizes, width = ops.shape(t_BTHK)
    if has_gpu():
        # A GPU reads a reversed axis in place, and concatenates in a kernel of its own; a CPU the
        # other way round.
        halves_BTHK = ops.reshape(t_BTHK, (*sizes, 2, width // 2))
        swapped_BTHK = ops.reshape(ops.flip(halves_BTHK, -2), (*sizes, width))
    else:
        second_half_BTHK = t_BTHK[..., width // 2 :]
        first_half_BTHK = t_BTHK[..., : width // 2]
        swapped_BTHK = ops.concatenate([second_half_BTHK, first_half_BTHK], axis=-1)
    return t_BTHK * cos_T1K + swapped_BTHK * sin_T1K
