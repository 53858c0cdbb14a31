"""Assigns a model's weights to replicas, and lays them out in the buffers of collectives.

Gradients are reduced in rounds, in the order of the weights. To gather new weights, each replica
concatenates the weights that it owns into a line, and lines are padded to one length. The buffer
of a round holds an equally long segment of each replica's line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from fastaccum.distribute.replicas import common_dtype, flat

ROUND = 2**28  # bytes of a buffer at most, beside which the tensors of other rounds are still there
Tensors = Sequence[tf.Tensor | tf.TensorSpec | tf.Variable | None]


def deal(sizes: Sequence[int], replicas: int) -> list[list[int]]:
    """Deals the places of weights out, the largest first, each to the replica with the least so
    far.

    The first replica, whose memory is planned, gets the most.

    >>> deal([1, 8, 3, 4], 2)
    [[1], [3, 2, 0]]
    """
    owned: list[list[int]] = [[] for _ in range(replicas)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        min(owned, key=lambda own: sum(sizes[other] for other in own)).append(place)
    return sorted(owned, key=lambda own: -sum(sizes[place] for place in own))


def segments(owned: Sequence[Sequence[int]], tensors: Tensors) -> tuple[int, int]:
    """Returns the numbers in a segment, and of rounds."""
    line = max(sum(_size(tensors[place]) for place in own) for own in owned)
    segment = min(line, max(1, ROUND // (len(owned) * _dtype(tensors).size)))
    return segment, -(-line // segment)


def cut(tensors: Tensors) -> list[list[tuple[int, int, int]]]:
    """Cuts tensors into rounds: the place of each with a part in the round, and where the part
    begins and ends.
    """
    line = _line(range(len(tensors)), tensors, ROUND // _dtype(tensors).size)
    rounds = itertools.groupby(line, key=lambda part: part[1])
    return [[(place, start, stop) for place, _, start, stop in parts] for _, parts in rounds]


def pack(
    own: Sequence[int], tensors: Tensors, specs: Tensors, number: int, segment: int
) -> tf.Tensor:
    """Returns segment `number` of an owner's line, which has these tensors."""
    found, dtype = dict(zip(own, tensors, strict=True)), _dtype(specs)
    line = (part for part in _line(own, specs, segment) if part[1] == number)
    parts = [
        tf.reshape(tf.cast(found[place], dtype), [-1])[start:stop] for place, _, start, stop in line
    ]
    return flat([*parts, tf.zeros([segment - sum(part.shape[0] for part in parts)], dtype)])


def unpack(
    own: Sequence[int], parts: Sequence[tf.Tensor], specs: Tensors
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields each tensor in the segments of an owner's line, with its place."""
    position, line = 0, _line(own, specs, segment := parts[0].shape[0])
    for place, pieces in itertools.groupby(line, key=lambda piece: piece[0]):
        found = []
        for _, number, start, stop in pieces:
            begin, position = position - number * segment, position + stop - start
            # A copy, or what the tensor is assigned to would keep the whole buffer.
            found.append(tf.raw_ops.DeepCopy(x=parts[number][begin : begin + stop - start]))
        yield (
            place,
            tf.cast(tf.reshape(tf.concat(found, 0), specs[place].shape), specs[place].dtype),
        )


def _line(
    own: Sequence[int], tensors: Tensors, segment: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields a weight's place, a segment that has a part of it, and where the part begins and ends
    in the weight.
    """
    position = 0
    for place in own:
        size = _size(tensors[place])
        for number in range(position // segment, -(-(position + size) // segment) if size else 0):
            start, stop = number * segment - position, (number + 1) * segment - position
            yield place, number, max(start, 0), min(stop, size)
        position += size


def _dtype(tensors: Tensors) -> tf.DType:
    dtype = common_dtype(t for t in tensors if t is not None)
    # which no collective of TensorFlow's takes
    return tf.float32 if dtype == tf.bfloat16 else dtype


def _size(tensor: tf.Tensor | tf.TensorSpec | tf.Variable | None) -> int:
    return 0 if tensor is None else math.prod(tensor.shape)
