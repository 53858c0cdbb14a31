"""Attention a strip of the scores at a time: few large kernels, for GPUs.

Shape suffixes: B batch, T queries, S keys, H heads, G heads of keys and values, P = H / G, K width of a head; N = B G;
q and k rows in a strip, of queries (times P) and of keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record

from fastaccum.kernels.blockwise_attention import Segments
from fastaccum.kernels.checkpoint_name import checkpoint_name
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.xla_ops import dot, first_order, sizes

# The score of a key that is not seen: finite, since of a row of -inf the softmax is NaN, and below every score.
_UNSEEN = -1e30
# Of a strip's scores in float32.
_MOST_BYTES = 2**30
# More would compute less of what `causal` hides, but every strip is traced and compiled by itself.
_MOST_STRIPS = 8
_LEAST_ROWS = 512


class _Strip(NamedTuple):
    """Scores that are computed at once: of queries [first, last) with keys [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


def strip_rows(query_shape: Sequence[int | None], key_shape: Sequence[int | None], causal: bool) -> int | None:
    """Returns the most queries in a strip forward, and the most keys backward; None where strips would take too much
    memory.

    Args:
        query_shape, key_shape: [B, T, H, K] and [B, S, G, K].
        causal: as in `attention`: what it hides is computed only within a strip.

    >>> strip_rows([8, 2048, 16, 128], [8, 2048, 16, 128], causal=True)
    512
    >>> strip_rows([1, 2**20, 16, 128], [1, 2**20, 16, 128], causal=True) is None
    True
    """
    (batch, queries, heads, _), keys = query_shape, key_shape[1]
    if batch is None or queries is None or heads is None or keys is None:
        return None
    longest = max(queries, keys)
    needed = math.ceil(4 * batch * heads * queries * keys / _MOST_BYTES)
    if needed > 2 * _MOST_STRIPS:
        return None
    wanted = min(_MOST_STRIPS, longest // _LEAST_ROWS) if causal else 1
    return 64 * math.ceil(longest / max(1, wanted, needed) / 64)


def strip_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scale: float, causal: bool, segments: Segments, rows: int
) -> tf.Tensor:
    """Computes `attention`, forward in strips of queries with all keys they see, backward in strips of keys.

    A strip of queries has its whole softmax at once. On the way back, strips of keys have their gradients at once, and
    only those of the queries are summed over strips; the scores are computed again. `segments` are integers [B, T] and
    [B, S], or None; `rows` is from `strip_rows`.
    """
    groups = key.shape[2]
    _, queries, heads, width = query.shape
    keys = key.shape[1]
    later = keys - queries  # query t sees keys up to t + later
    masked = _make_mask(queries, keys, causal, segments, groups, heads // groups)

    @custom_gradient
    def run(query, key, value):
        query_NTPK, key_NSPK, value_NSPK = (_split(t, groups) for t in (query, key, value))

        def scores(strip):
            query_NqK = _merge(query_NTPK[:, strip.first : strip.last])
            key_NkK = _merge(key_NSPK[:, strip.start : strip.stop])
            return query_NqK, key_NkK, masked(scale * dot(query_NqK, key_NkK, transpose_b=True), strip)

        with record.stop_recording():  # an eager tape would keep what is computed again
            acc_NTPK, lse_NTP1 = _forward(
                [_Strip(a, b, 0, min(keys, b + later) if causal else keys) for a, b in _cut(queries, rows)],
                scores,
                value_NSPK,
                heads // groups,
            )
        output = checkpoint_name(_join(acc_NTPK, query), "attention")
        lse_NTP1 = checkpoint_name(lse_NTP1, "attention")

        def gradient(doutput):
            delta = tf.reduce_sum(tf.cast(doutput, tf.float32) * tf.cast(output, tf.float32), -1, keepdims=True)
            doutput_NTPK, delta_NTP1 = _split(doutput, groups), _split(delta, groups)
            dqueries_NTPK, dkeys_NkK, dvalues_NkK = [], [], []
            for start, stop in _cut(keys, rows):
                first = max(0, start - later) if causal else 0
                query_NqK, key_NkK, scores_Nqk = scores(_Strip(first, queries, start, stop))
                doutput_NqK, delta_Nq1, lse_Nq1 = (_merge(t[:, first:]) for t in (doutput_NTPK, delta_NTP1, lse_NTP1))
                weights_Nqk = tf.exp(scores_Nqk - lse_Nq1)
                dweights_Nqk = dot(doutput_NqK, _merge(value_NSPK[:, start:stop]), transpose_b=True)
                if query.dtype == tf.bfloat16:  # of float32's range: written and read as the unfused expression has it
                    dweights_Nqk = tf.cast(tf.cast(dweights_Nqk, query.dtype), tf.float32)
                dscores_Nqk = tf.cast(weights_Nqk * (dweights_Nqk - delta_Nq1), query.dtype)
                dkeys_NkK.append(scale * dot(dscores_Nqk, query_NqK, transpose_a=True))
                dvalues_NkK.append(dot(tf.cast(weights_Nqk, query.dtype), doutput_NqK, transpose_a=True))
                dquery_NTPK = tf.reshape(dot(dscores_Nqk, key_NkK), [-1, queries - first, heads // groups, width])
                dqueries_NTPK.append(tf.pad(dquery_NTPK, [[0, 0], [first, 0], [0, 0], [0, 0]]))
            dkey_NSPK, dvalue_NSPK = (
                tf.concat([tf.cast(part, key.dtype) for part in parts], 1)[:, :, None]
                for parts in (dkeys_NkK, dvalues_NkK)
            )
            gradients = (
                _join(scale * tf.add_n(dqueries_NTPK), query),
                _join(dkey_NSPK, key),
                _join(dvalue_NSPK, value),
            )
            return first_order(gradients, "attention in blocks")

        return output, gradient

    return run(query, key, value)


def _forward(
    strips: list[_Strip], scores: Callable[[_Strip], tf.Tensor], value_NSPK: tf.Tensor, per_group: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the output [N, T, P, K] in float32, and the log-sum-exp of each query's scores."""
    count, _, _, width = sizes(value_NSPK)
    parts = []
    for strip in strips:
        if strip.stop > 0:
            *_, scores_Nqk = scores(strip)
            row_max_Nq1 = tf.reduce_max(scores_Nqk, -1, keepdims=True)
            weights_Nqk = tf.exp(scores_Nqk - row_max_Nq1)
            row_sum_Nq1 = tf.reduce_sum(weights_Nqk, -1, keepdims=True)
            acc_NqK = dot(tf.cast(weights_Nqk, value_NSPK.dtype), _merge(value_NSPK[:, : strip.stop]))
        else:  # no key is early enough
            rows = [count, (strip.last - strip.first) * per_group]
            row_max_Nq1, row_sum_Nq1 = tf.fill([*rows, 1], _UNSEEN), tf.ones([*rows, 1])
            acc_NqK = tf.zeros([*rows, width])
        parts.append((acc_NqK, row_max_Nq1, row_sum_Nq1))
    acc_NtK, row_max_Nt1, row_sum_Nt1 = (tf.concat(part, 1) for part in zip(*parts, strict=True))
    unseeing_Nt1 = row_max_Nt1 == _UNSEEN
    output_NtK = tf.where(unseeing_Nt1, 0.0, acc_NtK / row_sum_Nt1)
    # For a query that sees nothing, inf: on the way back its weights are exp(_UNSEEN - inf) = 0.
    lse_Nt1 = tf.where(unseeing_Nt1, math.inf, row_max_Nt1 + tf.math.log(row_sum_Nt1))
    return tuple(tf.reshape(t, [count, -1, per_group, t.shape[-1]]) for t in (output_NtK, lse_Nt1))


def _make_mask(
    queries: int, keys: int, causal: bool, segments: Segments, groups: int, per_group: int
) -> Callable[[tf.Tensor, _Strip], tf.Tensor]:
    """Returns a function that sets a strip's scores [N, q, k] to `_UNSEEN` where a query does not see a key."""
    if segments is not None:
        query_NTP1 = _split(tf.repeat(segments[0][:, :, None, None], groups * per_group, 2), groups)
        key_NSP1 = _split(tf.repeat(segments[1][:, :, None, None], groups, 2), groups)

    def masked(scores_Nqk, strip):
        conditions = []
        if causal:
            t_q1 = tf.repeat(tf.range(strip.first, strip.last), per_group)[:, None]
            conditions.append(tf.range(strip.start, strip.stop)[None, :] <= t_q1 + (keys - queries))
        if segments is not None:
            query_Nq1, key_Nk1 = (
                _merge(query_NTP1[:, strip.first : strip.last]),
                _merge(key_NSP1[:, strip.start : strip.stop]),
            )
            conditions.append(query_Nq1 == tf.linalg.matrix_transpose(key_Nk1))
        if not conditions:
            return scores_Nqk
        return tf.where(functools.reduce(tf.logical_and, conditions), scores_Nqk, _UNSEEN)

    return masked


def _cut(size: int, rows: int) -> list[tuple[int, int]]:
    return [(first, min(size, first + rows)) for first in range(0, size, rows)]


def _split(t: tf.Tensor, groups: int) -> tf.Tensor:
    """Rearranges [B, T, H, K] as [N, T, P, K]."""
    batch, time, heads, width = sizes(t)
    t = tf.transpose(tf.reshape(t, [batch, time, groups, heads // groups, width]), [0, 2, 1, 3, 4])
    return tf.reshape(t, [batch * groups, time, heads // groups, width])


def _join(t_NTPK: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Inverts `_split`, to the shape and dtype of `like`."""
    batch, time, heads, width = sizes(like)
    per_group = t_NTPK.shape[2]
    t = tf.reshape(t_NTPK, [batch, heads // per_group, time, per_group, width])
    return tf.reshape(tf.cast(tf.transpose(t, [0, 2, 1, 3, 4]), like.dtype), [batch, time, heads, width])


def _merge(t_NTPK: tf.Tensor) -> tf.Tensor:
    """Reshapes [N, T, P, K] to [N, T P, K]."""
    count, time, per_group, width = sizes(t_NTPK)
    return tf.reshape(t_NTPK, [count, time * per_group, width])
