"""Attention, by what computes it best: cuDNN's kernels, blocks, or the unfused expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from fastaccum.kernels import checks
from fastaccum.kernels.blockwise_attention import (
    Form,
    Segments,
    blockwise_attention,
    reference_attention,
)
from fastaccum.kernels.checkpoint_name import checkpoint_name
from fastaccum.kernels.checks import (
    LARGEST,
    as_tensor,
    naming,
    number,
    one_of,
    shown,
    true_or_false,
    whole_number,
)
from fastaccum.kernels.cudnn_attention import Call, cudnn_attention, is_usable
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import HALF, in_xla

_SCORES_ON_GPU = 2**28  # bytes of a block's


def attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    segment_ids: tf.Tensor | tuple[tf.Tensor, tf.Tensor] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: tf.Tensor | Sequence[int] | None = None,
    block_size: int | None = None,
    implementation: Literal["auto", "blockwise", "cudnn", "reference"] = "auto",
) -> tf.Tensor:
    """Computes softmax attention, forward and backward in blocks, in memory linear in the number of
    tokens.

    Equal, to rounding, to this unfused expression (for a group's heads of queries, key and value
    are repeated), in
    which products of float16 and bfloat16 are summed in float32, and the softmax is float32:

        scores = einsum("bthk,bshk->bhts", query, key) * scale
        scores = soft_cap * tanh(scores / soft_cap)
        seen = all of: s <= t + S - T (causal), query_segments[b, t] == key_segments[b, s]
               (segment_ids), abs(t + S - T - s) < window
        weights = where(seen, softmax(where(seen, scores, -inf)), 0)      # 0 for a query that sees
        nothing weights = where(drawn with probability dropout, 0, weights / (1 - dropout)) output =
        einsum("bhts,bshk->bthk", cast(weights, query.dtype), value)

    The blocks run in one loop each way with an online softmax, and the backward one computes their
    scores again (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691), in memory of a few
    blocks of scores `[B, H, block_size, block_size]` beside float32 sums of the arguments' sizes.
    Blocks that `causal` hides are not computed. Several heads of queries may share one of keys and
    values (grouped-query attention, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Args: query: [B, T, H, K], float32, float16 or bfloat16; the result has its shape and dtype.
        key: [B, S, G, K], query's dtype; H a multiple of G. value: [B, S, G, K], query's dtype.
        causal: query t sees keys up to t + S - T only: the ends are aligned. scale: factor of the
        scores; `1 / sqrt(K)` by default. segment_ids: integers [B, T] of packed sequences, each of
        which sees itself alone; where T and S differ, a
            tuple of [B, T] and [B, S]. None for one sequence.
        window: query t sees keys that are less than this from t + S - T. None for keys at any
            distance.
        soft_cap: bound of the scores, as in Gemma 2. None for none.
        dropout: probability that a weight is dropped; which are does not depend on block_size or
            implementation.
        seed: two integers that determine what is dropped, as `keras.random.SeedGenerator.next()`
            gives them.
        block_size: the most queries, and the most keys, in one block; by default 128 on a CPU, and
            on a GPU the largest power of two, 512 at least, of which a block's scores take 256 MiB
            at most, 512 MiB with dropout.
        implementation: "blockwise"; "reference", the unfused expression with plain autodiff;
            "cudnn", cuDNN's kernels (not run on a GPU yet); or "auto", see
            `attention_implementation`. cuDNN's need a program that XLA compiles for a GPU, float16
            or bfloat16, sizes known when it is traced, and K a multiple of 8 up to 128 (256 on a
            GPU of compute capability 9); T equal to S if causal, with segment_ids or with dropout;
            with the last two an even T, and memory for a mask [B, T, T], or [B, H, T, T]; no window
            or soft cap.

    >>> query, key, value = (tf.random.stateless_normal([1, 6, 2, 4], [0, i]) for i in range(3))
    >>> whole = attention(query, key, value, causal=True, implementation="reference")
    >>> blocks = attention(query, key, value, causal=True, block_size=2, implementation="blockwise")
    >>> bool(tf.reduce_all(tf.abs(whole - blocks) < 1e-6))
    True
    """
    query, key, value = as_tensor("query", query), as_tensor("key", key), as_tensor("value", value)
    _require_tensors(query, key, value)
    one_of("implementation", implementation, ("auto", "blockwise", "cudnn", "reference"))
    if block_size is not None:
        block_size = whole_number("block_size", block_size)
    causal, segments = true_or_false("causal", causal), _segments(segment_ids, query, key)
    window = None if window is None else min(whole_number("window", window), 2**30)
    soft_cap = None if soft_cap is None else checks.positive("soft_cap", soft_cap, ", or None")
    drawn = (
        (dropout, _require_seed(seed)) if (dropout := checks.fraction("dropout", dropout)) else None
    )
    plain = window is soft_cap is None
    if implementation == "auto":
        implementation = attention_implementation(
            query.shape,
            key.shape,
            block_size=block_size,
            dtype=query.dtype,
            causal=causal,
            packed=segments is not None,
            dropout=drawn is not None,
            jit_compile=in_xla() and plain,
        )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scale = number(
        "scale", scale, "a finite number, or None for 1 / sqrt(width)", lambda v: abs(v) <= LARGEST
    )
    form = Form(scale, causal, segments, drawn, soft_cap, window)
    with tf.name_scope("attention"):
        if implementation == "reference":
            return checkpoint_name(reference_attention(query, key, value, form), "attention")
        if implementation == "cudnn":
            if not plain:
                raise ValueError(
                    'implementation="cudnn" has no window or soft cap: pass "blockwise".'
                )
            return cudnn_attention(query, key, value, form)
        if None in (query.shape[1], key.shape[1]):
            raise ValueError(
                f"The times must be known when this is traced: query {query.shape}, key "
                f"{key.shape}. Give the function "
                'an input signature, or pass implementation="reference".'
            )
        largest = _SCORES_ON_GPU if drawn is None else 2 * _SCORES_ON_GPU  # fewer sums to add to
        block_size = block_size or _default_block_size(query.shape[0], query.shape[2], largest)
        return blockwise_attention(query, key, value, form, block_size)


def attention_implementation(
    query_shape: Sequence[int | None],
    key_shape: Sequence[int | None],
    *,
    block_size: int | None = None,
    dtype: tf.DType | str = "float32",
    causal: bool = False,
    packed: bool = False,
    dropout: bool = False,
    jit_compile: bool = True,
) -> Literal["blockwise", "cudnn", "reference"]:
    """Returns the implementation that `implementation="auto"` of `attention` stands for.

    "cudnn" where its kernels take the call (see `attention`) in a program that XLA compiles for a
    GPU. They are tried
    there first, once in a process for each kind of call: a small one, forward and backward, next to
        "reference".
    Where that fails, a RuntimeWarning gives the reason, and the choice is as elsewhere: "reference"
        up to one block of
    scores, and where T or S is not known, as in a symbolic call; "blockwise" beyond.

    Args:
        query_shape: [B, T, H, K].
        key_shape: [B, S, G, K].
        block_size: as in `attention`.
        dtype: of query, key and value.
        causal: as in `attention`.
        packed: whether queries and keys have `segment_ids`.
        dropout: whether weights are dropped.
        jit_compile: whether XLA compiles the program; False with a window or a soft cap.

    >>> attention_implementation([8, 128, 4, 32], [8, 128, 4, 32])
    'reference'
    >>> attention_implementation([1, 8192, 8, 64], [1, 8192, 8, 64])
    'blockwise'
    """
    query_shape, key_shape = _sizes("query_shape", query_shape), _sizes("key_shape", key_shape)
    block_size = (
        _default_block_size() if block_size is None else whole_number("block_size", block_size)
    )
    with naming(f"dtype={shown(dtype)}"):
        dtype = tf.as_dtype(dtype)
    causal, packed = true_or_false("causal", causal), true_or_false("packed", packed)
    call = Call(query_shape, key_shape, dtype, causal, packed, true_or_false("dropout", dropout))
    if true_or_false("jit_compile", jit_compile) and has_gpu() and is_usable(call):
        return "cudnn"
    queries, keys = query_shape[1], key_shape[1]
    if queries is None or keys is None or queries * keys <= block_size**2:
        return "reference"
    return "blockwise"


def _sizes(name: str, shape: Any) -> tuple[int | None, ...]:
    """Checks a shape: batch, time, heads and width."""
    try:
        sizes = list(shape) if isinstance(shape, (list, tuple, np.ndarray, tf.TensorShape)) else []
    except (TypeError, ValueError):  # of no axis, or of unknown rank
        sizes = []
    if len(sizes) != 4:
        raise TypeError(f"{name}={shown(shape)} must be four sizes, [batch, time, heads, width].")
    return tuple(None if size is None else whole_number(name, size, minimum=0) for size in sizes)


def _default_block_size(
    batch: int | None = None, heads: int | None = None, scores: int = _SCORES_ON_GPU
) -> int:
    """Returns a block's most queries and keys; the least that it is for any batch and heads where
    these are None.
    """
    if not has_gpu():  # a block of each head's scores stays in a core's cache
        return 128
    block_size = 512
    # few launches, and large
    while batch and heads and 4 * batch * heads * (2 * block_size) ** 2 <= scores:
        block_size *= 2
    return block_size


def _segments(segment_ids: Any, query: tf.Tensor, key: tf.Tensor) -> Segments:
    if segment_ids is None:
        return None
    pair = (
        segment_ids
        if isinstance(segment_ids, tuple) and len(segment_ids) == 2
        else (segment_ids, segment_ids)
    )
    query_ids = as_tensor("segment_ids", pair[0])
    key_ids = query_ids if pair[0] is pair[1] else as_tensor("segment_ids", pair[1])
    for ids, of in ((query_ids, query), (key_ids, key)):
        if not ids.dtype.is_integer:
            raise TypeError(f"segment_ids have dtype {ids.dtype.name}: they must be integers.")
        if not ids.shape.is_compatible_with(of.shape[:2]):
            raise ValueError(
                f"segment_ids of shape {ids.shape} do not fit query {query.shape} and key "
                f"{key.shape}: they must be [batch, time], and a tuple of two where queries and "
                "keys differ in time."
            )
    return query_ids, key_ids


def _require_seed(seed: Any) -> tf.Tensor:
    seed = as_tensor("seed", () if seed is None else seed)
    if seed.shape != (2,) or not seed.dtype.is_integer:
        raise ValueError(
            f"seed={shown(seed)} must be two integers, which determine what dropout drops."
        )
    return tf.cast(seed, tf.int64)


def _require_tensors(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> None:
    if query.dtype not in (*HALF, tf.float32) or not query.dtype == key.dtype == value.dtype:
        dtypes = f"query {query.dtype.name}, key {key.dtype.name}, value {value.dtype.name}"
        raise TypeError(
            f"The dtypes are {dtypes}: all must be float32, or all float16, or all bfloat16."
        )
    fits = all(
        t.shape.rank == 4 and None not in t.shape[2:] and 0 not in t.shape
        for t in (query, key, value)
    )
    fits = (
        fits
        and key.shape.is_compatible_with(value.shape)
        and query.shape[:1].is_compatible_with(key.shape[:1])
    )
    if not fits or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"The shapes do not fit: query {query.shape}, key {key.shape}, value {value.shape}. "
            "They must be [batch, time, heads, width] and twice [batch, keys, groups, width], "
            "of known heads, groups and width, heads a multiple of groups. No axis may be empty."
        )
