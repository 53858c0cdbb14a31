"""Stacks that a caller has made by hand, for a train step without `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastaccum.data.rows import as_tensors
from fastaccum.data.stacks import Batch, trip_count


def as_stack(stack: Any) -> Batch:
    """`(x, y)` or `(x, y, sample_weight)` of [micro-batches, rows, ...] arrays as tensors; a `Batch` as it is.

    Raises:
        TypeError: raised if the arrays do not hold dense numbers.
        ValueError: raised if the nest or its axes do not fit.
    """
    if isinstance(stack, Batch):
        return stack
    if not isinstance(stack, (tuple, list)) or len(stack) not in (2, 3):
        raise ValueError(
            f"A train step takes (x, y) or (x, y, sample_weight); got {type(stack).__name__}"
            + (f" of {len(stack)} entries." if isinstance(stack, (tuple, list)) else ".")
        )
    if stack[1] is None:
        raise ValueError("y=None: a train step needs targets, as in (x, y).")
    given = [() if each is None else each for each in stack]
    batch = Batch(*(as_tensors(name, each) for name, each in zip(Batch._fields, given, strict=False)))
    trip_count(batch)
    shapes = [tuple(t.shape) for t in tf.nest.flatten(batch)]
    if len({shape[:2] for shape in shapes}) > 1 or len(shapes[0]) < 2 or 0 in shapes[0][:2]:
        raise ValueError(
            f"Every tensor of a stack has shape [micro-batches, rows, ...], the same first two axes in all: {shapes}."
        )
    return batch


def sample(stack: Batch) -> Batch:
    """Specs of one micro-batch of a stack."""
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), stack)
