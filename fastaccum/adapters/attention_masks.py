"""Reads, in the graph that makes an attention mask, which keys each query sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.lift_to_graph import UnliftableError, lift_to_graph

# Operations that move no query and no key, as long as the last two axes stay the same.
_KEEP = {"BroadcastTo", "Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice"}
_BOTH = {"LogicalAnd", "Minimum"}
_LARGEST = 2**27  # elements of a mask that is evaluated

Axes = tuple[str, ...]  # the names of the axes before the last two, of "batch" and "head"


class Mask(NamedTuple):
    """Parts of a mask: a query sees the keys that all parts let it see.

    Attributes:
        causal: whether query t sees keys up to t alone.
        queries: bool [B or 1, T], false for a query that sees nothing; None if each may see.
        keys: bool [B or 1, S], false for a key that no query sees; None if each may be seen.
    """

    causal: bool = False
    queries: tf.Tensor | None = None
    keys: tf.Tensor | None = None

    def both(self, other: Mask) -> Mask:
        """Returns the mask that has the parts of this one and of the other."""
        pairs = zip(self[1:], other[1:], strict=True)
        return Mask(self.causal or other.causal, *(b if a is None else a if b is None else a & b for a, b in pairs))


def read_mask(mask: tf.Tensor, queries: int, keys: int) -> Mask | None:
    """Takes a symbolic mask apart: true, or a positive integer, where a query sees a key.

    A part that depends on no input of the graph is evaluated, such as a causal mask. A part of shape [B, 1, S] or
    [B, T, 1] is padding, whatever its values. Parts are joined by `&` or `minimum`, and may get axes of size 1.

    Args:
        mask: bool or integers, to be broadcast to [B, H, queries, keys] as NumPy does.
        queries, keys: T and S.

    Returns:
        The parts; None if another part is among them, such as one that differs between heads.

    >>> @tf.function
    ... def show(padding):
    ...     positions = tf.range(4)
    ...     mask = read_mask((positions[:, None] >= positions) & padding[:, None, None], 4, 4)
    ...     print(mask.causal, mask.queries, mask.keys.shape)
    >>> _ = show.get_concrete_function(tf.TensorSpec([2, 4], tf.bool))
    True None (2, 4)
    """
    rank = mask.shape.rank
    if rank is None or not 2 <= rank <= 4 or not (mask.dtype.is_bool or mask.dtype.is_integer):
        return None
    mask = mask if hasattr(mask, "op") else tf.constant(mask.numpy())  # a tensor that the layer holds
    return _read(mask, (queries, keys), ("batch", "head")[4 - rank :])


def _read(t: tf.Tensor, size: tuple[int, int], axes: Axes) -> Mask | None:
    if t.shape.rank is None or t.shape.rank < 2:
        return None
    padding, operation = _read_padding(t, size, axes), t.op
    if padding is not None:
        return padding
    if operation.type in _BOTH:
        inputs = [(each, axes[len(axes) + 2 - (each.shape.rank or 0) :]) for each in operation.inputs]
        one, other = (_read(each, size, names) for each, names in inputs)
        return None if one is None or other is None else one.both(other)
    if operation.type in _KEEP and (kept := _axes_of_input(operation, axes)) is not None:
        return _read(operation.inputs[0], size, kept)
    return _evaluate(t) if t.dtype.is_bool and tuple(t.shape[-2:]) == size else None


def _read_padding(t: tf.Tensor, size: tuple[int, int], axes: Axes) -> Mask | None:
    """Reads a mask of shape [B, 1, S] or [B, T, 1]."""
    one_head = all(name == "batch" or length == 1 for name, length in zip(axes, t.shape[:-2], strict=True))
    if one_head and tuple(t.shape[-2:]) == (1, size[1]):
        return Mask(keys=tf.reshape(t if t.dtype.is_bool else t > 0, [-1, size[1]]))
    if one_head and tuple(t.shape[-2:]) == (size[0], 1):
        return Mask(queries=tf.reshape(t if t.dtype.is_bool else t > 0, [-1, size[0]]))
    return None


def _axes_of_input(operation: tf.Operation, axes: Axes) -> Axes | None:
    """Names the axes of what an operation only casts, broadcasts or gives axes of size 1; None if it does more."""
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    if before.rank is None or before.rank < 2 or None in before[-2:]:
        return None
    if operation.type == "BroadcastTo":
        return axes[after.rank - before.rank :] if before[-2:] == after[-2:] else None
    if operation.type == "StridedSlice":
        strides = tf.get_static_value(operation.inputs[3])
        if strides is None or (strides != 1).any():
            return None
    # With axes of size 1 left out, the input's are the result's.
    named = [name for name, length in zip(axes, after[:-2], strict=True) if length != 1]
    if before[-2:] != after[-2:] or [n for n in before[:-2] if n != 1] != [n for n in after[:-2] if n != 1]:
        return None
    return tuple(named.pop(0) if length != 1 else "head" for length in before[:-2])


def _evaluate(t: tf.Tensor) -> Mask | None:
    """Evaluates a mask of constants; None if it depends on an input, or is not the mask of all keys or a causal one."""
    if set(t.shape[:-2]) - {1} or t.shape.num_elements() > _LARGEST:
        return None
    graph = tf.Graph()
    try:
        lifted = lift_to_graph([t], graph)[t]
    except UnliftableError:
        return None
    if any(operation.op_def.is_stateful for operation in graph.get_operations()):
        return None
    with tf.compat.v1.Session(graph=graph) as session:
        matrix = session.run(lifted).reshape(t.shape[-2:])
    if matrix.all():
        return Mask()
    causal = matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.tri(len(matrix), dtype=bool))
    return Mask(causal=True) if causal else None
