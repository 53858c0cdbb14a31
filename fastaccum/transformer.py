"""The reference model: a decoder-only transformer over token ids.

Shape suffixes: B batch, T time (twice in scores: query, then key), D width, H heads, K width per head,
F width of the MLP (4 D), V vocabulary.
"""

import math
from typing import Any

import keras
from keras import ops

from fastaccum.checks import whole_number

# Sizes by name; what is not named keeps the default of `gpt`.
PRESETS = {
    # What two CPU cores train on text in about two minutes.
    "nano": {"width": 128, "layers": 3, "heads": 4, "context": 128},
    # What the benchmarks time.
    "micro": {"width": 256, "layers": 4, "heads": 4, "context": 128},
    # GPT-2's smallest.
    "small": {"width": 768, "layers": 12, "heads": 12, "context": 1024},
}


@keras.saving.register_keras_serializable("fastaccum")
class TokenEmbedding(keras.layers.Embedding):
    """`keras.layers.Embedding` that knows the most positions that the model takes: `[B, T] -> [B, T, D]`.

    Raises:
        ValueError: ids with more than `context` positions.
    """

    def __init__(self, input_dim, output_dim, context, **kwargs):
        super().__init__(input_dim, output_dim, **kwargs)
        self.context = context

    def call(self, ids_BT):
        time = ids_BT.shape[1]
        if time is not None and time > self.context:
            raise ValueError(
                f"ids with {time} positions do not fit context={self.context}: "
                "cut them, or build the model with a larger context."
            )
        return super().call(ids_BT)

    def get_config(self):
        return {**super().get_config(), "context": self.context}


@keras.saving.register_keras_serializable("fastaccum")
class CausalSelfAttention(keras.layers.Layer):
    """Multi-head causal self-attention with rotary positions: `[B, T, D] -> [B, T, D]`.

    `softmax(q k^T / sqrt(K) + mask) v` for each head, with q and k turned by their position (RoPE, halves
    paired), where `mask` hides every later position. Queries, keys and values come from one fused projection;
    the softmax is taken in float32 whatever the compute dtype.

    Args:
        heads: how many heads; must divide the width, with an even quotient.
        residual_scale: factor on the spread of the output projection's initial values.
    """

    def __init__(self, heads, residual_scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.residual_scale = residual_scale

    def build(self, x_shape):
        width = x_shape[-1]
        self.head_width = width // self.heads
        self.qkv = keras.layers.Dense(
            3 * width, use_bias=False, kernel_initializer=_normal(width), dtype=self.dtype_policy, name="qkv"
        )
        self.out = keras.layers.Dense(
            width,
            use_bias=False,
            kernel_initializer=_normal(width, self.residual_scale),
            dtype=self.dtype_policy,
            name="out",
        )
        self.qkv.build(x_shape)
        self.out.build(x_shape)

    def call(self, x_BTD):
        time = ops.shape(x_BTD)[1]
        q_BHTK, k_BHTK, v_BHTK = map(self._split_heads, ops.split(self.qkv(x_BTD), 3, axis=-1))
        cos_TK, sin_TK = _rotary_angles(time, self.head_width)
        # Scaled before the product, so that float16 scores stay far from 65504.
        q_BHTK = _rotate(q_BHTK, cos_TK, sin_TK) * self.head_width**-0.5
        k_BHTK = _rotate(k_BHTK, cos_TK, sin_TK)
        scores_BHTT = ops.cast(ops.matmul(q_BHTK, ops.transpose(k_BHTK, (0, 1, 3, 2))), "float32")
        position_T = ops.arange(time)
        causal_TT = position_T[:, None] >= position_T[None, :]
        # A finite fill: exp underflows to an exact 0, and no row can turn into NaN.
        weights_BHTT = ops.softmax(ops.where(causal_TT, scores_BHTT, -1e30), axis=-1)
        mixed_BHTK = ops.matmul(ops.cast(weights_BHTT, self.compute_dtype), v_BHTK)
        mixed_BTHK = ops.transpose(mixed_BHTK, (0, 2, 1, 3))
        return self.out(ops.reshape(mixed_BTHK, ops.shape(x_BTD)))

    def _split_heads(self, t_BTD):
        batch, time = ops.shape(t_BTD)[:2]
        return ops.transpose(ops.reshape(t_BTD, (batch, time, self.heads, self.head_width)), (0, 2, 1, 3))

    def compute_output_shape(self, x_shape):
        return x_shape

    def get_config(self):
        return {**super().get_config(), "heads": self.heads, "residual_scale": self.residual_scale}


@keras.saving.register_keras_serializable("fastaccum")
class TransformerBlock(keras.layers.Layer):
    """One pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`: `[B, T, D] -> [B, T, D]`.

    The MLP is `gelu(x W_1) W_2` with four times the width inside.

    Args:
        heads: as in `CausalSelfAttention`.
        residual_scale: factor on the spread of the initial values of both projections onto the residual.
    """

    def __init__(self, heads, residual_scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.residual_scale = residual_scale

    def build(self, x_shape):
        width, policy = x_shape[-1], self.dtype_policy
        self.attention_norm = _norm("attention_norm", policy)
        self.attention = CausalSelfAttention(self.heads, self.residual_scale, dtype=policy, name="attention")
        self.mlp_norm = _norm("mlp_norm", policy)
        self.mlp_in = keras.layers.Dense(
            4 * width, use_bias=False, kernel_initializer=_normal(width), dtype=policy, name="mlp_in"
        )
        self.mlp_out = keras.layers.Dense(
            width,
            use_bias=False,
            kernel_initializer=_normal(4 * width, self.residual_scale),
            dtype=policy,
            name="mlp_out",
        )
        for layer in (self.attention_norm, self.attention, self.mlp_norm, self.mlp_in):
            layer.build(x_shape)
        self.mlp_out.build((*x_shape[:-1], 4 * width))

    def call(self, x_BTD):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        h_BTF = ops.gelu(self.mlp_in(self.mlp_norm(x_BTD)), approximate=True)
        return x_BTD + self.mlp_out(h_BTF)

    def compute_output_shape(self, x_shape):
        return x_shape

    def get_config(self):
        return {**super().get_config(), "heads": self.heads, "residual_scale": self.residual_scale}


def gpt(
    vocabulary_size: int = 256,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    *,
    preset: str | None = None,
    dtype: Any = None,
    name: str = "gpt",
) -> keras.Model:
    """Builds a decoder-only transformer, from token ids to the logits of each next token.

    Embedding, `layers` pre-norm blocks with causal attention, a final norm, and a linear head in float32.
    Positions are rotary: any `time` up to `context` works. Logits at t depend on ids up to t only. No biases:

        parameters = 2 * vocabulary_size * width + layers * (12 * width**2 + 2 * width) + width

    Args:
        vocabulary_size: ids are in `[0, vocabulary_size)`; 256 for bytes.
        context: the most positions that the model takes (128 unless the preset says otherwise).
        width: size of a token's vector (256).
        layers: number of blocks (4).
        heads: attention heads (4); `width / heads` must be even.
        preset: a name in `PRESETS`; sizes given as arguments override it.
        dtype: a Keras dtype or policy for every layer but the head, such as "mixed_float16"; by default the
            global one (`keras.config.dtype_policy()`).
        name: the model's name.

    Returns:
        A `keras.Model`, int32 `[batch, time]` -> float32 `[batch, time, vocabulary_size]`.

    Raises:
        ValueError: a size that is not a positive whole number, heads that do not fit the width, or an unknown
            preset.
        TypeError: a size that is not a number.

    >>> model = gpt(width=32, layers=1, heads=2, context=16)
    >>> model.output_shape
    (None, None, 256)
    >>> model.count_params() == 2 * 256 * 32 + 1 * (12 * 32**2 + 2 * 32) + 32
    True
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset={preset!r}: choose one of {', '.join(PRESETS)}.")
    given = {"context": context, "width": width, "layers": layers, "heads": heads}
    sizes = {"context": 128, "width": 256, "layers": 4, "heads": 4, **PRESETS.get(preset, {})}
    sizes.update({key: value for key, value in given.items() if value is not None})
    vocabulary_size = whole_number("vocabulary_size", vocabulary_size)
    context, width, layers, heads = (whole_number(key, value) for key, value in sizes.items())
    if width % (2 * heads):
        raise ValueError(f"width={width} must be divisible by 2 * heads={2 * heads}: positions turn pairs in a head.")

    ids_BT = keras.Input((None,), dtype="int32", name="ids")
    x_BTD = TokenEmbedding(
        vocabulary_size,
        width,
        context,
        embeddings_initializer=_normal(1),
        dtype=dtype,
        name="embedding",
    )(ids_BT)
    for i in range(layers):
        # Each block adds two terms to the residual: this keeps its spread the same at any depth.
        x_BTD = TransformerBlock(heads, 1 / math.sqrt(2 * layers), dtype=dtype, name=f"block_{i}")(x_BTD)
    x_BTD = _norm("final_norm", dtype)(x_BTD)
    logits_BTV = keras.layers.Dense(
        vocabulary_size, use_bias=False, kernel_initializer=_normal(width, 0.5), dtype="float32", name="head"
    )(x_BTD)
    return keras.Model(ids_BT, logits_BTV, name=name)


def _norm(name, dtype):
    return keras.layers.LayerNormalization(center=False, dtype=dtype, name=name)


def _normal(fan_in, scale=1.0):
    """Initial values that keep the spread of what a matmul over `fan_in` gets, times `scale`."""
    return keras.initializers.RandomNormal(stddev=scale / math.sqrt(fan_in))


def _rotary_angles(time, head_width):
    """cos and sin, float32 `[T, K]`, of the angle `t * 10000**(-2 i / K)`, the same for both halves of K."""
    inverse = ops.power(10000.0, -ops.arange(0, head_width, 2, dtype="float32") / head_width)
    angles = ops.cast(ops.arange(time), "float32")[:, None] * inverse[None, :]
    angles_TK = ops.concatenate([angles, angles], axis=-1)
    return ops.cos(angles_TK), ops.sin(angles_TK)


def _rotate(t_BHTK, cos_TK, sin_TK):
    half = t_BHTK.shape[-1] // 2
    turned_BHTK = ops.concatenate([-t_BHTK[..., half:], t_BHTK[..., :half]], axis=-1)
    return t_BHTK * ops.cast(cos_TK, t_BHTK.dtype) + turned_BHTK * ops.cast(sin_TK, t_BHTK.dtype)
