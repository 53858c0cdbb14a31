"""Reads, in the graph that makes an attention mask, which keys each query sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.kernels import private

# Operations that cast, reshape or broadcast; they move no query and no key if the last two axes
# stay the same.
_TRANSPARENT = {
    "BroadcastTo",
    "Cast",
    "ExpandDims",
    "Identity",
    "Reshape",
    "Squeeze",
    "StridedSlice",
}
_BOTH = {"LogicalAnd", "Minimum"}
_COMPARISONS = {"Greater": ">", "GreaterEqual": ">=", "Less": "<", "LessEqual": "<="}
_MIRRORED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_LARGEST = 2**24  # elements of a mask that is evaluated

# the names of the axes before the last two: "batch", "head", or "one" for any of size 1
Axes = tuple[str, ...]


class Mask(NamedTuple):
    """Parts of a mask: a query sees the keys that all parts let it see, and None lets it see
    all.
    """

    before: int | None = None  # query t sees keys from t - before
    after: int | None = None  # to t + after: a causal mask has 0
    queries: tf.Tensor | None = None  # bool [B or 1, T], false for a query that sees nothing
    keys: tf.Tensor | None = None  # bool [B or 1, S], false for a key that no query sees
    # Ids [B or 1, T] and [B or 1, S]: a query sees keys of its own document.
    documents: tuple[tf.Tensor, tf.Tensor] | None = None

    def both(self, other: Mask) -> Mask:
        """Returns the mask that has the parts of this one and of the other."""
        parts = zip((min, min, tf.logical_and, tf.logical_and), self[:4], other[:4], strict=True)
        before, after, queries, keys = (
            b if a is None else a if b is None else join(a, b) for join, a, b in parts
        )
        return Mask(before, after, queries, keys, self.documents or other.documents)


def read_mask(
    mask: tf.Tensor, queries: int, keys: int, *, zero_or_one: bool = False
) -> Mask | None:
    """Takes a symbolic mask apart: true, or a positive integer, where a query sees a key.

    A part that depends on no input of the graph is evaluated, such as a causal mask. A part of
    shape [B, 1, S] or [B, T, 1] is padding, whatever its values. Integers [B, T, 1] that equal
    integers [B, 1, S] are documents, of which a mask may have one part. Parts are joined by `&` or
    `minimum`, and may get axes of size 1. The mask is broadcast to [B, H, queries, keys], as by
    NumPy; `zero_or_one` says that integers which are cast to booleans are no others. Returns None
    if there is a part of another kind, such as one that differs between heads.
    """
    rank = mask.shape.rank
    if rank is None or not 2 <= rank <= 4 or not (mask.dtype.is_bool or mask.dtype.is_integer):
        return None
    return _Reader((queries, keys), zero_or_one).read(
        mask, ("batch", "head")[4 - rank :], positive=True
    )


class _Reader:
    def __init__(self, size: tuple[int, int], zero_or_one: bool):
        self._size, self._zero_or_one = size, zero_or_one

    def read(self, t: tf.Tensor, axes: Axes, positive: bool) -> Mask | None:
        """Reads a tensor, of numbers only if those that are `positive` are true."""
        t = t if hasattr(t, "op") else tf.constant(t.numpy())  # a tensor that the layer holds
        if t.shape.rank is None or t.shape.rank < 2:
            return None
        operation, last = t.op, tuple(t.shape[-2:])
        if (t.dtype.is_bool or positive) and (padding := self._read_padding(t, axes)) is not None:
            return padding
        if operation.type in _BOTH:
            one, other = (
                self.read(each, names, positive) for each, names in _operands(operation, axes)
            )
            if one is None or other is None or (one.documents and other.documents):
                return None
            return one.both(other)
        if operation.type in _TRANSPARENT and (kept := _axes_of_input(operation, axes)) is not None:
            # A cast to a boolean tells 0 from the others, and not what is positive.
            to_bool = operation.type == "Cast" and t.dtype.is_bool and not self._zero_or_one
            return self.read(operation.inputs[0], kept, positive and not to_bool)
        captured = {inner.name: outer for outer, inner in getattr(t.graph, "captures", ())}
        if t.name in captured:
            return self.read(captured[t.name], axes, positive)
        if not t.dtype.is_bool or last != self._size:
            return None
        if operation.type == "Equal" and operation.inputs[0].dtype.is_integer:
            (query, key), (other_query, other_key) = (
                self._along(*each) for each in _operands(operation, axes)
            )
            query, key = other_query if query is None else query, other_key if key is None else key
            return _evaluate(t) if query is None or key is None else Mask(documents=(query, key))
        return _compare(operation) if operation.type in _COMPARISONS else _evaluate(t)

    def _read_padding(self, t: tf.Tensor, axes: Axes) -> Mask | None:
        """Reads a mask of shape [B, 1, S] or [B, T, 1]."""
        query, key = (
            None if ids is None else ids if t.dtype.is_bool else ids > 0
            for ids in self._along(t, axes)
        )
        return None if query is key is None else Mask(queries=query, keys=key)

    def _along(self, t: tf.Tensor, axes: Axes) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Returns a tensor of shape [B, T, 1] as [B, T], and none of keys; one of shape [B, 1, S]
        as [B, S] of keys.
        """
        if (t.shape.rank or 0) < 2 or any(
            name == "head" and size != 1 for name, size in zip(axes, t.shape[:-2], strict=True)
        ):
            return None, None
        if t.shape[-2] == 1 and t.shape[-1] == self._size[1]:
            return None, tf.reshape(t, [-1, self._size[1]])
        if t.shape[-1] == 1 and t.shape[-2] == self._size[0]:
            return tf.reshape(t, [-1, self._size[0]]), None
        return None, None


def _operands(operation: tf.Operation, axes: Axes) -> list[tuple[tf.Tensor, Axes]]:
    """Returns the operands of an operation that broadcasts, each with the names of its own axes."""
    return [(each, axes[len(axes) + 2 - (each.shape.rank or 0) :]) for each in operation.inputs]


def _axes_of_input(operation: tf.Operation, axes: Axes) -> Axes | None:
    """Names the axes of what an operation only casts, broadcasts or gives axes of size 1; None if
    it does more.
    """
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    if before.rank is None or before.rank < 2 or None in before[-2:] or before[-2:] != after[-2:]:
        return None
    if operation.type in ("BroadcastTo", "Cast", "Identity"):
        return axes[after.rank - before.rank :]
    if operation.type == "StridedSlice":
        strides = tf.get_static_value(operation.inputs[3])
        if strides is None or (strides != 1).any():
            return None
    # With axes of size 1 left out, the input's are the result's.
    named = [name for name, length in zip(axes, after[:-2], strict=True) if length != 1]
    if None in after[:-2] or [n for n in before[:-2] if n != 1] != [
        n for n in after[:-2] if n != 1
    ]:
        return None
    return tuple(named.pop(0) if length != 1 else "one" for length in before[:-2])


def _compare(operation: tf.Operation) -> Mask | None:
    """Reads a comparison of constants [T, 1] and [1, S] or [S], however many they are."""
    mask = operation.outputs[0]
    queries, keys = mask.shape[-2:]
    left, right = operation.inputs
    sign = _COMPARISONS[operation.type]
    if not _is_column(left, queries):
        left, right, sign = right, left, _MIRRORED[sign]
    if not _is_column(left, queries):  # a number beside distances
        return _evaluate(mask)
    rows, columns = _constant(left), _constant(right)
    if rows is None or columns is None or rows.size != queries or columns.size != keys:
        return _evaluate(mask)
    rows, columns = rows.ravel(), columns.ravel()
    if not (columns[1:] > columns[:-1]).all():
        return None
    edge, places = (
        np.searchsorted(columns, rows, "right" if sign in (">=", "<") else "left"),
        np.arange(len(rows)),
    )
    if sign in ("<", "<="):  # the keys from the edge on
        before, after = places[-1] - edge[-1], len(columns)
        banded = np.array_equal(edge, np.maximum(places - before, 0))
    else:
        before, after = len(rows), edge[0] - 1
        banded = np.array_equal(edge, np.minimum(places + after + 1, len(columns)))
    return _band(before, after, len(rows), len(columns)) if banded else None


def _is_column(t: tf.Tensor, queries: int) -> bool:
    return bool(t.shape.rank) and tuple(t.shape[-2:]) == (queries, 1)


def _band(before: int, after: int, rows: int, columns: int) -> Mask | None:
    """Makes a mask of a band, without a bound that hides nothing; None where a query does not see
    its own place.
    """
    first, last = (
        int(bound) if bound < size - 1 else None
        for bound, size in ((before, rows), (after, columns))
    )
    return None if before < 0 or after < 0 else Mask(first, last)


def _evaluate(t: tf.Tensor) -> Mask | None:
    """Evaluates a mask of constants; None if it depends on an input, or is no band."""
    if (
        set(t.shape[:-2]) - {1}
        or t.shape.num_elements() > _LARGEST
        or (found := _constant(t)) is None
    ):
        return None
    matrix = found.reshape(t.shape[-2:])
    (rows, columns), before, after = matrix.shape, matrix[:, 0].sum() - 1, matrix[0].sum() - 1
    band = np.tri(rows, columns, after, dtype=bool) ^ np.tri(rows, columns, -before - 1, dtype=bool)
    return _band(before, after, rows, columns) if np.array_equal(matrix, band) else None


def _constant(t: tf.Tensor) -> np.ndarray | None:
    """Evaluates a tensor; None if it depends on an input of the graph, is drawn, or cannot be
    evaluated.
    """
    if not private.has("lift_to_graph"):
        return None
    graph = tf.Graph()
    try:
        lifted = private.lift_to_graph([t], graph)[t]
    except private.UnliftableError:
        return None
    if any(operation.op_def.is_stateful for operation in graph.get_operations()):
        return None
    with tf.compat.v1.Session(graph=graph) as session:
        try:
            return session.run(lifted)
        except tf.errors.OpError:  # a loop, or a function, which is not in the other graph
            return None
