"""A linear layer's logits in chunks of tokens and classes, and what a chunk adds to gradients.

Shape suffixes: N tokens, D width, V vocabulary; n and v are the part of N and V in one chunk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.xla_ops import dot, dynamic_add_slice

# Tokens or columns of a chunk, in multiples of this: matrix units take whole tiles.
_LENGTH_MULTIPLE = 32


class Cut(NamedTuple):
    """Axis in pieces of one length.

    The last piece begins early if it must, on what the one before has covered.
    """

    pieces: int
    length: int
    overlap: int

    @property
    def size(self) -> int:
        return self.pieces * self.length - self.overlap

    def start(self, i: tf.Tensor) -> tf.Tensor:
        return tf.minimum(i * self.length, self.size - self.length)

    def fresh(self, i: tf.Tensor) -> tf.Tensor:
        """Returns the places of piece i that no piece before it has covered: bool [length]."""
        return self.start(i) + tf.range(self.length) >= i * self.length

    def cut_up(self, t: tf.Tensor) -> tf.Tensor:
        """Cuts a vector into its pieces, [pieces, length].

        Places that a piece before has covered hold 0.
        """
        last = (self.pieces - 1) * self.length
        padded = tf.concat([t[:last], tf.zeros([self.overlap]), t[last:]], 0)
        return tf.reshape(padded, [self.pieces, self.length])


def cut(size: int, chunk: int) -> Cut:
    """Cuts an axis into even pieces of at most `chunk`, of a multiple of 32 where possible."""
    if not size:
        return Cut(0, 0, 0)
    even_length = size / math.ceil(size / chunk)
    rounded_length = _LENGTH_MULTIPLE * math.ceil(even_length / _LENGTH_MULTIPLE)
    length = min(size, chunk, rounded_length)
    pieces = math.ceil(size / length)
    return Cut(pieces, length, pieces * length - size)


class Chunk(NamedTuple):
    """Logits of some tokens for some classes, and the tensors that they are computed from."""

    start: tuple[tf.Tensor, tf.Tensor]  # its first token and column
    piece: tuple[
        tf.Tensor, tf.Tensor
    ]  # its number among the pieces of the tokens and of the columns
    hidden_nD: tf.Tensor
    kernel: tf.Tensor  # [D, v]; [v, D] where it is transposed
    logits_nv: tf.Tensor
    label_n: tf.Tensor  # from the first column on; none of the columns where it is in another chunk

    def at_label(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns whether the label is in this chunk, and its logit there: bool and float32 [n]."""
        columns = self.logits_nv.shape[1]
        here_n = (self.label_n >= 0) & (self.label_n < columns)
        column_n = tf.clip_by_value(self.label_n, 0, columns - 1)
        return here_n, tf.gather(self.logits_nv, column_n, batch_dims=1)

    def above(self, logit_n: tf.Tensor) -> tf.Tensor:
        """Counts the chunk's logits that are larger than those of the labels, int32 [n]."""
        is_not_label_nv = tf.range(self.logits_nv.shape[1]) != self.label_n[:, tf.newaxis]
        is_above_nv = (self.logits_nv > logit_n[:, tf.newaxis]) & is_not_label_nv
        return tf.reduce_sum(tf.cast(is_above_nv, tf.int32), -1)


class Head(NamedTuple):
    """Linear layer, its inputs, and how its logits are cut into chunks."""

    hidden_ND: tf.Tensor
    kernel: tf.Tensor  # [D, V]; [V, D] where `transposed`
    bias: tuple[tf.Tensor, ...]  # of one [V], or none
    copy: tf.Tensor | None  # the kernel in hidden's dtype, where it is at hand
    transposed: bool
    tokens: Cut
    columns: Cut
    soft_cap: float | None = None

    def of(self, hidden_ND: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> Head:
        """Replaces the tensors; casts the kernel to hidden's dtype once, and not in each chunk."""
        if self.copy is None:
            kernel = tf.cast(kernel, hidden_ND.dtype)
        else:
            kernel = self.copy
        return self._replace(hidden_ND=hidden_ND, kernel=kernel, bias=bias)

    def chunk(self, i: tf.Tensor, column_N: tf.Tensor) -> Chunk:
        """Computes the logits of chunk i; `column_N` holds the labels."""
        row = i // self.columns.pieces
        column = i % self.columns.pieces
        n = self.tokens.start(row)
        v = self.columns.start(column)
        width = self.hidden_ND.shape[1]
        hidden_nD = tf.slice(self.hidden_ND, [n, 0], [self.tokens.length, width])
        if self.transposed:
            kernel = tf.slice(self.kernel, [v, 0], [self.columns.length, width])
        else:
            kernel = tf.slice(self.kernel, [0, v], [width, self.columns.length])
        logits_nv = dot(hidden_nD, kernel, transpose_b=self.transposed)
        for b_V in self.bias:
            logits_nv += tf.cast(tf.slice(b_V, [v], [self.columns.length]), tf.float32)
        logits_nv = self.capped(logits_nv)
        label_n = tf.slice(column_N, [n], [self.tokens.length])
        if self.columns.overlap:
            logits_nv = tf.where(self.columns.fresh(column), logits_nv, -math.inf)
            label_n = tf.where(label_n >= column * self.columns.length, label_n, -1)
        return Chunk((n, v), (row, column), hidden_nD, kernel, logits_nv, label_n - v)

    def capped(self, logits: tf.Tensor) -> tf.Tensor:
        """Bounds logits by the soft cap, if there is one."""
        if self.soft_cap is None:
            return logits
        return self.soft_cap * tf.tanh(logits / self.soft_cap)

    def mean(self) -> tf.Tensor:
        """Returns the mean of each token's logits, float32 [N]: hidden @ (mean of the kernel)."""
        column_axis = 0 if self.transposed else 1
        mean_D = tf.reduce_mean(tf.cast(self.kernel, tf.float32), column_axis)
        mean_N = tf.linalg.matvec(tf.cast(self.hidden_ND, tf.float32), mean_D)
        for b_V in self.bias:
            mean_N += tf.reduce_mean(tf.cast(b_V, tf.float32))
        return mean_N

    def add(
        self,
        sums: list[tf.Tensor],
        chunk: Chunk,
        softmax_nv: tf.Tensor,
        dlse_n: tf.Tensor,
        dtarget_n: tf.Tensor,
        smoothing: float,
    ) -> list[tf.Tensor]:
        """Adds the share of a chunk to the gradients of hidden, kernel and bias, in float32."""
        dhidden_ND, dkernel, *dbias = sums
        n, v = chunk.start
        is_label_nv = tf.range(self.columns.length) == chunk.label_n[:, tf.newaxis]
        smoothed_nv = tf.where(is_label_nv, 1 - smoothing, 0.0)
        if smoothing:
            _, column = chunk.piece
            fresh_v = tf.cast(self.columns.fresh(column), tf.float32)
            smoothed_nv += smoothing / self.columns.size * fresh_v
        dlogits_nv = softmax_nv * dlse_n[:, tf.newaxis] + smoothed_nv * dtarget_n[:, tf.newaxis]
        if self.soft_cap is not None:
            # The derivative of tanh: 0 for the -inf of a column that another chunk has.
            dlogits_nv *= tf.maximum(1 - tf.square(chunk.logits_nv / self.soft_cap), 0.0)
        dbias = [dynamic_add_slice(db_V, tf.reduce_sum(dlogits_nv, 0), [v]) for db_V in dbias]
        dlogits_nv = tf.cast(dlogits_nv, chunk.hidden_nD.dtype)
        dhidden_nD = dot(dlogits_nv, chunk.kernel, transpose_b=not self.transposed)
        dhidden_ND = dynamic_add_slice(dhidden_ND, dhidden_nD, [n, 0])
        if self.transposed:
            dkernel_part = dot(dlogits_nv, chunk.hidden_nD, transpose_a=True)
            dkernel = dynamic_add_slice(dkernel, dkernel_part, [v, 0])
        else:
            dkernel_part = dot(chunk.hidden_nD, dlogits_nv, transpose_a=True)
            dkernel = dynamic_add_slice(dkernel, dkernel_part, [0, v])
        return [dhidden_ND, dkernel, *dbias]
