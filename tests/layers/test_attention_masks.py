"""Attention masks of random expressions: what is read of a mask is what the mask says, or nothing
is read.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from fastaccum.layers.attention_masks import Mask, read_mask

pytestmark = pytest.mark.long

COMPARE = (ops.greater, ops.greater_equal, ops.less, ops.less_equal, ops.equal, ops.not_equal)
HEADS = 3


class Expressions:
    """Draws masks of `rows` x `queries` x `keys`, some of whose operands depend on an input of the
    graph.
    """

    def __init__(self, seed, rows, queries, keys):
        self.random = np.random.default_rng(seed)
        self.rows, self.queries, self.keys = rows, queries, keys
        self.held, self.variable = tf.constant(3), tf.Variable(2)  # as by a layer

    def pick(self, choices):
        return choices[self.random.integers(len(choices))]

    def scalar(self, ids):
        number = int(self.random.integers(-2, 9))
        forms = (
            lambda: number,
            lambda: float(number),
            lambda: tf.constant(number),
            lambda: np.float32(number),
            lambda: tf.constant([number]),
            lambda: tf.constant([[number]]),
            lambda: tf.constant(float("nan")),
            lambda: self.held,
            lambda: self.variable,
            lambda: ids[0, 0],
            lambda: ops.max(ids),
        )
        return self.pick(forms)()

    def positions(self, ids):
        dtype = self.pick(("int32", "int32", "float32", "uint8", "int64"))
        of_queries, of_keys = (
            ops.arange(self.queries, dtype=dtype),
            ops.arange(self.keys, dtype=dtype),
        )
        forms = (
            lambda: of_queries[:, None],
            lambda: of_keys[None],
            lambda: of_keys,
            lambda: of_keys[::-1],
            lambda: ops.flip(of_queries)[:, None],
            lambda: of_keys[None, None, None],
            lambda: of_queries[:, None] - of_keys,
            lambda: abs(of_keys - of_queries[:, None]),
            lambda: ids[:, None, : self.keys],
            lambda: ids[:, : self.queries, None],
            lambda: ids[:, None, None, : self.keys],
            lambda: ids[:, None, : self.queries, None],
            lambda: ids[0, : self.keys],
            lambda: tf.tile(of_queries[None, :, None], [self.rows, 1, 1]),
            lambda: tf.reshape(tf.range(HEADS, dtype=of_keys.dtype), [HEADS, 1, 1]),
        )
        return self.pick(forms)()

    def operand(self, ids):
        found = self.positions(ids) if self.random.random() < 0.65 else self.scalar(ids)
        if self.random.random() < 0.3:
            found = found + self.scalar(ids)
        return found

    def constant(self):
        shape = self.pick(
            ((), (1,), (self.keys,), (self.queries, 1), (self.queries, self.keys), (1, 1, 1))
        )
        forms = (
            lambda: self.random.random(shape) < 0.5,
            lambda: np.ones(shape, bool),
            lambda: np.tri(self.queries, self.keys, int(self.random.integers(-1, 3)), dtype=bool),
            lambda: True,
        )
        return tf.constant(self.pick(forms)())

    def boolean(self, ids, depth):
        if depth == 0 or self.random.random() < 0.25:
            if self.random.random() < 0.15:
                return self.constant()
            one, other = self.operand(ids), self.operand(ids)
            if self.random.random() < 0.2:
                one, other = tf.cast(one, tf.int32), tf.cast(other, tf.int32)
            return self.pick(COMPARE)(one, other)
        deeper = lambda: self.boolean(ids, depth - 1)  # noqa: E731
        integers = lambda: ops.cast(deeper(), "int32")  # noqa: E731
        forms = (
            lambda: ops.logical_and(deeper(), deeper()),
            lambda: deeper() & deeper(),
            lambda: ops.logical_and(
                deeper(), self.pick((True, tf.constant(True), tf.constant([True])))
            ),
            lambda: ops.logical_or(deeper(), deeper()),
            lambda: ops.logical_or(deeper(), False),
            lambda: ops.logical_not(deeper()),
            lambda: ops.logical_xor(deeper(), deeper()),
            lambda: ops.where(deeper(), deeper(), deeper()),
            lambda: ops.where(deeper(), True, False),
            lambda: ops.cast(ops.minimum(integers(), integers()), "bool"),
            lambda: ops.cast(ops.minimum(integers(), self.scalar(ids)), "bool"),
            lambda: integers() > 0,
            lambda: ops.equal(integers(), integers()),
            lambda: ops.cast(integers() * integers(), "bool"),
            lambda: tf.function(lambda t: tf.identity(t) & True)(deeper()),
            lambda: tf.map_fn(tf.identity, deeper()),
            lambda: self.reshaped(deeper()),
            lambda: self.reshaped(deeper()),
        )
        return self.pick(forms)()

    def reshaped(self, mask):
        sizes = (self.rows, 1, self.queries, self.keys)
        forms = (
            lambda: mask[None],
            lambda: tf.expand_dims(mask, 1),
            lambda: tf.broadcast_to(mask, sizes),
            lambda: tf.broadcast_to(mask, sizes[2:]),
            lambda: tf.broadcast_to(mask, (self.rows, HEADS, *sizes[2:])),
            lambda: tf.squeeze(mask),
            lambda: tf.transpose(mask),
            lambda: mask[..., ::-1],
            lambda: mask[:1],
            lambda: tf.reshape(mask, sizes),
            lambda: tf.ensure_shape(mask, [None] * len(mask.shape)),
            lambda: tf.repeat(mask, 1, 0),
        )
        return self.pick(forms)()

    def mask(self, ids):
        drawn = self.boolean(ids, int(self.random.integers(0, 4)))
        if self.random.random() < 0.2:
            drawn = ops.cast(drawn, "int32")
        if self.random.random() < 0.3 and len(drawn.shape) < 4:
            drawn = drawn[None]
        return drawn


def made_again(parts: Mask, queries, keys):
    """Returns the mask [B, 1, T, S] that the parts stand for."""
    t, s = tf.range(queries)[:, None], tf.range(keys)
    mask = tf.ones([1, 1, queries, keys], tf.bool)
    if parts.before is not None:
        mask &= s >= t - parts.before
    if parts.after is not None:
        mask &= s <= t + parts.after
    if parts.queries is not None:
        mask &= parts.queries[:, None, :, None]
    if parts.keys is not None:
        mask &= parts.keys[:, None, None]
    if parts.documents is not None:
        own, others = parts.documents
        mask &= own[:, None, :, None] == others[:, None, None]
    return mask


SIZES = [(2, 6, 6), (6, 6, 6), (2, 5, 3), (1, 4, 4), (3, 4, 1), (2, 1, 5)]


def read_drawn(seed):
    """Draws a mask; returns what it is, and what was read of it; None for a mask that is none, or
    was not read.
    """
    rows, queries, keys = SIZES[seed % len(SIZES)]
    expressions = Expressions(seed, rows, queries, keys)
    seen = []

    def trace(ids):
        try:
            mask = expressions.mask(ids)
            shape = tf.broadcast_static_shape(
                mask.shape, tf.TensorShape([rows, HEADS, queries, keys])
            )
            drawn = shape == [rows, HEADS, queries, keys]
        except (ValueError, TypeError, IndexError, tf.errors.OpError):
            # shapes that do not go together
            drawn = False
        if not drawn:
            return None
        parts = read_mask(mask, queries, keys)
        seen.append(parts)
        return mask, None if parts is None else made_again(parts, queries, keys)

    ids = np.random.default_rng(seed).integers(-1, 3, (rows, 6)).astype("int32")
    found = tf.function(trace, autograph=False).get_concrete_function(
        tf.TensorSpec(ids.shape, tf.int32)
    )
    if not seen or seen[0] is None:
        return bool(seen), None
    return True, [each.numpy() for each in found(tf.constant(ids))]


def test_random_masks_are_read_as_they_are_or_not_at_all():
    drawn = read = 0
    for seed in range(300):
        is_mask, found = read_drawn(seed)
        drawn += is_mask
        if found is None:
            continue
        read += 1
        rows, queries, keys = SIZES[seed % len(SIZES)]
        mask, again = (np.broadcast_to(each, [rows, HEADS, queries, keys]) for each in found)
        np.testing.assert_array_equal(mask > 0, again, err_msg=f"seed {seed}")
    assert drawn > 120 and read > 40, (drawn, read)
