"""Softmax cross-entropy straight from the hidden states: the logits exist one chunk at a time.

Shape suffixes: N tokens, D width, V vocabulary; n and v are the part of N and V in one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    dynamic_add_slice,
    dynamic_update_slice,
    first_order,
    loop,
    max_and_exp_sum,
    product,
)


class LabelScores(NamedTuple):
    """Scores of each token's label among its logits, in tensors of the labels' shape; garbage where
    it is no class.
    """

    loss: tf.Tensor  # `logsumexp(logits) - logits[label]`, float32, without smoothing or z-loss
    best: tf.Tensor  # the place of the largest logit, int32, the first of several
    # how many logits are larger than the label's, int32, where that was asked for
    above: tf.Tensor | None = None


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
    """Computes the cross-entropy of each token from a linear layer whose logits are never all in
    memory.

    Equal, to rounding, to this unfused expression, in which float16 and bfloat16 products are
    summed in float32 and
    not rounded again:

        logits = cast(hidden @ cast(kernel, hidden.dtype), float32) + bias          # [..., V]
        logits = soft_cap * tanh(logits / soft_cap)                                 # where there is
        one lse = logsumexp(logits) loss = (1 - label_smoothing) * (lse - logits[label]) +
        label_smoothing * (lse - mean(logits)) loss = where(label == ignore_index, 0, loss + z_loss
        * lse**2)

    Tokens and vocabulary are both cut into chunks; on a GPU, tokens alone. One loop over the chunks
    computes `lse` and keeps nothing else; the backward pass computes each chunk's logits once more
    (Cut Cross-Entropy, Wijmans et al. 2024, https://arxiv.org/abs/2411.09009). So two chunks of
    logits exist at once, of `chunk_size**2` each where that is given. Gradients are summed in
    float32. The z-loss is that of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311).

    Args: hidden: [..., D], float32, float16 or bfloat16. kernel: [D, V], float32 (the raw weights)
        or hidden's dtype. labels: integers [...], in [0, V) or `ignore_index`. The loss of a label
        that is neither is NaN, and so are
            the gradients, where XLA by itself would read another column.
        bias: [V], float32 or hidden's dtype; None for none.
        transpose_kernel: the kernel is [V, D], as the table of an embedding is; so is its gradient.
        ignore_index: the label of tokens whose loss, and share in the gradients, is 0.
        label_smoothing: the part of the target that is spread evenly over the vocabulary, in [0,
            1).
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
    head, labels = _checked(
        hidden, kernel, labels, bias, transpose_kernel, chunk_size, None, soft_cap, options[1]
    )
    one_of("implementation", implementation, ("auto", "chunked", "reference"))
    if implementation == "auto":
        implementation = "reference" if _is_small(head, chunk_size) else "chunked"
    return _each(head, labels, *options, implementation)[0]


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
    """Computes `sum(weights * linear_cross_entropy(...))`, a float32 scalar, by three matmuls in
    place of four.

    The gradients of a weighted sum are known, up to its own cotangent, as soon as the losses are.
    So "one_pass" over slices of the tokens, each with all its logits, computes losses and
    gradients, and the backward pass only multiplies these by the cotangent (Liger Kernel, Hsu et
    al. 2024, https://arxiv.org/abs/2410.10989). There are no second derivatives. "auto" takes it on
    a GPU where a tape may ask for gradients and no chunk_size is given; but not with a z-loss in
    float16, whose gradients have no bound before the first slice that would keep them in range.

    `weights`, float32, are broadcast to labels' shape; `rounded_kernel` is `cast(kernel,
    hidden.dtype)`, where it is at hand; the other options are those of `linear_cross_entropy`.
    Returned beside the sum are scores without gradients where `ranks` is not None; True asks for
    `above` too, another matmul where the vocabulary is cut.
    """
    numbers = require_options(**options)
    head, labels = _checked(
        hidden,
        kernel,
        labels,
        bias,
        transpose_kernel,
        chunk_size,
        rounded_kernel,
        soft_cap,
        numbers[1],
    )
    one_of("implementation", implementation, ("auto", "one_pass", "chunked", "reference"))
    if implementation == "auto":
        one_pass = has_gpu() and chunk_size is None and private.record.could_possibly_record()
        one_pass = one_pass and not (numbers[2] and head.hidden_ND.dtype == tf.float16)
        implementation = (
            "reference" if _is_small(head, chunk_size) else "one_pass" if one_pass else "chunked"
        )
    if implementation == "one_pass" and head.tokens.size:
        head = head._replace(columns=cut(head.columns.size, head.columns.size))
        total, *scores = _one_pass(head, labels, weights, *numbers, ranks)
    else:
        losses, scores = _each(head, labels, *numbers, implementation, ranks)
        total = tf.reduce_sum(weights * losses)
    return total, None if ranks is None else LabelScores(
        *(tf.reshape(t, labels.shape) for t in scores)
    )


def cross_entropy_from_logits(
    logits: tf.Tensor,
    labels: tf.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tf.Tensor:
    """Computes the losses of `linear_cross_entropy` from existing logits: [..., V] and [...] ->
    float32 [...].
    """
    vocabulary = logits.shape[-1]

    def lse_and_target(column_N):
        return _of_logits(
            tf.reshape(tf.cast(logits, tf.float32), [-1, vocabulary]), column_N, label_smoothing
        )

    return _losses(lse_and_target, labels, vocabulary, ignore_index, z_loss)[0]


def _each(head, labels, ignore_index, smoothing, z_loss, implementation, ranks=None):
    """Returns the losses and the parts of the scores."""

    def lse_and_target(column_N):
        if implementation == "chunked" and head.tokens.size:
            return _chunked(head, column_N, smoothing, ranks)
        kernel_DV = tf.transpose(head.kernel) if head.transposed else head.kernel
        logits_NV = product(
            head.hidden_ND, kernel_DV, lambda dlogits_NV: _factor(dlogits_NV, head.hidden_ND.dtype)
        )
        for b_V in head.bias:
            logits_NV += tf.cast(b_V, tf.float32)
        return _of_logits(head.capped(logits_NV), column_N, smoothing, ranks)

    return _losses(lse_and_target, labels, head.columns.size, ignore_index, z_loss)


def _losses(
    lse_and_target: Callable, labels: tf.Tensor, vocabulary: int, ignore_index: int, z_loss: float
):
    """Computes the losses from what returns each token's log-sum-exp, target logit and scores;
    returns these too.
    """
    with tf.name_scope("linear_cross_entropy"):
        column_N, counted_N = _columns(labels, vocabulary, ignore_index)
        lse_N, target_N, *scores = lse_and_target(column_N)
        losses_N = lse_N - target_N
        if z_loss:
            losses_N += z_loss * tf.square(lse_N)
        losses_N = tf.where(counted_N == 0.0, 0.0, losses_N * counted_N)
    return tf.reshape(losses_N, tf.shape(labels)), scores


def _columns(labels: tf.Tensor, vocabulary: int, ignore_index: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each label's column, -1 for none, and its loss's factor: 0 if ignored, NaN (no step)
    if out of range.
    """
    labels_N = tf.cast(tf.reshape(labels, [-1]), tf.int64)
    in_range_N = (labels_N >= 0) & (labels_N < vocabulary)
    counted_N = tf.where(labels_N == ignore_index, 0.0, tf.where(in_range_N, 1.0, math.nan))
    return tf.cast(tf.where(in_range_N, labels_N, -1), tf.int32), counted_N


def _of_logits(
    logits_NV: tf.Tensor, column_N: tf.Tensor, smoothing: float, ranks: bool | None = None
) -> tuple[tf.Tensor, ...]:
    # A select rather than a gather, whose gradient is a scatter into one more array of this size.
    at_label_NV = tf.where(tf.range(logits_NV.shape[1]) == column_N[:, tf.newaxis], logits_NV, 0.0)
    logit_N = target_N = tf.reduce_sum(at_label_NV, -1)
    if smoothing:
        target_N = (1 - smoothing) * target_N + smoothing * tf.reduce_mean(logits_NV, -1)
    lse_N = tf.reduce_logsumexp(logits_NV, -1)
    if ranks is None:
        return lse_N, target_N
    above = [tf.reduce_sum(tf.cast(logits_NV > logit_N[:, tf.newaxis], tf.int32), -1)] * ranks
    return (
        lse_N,
        target_N,
        tf.stop_gradient(lse_N - logit_N),
        tf.argmax(logits_NV, -1, tf.int32),
        *above,
    )


def _factor(dlogits: tf.Tensor, dtype: tf.DType) -> tf.Tensor | float:
    """Returns a power of two that brings gradients of logits to the top of float16's range, for the
    small ones.
    """
    if dtype != tf.float16:
        return 1.0
    largest = tf.reduce_max(tf.abs(dlogits))
    factor = tf.pow(2.0, 13.0 - tf.math.ceil(tf.math.log(largest) / math.log(2)))
    return tf.where(tf.math.is_finite(factor) & (factor > 0), factor, 1.0)


def _one_pass(head, labels, weights, ignore_index, smoothing, z_loss, ranks):
    column_N, counted_N = _columns(labels, head.columns.size, ignore_index)
    scored = 0 if ranks is None else 2 + ranks  # parts of the scores

    @custom_gradient
    def weighted_sum(weight_N, *inputs):
        own = head.of(*inputs)
        factor = _factor(weight_N, own.hidden_ND.dtype)
        dlse, dtarget = (
            head.tokens.cut_up(factor * weight_N),
            head.tokens.cut_up(-factor * weight_N),
        )
        mean_N = own.mean() if smoothing else None

        def step(i, losses_N, *others):
            scores, sums = others[:scored], others[scored:]
            chunk = own.chunk(i, column_N)
            n, size = chunk.start[0], head.tokens.length
            dlse_n, dtarget_n = dlse[i], dtarget[i]
            row_max_n, row_sum_n, *best = max_and_exp_sum(chunk.logits_nv, argmax=bool(scored))
            lse_n = row_max_n + tf.math.log(row_sum_n)
            here_n, logit_n = chunk.at_label()
            found = [lse_n - logit_n, *best, *[chunk.above(logit_n)] * bool(ranks)][:scored]
            scores = [
                dynamic_update_slice(t, part, [n]) for t, part in zip(scores, found, strict=True)
            ]
            target_n = tf.where(here_n, logit_n, 0.0)
            if smoothing:
                target_n = (1 - smoothing) * target_n + smoothing * tf.slice(mean_N, [n], [size])
            losses_n = lse_n - target_n
            if z_loss:
                dlse_n *= 1 + 2 * z_loss * lse_n
                losses_n += z_loss * tf.square(lse_n)
            softmax_nv = (
                tf.exp(chunk.logits_nv - row_max_n[:, tf.newaxis]) / row_sum_n[:, tf.newaxis]
            )
            sums = own.add(sums, chunk, softmax_nv, dlse_n, dtarget_n, smoothing)
            return [dynamic_update_slice(losses_N, losses_n, [n]), *scores, *sums]

        with private.record.stop_recording():  # an eager tape would keep what the loop computes
            kinds = [tf.float32, tf.float32, tf.int32, tf.int32][: 1 + scored]
            zeros = [
                *(tf.zeros(weight_N.shape, kind) for kind in kinds),
                *(tf.zeros(t.shape) for t in inputs),
            ]
            losses_N, *others = loop(head.tokens.pieces * head.columns.pieces, step, zeros)
        scores, sums = others[:scored], others[scored:]

        def gradient(d, *of_scores):
            grads = [
                tf.cast(d / factor * total, t.dtype) for total, t in zip(sums, inputs, strict=True)
            ]
            return first_order([d * losses_N, *grads], "linear_cross_entropy_sum_and_scores")

        return (
            tf.reduce_sum(tf.where(counted_N == 0.0, 0.0, weight_N * losses_N)),
            *scores,
        ), gradient

    with tf.name_scope("linear_cross_entropy"):
        weight_N = tf.reshape(tf.broadcast_to(weights, labels.shape), [-1])
        return weighted_sum(
            tf.where(counted_N == 0, 0.0, weight_N * counted_N),
            head.hidden_ND,
            head.kernel,
            *head.bias,
        )


def _chunked(head, column_N, smoothing, ranks):
    @custom_gradient
    def lse_and_target(*inputs):
        own = head.of(*inputs)
        lse_N, logit_N, *best = _online_lse(own, column_N, argmax=ranks is not None)
        target_N = (1 - smoothing) * logit_N + smoothing * own.mean() if smoothing else logit_N
        scores = (
            []
            if ranks is None
            else [lse_N - logit_N, *best, *([_above(own, column_N, logit_N)] if ranks else [])]
        )

        def gradient(dlse_N, dtarget_N, *of_scores):
            factor = _factor(tf.abs(dlse_N) + tf.abs(dtarget_N), own.hidden_ND.dtype)
            dlse, dtarget = (
                head.tokens.cut_up(factor * dlse_N),
                head.tokens.cut_up(factor * dtarget_N),
            )

            def backward(i, *sums):
                chunk = own.chunk(i, column_N)
                row, lse_n = chunk.place[0], tf.slice(lse_N, [chunk.start[0]], [head.tokens.length])
                softmax_nv = tf.exp(chunk.logits_nv - lse_n[:, tf.newaxis])
                return own.add(sums, chunk, softmax_nv, dlse[row], dtarget[row], smoothing)

            sums = loop(
                head.tokens.pieces * head.columns.pieces,
                backward,
                [tf.zeros(t.shape) for t in inputs],
            )
            return [tf.cast(total / factor, t.dtype) for total, t in zip(sums, inputs, strict=True)]

        return (lse_N, target_N, *scores), gradient

    return lse_and_target(head.hidden_ND, head.kernel, *head.bias)


def _online_lse(head, column_N, argmax):
    """Computes each token's log-sum-exp, its label's logit and, if asked to, its largest logit's
    column in one loop.
    """

    def forward(i, *carried):
        chunk = head.chunk(i, column_N)
        n = chunk.start[0]
        before = [tf.slice(t, [n], [head.tokens.length]) for t in carried]
        row_max_n, row_sum_n, label_logit_n, *best = before
        chunk_max_n, chunk_sum_n, *place = max_and_exp_sum(chunk.logits_nv, argmax)
        new_row_max_n = tf.maximum(row_max_n, chunk_max_n)
        new_row_sum_n = row_sum_n * tf.exp(row_max_n - new_row_max_n)
        new_row_sum_n += chunk_sum_n * tf.exp(chunk_max_n - new_row_max_n)
        here_n, logit_n = chunk.at_label()
        after = [new_row_max_n, new_row_sum_n, tf.where(here_n, logit_n, label_logit_n)]
        for place_n, best_n in zip(place, best, strict=True):
            after.append(tf.where(chunk_max_n > row_max_n, place_n + chunk.start[1], best_n))
        if head.tokens.overlap:
            fresh_n = head.tokens.fresh(chunk.place[0])
            after = [tf.where(fresh_n, new, old) for new, old in zip(after, before, strict=True)]
        return [dynamic_update_slice(t, new, [n]) for t, new in zip(carried, after, strict=True)]

    # A finite start: the exponential of -inf - -inf, in a chunk without a possible class, would be
    # NaN.
    size = [head.tokens.size]
    start = [
        tf.fill(size, tf.float32.min),
        tf.zeros(size),
        tf.zeros(size),
        *[tf.zeros(size, tf.int32)] * argmax,
    ]
    row_max_N, row_sum_N, *others = loop(head.tokens.pieces * head.columns.pieces, forward, start)
    return row_max_N + tf.math.log(row_sum_N), *others


def _above(head, column_N, logit_N):
    """Counts each token's logits above its label's, which is known only after a loop over all of
    them.
    """

    def step(i, above_N):
        chunk = head.chunk(i, column_N)
        n, size = chunk.start[0], head.tokens.length
        above_n = tf.where(
            head.tokens.fresh(chunk.place[0]), chunk.above(tf.slice(logit_N, [n], [size])), 0
        )
        return [dynamic_add_slice(above_N, above_n, [n])]

    return loop(
        head.tokens.pieces * head.columns.pieces, step, [tf.zeros([head.tokens.size], tf.int32)]
    )[0]


def _checked(
    hidden, kernel, labels, bias, transposed, chunk_size, rounded=None, soft_cap=None, smoothing=0.0
) -> tuple[Head, tf.Tensor]:
    """Returns the head and the labels; raises TypeError or ValueError for arguments that do not
    fit.
    """
    hidden, kernel, labels = (
        as_tensor("hidden", hidden),
        as_tensor("kernel", kernel),
        as_tensor("labels", labels),
    )
    biases = () if bias is None else (as_tensor("bias", bias),)
    transposed = true_or_false("transpose_kernel", transposed)
    _require_tensors(hidden, kernel, labels, transposed, *biases)
    width, vocabulary = kernel.shape[:: -1 if transposed else 1]
    count = math.prod(labels.shape)
    if transposed and not has_gpu():
        # XLA:CPU takes up to three times as long for the products with a kernel [V, D].
        kernel, rounded = (None if t is None else tf.transpose(t) for t in (kernel, rounded))
        transposed = False
    if chunk_size is not None:
        tokens = columns = whole_number("chunk_size", chunk_size)
    elif has_gpu():
        # Enough that the products take longer than to read and write the sum of the kernel's
        # gradients, and in few launches; few enough that logits and their gradients stay within
        # 0.15 of all the logits' size.
        tokens, columns = max(1024, min(count // 10, 2048), 2**25 // vocabulary), vocabulary
    else:
        tokens = columns = 2048  # 16 MiB of logits stay in the last cache
    if soft_cap is not None:
        if smoothing:
            raise ValueError(
                f"label_smoothing={smoothing} with soft_cap={soft_cap} (the head's): leave one out."
            )
        soft_cap = positive("soft_cap", soft_cap)
    cuts = cut(count, tokens), cut(vocabulary, columns)
    return Head(
        tf.reshape(hidden, [count, width]), kernel, biases, rounded, transposed, *cuts, soft_cap
    ), labels


def _is_small(head: Head, chunk_size: int | None) -> bool:
    """Returns whether all the logits take no more room than one chunk, or than `hidden`."""
    chunk = chunk_size or (4096 if has_gpu() else 2048)
    return head.tokens.size * head.columns.size <= max(chunk**2, math.prod(head.hidden_ND.shape))


def _require_tensors(
    hidden: tf.Tensor, kernel: tf.Tensor, labels: tf.Tensor, transposed: bool, *bias: tf.Tensor
):
    named = dict(
        zip(("hidden", "kernel", "labels", "bias"), (hidden, kernel, labels, *bias), strict=False)
    )
    if hidden.dtype not in (*HALF, tf.float32):
        raise TypeError(
            f"hidden has dtype {hidden.dtype.name}: it must be float32, float16 or bfloat16."
        )
    for name, tensor in named.items():
        if name in ("kernel", "bias") and tensor.dtype not in (tf.float32, hidden.dtype):
            raise TypeError(
                f"{name} has dtype {tensor.dtype.name}, but hidden {hidden.dtype.name}: float32 "
                "or the same is needed."
            )
    if not labels.dtype.is_integer:
        raise TypeError(
            f"labels have dtype {labels.dtype.name}: they must be integers, the indices of classes."
        )
    layout = "[V, D]" if transposed else "[D, V]"
    shapes = ", ".join(f"{name} {tensor.shape}" for name, tensor in named.items())
    fits = all(tensor.shape.is_fully_defined() for tensor in named.values())
    fits = fits and hidden.shape.rank >= 1 and kernel.shape.rank == 2
    width, vocabulary = kernel.shape[:: -1 if transposed else 1] if fits else (0, 0)
    fits = (
        fits and vocabulary > 0 and hidden.shape[-1] == width and labels.shape == hidden.shape[:-1]
    )
    if not fits or any(b.shape != [vocabulary] for b in bias):
        raise ValueError(
            f"The shapes do not fit: {shapes}. They must be hidden [..., D], kernel {layout}, "
            "labels [...] and bias [V], every size known when this is traced."
        )


def require_options(
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[int, float, float]:
    """Returns the options as numbers; raises TypeError or ValueError for one out of its range."""
    return (
        whole_number("ignore_index", ignore_index, minimum=None),
        fraction("label_smoothing", label_smoothing),
        number("z_loss", z_loss, "a finite number of at least 0", lambda v: 0 <= v <= LARGEST),
    )
