"""The few lengths that batches are padded to, where batches differ in length.

A *length* is that of a tensor's second axis, behind the rows. A *bucket* is what is padded to: a
length for each tensor whose spec leaves its length open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from fastaccum.data.stacks import Batch, Layout, Padding, Place, count_rows, slice_rows

# At most this share of a bucket's lengths may be padding: above a third, a shorter bucket is worth
# a program of its own.
MAX_WASTED_SHARE = 0.34
# Padding is checked on batches cut to these lengths too. What padding adds to many steps may not
# show, as in their maximum; nor what depends on the first few steps alone.
SHORT_LENGTHS = (1, 2, 3, 5, 9)
# Padding is checked on this many rows of a batch alone, so that the checks cost little.
ROWS_OF_CHECK = 2

Lengths = tuple[int, ...]


class LengthBuckets:
    """The lengths that batches are padded to, of tensors whose specs leave the second axis open.

    As long as all batches are of the same lengths, they stay as they are.
    """

    def __init__(self, spec: Batch, layout: Layout):
        leaves = tf.nest.flatten(spec)
        inputs = len(tf.nest.flatten(spec.x))
        targets = len(tf.nest.flatten(spec.y))
        # Places in a flat batch: of tensors whose lengths are open, of inputs, of targets.
        self._open = [place for place, leaf in enumerate(leaves) if _is_open(leaf)]
        self._inputs = range(inputs)
        self._targets = range(inputs, inputs + targets)
        self._padding = layout.padding
        self._max_buckets = layout.max_programs

        self._varies = [False] * len(self._open)
        self._fill: float | None = None  # of inputs; None where padding is not known to be exact
        self._pads_empty_rows: bool | None = None  # None before one has come
        self._buckets: list[Lengths] = []

    @property
    def are_open(self) -> bool:
        """True if the specs leave a length open."""
        return bool(self._open)

    @property
    def vary(self) -> bool:
        """True once batches of other lengths have come."""
        return any(self._varies)

    def place(self) -> Place:
        """Returns what `restore` needs, as plain values."""
        # The keys are those of the checkpoints' format.
        return {
            "varies": [*self._varies],
            "fill": self._fill,
            "rungs": [list(bucket) for bucket in self._buckets],
            "empty": self._pads_empty_rows,
        }

    def restore(self, saved: Place) -> None:
        """Goes on as after the batches that `place` was called after."""
        self._varies = [*saved["varies"]]
        self._fill = saved["fill"]
        self._buckets = [tuple(bucket) for bucket in saved["rungs"]]
        self._pads_empty_rows = saved["empty"]

    def pad(self, batches: list[Batch], together: bool) -> list[Batch]:
        """Pads each batch to a bucket of its own, or all of them `together` to one."""
        if not self._open:
            return batches
        lengths = [self._lengths(batch) for batch in batches]
        varied_before = self._varies
        self._note(lengths)
        padding = self._padding
        if padding is None or not self.vary:
            return batches
        if self._varies != varied_before:
            self._fill = self._find_fill(padding, batches[0])
        if self._fill is None:
            return batches

        may_pad = [self._may_pad(padding, batch) for batch in batches]
        if together:
            if not all(may_pad):
                return batches
            lengths = [_longest(lengths)] * len(lengths)
        padded = []
        for batch, needed, may_pad_batch in zip(batches, lengths, may_pad, strict=True):
            if may_pad_batch:
                bucket = self._find_bucket(needed)
                if bucket is None:
                    bucket = self._add_bucket(padding, batch, needed)
                batch = self._padded(batch, bucket, self._fill)
            padded.append(batch)
        return padded

    # Which batches may be padded, and by what.

    def _may_pad(self, padding: Padding, batch: Batch) -> bool:
        """Tells if the batch has no row that is all padding, or padding is exact for these too.

        Attention of such a row, for one, is the mean over all steps, whatever the mask.
        """
        empty_rows = self._find_empty_rows(batch)
        if self._pads_empty_rows or not len(empty_rows):
            return True
        if self._pads_empty_rows is None:
            checked_rows = empty_rows[:ROWS_OF_CHECK]
            few = tf.nest.map_structure(lambda tensor: tf.gather(tensor, checked_rows), batch)
            padded = self._padded(few, self._longer_bucket(self._lengths(few)), self._fill)
            self._pads_empty_rows = bool(padding.is_same(few, padded, thoroughly=True))
        return self._pads_empty_rows

    def _find_empty_rows(self, batch: Batch) -> np.ndarray:
        """Finds the rows in which an input is all padding, and other rows are not: int64 [rows]."""
        leaves = tf.nest.flatten(batch)
        rows = count_rows(batch)
        is_empty = np.zeros(rows, bool)
        for place in self._varying_inputs():
            leaf = leaves[place]
            fill = self._fill if leaf.dtype.is_floating else 0
            is_all_fill = (leaf.numpy() == fill).reshape(rows, -1).all(1)
            if not is_all_fill.all():
                is_empty |= is_all_fill
        return np.flatnonzero(is_empty)

    def _find_fill(self, padding: Padding, batch: Batch) -> float | None:
        """Finds a value that pads inputs without changing a result; None if there is none."""
        few = slice_rows(batch, 0, ROWS_OF_CHECK)
        lengths = dict(zip(self._open, self._lengths(few), strict=True))
        shortest = min(lengths[place] for place in self._varying())
        short_batches = []
        for length in SHORT_LENGTHS:
            if length < shortest:
                short_batches.append(self._drawn(self._cut(few, shortest - length)))

        for fill in padding.fills:
            verdicts = set()
            for short in short_batches:
                bucket = self._longer_bucket(self._bucket_of(self._lengths(short)))
                padded = self._padded(short, bucket, fill)
                verdicts.add(padding.is_same(short, padded, thoroughly=True))
            if False in verdicts:
                continue
            # The batch as it is, too. What cannot be computed for a few steps is checked
            # thoroughly here.
            padded = self._padded(few, self._longer_bucket(self._lengths(few)), fill)
            verdicts.add(padding.is_same(few, padded, thoroughly=True not in verdicts))
            if False not in verdicts and True in verdicts:
                return fill
        return None

    # The buckets.

    def _note(self, lengths: list[Lengths]) -> None:
        """Notes which lengths vary from batch to batch."""
        if not self._buckets:
            self._buckets.append(lengths[0])
        first = self._buckets[0]
        varies = list(self._varies)
        for batch_lengths in lengths:
            for i, (length, first_length) in enumerate(zip(batch_lengths, first, strict=True)):
                if length != first_length:
                    varies[i] = True
        self._varies = varies

    def _find_bucket(self, lengths: Lengths) -> Lengths | None:
        """Finds the least bucket that holds these lengths; None if a new one would waste less."""
        holding = [bucket for bucket in self._buckets if _holds(bucket, lengths)]
        if not holding:
            return None
        bucket = min(holding, key=sum)
        wastes_little = sum(lengths) >= (1 - MAX_WASTED_SHARE) * sum(bucket)
        if wastes_little or len(self._buckets) >= self._max_buckets:
            return bucket
        return None

    def _add_bucket(self, padding: Padding, batch: Batch, lengths: Lengths) -> Lengths:
        """Adds the bucket above these lengths.

        It has the batch's own lengths where a table of positions ends before the next bucket.
        """
        above = self._bucket_of(lengths)
        if len(self._buckets) >= self._max_buckets - 1:
            # The last one is for all lengths. What is longer still needs another, far above it.
            above = _longest([self._raised(lengths, _raise_to_power), *self._buckets])
        few = slice_rows(batch, 0, ROWS_OF_CHECK)
        new_bucket = lengths
        for bucket in (above, self._raised(lengths, _raise_to_eight)):
            padded = self._padded(few, bucket, self._fill)
            is_needed = bucket == self._lengths(batch)
            if is_needed or padding.is_same(few, padded, thoroughly=False):
                new_bucket = bucket
                break
        self._buckets.append(new_bucket)
        return new_bucket

    def _longer_bucket(self, lengths: Lengths) -> Lengths:
        """Returns the next bucket that is longer than these lengths."""
        longer = []
        for length, varies in zip(lengths, self._varies, strict=True):
            longer.append(length + 1 if varies else length)
        return self._bucket_of(tuple(longer))

    def _bucket_of(self, lengths: Lengths) -> Lengths:
        return self._raised(lengths, _raise)

    def _raised(self, lengths: Lengths, raise_one: Callable[[int], int]) -> Lengths:
        """Raises those lengths that vary."""
        raised = []
        for length, varies in zip(lengths, self._varies, strict=True):
            raised.append(raise_one(length) if varies else length)
        return tuple(raised)

    # The lengths of a batch.

    def _lengths(self, batch: Batch) -> Lengths:
        leaves = tf.nest.flatten(batch)
        return tuple(int(leaves[place].shape[1]) for place in self._open)

    def _varying(self) -> list[int]:
        """Lists the places of the tensors whose lengths vary."""
        return [place for place, varies in zip(self._open, self._varies, strict=True) if varies]

    def _varying_inputs(self) -> list[int]:
        return [place for place in self._varying() if place in self._inputs]

    def _cut(self, batch: Batch, steps: int) -> Batch:
        """Leaves so many of the last steps out of those lengths that vary."""
        leaves = tf.nest.flatten(batch)
        for place in self._varying():
            leaves[place] = leaves[place][:, :-steps]
        return tf.nest.pack_sequence_as(batch, leaves)

    def _drawn(self, batch: Batch) -> Batch:
        """Draws the steps of inputs anew, so that none of them is padding.

        The first steps of the data may all be silence, or padding.
        """
        leaves = tf.nest.flatten(batch)
        for place in self._varying_inputs():
            leaves[place] = _draw_like(leaves[place], seed=place)
        drawn = tf.nest.pack_sequence_as(batch, leaves)
        if drawn.weights is None:
            return drawn
        ones = tf.nest.map_structure(tf.ones_like, drawn.sample_weight)
        return drawn._replace(sample_weight=ones)

    def _padded(self, batch: Batch, bucket: Lengths, fill: float | None) -> Batch:
        """Pads inputs with `fill`, weights with 0, and targets with their last steps.

        `real` says which steps of a target are no padding. A target of 0 could make a loss
        infinite, and its gradient NaN, though it is not counted.
        """
        leaves = tf.nest.flatten(batch)
        real = {place: tf.ones(leaves[place].shape[:1], tf.bool) for place in self._targets}
        for place, length in zip(self._open, bucket, strict=True):
            tensor = leaves[place]
            value = tf.zeros([], tensor.dtype)
            if place in self._inputs and tensor.dtype.is_floating:
                value = tf.cast(fill, tensor.dtype)
            if place in self._targets:
                steps_are_real = tf.range(length) < tensor.shape[1]
                real[place] = tf.broadcast_to(steps_are_real, [tensor.shape[0], length])
                if tensor.shape[1]:
                    value = tensor[:, -1:]
            leaves[place] = _pad(tensor, length, value)
        padded = tf.nest.pack_sequence_as(batch, leaves)
        if not any(place in self._targets for place in self._open):
            return padded
        return padded._replace(real=tf.nest.pack_sequence_as(batch.y, list(real.values())))


def _is_open(spec: tf.TensorSpec) -> bool:
    return spec.shape.rank > 1 and spec.shape[1] is None and spec.dtype != tf.string


def _pad(tensor: tf.Tensor, length: int, value: tf.Tensor) -> tf.Tensor:
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    filling = tf.broadcast_to(value, [tensor.shape[0], missing, *tensor.shape[2:]])
    return tf.concat([tensor, filling], 1)


def _draw_like(tensor: tf.Tensor, seed: int) -> tf.Tensor:
    """Draws normal numbers in place of floats, and values that occur, but not 0, for integers.

    Floats that are all 0 or 1, as a mask's are, are drawn as integers are.
    """
    values = np.unique(tensor.numpy())
    if tensor.dtype.is_floating and not np.isin(values, (0, 1)).all():
        return tf.cast(tf.random.stateless_normal(tensor.shape, seed=(0, seed)), tensor.dtype)
    drawn_from = values[values != 0]
    if not drawn_from.size:
        drawn_from = values
    drawn = np.random.default_rng(seed).choice(drawn_from, tensor.shape)
    return tf.constant(drawn, tensor.dtype)


def _raise(length: int) -> int:
    """Returns the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds the length.

    A third of it is wasted at most.
    """
    power = _raise_to_power(length)
    between = power * 3 // 4
    return between if power > 3 and between >= length else power


def _raise_to_power(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _raise_to_eight(length: int) -> int:
    return -(-length // 8) * 8


def _holds(bucket: Lengths, lengths: Lengths) -> bool:
    return all(room >= length for room, length in zip(bucket, lengths, strict=True))


def _longest(lengths: Iterable[Lengths]) -> Lengths:
    """Returns the longest of each length."""
    return tuple(max(alternatives) for alternatives in zip(*lengths, strict=True))
