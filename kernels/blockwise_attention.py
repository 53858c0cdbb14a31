"""Attention by XLA's own kernels: unfused, and a block of queries and keys at a time.

Shape suffixes: B batch, T queries, S keys, H heads, G heads of keys and values, K width of a head;
N = B G; n and s blocks of queries and of keys; q and k rows in a block of queries (times the H / G
heads of a group) and of keys.
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
from fastaccum.kernels.devices import has_gpu
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
        """Number of keys before, and after, its own place that a query sees."""
        before = math.inf if self.window is None else self.window - 1
        after = 0 if self.causal else before
        return before, after

    def cap(self, scores: tf.Tensor) -> tf.Tensor:
        """Bounds the scores by the soft cap, if there is one."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * tf.tanh(scores / self.soft_cap)


# A running maximum starts here: finite, and below every score, so that exp(-inf - maximum) is 0 and
# never NaN.
_LOW = -1e30


class Blocks(NamedTuple):
    """Axis of `size` in `pieces` of `length`, the last piece padded."""

    size: int | tf.Tensor
    pieces: int
    length: int | tf.Tensor

    @property
    def padding(self) -> int | tf.Tensor:
        if self.length is self.size:  # also if the size is a tensor: nothing is to be computed
            return 0
        return self.pieces * self.length - self.size


def _cut(size: int, block_size: int) -> Blocks:
    """Cuts an axis into even pieces of at most `block_size`, of a multiple of 8 where possible."""
    fewest_pieces = math.ceil(size / block_size)
    even_length = 8 * math.ceil(size / fewest_pieces / 8)
    length = min(block_size, even_length)
    return Blocks(size, math.ceil(size / length), length)


def _list_pairs(queries: Blocks, keys: Blocks, form: Form) -> np.ndarray:
    """Lists the pairs of blocks that see each other, row by row: int32 [3, pairs].

    Of each pair: the number of the queries' block, that of the keys' block, and 1 if it is the
    first of its row, else 0.
    """
    first_n1 = np.arange(queries.pieces)[:, None] * queries.length + keys.size - queries.size
    last_n1 = np.minimum(first_n1 + queries.length, keys.size) - 1
    first_s = np.arange(keys.pieces) * keys.length
    before, after = form.reach
    begins_in_reach = first_s <= last_n1 + after
    ends_in_reach = first_s + keys.length > first_n1 - before
    i, j = np.nonzero(begins_in_reach & ends_in_reach)
    is_first_of_row = np.diff(i, prepend=-1) > 0
    return np.stack([i, j, is_first_of_row]).astype("int32")


def _needed_pairs(
    pairs: np.ndarray, queries: Blocks, keys: Blocks, segments: tuple[tf.Tensor, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Puts the pairs of blocks that may have a segment in common first, and counts them.

    The ranges of ids in two blocks overlap if they have one in common. Where ids ascend, as those
    of documents in packed rows, hardly any others overlap.
    """

    def ranges(ids_BT: tf.Tensor, blocks: Blocks) -> tuple[tf.Tensor, tf.Tensor]:
        places = np.minimum(np.arange(blocks.pieces * blocks.length), blocks.size - 1)
        ids_Bnq = tf.reshape(tf.gather(ids_BT, places, axis=1), [-1, blocks.pieces, blocks.length])
        return tf.reduce_min(ids_Bnq, 2), tf.reduce_max(ids_Bnq, 2)

    i, j, _ = pairs
    query_least_Bn, query_most_Bn = ranges(segments[0], queries)
    key_least_Bs, key_most_Bs = ranges(segments[1], keys)
    begins_before = tf.gather(query_least_Bn, i, axis=1) <= tf.gather(key_most_Bs, j, axis=1)
    ends_after = tf.gather(query_most_Bn, i, axis=1) >= tf.gather(key_least_Bs, j, axis=1)
    is_needed = tf.reduce_any(begins_before & ends_after, 0)

    count = len(i)
    # The place of the first pair up to which n are needed, for n = 1, 2, ...
    needed_so_far = tf.cumsum(tf.cast(is_needed, tf.int32))
    order = tf.minimum(tf.searchsorted(needed_so_far, tf.range(1, count + 1)), count - 1)
    i = tf.gather(i, order)
    j = tf.gather(j, order)
    is_first_of_row = tf.concat([[True], i[1:] != i[:-1]], 0)
    pairs_in_order = tf.stack([i, j, tf.cast(is_first_of_row, tf.int32)])
    return pairs_in_order, tf.reduce_sum(tf.cast(is_needed, tf.int32))


def _make_mask(
    queries: Blocks, keys: Blocks, form: Form, groups: int, per_group: int
) -> Callable[[int | tf.Tensor, int | tf.Tensor], tf.Tensor | None]:
    """Returns a function of two blocks' numbers that tells which keys each query sees.

    Its result is bool, to be broadcast to [N, q, k]; None if each query sees all of the keys.
    """
    segments = form.segments
    if segments is not None:
        query_BTH1 = tf.repeat(segments[0][:, :, None, None], groups * per_group, 2)
        key_BSG1 = tf.repeat(segments[1][:, :, None, None], groups, 2)
        query_nNq = _split(query_BTH1, groups, queries)[..., 0]
        key_sNk = _split(key_BSG1, groups, keys)[..., 0]

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
        if not conditions:
            return None
        return functools.reduce(tf.logical_and, conditions)

    return seen


def make_dropout(
    form: Form, query: tf.Tensor, groups: int, queries: Blocks, keys: Blocks
) -> Callable[..., Any]:
    """Returns a function of two blocks' numbers: the factor of each weight, 0 where it is dropped.

    The factors, [N, q, k], depend on the seed and the weight's place alone, since each query of
    each head has random keys of its own.
    """
    if form.dropout is None:
        return lambda i, j: 1.0
    rate, seed = form.dropout
    keys_BTH2 = tf.random.stateless_uniform(
        [*sizes(query)[:3], 2], seed, None, None, tf.uint32, alg="philox"
    )
    keys_nNq2 = _split(keys_BTH2, groups, queries)

    # The bits are evenly spread over the 2**32 values of uint32.
    dropped_below = round(rate * 2**32)
    factor_of_kept = 1 / (1 - rate)

    def factor(i, j):
        keys_Nq2 = tf.gather(keys_nNq2, i)
        s_k = j * keys.length + tf.range(keys.length)
        bits_Nqk = random_keys.hash_bits(keys_Nq2, tf.cast(s_k, tf.uint32))
        return tf.where(bits_Nqk < dropped_below, 0.0, factor_of_kept)

    return factor


def _split(t: tf.Tensor, groups: int, blocks: Blocks) -> tf.Tensor:
    """Splits [B, T, H, K] into blocks [n, N, q, K], padded with zeros.

    The heads of a group become rows of its blocks, one head after the other.
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
    t = tf.transpose(t, [1, 0, 4, 2, 3, 5])
    t = tf.reshape(t, [batch, blocks.pieces * blocks.length, heads, width])
    return tf.cast(t[:, : blocks.size], like.dtype)


def reference_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form
) -> tf.Tensor:
    """Computes `attention` as the unfused expression, with plain autodiff."""
    groups = key.shape[2]
    per_group = query.shape[2] // groups
    query_size = sizes(query)[1]
    key_size = sizes(key)[1]
    queries = Blocks(query_size, 1, query_size)
    keys = Blocks(key_size, 1, key_size)
    query_NqK = _split(query, groups, queries)[0]
    key_NkK = _split(key, groups, keys)[0]
    value_NkK = _split(value, groups, keys)[0]

    scores_Nqk = form.cap(form.scale * product(query_NqK, tf.linalg.matrix_transpose(key_NkK)))
    seen = _make_mask(queries, keys, form, groups, per_group)(0, 0)
    if seen is None:
        weights_Nqk = tf.nn.softmax(scores_Nqk)
    else:
        weights_Nqk = tf.nn.softmax(tf.where(seen, scores_Nqk, _LOW))

    # A row without a key to see has even weights by now.
    each_query_sees_its_own_place = form.segments is None and query.shape[1] == key.shape[1]
    if seen is not None and not each_query_sees_its_own_place:
        weights_Nqk = tf.where(seen, weights_Nqk, 0.0)

    factor = make_dropout(form, query, groups, queries, keys)
    weights_Nqk *= factor(0, 0)
    output_NqK = product(tf.cast(weights_Nqk, value.dtype), value_NkK)
    return _join(output_NqK[None], groups, queries, query)


class _Pair(NamedTuple):
    """Block of queries and block of keys, and the scores between them."""

    i: tf.Tensor  # number of the block of queries
    j: tf.Tensor  # number of the block of keys
    scores_Nqk: tf.Tensor  # -inf where a query does not see a key
    slope_Nqk: tf.Tensor | float  # derivative of the scores by those without a soft cap


class _Grid(NamedTuple):
    """Blocks of queries and of keys, and which pairs of them are computed, and how."""

    form: Form
    queries: Blocks
    keys: Blocks
    pairs: tf.Tensor  # of `_list_pairs`
    steps: int | tf.Tensor  # how many of the pairs are computed: a loop's turns
    seen: Callable[..., tf.Tensor | None]  # of `_make_mask`
    factor: Callable[..., Any]  # of `make_dropout`

    def pair(self, p: tf.Tensor, query_nNqK: tf.Tensor, key_sNkK: tf.Tensor) -> _Pair:
        """Computes the scores of pair p."""
        form = self.form
        i = tf.gather(self.pairs[0], p)
        j = tf.gather(self.pairs[1], p)
        query_NqK = tf.gather(query_nNqK, i)
        key_NkK = tf.gather(key_sNkK, j)
        scores_Nqk = form.cap(form.scale * dot(query_NqK, key_NkK, transpose_b=True))

        slope_Nqk = 1.0
        if form.soft_cap is not None:  # that of tanh
            slope_Nqk = 1 - (scores_Nqk / form.soft_cap) ** 2

        visible = self.seen(i, j)
        if visible is not None:
            scores_Nqk = tf.where(visible, scores_Nqk, -math.inf)
        return _Pair(i, j, scores_Nqk, slope_Nqk)


def blockwise_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form, block_size: int
) -> tf.Tensor:
    """Computes `attention` a block of queries and keys at a time.

    The whole matrix of scores never exists.
    """
    groups = key.shape[2]
    queries = _cut(query.shape[1], block_size)
    keys = _cut(key.shape[1], block_size)
    listed_pairs = _list_pairs(queries, keys, form)
    pairs = tf.constant(listed_pairs)
    steps: int | tf.Tensor = len(listed_pairs[0])
    if form.segments is not None and not has_gpu():
        # A GPU would ask the host before every turn of a loop whose turns are not known.
        pairs, steps = _needed_pairs(listed_pairs, queries, keys, form.segments)
    seen = _make_mask(queries, keys, form, groups, query.shape[2] // groups)
    factor = make_dropout(form, query, groups, queries, keys)
    grid = _Grid(form, queries, keys, pairs, steps, seen, factor)

    @custom_gradient
    def run(query, key, value):
        query_nNqK = _split(query, groups, queries)
        key_sNkK = _split(key, groups, keys)
        value_sNkK = _split(value, groups, keys)

        with private.record.stop_recording():  # an eager tape would keep what the loop computes
            acc_nNqK, lse_nNq = _online_softmax(grid, query_nNqK, key_sNkK, value_sNkK)
        output = checkpoint_name(_join(acc_nNqK, groups, queries, query), "attention")
        lse_nNq = checkpoint_name(lse_nNq, "attention")

        def gradient(doutput):
            doutput_nNqK = _split(doutput, groups, queries)
            zero = tf.constant(0)
            products_nNqK = tf.cast(doutput_nNqK, tf.float32) * tf.cast(
                _split(output, groups, queries), tf.float32
            )
            delta_nNq = tf.reduce_sum(products_nNqK, -1)

            # Of a loop of one turn XLA would keep the weights, and which of them are dropped:
            # behind a barrier it computes the scores again.
            tied_query_nNqK = query_nNqK
            if grid.pairs.shape[1] == 1 and xla_ops.in_xla():
                tied_query_nNqK, doutput_nNqK, zero = private.xla.optimization_barrier(
                    query_nNqK, doutput_nNqK, zero
                )

            dquery_nNqK, dkey_sNkK, dvalue_sNkK = _sum_gradients(
                grid,
                query_nNqK,
                key_sNkK,
                value_sNkK,
                tied_query_nNqK=tied_query_nNqK,
                doutput_nNqK=doutput_nNqK,
                lse_nNq=lse_nNq,
                delta_nNq=delta_nNq,
                zero=zero,
            )
            gradients = [
                _join(form.scale * dquery_nNqK, groups, queries, query),
                _join(form.scale * dkey_sNkK, groups, keys, key),
                _join(dvalue_sNkK, groups, keys, value),
            ]
            return first_order(gradients, "attention in blocks")

        return output, gradient

    return run(query, key, value)


def _online_softmax(
    grid: _Grid, query_nNqK: tf.Tensor, key_sNkK: tf.Tensor, value_sNkK: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the output, [n, N, q, K], and the log-sum-exp of each query's scores, [n, N, q].

    One loop goes over the pairs of blocks.
    """
    shape = tf.shape(query_nNqK)

    # A row's maximum so far goes from block to block beside its place in the whole: were it read
    # there, XLA would copy the whole before each write.
    def forward(p, row_max_Nq, row_max_nNq, row_sum_nNq, acc_nNqK):
        i, j, scores_Nqk, _ = grid.pair(p, query_nNqK, key_sNkK)
        is_first_of_row = tf.gather(grid.pairs[2], p) == 1
        row_max_Nq = tf.where(is_first_of_row, _LOW, row_max_Nq)
        row_sum_Nq = tf.gather(row_sum_nNq, i)
        acc_NqK = tf.gather(acc_nNqK, i)

        new_row_max_Nq = tf.maximum(row_max_Nq, tf.reduce_max(scores_Nqk, -1))
        weights_Nqk = tf.exp(scores_Nqk - new_row_max_Nq[..., None])
        correction_Nq = tf.exp(row_max_Nq - new_row_max_Nq)
        row_sum_Nq = correction_Nq * row_sum_Nq + tf.reduce_sum(weights_Nqk, -1)
        acc_NqK = correction_Nq[..., None] * acc_NqK
        dropped_weights_Nqk = tf.cast(grid.factor(i, j) * weights_Nqk, value_sNkK.dtype)
        acc_NqK += dot(dropped_weights_Nqk, tf.gather(value_sNkK, j))
        return [
            new_row_max_Nq,
            dynamic_update_slice(row_max_nNq, new_row_max_Nq[None], [i, 0, 0]),
            dynamic_update_slice(row_sum_nNq, row_sum_Nq[None], [i, 0, 0]),
            dynamic_update_slice(acc_nNqK, acc_NqK[None], [i, 0, 0, 0]),
        ]

    start = [tf.zeros(shape[1:-1]), tf.zeros(shape[:-1]), tf.zeros(shape[:-1]), tf.zeros(shape)]
    _, row_max_nNq, row_sum_nNq, acc_nNqK = loop(grid.steps, forward, start)
    # For a query that sees nothing, inf: its weights are exp(-inf - inf) = 0 again.
    lse_nNq = tf.where(row_sum_nNq > 0, row_max_nNq + tf.math.log(row_sum_nNq), math.inf)
    output_nNqK = tf.math.divide_no_nan(acc_nNqK, row_sum_nNq[..., None])
    return output_nNqK, lse_nNq


def _sum_gradients(
    grid: _Grid,
    query_nNqK: tf.Tensor,
    key_sNkK: tf.Tensor,
    value_sNkK: tf.Tensor,
    *,
    tied_query_nNqK: tf.Tensor,
    doutput_nNqK: tf.Tensor,
    lse_nNq: tf.Tensor,
    delta_nNq: tf.Tensor,
    zero: tf.Tensor,
) -> list[tf.Tensor]:
    """Sums the gradients of queries, keys and values over the pairs of blocks, in float32.

    Those of queries and keys are still to be multiplied by the scale.

    Args:
        grid: the pairs.
        query_nNqK: blocks of queries.
        key_sNkK: blocks of keys.
        value_sNkK: blocks of values.
        tied_query_nNqK: the queries again, for the scores.
        doutput_nNqK: upstream gradient of the output.
        lse_nNq: log-sum-exp of each query's scores.
        delta_nNq: sum of each row of `doutput * output`.
        zero: what is added to the numbers of blocks that dropout is drawn for.
    """

    def backward(p, dquery_nNqK, dkey_sNkK, dvalue_sNkK):
        i, j, scores_Nqk, slope_Nqk = grid.pair(p, tied_query_nNqK, key_sNkK)
        query_NqK = tf.gather(query_nNqK, i)
        key_NkK = tf.gather(key_sNkK, j)
        value_NkK = tf.gather(value_sNkK, j)
        doutput_NqK = tf.gather(doutput_nNqK, i)

        weights_Nqk = tf.exp(scores_Nqk - tf.gather(lse_nNq, i)[..., None])
        factor_Nqk = grid.factor(i, j + zero)
        dweights_Nqk = factor_Nqk * dot(doutput_NqK, value_NkK, transpose_b=True)
        dscores_Nqk = slope_Nqk * weights_Nqk * (dweights_Nqk - tf.gather(delta_nNq, i)[..., None])
        dropped_weights_Nqk = tf.cast(factor_Nqk * weights_Nqk, query_nNqK.dtype)
        dscores_Nqk = tf.cast(dscores_Nqk, query_nNqK.dtype)

        dquery_NqK = dot(dscores_Nqk, key_NkK)
        dquery_nNqK = dynamic_add_slice(dquery_nNqK, dquery_NqK[None], [i, 0, 0, 0])
        dkey_NkK = dot(dscores_Nqk, query_NqK, transpose_a=True)
        dkey_sNkK = dynamic_add_slice(dkey_sNkK, dkey_NkK[None], [j, 0, 0, 0])
        dvalue_NkK = dot(dropped_weights_Nqk, doutput_NqK, transpose_a=True)
        dvalue_sNkK = dynamic_add_slice(dvalue_sNkK, dvalue_NkK[None], [j, 0, 0, 0])
        return [dquery_nNqK, dkey_sNkK, dvalue_sNkK]

    start = [tf.zeros(tf.shape(t)) for t in (query_nNqK, key_sNkK, value_sNkK)]
    return loop(grid.steps, backward, start)
