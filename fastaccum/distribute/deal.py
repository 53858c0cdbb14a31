"""Assigns a model's weights to replicas, and lays them out in the buffers of collectives.

Gradients are reduced in rounds, in the order of the weights. To gather new weights, each replica
concatenates the weights that it owns into a line, and lines are padded to one length. The buffer
of a round holds an equally long segment of each replica's line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.distribute.replicas import common_dtype, flat

# A collective's buffer has at most this many bytes. Tensors of other rounds stay beside it.
ROUND = 2**28

Tensors = Sequence[tf.Tensor | tf.TensorSpec | tf.Variable | None]


class Segments(NamedTuple):
    """The segments that all lines are cut into."""

    length: int  # numbers in a segment
    rounds: int  # segments of a line, each in a round of its own


class Part(NamedTuple):
    """The numbers of a flat weight from `start` to before `stop`."""

    place: int  # of the weight among all weights
    start: int
    stop: int


class _Piece(NamedTuple):
    """A part of a weight that lies in one segment of a line."""

    segment: int  # the number of the segment in the line
    part: Part


def deal(sizes: Sequence[int], replicas: int) -> list[list[int]]:
    """Deals weights of these sizes out, the largest first, each to the replica with the least.

    Returns the places of each replica's weights. The first replica, whose memory is planned, gets
    the most.

    >>> deal([1, 8, 3, 4], 2)
    [[1], [3, 2, 0]]
    """
    owned: list[list[int]] = [[] for _ in range(replicas)]

    def total(places: list[int]) -> int:
        return sum(sizes[place] for place in places)

    largest_first = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    for place in largest_first:
        min(owned, key=total).append(place)
    return sorted(owned, key=lambda places: -total(places))


def segments(owned: Sequence[Sequence[int]], tensors: Tensors) -> Segments:
    """Returns the segments of the lines of replicas that own the tensors at these places."""
    lengths = [sum(_size(tensors[place]) for place in places) for places in owned]
    longest = max(lengths)
    # The buffer of a round holds a segment of each replica.
    most = max(1, ROUND // (len(owned) * _dtype(tensors).size))
    length = min(longest, most)
    return Segments(length, math.ceil(longest / length))


def cut(tensors: Tensors) -> list[list[Part]]:
    """Cuts tensors into rounds; returns the parts of each round."""
    numbers_of_round = ROUND // _dtype(tensors).size
    pieces = _line(range(len(tensors)), tensors, numbers_of_round)
    rounds = []
    for _, pieces_of_round in itertools.groupby(pieces, key=lambda piece: piece.segment):
        rounds.append([piece.part for piece in pieces_of_round])
    return rounds


def pack(
    places: Sequence[int], tensors: Tensors, specs: Tensors, number: int, length: int
) -> tf.Tensor:
    """Returns segment `number` of the line of an owner of these places, padded to its length.

    Args:
        places: places of the weights that the owner has.
        tensors: its tensors, one for each of them.
        specs: specs of the tensors of all weights.
        number: the segment.
        length: the numbers in a segment.
    """
    dtype = _dtype(specs)
    tensor_of_place = dict(zip(places, tensors, strict=True))
    parts = []
    for segment, part in _line(places, specs, length):
        if segment == number:
            numbers = tf.reshape(tf.cast(tensor_of_place[part.place], dtype), [-1])
            parts.append(numbers[part.start : part.stop])
    missing = length - sum(part.shape[0] for part in parts)
    return flat([*parts, tf.zeros([missing], dtype)])


def unpack(
    places: Sequence[int], line: Sequence[tf.Tensor], specs: Tensors
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields each tensor in the segments of an owner's line, with its place."""
    length = line[0].shape[0]
    position = 0  # in the line
    pieces = _line(places, specs, length)
    for place, pieces_of_weight in itertools.groupby(pieces, key=lambda piece: piece.part.place):
        numbers = []
        for segment, part in pieces_of_weight:
            begin = position - segment * length
            size = part.stop - part.start
            # A copy: what the tensor is assigned to would keep the whole buffer.
            numbers.append(tf.raw_ops.DeepCopy(x=line[segment][begin : begin + size]))
            position += size
        spec = specs[place]
        yield place, tf.cast(tf.reshape(tf.concat(numbers, 0), spec.shape), spec.dtype)


def _line(places: Sequence[int], tensors: Tensors, length: int) -> Iterator[_Piece]:
    """Yields the pieces of a line of tensors that is cut into segments of this length."""
    position = 0  # where the weight begins in the line
    for place in places:
        size = _size(tensors[place])
        if size == 0:
            continue
        first = position // length
        last = (position + size - 1) // length
        for segment in range(first, last + 1):
            start = max(segment * length - position, 0)
            stop = min((segment + 1) * length - position, size)
            yield _Piece(segment, Part(place, start, stop))
        position += size


def _dtype(tensors: Tensors) -> tf.DType:
    """Returns the dtype of the numbers in a buffer."""
    dtype = common_dtype(tensor for tensor in tensors if tensor is not None)
    if dtype == tf.bfloat16:  # no collective of TensorFlow's takes it
        return tf.float32
    return dtype


def _size(tensor: tf.Tensor | tf.TensorSpec | tf.Variable | None) -> int:
    if tensor is None:
        return 0
    return math.prod(tensor.shape)
