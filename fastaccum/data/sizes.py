"""The few sizes that micro-batches are filled up to, where batches have other numbers of rows, or other lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from fastaccum.data.stacks import Batch, Layout, Place, reshape, split_rows
from fastaccum.lines import warn

WASTED = 0.34  # of a micro-batch, at most, before a length of its own is worth a program
MUCH = 0.2  # of the rows computed, which is worth a word
SHARES = (1.0, 0.7, 0.5)  # of the largest size of a micro-batch: the sizes that get programs, from the first on
# A program takes seconds to compile: shorter trainings do not earn those of smaller sizes back.
STEPS_BEFORE_SMALLER = 32

Lengths = tuple[int, ...]


class Sizes:
    """Arranges the rows of each train step as stacks of few shapes.

    - Rows are dealt out as equal micro-batches of one size, or of the least of a few sizes that holds them: what is
      left is filled with rows that are not valid.
    - Where rows must be exact, they stay in the batches that they came in.
    - Batches of other lengths are padded along their second axis to one of a few lengths, if the layout shows that this
      changes no result; if not, they keep their lengths. Each is a stack of its own then.

    Args:
        what: the data's name in messages.
        spec: specs of a batch.
        layout: the rules.
    """

    def __init__(self, what: str, spec: Batch, layout: Layout):
        self._what = what
        self._layout = layout
        self._may_be_apart = layout.may_be_apart and layout.accumulation > 1
        self._lengths = _Lengths(spec, layout)
        self.batch_size = 0  # of a micro-batch
        # Some step was not of micro-batches of this size and a last one of fewer rows; and how many steps came since.
        self._rows_vary = False
        self._steps_since = 0
        self._given = self._computed = 0  # rows since then, of which those that were not given fill micro-batches up
        self._lengths_vary = False  # within a step
        self._piece = 0  # rows of a stack that is not as large as a micro-batch, since rows and lengths vary

    def place(self) -> Place:
        """Returns what `restore` needs, as plain values."""
        return {
            "batch_size": self.batch_size,
            "rows_vary": self._rows_vary,
            "steps_since": self._steps_since,
            "lengths_vary": self._lengths_vary,
            "piece": self._piece,
            "lengths": self._lengths.place(),
        }

    def restore(self, saved: Place) -> None:
        self.batch_size = saved["batch_size"]
        self._rows_vary = saved["rows_vary"]
        self._steps_since = saved["steps_since"]
        self._lengths_vary = saved["lengths_vary"]
        self._piece = saved["piece"]
        self._lengths.restore(saved["lengths"])

    def arrange(self, batches: list[Batch], rows: list[int]) -> tuple[tuple[Batch, ...], bool]:
        """Returns the stacks of a step, and whether a program computes each of them by itself.

        `rows` are those of the step's batches; these are joined already where all data are of one length.
        """
        rows = [count for count in rows if count]
        self._note(rows)
        if len(batches) == 1:
            batches = [self._lengths.padded(batches)[0]]
        else:
            batches = self._lengths.padded(batches, together=not self._may_be_apart)
            if self._layout.replicas > 1 and len({*map(_row_shapes, batches)}) > 1:
                raise ValueError(
                    f"{self._what}: the micro-batches of one train step have rows of different shapes, and nothing in "
                    "the model or its loss leaves padding out. On several replicas, make them alike: by "
                    "dataset.padded_batch(k * b).unbatch().batch(b) for k micro-batches of b rows, or by as many steps "
                    "in each k batches that a PyDataset or a generator yields."
                )
            groups = _joined(batches, keep_order=self._layout.exact_rows or self._layout.shapes_are_free)
            self._lengths_vary |= len(groups) > 1
            batches = [*groups]
        if self._lengths_vary:
            return self._apart(batches, rows), self._may_be_apart
        (batch,) = batches
        if not self._layout.exact_rows:
            return (self._dealt(batch, rows),), False
        apart = self._may_be_apart and self._rows_vary and any(count != self.batch_size for count in rows)
        return split_rows(_all_valid(batch), rows, apart), apart

    def _note(self, rows: list[int]) -> None:
        self.batch_size = self.batch_size or max(rows)
        *others, last = rows
        if any(count != self.batch_size for count in others) or last > self.batch_size:
            self._rows_vary = True
        self._steps_since += self._rows_vary

    def _apart(self, batches: list[Batch], rows: list[int]) -> tuple[Batch, ...]:
        """Makes stacks of one micro-batch each."""
        if self._layout.exact_rows or self._layout.shapes_are_free:
            left = iter(rows)
            stacks: list[Batch] = []
            for batch in batches:
                total, own = _rows(batch), list[int]()
                while sum(own) < total:
                    own.append(next(left))
                stacks.extend(split_rows(_all_valid(batch), own, by_micro_batch=True))
            return tuple(stacks)
        size = self.batch_size
        if self._rows_vary:
            if not self._piece or max(rows) > 8 * self._piece:
                self._piece = math.ceil(max(rows) / 2)
            size = self._piece
        return tuple(
            reshape(piece, [1, size])
            for batch in batches
            for start in range(0, _rows(batch), size)
            for piece in [_filled(_slice(batch, start, start + size), size)]
        )

    def _dealt(self, batch: Batch, rows: list[int]) -> Batch:
        """Deals rows out as micro-batches of one size."""
        micro_batches, total = self._layout.accumulation, sum(rows)
        if total > micro_batches * self.batch_size:
            larger = max(math.ceil(total / micro_batches), *rows)
            warn(
                f"{self._what}: batches of up to {max(rows)} rows after micro-batches of {self.batch_size}; the "
                f"train step is compiled again for {larger}. Put the largest batch first to compile once.",
                UserWarning,
            )
            self.batch_size = larger
        size = self.batch_size
        if self._rows_vary:
            self._given += total
            self._computed += micro_batches * size
        if self._steps_since == STEPS_BEFORE_SMALLER and (share := 1 - self._given / self._computed) > MUCH:
            warn(
                f"{self._what}: batches differ in their rows, and {share:.0%} of the rows computed only fill up "
                f"micro-batches of {size}. From here on smaller ones have programs of their own. For none that fills "
                "up, cut equal batches, as dataset.unbatch().batch(batch_size) does."
            )
        if self._steps_since > STEPS_BEFORE_SMALLER:
            sizes = [math.ceil(share * size) for share in SHARES[: self._layout.most_sizes]]
            size = min(each for each in sizes if each * micro_batches >= total)
        return reshape(_filled(batch, micro_batches * size), [micro_batches, size])


class _Lengths:
    """The lengths that batches are padded to along the second axis of those tensors whose specs leave it open.

    As long as all batches are of the same lengths, they stay as they are.
    """

    def __init__(self, spec: Batch, layout: Layout):
        leaves = tf.nest.flatten(spec)
        self._open = [
            j for j, s in enumerate(leaves) if s.shape.rank > 1 and s.shape[1] is None and s.dtype != tf.string
        ]
        self._marks_targets = any(s.shape.rank > 1 and s.shape[1] is None for s in tf.nest.flatten(spec.y))
        self._layout = layout
        self._vary: list[bool] = [False] * len(self._open)
        self._fill: float | None = None  # of inputs; None where padding is not known to be exact
        self._rungs: list[Lengths] = []

    def place(self) -> Place:
        return {"vary": self._vary, "fill": self._fill, "rungs": [list(rung) for rung in self._rungs]}

    def restore(self, saved: Place) -> None:
        self._vary = list(saved["vary"])
        self._fill = saved["fill"]
        self._rungs = [tuple(rung) for rung in saved["rungs"]]

    def padded(self, batches: list[Batch], together: bool = False) -> list[Batch]:
        """Pads each batch to a rung of its own, or all of them `together` to one."""
        if not self._open:
            return batches
        lengths = [self._of(batch) for batch in batches]
        if not self._rungs:
            self._rungs.append(lengths[0])
        before = self._vary
        for each in lengths:
            pairs = zip(self._vary, each, self._rungs[0], strict=True)
            self._vary = [varies or own != first for varies, own, first in pairs]
        if not any(self._vary):
            return batches
        if self._vary != before:
            self._fill = self._find_fill(batches[0], lengths[0])
        if self._fill is None:
            return batches
        if together:
            longest = _longest(lengths)
            lengths = [longest] * len(lengths)
        return [self._pad(b, self._rung(b, each), self._fill) for b, each in zip(batches, lengths, strict=True)]

    def _rung(self, batch: Batch, lengths: Lengths) -> Lengths:
        """Returns the lengths for a batch that needs these."""
        covering = [rung for rung in self._rungs if all(a >= b for a, b in zip(rung, lengths, strict=True))]
        best = min(covering, key=sum, default=None)
        most = self._layout.most_sizes
        if best is not None and (len(self._rungs) >= most or sum(lengths) >= (1 - WASTED) * sum(best)):
            return best
        longer = self._raised(lengths)
        if best is None and len(self._rungs) >= most - 1:
            longer = _longest([longer, *self._rungs])
        few = _slice(batch, 0, 2)
        # A table of positions may be shorter.
        is_exact = longer == self._of(batch) or self._layout.is_same(few, self._pad(few, longer, self._fill))
        self._rungs.append(longer if is_exact else lengths)
        return self._rungs[-1]

    def _find_fill(self, batch: Batch, lengths: Lengths) -> float | None:
        """Finds the value by which inputs may be padded without another result; None if there is none."""
        few = _slice(batch, 0, 2)
        shortest = min(itertools.compress(lengths, self._vary))
        # Short ones first: what padding adds to many steps, as to their maximum, may not show.
        wanted = [length for length in (5, 9, 17, 33, 65) if length < shortest] + [shortest]
        for fill in self._layout.fills:
            found = []
            for length in wanted:
                cut = tuple(n - (shortest - length) if v else n for n, v in zip(lengths, self._vary, strict=True))
                short = self._cut(few, cut)
                beyond = self._raised(tuple(n + v for n, v in zip(self._raised(cut), self._vary, strict=True)))
                same = self._layout.is_same(short, self._pad(short, beyond, fill))
                found += [same] if same is not None else []
                if len(found) == 2 or same is False:
                    break
            if found and all(found):
                return fill
        return None

    def _raised(self, lengths: Lengths) -> Lengths:
        return tuple(_raise(n) if varies else n for n, varies in zip(lengths, self._vary, strict=True))

    def _of(self, batch: Batch) -> Lengths:
        leaves = tf.nest.flatten(batch)
        return tuple(int(leaves[j].shape[1]) for j in self._open)

    def _cut(self, batch: Batch, lengths: Lengths) -> Batch:
        leaves = tf.nest.flatten(batch)
        for j, length in zip(self._open, lengths, strict=True):
            leaves[j] = leaves[j][:, :length]
        return tf.nest.pack_sequence_as(batch, leaves)

    def _pad(self, batch: Batch, lengths: Lengths, fill: float | None) -> Batch:
        """Pads inputs with `fill`, the others with 0; says which elements of targets are real."""
        leaves = tf.nest.flatten(batch)
        inputs = len(tf.nest.flatten(batch.x))
        for j, length in zip(self._open, lengths, strict=True):
            value = fill if j < inputs and leaves[j].dtype.is_floating else 0
            leaves[j] = _pad(leaves[j], length, value)
        padded = tf.nest.pack_sequence_as(batch, leaves)
        if not self._marks_targets:
            return padded
        return padded._replace(real=tf.nest.map_structure(_mark, batch.y, padded.y))


def _pad(tensor: tf.Tensor, length: int, value: float | None) -> tf.Tensor:
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    filling = tf.fill([tensor.shape[0], missing, *tensor.shape[2:]], tf.cast(value, tensor.dtype))
    return tf.concat([tensor, filling], 1)


def _mark(given: tf.Tensor, padded: tf.Tensor) -> tf.Tensor:
    """Returns which elements of a target were given: bool [rows, length], or [rows] of one without a second axis."""
    if given.shape.rank < 2:
        return tf.ones(given.shape, tf.bool)
    return tf.broadcast_to(tf.range(padded.shape[1]) < given.shape[1], padded.shape[:2])


def _raise(length: int) -> int:
    """Returns the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below: a third is wasted at most."""
    power = 1 << max(0, length - 1).bit_length()
    between = power * 3 // 4
    return between if power > 3 and between >= length else power


def _longest(lengths: Iterable[Lengths]) -> Lengths:
    return tuple(map(max, zip(*lengths, strict=True)))


def _rows(batch: Batch) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def _row_shapes(batch: Batch) -> tuple:
    return tuple(tuple(t.shape[1:]) for t in tf.nest.flatten(batch))


def _slice(batch: Batch, start: int, end: int) -> Batch:
    return tf.nest.map_structure(lambda t: t[start:end], batch)


def _joined(batches: Sequence[Batch], keep_order: bool) -> list[Batch]:
    """Joins batches whose rows are of one shape; to `keep_order`, only those that come one after the other."""
    ordered = list(batches) if keep_order else sorted(batches, key=_row_shapes)
    groups = (list(group) for _, group in itertools.groupby(ordered, _row_shapes))
    return [tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *group) for group in groups]


def _all_valid(batch: Batch) -> Batch:
    return batch._replace(valid=tf.ones([_rows(batch)], tf.bool))


def _filled(batch: Batch, rows: int) -> Batch:
    """Repeats the last row up to so many, and says which rows are valid."""
    given = _rows(batch)
    order = tf.range(rows)
    if given < rows:
        taken = tf.minimum(order, given - 1)
        batch = tf.nest.map_structure(lambda t: tf.gather(t, taken), batch)
    return batch._replace(valid=order < given)
