"""Reads, in the graph that makes an attention mask, which keys each query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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
# Elements of the largest mask of constants that is evaluated, which takes their memory and time.
_LARGEST = 2**24

# The names of the axes before the last two: "batch", "head", or "one" for any of size 1.
Axes = tuple[str, ...]


class Mask(NamedTuple):
    """Parts of a mask, each of which may hide keys from a query; None hides nothing."""

    before: int | None = None  # query t sees keys from t - before
    after: int | None = None  # to t + after: a causal mask has 0
    queries: tf.Tensor | None = None  # bool [B or 1, T], false for a query that sees nothing
    keys: tf.Tensor | None = None  # bool [B or 1, S], false for a key that no query sees
    # Ids [B or 1, T] and [B or 1, S]: a query sees keys of its own document.
    documents: tuple[tf.Tensor, tf.Tensor] | None = None

    def both(self, other: Mask) -> Mask:
        """Returns the mask that has the parts of this one and of the other."""
        return Mask(
            before=_joined(min, self.before, other.before),
            after=_joined(min, self.after, other.after),
            queries=_joined(tf.logical_and, self.queries, other.queries),
            keys=_joined(tf.logical_and, self.keys, other.keys),
            documents=self.documents or other.documents,
        )


def _joined(join: Callable[[Any, Any], Any], part: Any, other: Any) -> Any:
    if part is None:
        return other
    if other is None:
        return part
    return join(part, other)


class _AlongTokens(NamedTuple):
    """Tensor that differs along the queries only, or along the keys only: it is in one field."""

    queries: tf.Tensor | None = None  # [B or 1, T]
    keys: tf.Tensor | None = None  # [B or 1, S]


class _Operand(NamedTuple):
    tensor: tf.Tensor
    axes: Axes


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
    axes = ("batch", "head")[4 - rank :]  # aligned at the last axis, as NumPy broadcasts
    return _Reader((queries, keys), zero_or_one).read(mask, axes, positive=True)


class _Reader:
    def __init__(self, size: tuple[int, int], zero_or_one: bool):
        self._size = size
        self._zero_or_one = zero_or_one

    def read(self, t: tf.Tensor, axes: Axes, positive: bool) -> Mask | None:
        """Reads a tensor, of numbers only if those that are `positive` are true."""
        if not hasattr(t, "op"):  # a tensor that the layer holds
            t = tf.constant(t.numpy())
        if t.shape.rank is None or t.shape.rank < 2:
            return None
        operation = t.op

        if t.dtype.is_bool or positive:
            padding = self._read_padding(t, axes)
            if padding is not None:
                return padding

        if operation.type in _BOTH:
            left, right = _operands(operation, axes)
            left_mask = self.read(left.tensor, left.axes, positive)
            right_mask = self.read(right.tensor, right.axes, positive)
            if left_mask is None or right_mask is None:
                return None
            if left_mask.documents and right_mask.documents:
                return None
            return left_mask.both(right_mask)

        if operation.type in _TRANSPARENT:
            input_axes = _axes_of_input(operation, axes)
            if input_axes is not None:
                # A cast to a boolean tells 0 from the others, and not what is positive.
                to_bool = operation.type == "Cast" and t.dtype.is_bool and not self._zero_or_one
                return self.read(operation.inputs[0], input_axes, positive and not to_bool)

        captured = {inner.name: outer for outer, inner in getattr(t.graph, "captures", ())}
        if t.name in captured:
            return self.read(captured[t.name], axes, positive)

        if not t.dtype.is_bool or tuple(t.shape[-2:]) != self._size:
            return None
        if operation.type == "Equal" and operation.inputs[0].dtype.is_integer:
            return self._read_documents(operation, axes)
        if operation.type in _COMPARISONS:
            return _compare(operation)
        return _evaluate(t)

    def _read_padding(self, t: tf.Tensor, axes: Axes) -> Mask | None:
        """Reads a mask of shape [B, 1, S] or [B, T, 1]."""
        queries, keys = self._along(t, axes)
        if queries is None and keys is None:
            return None
        if not t.dtype.is_bool:
            queries = None if queries is None else queries > 0
            keys = None if keys is None else keys > 0
        return Mask(queries=queries, keys=keys)

    def _read_documents(self, operation: tf.Operation, axes: Axes) -> Mask | None:
        """Reads integers [B, T, 1] that equal integers [B, 1, S]; evaluates other equalities."""
        left, right = _operands(operation, axes)
        left_ids = self._along(left.tensor, left.axes)
        right_ids = self._along(right.tensor, right.axes)
        query_ids = right_ids.queries if left_ids.queries is None else left_ids.queries
        key_ids = right_ids.keys if left_ids.keys is None else left_ids.keys
        if query_ids is None or key_ids is None:
            return _evaluate(operation.outputs[0])
        return Mask(documents=(query_ids, key_ids))

    def _along(self, t: tf.Tensor, axes: Axes) -> _AlongTokens:
        """Reshapes a tensor [B, T, 1] to [B, T] of queries, and one [B, 1, S] to [B, S] of keys.

        Both fields are None for a tensor of another shape.
        """
        if (t.shape.rank or 0) < 2:
            return _AlongTokens()
        for name, size in zip(axes, t.shape[:-2], strict=True):
            if name == "head" and size != 1:
                return _AlongTokens()
        queries, keys = self._size
        if t.shape[-2] == 1 and t.shape[-1] == keys:
            return _AlongTokens(keys=tf.reshape(t, [-1, keys]))
        if t.shape[-1] == 1 and t.shape[-2] == queries:
            return _AlongTokens(queries=tf.reshape(t, [-1, queries]))
        return _AlongTokens()


def _operands(operation: tf.Operation, axes: Axes) -> list[_Operand]:
    """Returns the operands of an operation that broadcasts, each with the names of its own axes."""
    operands = []
    for tensor in operation.inputs:
        first = len(axes) + 2 - (tensor.shape.rank or 0)
        operands.append(_Operand(tensor, axes[first:]))
    return operands


def _axes_of_input(operation: tf.Operation, axes: Axes) -> Axes | None:
    """Names the axes of what an operation only casts, broadcasts or gives axes of size 1.

    Returns None if the operation does more.
    """
    before = operation.inputs[0].shape
    after = operation.outputs[0].shape
    if before.rank is None or before.rank < 2 or None in before[-2:] or before[-2:] != after[-2:]:
        return None
    if operation.type in ("BroadcastTo", "Cast", "Identity"):
        return axes[after.rank - before.rank :]
    if operation.type == "StridedSlice":
        strides = tf.get_static_value(operation.inputs[3])
        if strides is None or (strides != 1).any():
            return None

    # With axes of size 1 left out, the input's are the result's.
    names = [name for name, size in zip(axes, after[:-2], strict=True) if size != 1]
    if None in after[:-2]:
        return None
    sizes_before = [size for size in before[:-2] if size != 1]
    sizes_after = [size for size in after[:-2] if size != 1]
    if sizes_before != sizes_after:
        return None
    remaining_names = iter(names)
    input_axes = []
    for size in before[:-2]:
        if size == 1:
            input_axes.append("one")
        else:
            input_axes.append(next(remaining_names))
    return tuple(input_axes)


def _compare(operation: tf.Operation) -> Mask | None:
    """Reads a comparison of constants [T, 1] and [1, S] or [S], however many they are."""
    mask = operation.outputs[0]
    queries, keys = mask.shape[-2:]
    left, right = operation.inputs
    sign = _COMPARISONS[operation.type]
    if not _is_column(left, queries):
        left, right = right, left
        sign = _MIRRORED[sign]
    if not _is_column(left, queries):  # a number beside distances
        return _evaluate(mask)
    of_queries = _constant(left)
    of_keys = _constant(right)
    if of_queries is None or of_keys is None:
        return _evaluate(mask)
    if of_queries.size != queries or of_keys.size != keys:
        return _evaluate(mask)
    of_queries = of_queries.ravel()
    of_keys = of_keys.ravel()
    if not (of_keys[1:] > of_keys[:-1]).all():
        return None

    # A query sees the keys before its edge, or those from the edge on.
    side: Literal["left", "right"] = "right" if sign in (">=", "<") else "left"
    edges = np.searchsorted(of_keys, of_queries, side)
    places = np.arange(queries)
    if sign in (">", ">="):
        before = queries
        after = edges[0] - 1
        edges_of_band = np.minimum(places + after + 1, keys)
    else:
        before = places[-1] - edges[-1]
        after = keys
        edges_of_band = np.maximum(places - before, 0)
    if not np.array_equal(edges, edges_of_band):
        return None
    return _band(before, after, queries, keys)


def _is_column(t: tf.Tensor, queries: int) -> bool:
    return bool(t.shape.rank) and tuple(t.shape[-2:]) == (queries, 1)


def _band(before: int, after: int, queries: int, keys: int) -> Mask | None:
    """Makes a mask of a band, without a bound that hides nothing.

    Returns None where a query does not see its own place.
    """
    if before < 0 or after < 0:
        return None
    mask = Mask()
    if before < queries - 1:
        mask = mask._replace(before=int(before))
    if after < keys - 1:
        mask = mask._replace(after=int(after))
    return mask


def _evaluate(t: tf.Tensor) -> Mask | None:
    """Evaluates a mask of constants; None if it depends on an input, or is no band."""
    if any(size != 1 for size in t.shape[:-2]) or t.shape.num_elements() > _LARGEST:
        return None
    value = _constant(t)
    if value is None:
        return None
    matrix = value.reshape(t.shape[-2:])
    queries, keys = matrix.shape
    before = matrix[:, 0].sum() - 1
    after = matrix[0].sum() - 1
    is_early_enough = np.tri(queries, keys, after, dtype=bool)
    is_too_early = np.tri(queries, keys, -before - 1, dtype=bool)
    if not np.array_equal(matrix, is_early_enough ^ is_too_early):
        return None
    return _band(before, after, queries, keys)


def _constant(t: tf.Tensor) -> np.ndarray | None:
    """Evaluates a tensor; None if it depends on an input of the graph, or is drawn.

    It is None too if the tensor cannot be evaluated.
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
