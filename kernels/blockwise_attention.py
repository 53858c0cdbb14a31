"""Attention by XLA's own kernels: unfused, and a block of queries and keys at a time.

Shape suffixes: B batch, T queries, S keys, H heads, G heads of keys and values, K width of a head;
    N = B G;
n and s blocks of queries and of keys; q and k rows in a block of queries (times the H / G heads of
a group) and of keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from fastaccum.kernels import private, random_keys, xla_ops
from fastaccum.kernels.checkpoint_name import checkpoint_name
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.xla_ops import (
    dot,
    dynamic_add_slice,
    dynamic_update_slice,
    first_order,
    loop,
    product,
    sizes,
)

# of queries and of keys, [B, T] and [B, S]
Segments: TypeAlias = "tuple[tf.Tensor, tf.Tensor] | None"


class Form(NamedTuple):
    """Terms of the formula of `attention`: its arguments, with dropout as a rate and a seed."""

    scale: float
    causal: bool
    segments: Segments = None
    dropout: tuple[float, tf.Tensor] | None = None
    soft_cap: float | None = None
    window: int | None = None

    @property
    def reach(self) -> tuple[float, float]:
        """How many keys before and after its own place a query sees."""
        before = math.inf if self.window is None else self.window - 1
        return before, 0 if self.causal else before

    def cap(self, scores: tf.Tensor) -> tf.Tensor:
        """Computes the scores with their soft cap."""
        return scores if self.soft_cap is None else self.soft_cap * tf.tanh(scores / self.soft_cap)


# Finite, and below every score: where a running maximum starts, so that exp(-inf - maximum) is 0
# and never NaN.
_LOW = -1e30


class Blocks(NamedTuple):
    """Axis of `size` in `pieces` of `length`, the last piece padded."""

    size: int | tf.Tensor
    pieces: int
    length: int | tf.Tensor

    @property
    def padding(self) -> int | tf.Tensor:
        return 0 if self.length is self.size else self.pieces * self.length - self.size


def _cut(size: int, block_size: int) -> Blocks:
    """Cuts an axis into even pieces of at most `block_size`, of a multiple of 8 where possible."""
    length = min(block_size, 8 * math.ceil(size / math.ceil(size / block_size) / 8))
    return Blocks(size, math.ceil(size / length), length)


def _list_pairs(queries: Blocks, keys: Blocks, form: Form) -> np.ndarray:
    """Lists the pairs of blocks that see each other, row by row, and which are the first of a row:
    int32 [3, pairs].
    """
    first_n1 = np.arange(queries.pieces)[:, None] * queries.length + keys.size - queries.size
    last_n1 = np.minimum(first_n1 + queries.length, keys.size) - 1
    first_s = np.arange(keys.pieces) * keys.length
    before, after = form.reach
    i, j = np.nonzero((first_s <= last_n1 + after) & (first_s + keys.length > first_n1 - before))
    return np.stack([i, j, np.diff(i, prepend=-1) > 0]).astype("int32")


def _make_mask(
    queries: Blocks, keys: Blocks, form: Form, groups: int, per_group: int
) -> Callable[[int | tf.Tensor, int | tf.Tensor], tf.Tensor | None]:
    """Returns a function of two blocks' numbers: which keys each query sees, bool, for [N, q, k];
    None if all.
    """
    segments = form.segments
    if segments is not None:
        query_BTH1 = tf.repeat(segments[0][:, :, None, None], groups * per_group, 2)
        key_BSG1 = tf.repeat(segments[1][:, :, None, None], groups, 2)
        query_nNq, key_sNk = (
            _split(query_BTH1, groups, queries)[..., 0],
            _split(key_BSG1, groups, keys)[..., 0],
        )

    def seen(i, j):
        t_q1 = (i * queries.length + tf.tile(tf.range(queries.length), [per_group]))[:, None]
        s_1k = (j * keys.length + tf.range(keys.length))[None, :]
        conditions = []
        if keys.padding:
            conditions.append(s_1k < keys.size)
        before, after = form.reach
        if after < math.inf:
            conditions.append(s_1k <= t_q1 + (keys.size - queries.size + after))
        if before < math.inf:
            conditions.append(s_1k >= t_q1 + (keys.size - queries.size - before))
        if segments is not None:
            conditions.append(
                tf.gather(query_nNq, i)[:, :, None] == tf.gather(key_sNk, j)[:, None, :]
            )
        return functools.reduce(tf.logical_and, conditions) if conditions else None

    return seen


def make_dropout(
    form: Form, query: tf.Tensor, groups: int, queries: Blocks, keys: Blocks
) -> Callable[..., Any]:
    """Returns a function of the numbers of two blocks: the factor of each weight, 0 where it is
    dropped, [N, q, k].

    It depends on the seed and the weight's place alone, since each query of each head has keys of
    its own.
    """
    if form.dropout is None:
        return lambda i, j: 1.0
    rate, seed = form.dropout
    keys_BTH2 = tf.random.stateless_uniform(
        [*sizes(query)[:3], 2], seed, None, None, tf.uint32, alg="philox"
    )
    keys_nNq2 = _split(keys_BTH2, groups, queries)

    def factor(i, j):
        bits_Nqk = random_keys.hash_bits(
            tf.gather(keys_nNq2, i), tf.cast(j * keys.length + tf.range(keys.length), tf.uint32)
        )
        return tf.where(bits_Nqk < round(rate * 2**32), 0.0, 1 / (1 - rate))

    return factor


def _split(t: tf.Tensor, groups: int, blocks: Blocks) -> tf.Tensor:
    """Splits [B, T, H, K] into blocks [n, N, q, K], padded with zeros; a group's heads become rows,
    one by one.
    """
    batch, _, heads, width = sizes(t)
    per_group = heads // groups
    t = tf.pad(t, [[0, 0], [0, blocks.padding], [0, 0], [0, 0]])
    t = tf.reshape(t, [batch, blocks.pieces, blocks.length, groups, per_group, width])
    t = tf.transpose(t, [1, 0, 3, 4, 2, 5])
    return tf.reshape(t, [blocks.pieces, batch * groups, per_group * blocks.length, width])


def _join(t: tf.Tensor, groups: int, blocks: Blocks, like: tf.Tensor) -> tf.Tensor:
    """Inverts `_split`, to the shape and dtype of `like`."""
    batch, _, heads, width = sizes(like)
    t = tf.reshape(t, [blocks.pieces, batch, groups, heads // groups, blocks.length, width])
    t = tf.reshape(
        tf.transpose(t, [1, 0, 4, 2, 3, 5]), [batch, blocks.pieces * blocks.length, heads, width]
    )
    return tf.cast(t[:, : blocks.size], like.dtype)


def reference_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form
) -> tf.Tensor:
    """Computes `attention` as the unfused expression, with plain autodiff."""
    groups, per_group = key.shape[2], query.shape[2] // key.shape[2]
    queries, keys = (Blocks(size, 1, size) for size in (sizes(query)[1], sizes(key)[1]))
    query_NqK, key_NkK, value_NkK = (
        _split(t, groups, blocks)[0] for t, blocks in ((query, queries), (key, keys), (value, keys))
    )
    scores_Nqk = form.cap(form.scale * product(query_NqK, tf.linalg.matrix_transpose(key_NkK)))
    seen = _make_mask(queries, keys, form, groups, per_group)(0, 0)
    weights_Nqk = tf.nn.softmax(scores_Nqk if seen is None else tf.where(seen, scores_Nqk, _LOW))
    if seen is not None and not (form.segments is None and query.shape[1] == key.shape[1]):
        # Some query may see nothing.
        weights_Nqk = tf.where(seen, weights_Nqk, 0.0)
    weights_Nqk *= make_dropout(form, query, groups, queries, keys)(0, 0)
    return _join(
        product(tf.cast(weights_Nqk, value.dtype), value_NkK)[None], groups, queries, query
    )


def blockwise_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form, block_size: int
) -> tf.Tensor:
    """Computes `attention` a block of queries and keys at a time: the whole matrix of scores never
    exists.
    """
    groups = key.shape[2]
    queries, keys = _cut(query.shape[1], block_size), _cut(key.shape[1], block_size)
    pairs = tf.constant(_list_pairs(queries, keys, form))
    steps = pairs.shape[1]
    seen = _make_mask(queries, keys, form, groups, query.shape[2] // groups)
    factor = make_dropout(form, query, groups, queries, keys)

    @custom_gradient
    def run(query, key, value):
        query_nNqK = _split(query, groups, queries)
        key_sNkK, value_sNkK = _split(key, groups, keys), _split(value, groups, keys)

        def block(p, query_nNqK=query_nNqK):
            """Returns the numbers of a pair of blocks, their scores, and the derivative of these by
            the uncapped.
            """
            i, j = tf.gather(pairs[0], p), tf.gather(pairs[1], p)
            scores_Nqk = form.cap(
                form.scale * dot(tf.gather(query_nNqK, i), tf.gather(key_sNkK, j), transpose_b=True)
            )
            slope_Nqk = 1.0 if form.soft_cap is None else 1 - (scores_Nqk / form.soft_cap) ** 2
            visible = seen(i, j)
            return (
                i,
                j,
                scores_Nqk if visible is None else tf.where(visible, scores_Nqk, -math.inf),
                slope_Nqk,
            )

        with private.record.stop_recording():  # an eager tape would keep what the loop computes
            acc_nNqK, lse_nNq = _online_softmax(
                pairs, block, factor, value_sNkK, tf.shape(query_nNqK)
            )
        output = checkpoint_name(_join(acc_nNqK, groups, queries, query), "attention")
        lse_nNq = checkpoint_name(lse_nNq, "attention")

        def gradient(doutput):
            tied_nNqK, doutput_nNqK, zero = (
                query_nNqK,
                _split(doutput, groups, queries),
                tf.constant(0),
            )
            products_nNqK = tf.cast(doutput_nNqK, tf.float32) * tf.cast(
                _split(output, groups, queries), tf.float32
            )
            delta_nNq = tf.reduce_sum(products_nNqK, -1)
            # XLA would keep such a loop's weights, and which are dropped
            if steps == 1 and xla_ops.in_xla():
                tied_nNqK, doutput_nNqK, zero = private.xla.optimization_barrier(
                    query_nNqK, doutput_nNqK, zero
                )

            def backward(p, dquery_nNqK, dkey_sNkK, dvalue_sNkK):
                i, j, scores_Nqk, slope_Nqk = block(p, tied_nNqK)
                query_NqK, key_NkK, value_NkK = (
                    tf.gather(t, b) for t, b in ((query_nNqK, i), (key_sNkK, j), (value_sNkK, j))
                )
                doutput_NqK = tf.gather(doutput_nNqK, i)
                weights_Nqk = tf.exp(scores_Nqk - tf.gather(lse_nNq, i)[..., None])
                factor_Nqk = factor(i, j + zero)
                dweights_Nqk = factor_Nqk * dot(doutput_NqK, value_NkK, transpose_b=True)
                dscores_Nqk = (
                    slope_Nqk * weights_Nqk * (dweights_Nqk - tf.gather(delta_nNq, i)[..., None])
                )
                weights_Nqk, dscores_Nqk = (
                    tf.cast(t, query.dtype) for t in (factor_Nqk * weights_Nqk, dscores_Nqk)
                )
                return [
                    dynamic_add_slice(dquery_nNqK, dot(dscores_Nqk, key_NkK)[None], [i, 0, 0, 0]),
                    dynamic_add_slice(
                        dkey_sNkK, dot(dscores_Nqk, query_NqK, transpose_a=True)[None], [j, 0, 0, 0]
                    ),
                    dynamic_add_slice(
                        dvalue_sNkK,
                        dot(weights_Nqk, doutput_NqK, transpose_a=True)[None],
                        [j, 0, 0, 0],
                    ),
                ]

            start = [tf.zeros(tf.shape(t)) for t in (query_nNqK, key_sNkK, value_sNkK)]
            dquery_nNqK, dkey_sNkK, dvalue_sNkK = loop(steps, backward, start)
            gradients = [
                _join(form.scale * dquery_nNqK, groups, queries, query),
                _join(form.scale * dkey_sNkK, groups, keys, key),
                _join(dvalue_sNkK, groups, keys, value),
            ]
            return first_order(gradients, "attention in blocks")

        return output, gradient

    return run(query, key, value)


def _online_softmax(pairs, block, factor, value_sNkK, shape):
    """Computes the output [n, N, q, K] and the log-sum-exp of each query's scores in one loop over
    blocks.
    """

    # A row's maximum so far goes from block to block beside its place in the whole: were it read
    # there, XLA would copy the whole before each write.
    def forward(p, row_max_Nq, row_max_nNq, row_sum_nNq, acc_nNqK):
        i, j, scores_Nqk, _ = block(p)
        row_max_Nq = tf.where(tf.gather(pairs[2], p) == 1, _LOW, row_max_Nq)
        row_sum_Nq, acc_NqK = (tf.gather(t, i) for t in (row_sum_nNq, acc_nNqK))
        new_row_max_Nq = tf.maximum(row_max_Nq, tf.reduce_max(scores_Nqk, -1))
        weights_Nqk = tf.exp(scores_Nqk - new_row_max_Nq[..., None])
        correction_Nq = tf.exp(row_max_Nq - new_row_max_Nq)
        row_sum_Nq = correction_Nq * row_sum_Nq + tf.reduce_sum(weights_Nqk, -1)
        acc_NqK = correction_Nq[..., None] * acc_NqK
        acc_NqK += dot(
            tf.cast(factor(i, j) * weights_Nqk, value_sNkK.dtype), tf.gather(value_sNkK, j)
        )
        return [
            new_row_max_Nq,
            dynamic_update_slice(row_max_nNq, new_row_max_Nq[None], [i, 0, 0]),
            dynamic_update_slice(row_sum_nNq, row_sum_Nq[None], [i, 0, 0]),
            dynamic_update_slice(acc_nNqK, acc_NqK[None], [i, 0, 0, 0]),
        ]

    start = [tf.zeros(shape[1:-1]), tf.zeros(shape[:-1]), tf.zeros(shape[:-1]), tf.zeros(shape)]
    _, row_max_nNq, row_sum_nNq, acc_nNqK = loop(pairs.shape[1], forward, start)
    # For a query that sees nothing, inf: its weights are exp(-inf - inf) = 0 again.
    lse_nNq = tf.where(row_sum_nNq > 0, row_max_nNq + tf.math.log(row_sum_nNq), math.inf)
    return tf.math.divide_no_nan(acc_nNqK, row_sum_nNq[..., None]), lse_nNq
