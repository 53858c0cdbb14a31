"""Softmax cross-entropy straight from the hidden states: the logits exist one chunk at a time.

Shape suffixes: N tokens, D width, V vocabulary; n and v are the part of N and V in one chunk.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checks import (
    LARGEST,
    as_tensor,
    fraction,
    number,
    one_of,
    positive,
    true_or_false,
    whole_number,
)
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.logit_chunks import Head, cut
from fastaccum.kernels.xla_ops import (
    HALF,
    MaxAndExpSum,
    dynamic_add_slice,
    dynamic_update_slice,
    first_order,
    loop,
    max_and_exp_sum,
    product,
)


class LabelScores(NamedTuple):
    """Scores of each token's label among its logits, in tensors of the labels' shape.

    They are garbage where the label is no class.
    """

    loss: tf.Tensor  # `logsumexp(logits) - logits[label]`, float32, without smoothing or z-loss
    best: tf.Tensor  # the column of the largest logit, int32, the first of several
    # how many logits are larger than the label's, int32, where that was asked for
    above: tf.Tensor | None = None


class _Scores(enum.Enum):
    """The scores of labels that are computed beside the losses."""

    NONE = enum.auto()
    LOSS_AND_BEST = enum.auto()
    ALL = enum.auto()  # `above` too

    @classmethod
    def of(cls, ranks: bool | None) -> _Scores:
        """Returns the scores that `ranks` of `linear_cross_entropy_sum_and_scores` asks for."""
        if ranks is None:
            return cls.NONE
        if ranks:
            return cls.ALL
        return cls.LOSS_AND_BEST


class _Options(NamedTuple):
    """Options of the losses, as numbers in their ranges."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


class _Terms(NamedTuple):
    """Terms of each token's loss, and the scores of its label if they were asked for."""

    lse_N: tf.Tensor
    target_N: tf.Tensor  # the label's logit, with the smoothing's share of the others
    scores: LabelScores | None = None


class _Running(NamedTuple):
    """Values of each token that the loop over the chunks updates."""

    row_max: tf.Tensor
    row_sum: tf.Tensor
    label_logit: tf.Tensor
    best: tf.Tensor | None = None


def linear_cross_entropy(
    hidden: tf.Tensor,
    kernel: tf.Tensor,
    labels: tf.Tensor,
    bias: tf.Tensor | None = None,
    *,
    transpose_kernel: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
    implementation: Literal["auto", "chunked", "reference"] = "auto",
) -> tf.Tensor:
    """Computes the cross-entropy of each token from a linear layer, a chunk of logits at a time.

    The logits are never all in memory. The losses equal, to rounding, those of this unfused
    expression, in which float16 and bfloat16 products are summed in float32 and not rounded again:

        logits = cast(hidden @ cast(kernel, hidden.dtype), float32) + bias    # [..., V]
        logits = soft_cap * tanh(logits / soft_cap)                           # where there is one
        lse = logsumexp(logits)
        loss = (1 - label_smoothing) * (lse - logits[label])
        loss += label_smoothing * (lse - mean(logits))
        loss = where(label == ignore_index, 0, loss + z_loss * lse**2)

    Tokens and vocabulary are both cut into chunks; on a GPU, tokens alone. One loop over the chunks
    computes `lse` and keeps nothing else; the backward pass computes each chunk's logits once more
    (Cut Cross-Entropy, Wijmans et al. 2024, https://arxiv.org/abs/2411.09009). So two chunks of
    logits exist at once, of `chunk_size**2` each where that is given. Gradients are summed in
    float32. The z-loss is that of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311).

    Args:
        hidden: [..., D], float32, float16 or bfloat16.
        kernel: [D, V], float32 (the raw weights) or hidden's dtype.
        labels: integers [...], in [0, V) or `ignore_index`. The loss of a label that is neither is
            NaN, and so are the gradients, where XLA by itself would read another column.
        bias: [V], float32 or hidden's dtype; None for none.
        transpose_kernel: the kernel is [V, D], as the table of an embedding is; so is its gradient.
        ignore_index: the label of tokens whose loss, and share in the gradients, is 0.
        label_smoothing: the part of the target that is spread evenly over the vocabulary, in
            [0, 1).
        z_loss: the factor of `lse**2`, which keeps the logits from drifting.
        soft_cap: a bound of the logits, as Gemma's models have; None for none. Not with
            label_smoothing.
        chunk_size: the most tokens, and the most columns of the vocabulary, in one chunk; by
            default, what runs fast.
        implementation: "chunked"; "reference", the unfused expression; or "auto": the reference
            where all the logits take no more room than one chunk, or than `hidden` itself, as those
            of a byte-level model do.

    Returns:
        The losses, float32 [...]: weigh and reduce them as you like.

    >>> hidden, kernel = tf.ones([2, 3]), tf.zeros([3, 100])
    >>> labels = tf.constant([7, -100])  # the loss of the second one is left out
    >>> losses = linear_cross_entropy(hidden, kernel, labels)  # log(100) and 0
    >>> losses.numpy().round(4).tolist()
    [4.6052, 0.0]
    """
    options = require_options(ignore_index, label_smoothing, z_loss)
    head, labels = _make_head(
        hidden,
        kernel,
        labels,
        bias,
        transposed=transpose_kernel,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
        smoothing=options.label_smoothing,
    )
    choices = ("auto", "chunked", "reference")
    chosen = _choose(implementation, choices, head, chunk_size, options)
    losses, _ = _token_losses(head, labels, options, chosen)
    return losses


def linear_cross_entropy_sum_and_scores(
    hidden: tf.Tensor,
    kernel: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    bias: tf.Tensor | None = None,
    *,
    rounded_kernel: tf.Tensor | None = None,
    transpose_kernel: bool = False,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
    implementation: Literal["auto", "one_pass", "chunked", "reference"] = "auto",
    ranks: bool | None = None,
    **options: Any,
) -> tuple[tf.Tensor, LabelScores | None]:
    """Computes `sum(weights * linear_cross_entropy(...))`, a float32 scalar, and labels' scores.

    It takes three matmuls in place of four. The gradients of a weighted sum are known, up to its
    own cotangent, as soon as the losses are. So "one_pass" over slices of the tokens, each with all
    its logits, computes losses and gradients, and the backward pass only multiplies these by the
    cotangent (Liger Kernel, Hsu et al. 2024, https://arxiv.org/abs/2410.10989). There are no second
    derivatives. "auto" takes it on a GPU where a tape may ask for gradients and no chunk_size is
    given; but not with a z-loss in float16, whose gradients have no bound before the first slice
    that would keep them in range.

    `weights`, float32, are broadcast to labels' shape; `rounded_kernel` is `cast(kernel,
    hidden.dtype)`, where it is at hand; the other options are those of `linear_cross_entropy`.
    The scores beside the sum have no gradients. `ranks=None` asks for none, False for `loss` and
    `best`, and True for `above` too, which takes another matmul where the vocabulary is cut.
    """
    numbers = require_options(**options)
    wanted = _Scores.of(ranks)
    head, labels = _make_head(
        hidden,
        kernel,
        labels,
        bias,
        transposed=transpose_kernel,
        chunk_size=chunk_size,
        rounded=rounded_kernel,
        soft_cap=soft_cap,
        smoothing=numbers.label_smoothing,
    )
    choices = ("auto", "one_pass", "chunked", "reference")
    chosen = _choose(implementation, choices, head, chunk_size, numbers)
    if chosen == "one_pass" and head.tokens.size:
        all_columns = cut(head.columns.size, head.columns.size)
        head = head._replace(columns=all_columns)
        total, scores = _one_pass(head, labels, weights, numbers, wanted)
    else:
        losses, scores = _token_losses(head, labels, numbers, chosen, wanted)
        total = tf.reduce_sum(weights * losses)

    if scores is None:
        return total, None
    return total, _reshaped(scores, labels.shape)


def _choose(
    implementation: str,
    choices: tuple[str, ...],
    head: Head,
    chunk_size: int | None,
    options: _Options,
) -> str:
    """Returns the implementation, one of the choices; for "auto" the one that suits the head."""
    one_of("implementation", implementation, choices)
    if implementation != "auto":
        return implementation
    if _is_small(head, chunk_size):
        return "reference"
    may_take_one_pass = "one_pass" in choices and chunk_size is None
    if may_take_one_pass and _gains_by_one_pass(head, options.z_loss):
        return "one_pass"
    return "chunked"


def _gains_by_one_pass(head: Head, z_loss: float) -> bool:
    """Returns whether "auto" takes one pass: on a GPU, for gradients that float16 can hold."""
    if not has_gpu() or not private.record.could_possibly_record():
        return False
    may_overflow = z_loss > 0 and head.hidden_ND.dtype == tf.float16
    return not may_overflow


def _reshaped(scores: LabelScores, shape: tf.TensorShape) -> LabelScores:
    """Returns the scores, [N], in the shape of the labels."""
    loss = tf.reshape(scores.loss, shape)
    best = tf.reshape(scores.best, shape)
    above = None
    if scores.above is not None:
        above = tf.reshape(scores.above, shape)
    return LabelScores(loss, best, above)


def cross_entropy_from_logits(
    logits: tf.Tensor,
    labels: tf.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tf.Tensor:
    """Computes the losses of `linear_cross_entropy` from logits, [..., V] -> float32 [...]."""
    vocabulary = logits.shape[-1]

    def compute_terms(column_N):
        logits_NV = tf.reshape(tf.cast(logits, tf.float32), [-1, vocabulary])
        return _of_logits(logits_NV, column_N, label_smoothing)

    losses, _ = _losses(compute_terms, labels, vocabulary, ignore_index, z_loss)
    return losses


def _token_losses(
    head: Head,
    labels: tf.Tensor,
    options: _Options,
    implementation: str,
    wanted: _Scores = _Scores.NONE,
) -> tuple[tf.Tensor, LabelScores | None]:
    """Computes each token's loss, chunked or unfused, and its label's scores as flat tensors."""

    def compute_terms(column_N):
        if implementation == "chunked" and head.tokens.size:
            return _chunked(head, column_N, options.label_smoothing, wanted)

        kernel_DV = head.kernel
        if head.transposed:
            kernel_DV = tf.transpose(head.kernel)
        logits_NV = product(
            head.hidden_ND, kernel_DV, lambda dlogits_NV: _factor(dlogits_NV, head.hidden_ND.dtype)
        )
        for b_V in head.bias:
            logits_NV += tf.cast(b_V, tf.float32)
        return _of_logits(head.capped(logits_NV), column_N, options.label_smoothing, wanted)

    return _losses(compute_terms, labels, head.columns.size, options.ignore_index, options.z_loss)


def _losses(
    compute_terms: Callable[[tf.Tensor], _Terms],
    labels: tf.Tensor,
    vocabulary: int,
    ignore_index: int,
    z_loss: float,
) -> tuple[tf.Tensor, LabelScores | None]:
    """Computes the losses, in the labels' shape, from their terms; returns the scores as well."""
    with tf.name_scope("linear_cross_entropy"):
        column_N, loss_factor_N = _columns(labels, vocabulary, ignore_index)
        terms = compute_terms(column_N)
        losses_N = terms.lse_N - terms.target_N
        if z_loss:
            losses_N += z_loss * tf.square(terms.lse_N)
        losses_N = tf.where(loss_factor_N == 0.0, 0.0, losses_N * loss_factor_N)
    return tf.reshape(losses_N, tf.shape(labels)), terms.scores


def _columns(labels: tf.Tensor, vocabulary: int, ignore_index: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each label's column, -1 for none, and the factor of its loss.

    The factor is 0 for a label that is ignored, and NaN, so that there is no step, for one that is
    out of range.
    """
    labels_N = tf.cast(tf.reshape(labels, [-1]), tf.int64)
    in_range_N = (labels_N >= 0) & (labels_N < vocabulary)
    loss_factor_N = tf.where(labels_N == ignore_index, 0.0, tf.where(in_range_N, 1.0, math.nan))
    column_N = tf.cast(tf.where(in_range_N, labels_N, -1), tf.int32)
    return column_N, loss_factor_N


def _of_logits(
    logits_NV: tf.Tensor, column_N: tf.Tensor, smoothing: float, wanted: _Scores = _Scores.NONE
) -> _Terms:
    """Computes the terms of the losses from all the logits, with plain autodiff."""
    # A select rather than a gather, whose gradient is a scatter into one more array of this size.
    at_label_NV = tf.where(tf.range(logits_NV.shape[1]) == column_N[:, tf.newaxis], logits_NV, 0.0)
    logit_N = tf.reduce_sum(at_label_NV, -1)
    target_N = logit_N
    if smoothing:
        target_N = (1 - smoothing) * target_N + smoothing * tf.reduce_mean(logits_NV, -1)
    lse_N = tf.reduce_logsumexp(logits_NV, -1)
    if wanted is _Scores.NONE:
        return _Terms(lse_N, target_N)

    loss_N = tf.stop_gradient(lse_N - logit_N)
    best_N = tf.argmax(logits_NV, -1, tf.int32)
    if wanted is _Scores.LOSS_AND_BEST:
        return _Terms(lse_N, target_N, LabelScores(loss_N, best_N))
    above_N = tf.reduce_sum(tf.cast(logits_NV > logit_N[:, tf.newaxis], tf.int32), -1)
    return _Terms(lse_N, target_N, LabelScores(loss_N, best_N, above_N))


def _factor(dlogits: tf.Tensor, dtype: tf.DType) -> tf.Tensor | float:
    """Returns a power of two that brings gradients of logits to the top of float16's range.

    Small ones would round to 0 there. Other dtypes need no factor.
    """
    if dtype != tf.float16:
        return 1.0
    largest = tf.reduce_max(tf.abs(dlogits))
    # The largest comes to 2**13 at most; float16 ends just below 2**16.
    factor = tf.pow(2.0, 13.0 - tf.math.ceil(tf.math.log(largest) / math.log(2)))
    return tf.where(tf.math.is_finite(factor) & (factor > 0), factor, 1.0)


def _one_pass(
    head: Head, labels: tf.Tensor, weights: tf.Tensor, options: _Options, wanted: _Scores
) -> tuple[tf.Tensor, LabelScores | None]:
    """Computes the weighted sum of losses, and the gradients with it, in one loop over tokens."""
    column_N, loss_factor_N = _columns(labels, head.columns.size, options.ignore_index)

    @custom_gradient
    def weighted_sum(weight_N, *inputs):
        traced_head = head.of(*inputs)
        factor = _factor(weight_N, traced_head.hidden_ND.dtype)
        dlse = head.tokens.cut_up(factor * weight_N)
        dtarget = head.tokens.cut_up(-factor * weight_N)
        mean_N = None
        if options.label_smoothing:
            mean_N = traced_head.mean()

        with private.record.stop_recording():  # an eager tape would keep what the loop computes
            losses_N, scores, sums = _losses_and_gradients(
                traced_head, column_N, dlse, dtarget, mean_N, inputs, options, wanted
            )

        def gradient(dtotal, *dscores):
            gradients = []
            for summed, t in zip(sums, inputs, strict=True):
                gradients.append(tf.cast(dtotal / factor * summed, t.dtype))
            dweight_N = dtotal * losses_N
            return first_order([dweight_N, *gradients], "linear_cross_entropy_sum_and_scores")

        total = tf.reduce_sum(tf.where(loss_factor_N == 0.0, 0.0, weight_N * losses_N))
        return (total, *scores), gradient

    with tf.name_scope("linear_cross_entropy"):
        weight_N = tf.reshape(tf.broadcast_to(weights, labels.shape), [-1])
        total, *scores = weighted_sum(
            tf.where(loss_factor_N == 0, 0.0, weight_N * loss_factor_N),
            head.hidden_ND,
            head.kernel,
            *head.bias,
        )
    if wanted is _Scores.NONE:
        return total, None
    return total, LabelScores(*scores)


def _losses_and_gradients(
    head: Head,
    column_N: tf.Tensor,
    dlse: tf.Tensor,
    dtarget: tf.Tensor,
    mean_N: tf.Tensor | None,
    inputs: Sequence[tf.Tensor],
    options: _Options,
    wanted: _Scores,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Computes losses, the tensors of the scores, and the inputs' gradients, in one loop.

    Args:
        head: of all columns in one piece.
        column_N: each label's column.
        dlse: upstream gradient of the log-sum-exps, in the pieces of the tokens.
        dtarget: that of the target logits.
        mean_N: mean of each token's logits, for label smoothing.
        inputs: the tensors that are to have gradients.
        options: those of the losses.
        wanted: the scores to compute.
    """
    smoothing = options.label_smoothing
    size = head.tokens.length

    def step(i, losses_N, scores, sums):
        chunk = head.chunk(i, column_N)
        n, _ = chunk.start
        dlse_n = dlse[i]
        dtarget_n = dtarget[i]

        rows = MaxAndExpSum(*max_and_exp_sum(chunk.logits_nv, argmax=wanted is not _Scores.NONE))
        lse_n = rows.maximum + tf.math.log(rows.exp_sum)
        here_n, logit_n = chunk.at_label()
        scores_n = []
        if wanted is not _Scores.NONE:
            scores_n = [lse_n - logit_n, rows.argmax]
        if wanted is _Scores.ALL:
            scores_n.append(chunk.above(logit_n))
        scores = [
            dynamic_update_slice(whole, part, [n])
            for whole, part in zip(scores, scores_n, strict=True)
        ]

        target_n = tf.where(here_n, logit_n, 0.0)
        if smoothing:
            target_n = (1 - smoothing) * target_n + smoothing * tf.slice(mean_N, [n], [size])
        losses_n = lse_n - target_n
        if options.z_loss:
            dlse_n *= 1 + 2 * options.z_loss * lse_n
            losses_n += options.z_loss * tf.square(lse_n)

        exp_nv = tf.exp(chunk.logits_nv - rows.maximum[:, tf.newaxis])
        softmax_nv = exp_nv / rows.exp_sum[:, tf.newaxis]
        sums = head.add(sums, chunk, softmax_nv, dlse_n, dtarget_n, smoothing)
        return [dynamic_update_slice(losses_N, losses_n, [n]), scores, sums]

    losses_N = tf.zeros(column_N.shape)
    scores: list[tf.Tensor] = []
    if wanted is not _Scores.NONE:
        scores = [tf.zeros(column_N.shape), tf.zeros(column_N.shape, tf.int32)]
    if wanted is _Scores.ALL:
        scores.append(tf.zeros(column_N.shape, tf.int32))
    sums = [tf.zeros(t.shape) for t in inputs]
    steps = head.tokens.pieces * head.columns.pieces
    losses_N, scores, sums = loop(steps, step, [losses_N, scores, sums])
    return losses_N, scores, sums


def _chunked(head: Head, column_N: tf.Tensor, smoothing: float, wanted: _Scores) -> _Terms:
    """Computes the terms of the losses, and their gradients, in chunks of tokens and columns."""
    steps = head.tokens.pieces * head.columns.pieces

    @custom_gradient
    def compute_terms(*inputs):
        traced_head = head.of(*inputs)
        lse_N, logit_N, best_N = _online_lse(
            traced_head, column_N, argmax=wanted is not _Scores.NONE
        )
        target_N = logit_N
        if smoothing:
            target_N = (1 - smoothing) * logit_N + smoothing * traced_head.mean()
        scores = []
        if wanted is not _Scores.NONE:
            scores = [lse_N - logit_N, best_N]
        if wanted is _Scores.ALL:
            scores.append(_above(traced_head, column_N, logit_N))

        def gradient(dlse_N, dtarget_N, *dscores):
            factor = _factor(tf.abs(dlse_N) + tf.abs(dtarget_N), traced_head.hidden_ND.dtype)
            dlse = head.tokens.cut_up(factor * dlse_N)
            dtarget = head.tokens.cut_up(factor * dtarget_N)

            def backward(i, *sums):
                chunk = traced_head.chunk(i, column_N)
                token_piece, _ = chunk.piece
                n, _ = chunk.start
                lse_n = tf.slice(lse_N, [n], [head.tokens.length])
                softmax_nv = tf.exp(chunk.logits_nv - lse_n[:, tf.newaxis])
                return traced_head.add(
                    sums, chunk, softmax_nv, dlse[token_piece], dtarget[token_piece], smoothing
                )

            sums = loop(steps, backward, [tf.zeros(t.shape) for t in inputs])
            return [
                tf.cast(summed / factor, t.dtype) for summed, t in zip(sums, inputs, strict=True)
            ]

        return (lse_N, target_N, *scores), gradient

    lse_N, target_N, *scores = compute_terms(head.hidden_ND, head.kernel, *head.bias)
    if wanted is _Scores.NONE:
        return _Terms(lse_N, target_N)
    return _Terms(lse_N, target_N, LabelScores(*scores))


def _online_lse(
    head: Head, column_N: tf.Tensor, argmax: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Computes each token's log-sum-exp, its label's logit and the column of its largest logit.

    One loop goes over all chunks. The column is None unless `argmax` asks for it.
    """

    def forward(i, *running):
        chunk = head.chunk(i, column_N)
        n, first_column = chunk.start
        slices = [tf.slice(t, [n], [head.tokens.length]) for t in running]
        before = _Running(*slices)

        rows = MaxAndExpSum(*max_and_exp_sum(chunk.logits_nv, argmax))
        row_max_n = tf.maximum(before.row_max, rows.maximum)
        row_sum_n = before.row_sum * tf.exp(before.row_max - row_max_n)
        row_sum_n += rows.exp_sum * tf.exp(rows.maximum - row_max_n)
        here_n, logit_n = chunk.at_label()
        label_logit_n = tf.where(here_n, logit_n, before.label_logit)
        updated = [row_max_n, row_sum_n, label_logit_n]
        if argmax:
            is_larger_n = rows.maximum > before.row_max
            updated.append(tf.where(is_larger_n, rows.argmax + first_column, before.best))

        if head.tokens.overlap:
            # The last piece begins on tokens that the piece before has finished. Those keep their
            # old values, or their sums would count each column a second time.
            token_piece, _ = chunk.piece
            fresh_n = head.tokens.fresh(token_piece)
            updated = [
                tf.where(fresh_n, new, old) for new, old in zip(updated, slices, strict=True)
            ]
        return [
            dynamic_update_slice(whole, part, [n])
            for whole, part in zip(running, updated, strict=True)
        ]

    # A finite start: the exponential of -inf - -inf, in a chunk without a possible class, would be
    # NaN.
    size = [head.tokens.size]
    row_max_N = tf.fill(size, tf.float32.min)
    row_sum_N = tf.zeros(size)
    label_logit_N = tf.zeros(size)
    best_N = tf.zeros(size, tf.int32)
    start = [row_max_N, row_sum_N, label_logit_N]
    if argmax:
        start.append(best_N)
    whole = _Running(*loop(head.tokens.pieces * head.columns.pieces, forward, start))
    lse_N = whole.row_max + tf.math.log(whole.row_sum)
    return lse_N, whole.label_logit, whole.best


def _above(head: Head, column_N: tf.Tensor, logit_N: tf.Tensor) -> tf.Tensor:
    """Counts each token's logits above its label's.

    The label's logit is known only after a loop over all of them, so this is another loop.
    """

    def step(i, above_N):
        chunk = head.chunk(i, column_N)
        n, _ = chunk.start
        token_piece, _ = chunk.piece
        above_n = tf.where(
            head.tokens.fresh(token_piece),
            chunk.above(tf.slice(logit_N, [n], [head.tokens.length])),
            0,
        )
        return [dynamic_add_slice(above_N, above_n, [n])]

    steps = head.tokens.pieces * head.columns.pieces
    (above_N,) = loop(steps, step, [tf.zeros([head.tokens.size], tf.int32)])
    return above_N


def _make_head(
    hidden: tf.Tensor,
    kernel: tf.Tensor,
    labels: tf.Tensor,
    bias: tf.Tensor | None,
    *,
    transposed: bool,
    chunk_size: int | None,
    rounded: tf.Tensor | None = None,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
) -> tuple[Head, tf.Tensor]:
    """Returns the head and the labels as tensors.

    The arguments are those of `linear_cross_entropy_sum_and_scores`. Raises TypeError or
    ValueError for arguments that do not fit.
    """
    hidden = as_tensor("hidden", hidden)
    kernel = as_tensor("kernel", kernel)
    labels = as_tensor("labels", labels)
    biases: tuple[tf.Tensor, ...] = ()
    if bias is not None:
        biases = (as_tensor("bias", bias),)
    transposed = true_or_false("transpose_kernel", transposed)
    _require_tensors(hidden, kernel, labels, transposed, *biases)

    width, vocabulary = _width_and_vocabulary(kernel, transposed)
    count = math.prod(labels.shape)
    if transposed and not has_gpu():
        # XLA:CPU takes up to three times as long for the products with a kernel [V, D].
        kernel = tf.transpose(kernel)
        if rounded is not None:
            rounded = tf.transpose(rounded)
        transposed = False

    tokens_at_once, columns_at_once = _chunk_sizes(chunk_size, count, vocabulary)
    if soft_cap is not None:
        if smoothing:
            raise ValueError(
                f"label_smoothing={smoothing} with soft_cap={soft_cap} (the head's): leave one out."
            )
        soft_cap = positive("soft_cap", soft_cap)
    head = Head(
        tf.reshape(hidden, [count, width]),
        kernel,
        biases,
        rounded,
        transposed,
        cut(count, tokens_at_once),
        cut(vocabulary, columns_at_once),
        soft_cap,
    )
    return head, labels


def _width_and_vocabulary(kernel: tf.Tensor, transposed: bool) -> tuple[int, int]:
    """Returns the sizes D and V of a kernel [D, V], or [V, D] where it is transposed."""
    if transposed:
        vocabulary, width = kernel.shape
    else:
        width, vocabulary = kernel.shape
    return width, vocabulary


def _chunk_sizes(chunk_size: Any, count: int, vocabulary: int) -> tuple[int, int]:
    """Returns the most tokens and the most columns in one chunk of `count` tokens' logits."""
    if chunk_size is not None:
        chunk_size = whole_number("chunk_size", chunk_size)
        return chunk_size, chunk_size
    if has_gpu():
        # Enough that the products take longer than to read and write the sum of the kernel's
        # gradients, and in few launches; few enough that logits and their gradients stay within
        # 0.15 of all the logits' size.
        tokens = max(1024, min(count // 10, 2048), 2**25 // vocabulary)
        return tokens, vocabulary
    return 2048, 2048  # 16 MiB of logits stay in the last cache


def _is_small(head: Head, chunk_size: int | None) -> bool:
    """Returns whether all the logits take no more room than one chunk, or than `hidden`."""
    if chunk_size is not None:
        chunk = chunk_size
    elif has_gpu():
        chunk = 4096
    else:
        chunk = 2048
    return head.tokens.size * head.columns.size <= max(chunk**2, math.prod(head.hidden_ND.shape))


def _require_tensors(
    hidden: tf.Tensor, kernel: tf.Tensor, labels: tf.Tensor, transposed: bool, *bias: tf.Tensor
) -> None:
    """Raises TypeError or ValueError for tensors whose dtypes or shapes do not fit."""
    weights = {"kernel": kernel}
    for b_V in bias:
        weights["bias"] = b_V
    if hidden.dtype not in (*HALF, tf.float32):
        raise TypeError(
            f"hidden has dtype {hidden.dtype.name}: it must be float32, float16 or bfloat16."
        )
    for name, tensor in weights.items():
        if tensor.dtype not in (tf.float32, hidden.dtype):
            raise TypeError(
                f"{name} has dtype {tensor.dtype.name}, but hidden {hidden.dtype.name}: float32 "
                "or the same is needed."
            )
    if not labels.dtype.is_integer:
        raise TypeError(
            f"labels have dtype {labels.dtype.name}: they must be integers, the indices of classes."
        )

    if not _shapes_fit(hidden, kernel, labels, transposed, *bias):
        layout = "[V, D]" if transposed else "[D, V]"
        shapes = f"hidden {hidden.shape}, kernel {kernel.shape}, labels {labels.shape}"
        for b_V in bias:
            shapes += f", bias {b_V.shape}"
        raise ValueError(
            f"The shapes do not fit: {shapes}. They must be hidden [..., D], kernel {layout}, "
            "labels [...] and bias [V], every size known when this is traced."
        )


def _shapes_fit(
    hidden: tf.Tensor, kernel: tf.Tensor, labels: tf.Tensor, transposed: bool, *bias: tf.Tensor
) -> bool:
    """Returns whether all sizes are known, none of the classes is missing, and they fit."""
    for tensor in (hidden, kernel, labels, *bias):
        if not tensor.shape.is_fully_defined():
            return False
    if hidden.shape.rank < 1 or kernel.shape.rank != 2:
        return False
    width, vocabulary = _width_and_vocabulary(kernel, transposed)
    if vocabulary == 0 or hidden.shape[-1] != width or labels.shape != hidden.shape[:-1]:
        return False
    return all(b_V.shape == [vocabulary] for b_V in bias)


def require_options(
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> _Options:
    """Returns the options as numbers; raises TypeError or ValueError for one out of its range."""
    return _Options(
        whole_number("ignore_index", ignore_index, minimum=None),
        fraction("label_smoothing", label_smoothing),
        number("z_loss", z_loss, "a finite number of at least 0", lambda v: 0 <= v <= LARGEST),
    )
