"""Attention, by what computes it best: cuDNN's kernels, blocks, or the unfused expression."""

from __future__ import annotations

import contextlib
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

# Bytes that a block's scores may take on a GPU, 256 MiB: large blocks need few launches.
_MAX_BYTES_OF_SCORES = 2**28
# The same with dropout, 512 MiB: in larger blocks, a row's sums are added to less often.
_MAX_BYTES_OF_SCORES_WITH_DROPOUT = 2 * _MAX_BYTES_OF_SCORES
# Tokens beyond which a window is cut off: no sequence is as long, and places stay within int32.
_MAX_WINDOW = 2**30


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
    """Computes softmax attention in memory linear in the number of tokens.

    It works in blocks, forward and backward. The result equals, to rounding, that of this unfused
    expression (for a group's heads of queries, key and value are repeated), in which products of
    float16 and bfloat16 are summed in float32, and the softmax is float32:

        scores = einsum("bthk,bshk->bhts", query, key) * scale
        scores = soft_cap * tanh(scores / soft_cap)
        seen = all of:
            s <= t + S - T                                # causal
            query_segments[b, t] == key_segments[b, s]    # segment_ids
            abs(t + S - T - s) < window
        # 0 for a query that sees nothing
        weights = where(seen, softmax(where(seen, scores, -inf)), 0)
        weights = where(drawn with probability dropout, 0, weights / (1 - dropout))
        output = einsum("bhts,bshk->bthk", cast(weights, query.dtype), value)

    The blocks run in one loop each way with an online softmax, and the backward one computes their
    scores again (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691), in memory of a few
    blocks of scores `[B, H, block_size, block_size]` beside float32 sums of the arguments' sizes.
    Blocks that `causal` hides are not computed. Several heads of queries may share one of keys and
    values (grouped-query attention, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    Args:
        query: [B, T, H, K], float32, float16 or bfloat16; the result has its shape and dtype.
        key: [B, S, G, K], query's dtype; H a multiple of G.
        value: [B, S, G, K], query's dtype.
        causal: query t sees keys up to t + S - T only: the ends are aligned.
        scale: factor of the scores; `1 / sqrt(K)` by default.
        segment_ids: integers [B, T] of packed sequences, each of which sees itself alone; where T
            and S differ, a tuple of [B, T] and [B, S]. None for one sequence. On a CPU, pairs of
            blocks whose ranges of ids do not overlap are not computed: let ids ascend.
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
    query = as_tensor("query", query)
    key = as_tensor("key", key)
    value = as_tensor("value", value)
    _require_tensors(query, key, value)
    one_of("implementation", implementation, ("auto", "blockwise", "cudnn", "reference"))
    if block_size is not None:
        block_size = whole_number("block_size", block_size)

    causal = true_or_false("causal", causal)
    segments = _segments(segment_ids, query, key)
    if window is not None:
        window = min(whole_number("window", window), _MAX_WINDOW)
    if soft_cap is not None:
        soft_cap = checks.positive("soft_cap", soft_cap, ", or None")
    rate_and_seed = None
    dropout = checks.fraction("dropout", dropout)
    if dropout:
        rate_and_seed = (dropout, _require_seed(seed))

    has_plain_scores = window is None and soft_cap is None
    if implementation == "auto":
        implementation = attention_implementation(
            query.shape,
            key.shape,
            block_size=block_size,
            dtype=query.dtype,
            causal=causal,
            packed=segments is not None,
            dropout=rate_and_seed is not None,
            jit_compile=in_xla() and has_plain_scores,
        )

    if scale is None:
        scale = query.shape[-1] ** -0.5
    scale = number(
        "scale", scale, "a finite number, or None for 1 / sqrt(width)", lambda v: abs(v) <= LARGEST
    )
    form = Form(scale, causal, segments, rate_and_seed, soft_cap, window)

    with tf.name_scope("attention"):
        if implementation == "reference":
            output = reference_attention(query, key, value, form)
            return checkpoint_name(output, "attention")
        if implementation == "cudnn":
            if not has_plain_scores:
                raise ValueError(
                    'implementation="cudnn" has no window or soft cap: pass "blockwise".'
                )
            return cudnn_attention(query, key, value, form)
        return _attention_in_blocks(query, key, value, form, block_size)


def _attention_in_blocks(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form, block_size: int | None
) -> tf.Tensor:
    """Computes the attention by `blockwise_attention`, in blocks of the default size for None."""
    if query.shape[1] is None or key.shape[1] is None:
        raise ValueError(
            f"The times must be known when this is traced: query {query.shape}, key "
            f"{key.shape}. Give the function "
            'an input signature, or pass implementation="reference".'
        )
    if block_size is None:
        max_bytes = _MAX_BYTES_OF_SCORES
        if form.dropout is not None:
            max_bytes = _MAX_BYTES_OF_SCORES_WITH_DROPOUT
        block_size = _default_block_size(query.shape[0], query.shape[2], max_bytes)
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

    It is "cudnn" where its kernels take the call (see `attention`) in a program that XLA compiles
    for a GPU. They are tried there first, once in a process for each kind of call: a small one,
    forward and backward, next to "reference". Where that fails, a RuntimeWarning gives the reason,
    and the choice is as elsewhere: "reference" up to one block of scores, and where T or S is not
    known, as in a symbolic call; "blockwise" beyond.

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
    query_shape = _sizes("query_shape", query_shape)
    key_shape = _sizes("key_shape", key_shape)
    if block_size is None:
        block_size = _default_block_size()
    else:
        block_size = whole_number("block_size", block_size)
    with naming(f"dtype={shown(dtype)}"):
        dtype = tf.as_dtype(dtype)
    causal = true_or_false("causal", causal)
    packed = true_or_false("packed", packed)
    dropout = true_or_false("dropout", dropout)
    jit_compile = true_or_false("jit_compile", jit_compile)

    call = Call(query_shape, key_shape, dtype, causal, packed, dropout)
    if jit_compile and has_gpu() and is_usable(call):
        return "cudnn"
    queries = query_shape[1]
    keys = key_shape[1]
    if queries is None or keys is None or queries * keys <= block_size**2:
        return "reference"
    return "blockwise"


def _sizes(name: str, shape: Any) -> tuple[int | None, ...]:
    """Returns the four sizes of a shape, batch, time, heads and width; None if not known."""
    sizes: list[Any] = []
    if isinstance(shape, (list, tuple, np.ndarray, tf.TensorShape)):
        # An array without an axis and a shape of unknown rank have no sizes to list.
        with contextlib.suppress(TypeError, ValueError):
            sizes = list(shape)
    if len(sizes) != 4:
        raise TypeError(f"{name}={shown(shape)} must be four sizes, [batch, time, heads, width].")

    checked_sizes = []
    for size in sizes:
        if size is not None:
            size = whole_number(name, size, minimum=0)
        checked_sizes.append(size)
    return tuple(checked_sizes)


def _default_block_size(
    batch: int | None = None, heads: int | None = None, max_bytes: int = _MAX_BYTES_OF_SCORES
) -> int:
    """Returns the most queries and keys in a block, whose float32 scores take `max_bytes` at most.

    Where the batch or the heads are None, it is the least that it is for any number of them.
    """
    # On a CPU the block of each head's scores stays in a core's cache.
    if not has_gpu():
        return 128

    # On a GPU few launches, and large ones, are fast.
    block_size = 512
    if not batch or not heads:
        return block_size
    while 4 * batch * heads * (2 * block_size) ** 2 <= max_bytes:
        block_size *= 2
    return block_size


def _segments(segment_ids: Any, query: tf.Tensor, key: tf.Tensor) -> Segments:
    """Returns the ids of the queries' and of the keys' segments; one tensor twice if they share it.

    Raises TypeError or ValueError for ids that do not fit query and key.
    """
    if segment_ids is None:
        return None
    if isinstance(segment_ids, tuple) and len(segment_ids) == 2:
        ids_of_queries, ids_of_keys = segment_ids
    else:
        ids_of_queries = segment_ids
        ids_of_keys = segment_ids
    query_ids = as_tensor("segment_ids", ids_of_queries)
    key_ids = query_ids
    if ids_of_keys is not ids_of_queries:
        key_ids = as_tensor("segment_ids", ids_of_keys)

    for ids, tensor in ((query_ids, query), (key_ids, key)):
        if not ids.dtype.is_integer:
            raise TypeError(f"segment_ids have dtype {ids.dtype.name}: they must be integers.")
        if not ids.shape.is_compatible_with(tensor.shape[:2]):
            raise ValueError(
                f"segment_ids of shape {ids.shape} do not fit query {query.shape} and key "
                f"{key.shape}: they must be [batch, time], or a tuple of two such tensors if "
                "queries and keys differ in time."
            )
    return query_ids, key_ids


def _require_seed(seed: Any) -> tf.Tensor:
    """Returns the seed as an int64 tensor; raises ValueError if it is not two integers."""
    if seed is None:
        seed = ()
    seed = as_tensor("seed", seed)
    if seed.shape != (2,) or not seed.dtype.is_integer:
        raise ValueError(
            f"seed={shown(seed)} must be two integers, which determine what dropout drops."
        )
    return tf.cast(seed, tf.int64)


def _require_tensors(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> None:
    """Raises TypeError or ValueError for tensors whose dtypes or shapes do not fit."""
    if query.dtype not in (*HALF, tf.float32) or not query.dtype == key.dtype == value.dtype:
        dtypes = f"query {query.dtype.name}, key {key.dtype.name}, value {value.dtype.name}"
        raise TypeError(
            f"The dtypes are {dtypes}: all must be float32, or all float16, or all bfloat16."
        )
    if not _shapes_fit(query.shape, key.shape, value.shape):
        raise ValueError(
            f"The shapes do not fit: query {query.shape}, key {key.shape}, value {value.shape}. "
            "query must be [batch, time, heads, width], key and value [batch, keys, groups, "
            "width]. Heads, groups and width must be known, heads must be a multiple of groups, "
            "and no axis may be empty."
        )


def _shapes_fit(query: tf.TensorShape, key: tf.TensorShape, value: tf.TensorShape) -> bool:
    """Returns whether the shapes of query, key and value are those that `attention` takes."""
    for shape in (query, key, value):
        if shape.rank != 4 or None in shape[2:] or 0 in shape:
            return False
    if not key.is_compatible_with(value):
        return False
    if not query[:1].is_compatible_with(key[:1]):
        return False
    has_one_width = query[3] == key[3]
    heads_are_groups = query[2] % key[2] == 0
    return has_one_width and heads_are_groups
