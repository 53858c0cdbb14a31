"""The few sizes that micro-batches are filled up to, where batches have other numbers of rows, or
other lengths.

A *length* is that of a tensor's second axis, behind the rows; a *rung* is one of the lengths that
are padded to.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.warnings import warn
from fastaccum.data.stacks import Batch, Layout, Padding, Place, reshape, split_rows

# A third of a padded micro-batch may be padding; above that a shorter length is worth a program.
MAX_WASTED_SHARE = 0.34
# Rows that only fill up are worth a warning above this share.
SHARE_WORTH_A_WARNING = 0.2
# So many steps whose rows vary show which sizes waste least. Shorter trainings do not earn their
# programs back.
STEPS_TO_LEARN = 32
# XLA compiles a step for seconds, and saves at most some 10 ms a step of a small model on a CPU:
# with so many steps behind it a training may be long enough.
STEPS_TO_EARN = 512
# Sizes of micro-batches beside the largest one, where rows vary.
MOST_SMALLER_SIZES = 2
# Checks of padding: what it adds to many steps, as to their maximum, may not show, nor what is made
# of the first few.
SHORT_LENGTHS = (1, 2, 3, 5, 9)
# Where rows and lengths vary, a piece has half the rows of the first step's largest batch; they are
# chosen anew when a batch is of more pieces than these.
MOST_PIECES = 8

Lengths = tuple[int, ...]


class Sizes:
    """Arranges the rows of each train step as stacks of few shapes.

    - Rows are dealt out as equal micro-batches of one size, or of the least of a few sizes that
      holds them: what is left is filled up with rows that are not valid. The first steps that
      differ show which sizes waste least.
    - Where rows must be exact, or one trace takes all of them, they stay in the batches that they
      came in. Where XLA would compile whole steps, that ends when the training is long enough.
    - Batches of other lengths are padded to one of a few, if the layout's `padding` shows that this
      changes no result; if not, they keep their lengths. Each is a stack of its own then.

    Args:
        what: the data's name in messages.
        spec: specs of a batch.
        layout: the rules.
        lengths_differ: those that the spec leaves open are known to differ.
    """

    def __init__(self, what: str, spec: Batch, layout: Layout, lengths_differ: bool = False):
        self._what = what
        self._layout = layout
        # A step of one micro-batch is computed as a whole, but for the trace that takes all sizes.
        self._may_be_apart = layout.may_be_apart and (
            layout.accumulation > 1 or layout.one_trace != "never"
        )
        self._keeps_batches = layout.exact_rows or layout.one_trace != "never"
        self._rungs = _Rungs(spec, layout)
        self.batch_size = 0  # the rows of a micro-batch
        self._largest = 0  # the most rows of a batch that came
        # sizes that are used beside the largest, once they are chosen
        self._smaller: list[int] | None = None
        self._totals: list[int] = []  # rows of the first steps, once these vary
        # of last micro-batches; the data's last one alone is one size
        self._short_sizes: list[int] = []
        self._varied_steps = 0  # steps from the first that showed that rows vary; 0 before it
        self._has_whole_step = False  # a program was made for one of full micro-batches
        # Before a program is compiled for the first batch's length alone.
        self._lengths_vary = lengths_differ and self._rungs.are_open and layout.one_trace != "never"
        self._piece_rows = 0  # rows of a stack, where rows and lengths vary
        self._steps_apart = 0
        self._ones = functools.cache(lambda rows: tf.ones([1, rows], tf.bool))

    def place(self) -> Place:
        """Returns what `restore` needs, as plain values."""
        return {
            "batch_size": self.batch_size,
            "largest": self._largest,
            "smaller": self._smaller,
            "short_sizes": [*self._short_sizes],
            "varied_steps": self._varied_steps,
            "has_whole_step": self._has_whole_step,
            "lengths_vary": self._lengths_vary,
            "piece_rows": self._piece_rows,
            "totals": [*self._totals],
            "steps_apart": self._steps_apart,
            "rungs": self._rungs.place(),
        }

    def restore(self, saved: Place) -> None:
        """Goes on as after the steps that `place` was called after."""
        self.batch_size = saved["batch_size"]
        self._largest = saved["largest"]
        self._smaller = saved["smaller"]
        self._short_sizes = [*saved["short_sizes"]]
        self._varied_steps = saved["varied_steps"]
        self._has_whole_step = saved["has_whole_step"]
        self._lengths_vary = saved["lengths_vary"]
        self._piece_rows = saved["piece_rows"]
        self._totals = [*saved["totals"]]
        self._steps_apart = saved["steps_apart"]
        self._rungs.restore(saved["rungs"])

    def arrange(self, batches: list[Batch], rows: list[int]) -> tuple[tuple[Batch, ...], bool]:
        """Returns the stacks of a step, and whether a program computes each of them by itself.

        `batches` are the step's, of these numbers of `rows`; or one batch of all rows, where
        TensorFlow joined them.
        """
        rows = [count for count in rows if count]
        self._note_rows(rows)
        batches = self._rungs.pad(batches, together=not self._may_be_apart)
        if len({_row_shapes(batch) for batch in batches}) > 1:
            self._require_one_replica()
            self._lengths_vary = True
        if self._layout.one_trace != "never" and self._rungs.vary:
            self._lengths_vary = True
        if self._lengths_vary:
            self._note_step_apart("lengths")
            return self._make_stacks_apart(batches, rows), self._may_be_apart
        if self._layout.exact_rows:
            return self._arrange_exact(batches, rows)
        if self._runs_op_by_op:
            return self._make_stacks_apart(batches, rows), True
        (batch,) = _join(batches)
        return (self._deal(batch, rows),), False

    def _arrange_exact(
        self, batches: list[Batch], rows: list[int]
    ) -> tuple[tuple[Batch, ...], bool]:
        """Arranges a step whose rows must stay in their batches."""
        is_full = len(rows) == self._layout.accumulation and all(
            count == self.batch_size for count in rows
        )
        if self._may_be_apart and self.rows_vary and not (is_full and self._has_whole_step):
            self._note_step_apart("rows, which may not be padded in this model")
            return self._make_stacks_apart(batches, rows), True
        self._has_whole_step |= is_full
        (batch,) = _join(batches)
        return split_rows(_all_valid(batch), rows), False

    @property
    def rows_vary(self) -> bool:
        """True once steps have shown that batches differ in their rows."""
        return self._varied_steps > 0

    @property
    def _runs_op_by_op(self) -> bool:
        """True where one trace takes rows that vary as they are, and XLA's programs are not worth
        their compilation.
        """
        if not self.rows_vary or self._layout.one_trace == "never":
            return False
        return self._layout.one_trace == "always" or self._varied_steps <= STEPS_TO_EARN

    def _note_rows(self, rows: list[int]) -> None:
        self._largest = max(self._largest, *rows)
        self.batch_size = self.batch_size or self._largest
        *others, last = rows
        if last < self.batch_size and last not in self._short_sizes:
            self._short_sizes.append(last)
        is_odd = any(count != self.batch_size for count in others) or last > self.batch_size
        if self.rows_vary or is_odd or len(self._short_sizes) > 1:
            self._varied_steps += 1
            if self._varied_steps <= STEPS_TO_LEARN:
                self._totals.append(sum(rows))
            if self._runs_op_by_op:
                self.batch_size = self._largest  # sizes are chosen below this

    def _require_one_replica(self) -> None:
        if self._layout.replicas > 1:
            raise ValueError(
                f"{self._what}: the micro-batches of one train step have rows of different shapes, "
                "and padding them would change what the model or its loss computes. Several "
                "replicas need rows of one shape: use dataset.padded_batch(k * "
                "b).unbatch().batch(b) for k micro-batches of b rows, or let a PyDataset or a "
                "generator give all k batches of a step one shape."
            )

    def _make_stacks_apart(self, batches: list[Batch], rows: list[int]) -> tuple[Batch, ...]:
        """Makes stacks of one micro-batch each."""
        if self._keeps_batches:
            return tuple(self._as_stack(batch) for batch in _one_by_one(batches, rows))
        size = self._piece_size(rows)
        stacks = []
        for batch in _join(sorted(batches, key=_row_shapes)):
            for start in range(0, _rows(batch), size):
                piece = _slice(batch, start, start + size)
                stacks.append(reshape(_fill_up(piece, size), [1, size]))
        return tuple(stacks)

    def _as_stack(self, batch: Batch) -> Batch:
        stack = tf.nest.map_structure(lambda tensor: tf.expand_dims(tensor, 0), batch)
        return stack._replace(valid=self._ones(_rows(batch)))

    def _piece_size(self, rows: list[int]) -> int:
        if not self.rows_vary:
            return self.batch_size
        if not self._piece_rows or max(rows) > MOST_PIECES * self._piece_rows:
            self._piece_rows = math.ceil(max(rows) / 2)
        return self._piece_rows

    def _deal(self, batch: Batch, rows: list[int]) -> Batch:
        """Deals rows out as micro-batches of one size."""
        micro_batches = self._layout.accumulation
        total = sum(rows)
        if total > micro_batches * self.batch_size:
            warn(
                f"{self._what}: batches of up to {self._largest} rows after micro-batches of "
                f"{self.batch_size}; the train step is compiled again for {self._largest}. Put "
                "the largest batch first to compile once.",
                UserWarning,
            )
            if self._smaller is not None:
                self._smaller = [*self._smaller, self.batch_size]
            self.batch_size = self._largest
        size = self.batch_size
        if self._varied_steps > STEPS_TO_LEARN:
            if self._smaller is None:
                self._smaller = self._choose_sizes()
            size = min(each for each in [size, *self._smaller] if each * micro_batches >= total)
        return reshape(_fill_up(batch, micro_batches * size), [micro_batches, size])

    def _choose_sizes(self) -> list[int]:
        """Chooses the sizes that waste least beside the largest; warns where that is still much."""
        needed = [math.ceil(total / self._layout.accumulation) for total in self._totals]
        count = min(self._layout.max_programs - 1, MOST_SMALLER_SIZES)
        smaller = _least_wasteful(needed, self.batch_size, count)
        sizes = sorted([*smaller, self.batch_size])
        computed = self._layout.accumulation * _rows_computed(needed, sizes)
        share = 1 - sum(self._totals) / computed
        if share > SHARE_WORTH_A_WARNING or self._layout.one_trace == "at first":
            shown = " or ".join(map(str, sizes))
            warn(
                f"{self._what}: batches have different numbers of rows. From here on micro-batches "
                f"are padded to {shown} rows, and XLA compiles a program for each size when it "
                f"first occurs. Of the first {len(self._totals)} updates that vary, {share:.0%} of "
                "the rows computed would be padding. To compute no padding, make equal batches, "
                "as dataset.unbatch().batch(batch_size) does."
            )
        return smaller

    def _note_step_apart(self, what: str) -> None:
        self._steps_apart += 1
        if self._steps_apart == STEPS_TO_LEARN and self._layout.one_trace == "at first":
            warn(
                f"{self._what}: micro-batches differ in their {what}. TensorFlow runs each as it "
                "is, op by op. XLA would compile for seconds for each size, or for a few lengths "
                "where padding does not change what the model computes. In a long training that "
                "may pay off (jit_compile=True); or make batches of one size "
                "(docs/guides/varying-batches.md).",
                UserWarning,
            )


def _least_wasteful(needed: list[int], largest: int, count: int) -> list[int]:
    """Returns the sizes, so many at most, that beside `largest` fill up least where these sizes are
    needed.
    """
    smaller = sorted({*needed} - {largest})
    best: list[int] = []
    fewest_rows = math.inf
    for sizes in itertools.combinations(smaller, min(count, len(smaller))):
        rows = _rows_computed(needed, [*sizes, largest])
        if rows < fewest_rows:
            fewest_rows = rows
            best = list(sizes)
    return best


def _rows_computed(needed: list[int], sizes: list[int]) -> int:
    """Adds up, for all that is needed, the least of the sizes that holds it."""
    rows = 0
    for each in needed:
        rows += min(size for size in sizes if size >= each)
    return rows


class _Rungs:
    """The lengths that batches are padded to, of those tensors whose specs leave the second axis
    open.

    As long as all batches are of the same lengths, they stay as they are.
    """

    def __init__(self, spec: Batch, layout: Layout):
        leaves = tf.nest.flatten(spec)
        self._open = [j for j, leaf in enumerate(leaves) if _is_open(leaf)]
        inputs = len(tf.nest.flatten(spec.x))
        self._inputs = range(inputs)
        self._targets = range(inputs, inputs + len(tf.nest.flatten(spec.y)))
        self._padding = layout.padding
        self._most = layout.max_programs
        self._varies = [False] * len(self._open)
        self._fill: float | None = None  # of inputs; None where padding is not known to be exact
        self._pads_empty_rows: bool | None = None  # None before one has come
        self._rungs: list[Lengths] = []

    @property
    def are_open(self) -> bool:
        """True if the specs leave a length open."""
        return bool(self._open)

    @property
    def vary(self) -> bool:
        """True once batches of other lengths have come."""
        return any(self._varies)

    def place(self) -> Place:
        rungs = [list(rung) for rung in self._rungs]
        return {
            "varies": [*self._varies],
            "fill": self._fill,
            "rungs": rungs,
            "empty": self._pads_empty_rows,
        }

    def restore(self, saved: Place) -> None:
        self._varies = [*saved["varies"]]
        self._fill = saved["fill"]
        self._pads_empty_rows = saved["empty"]
        self._rungs = [tuple(rung) for rung in saved["rungs"]]

    def pad(self, batches: list[Batch], together: bool) -> list[Batch]:
        """Pads each batch to a rung of its own, or all of them `together` to one."""
        if not self._open:
            return batches
        lengths = [self._lengths(batch) for batch in batches]
        varied = self._varies
        self._note(lengths)
        if self._padding is None or not self.vary:
            return batches
        if self._varies != varied:
            self._fill = self._find_fill(self._padding, batches[0])
        if self._fill is None:
            return batches
        may_pad = [self._may_pad(self._padding, batch) for batch in batches]
        if together:
            if not all(may_pad):
                return batches
            lengths = [_longest(lengths)] * len(lengths)
        padded = []
        for batch, needed, may in zip(batches, lengths, may_pad, strict=True):
            if may:
                rung = self._known_rung(needed) or self._new_rung(self._padding, batch, needed)
                batch = self._padded(batch, rung, self._fill)
            padded.append(batch)
        return padded

    def _may_pad(self, padding: Padding, batch: Batch) -> bool:
        """Tells if the batch has no row that is all padding, or padding is exact for these too.

        Attention of such a row, for one, is the mean over all steps, whatever the mask.
        """
        empty = self._find_empty_rows(batch)
        if self._pads_empty_rows or not len(empty):
            return True
        if self._pads_empty_rows is None:
            few = tf.nest.map_structure(lambda tensor: tf.gather(tensor, empty[:2]), batch)
            padded = self._padded(few, self._above(self._lengths(few)), self._fill)
            self._pads_empty_rows = bool(padding.is_same(few, padded, thoroughly=True))
        return self._pads_empty_rows

    def _find_empty_rows(self, batch: Batch) -> np.ndarray:
        """Finds the rows in which an input holds padding alone, and other rows do not: int64
        [rows].
        """
        leaves = tf.nest.flatten(batch)
        is_empty = np.zeros(leaves[0].shape[0], bool)
        for j in itertools.compress(self._open, self._varies):
            if j in self._inputs:
                fill = self._fill if leaves[j].dtype.is_floating else 0
                alone = (leaves[j].numpy() == fill).reshape(len(is_empty), -1).all(1)
                if not alone.all():
                    is_empty |= alone
        return np.flatnonzero(is_empty)

    def _note(self, lengths: list[Lengths]) -> None:
        if not self._rungs:
            self._rungs.append(lengths[0])
        first = self._rungs[0]
        for each in lengths:
            self._varies = [v or a != b for v, a, b in zip(self._varies, each, first, strict=True)]

    def _known_rung(self, lengths: Lengths) -> Lengths | None:
        """Returns the least rung that covers the lengths, if it wastes little or there may be no
        more; else None.
        """
        covering = [
            rung for rung in self._rungs if all(a >= b for a, b in zip(rung, lengths, strict=True))
        ]
        if not covering:
            return None
        rung = min(covering, key=sum)
        wastes_little = sum(lengths) >= (1 - MAX_WASTED_SHARE) * sum(rung)
        return rung if wastes_little or len(self._rungs) >= self._most else None

    def _new_rung(self, padding: Padding, batch: Batch, lengths: Lengths) -> Lengths:
        """Adds the rung above these lengths; those of the batch, where a table of positions ends
        before it.
        """
        above = self._raised(lengths, _raise)
        if len(self._rungs) >= self._most - 1:
            # The last one is for all lengths. What is longer still needs another one, far above it.
            above = _longest([self._raised(lengths, _raise_to_power), *self._rungs])
        few = _slice(batch, 0, 2)
        for rung in (above, self._raised(lengths, _raise_to_eight)):
            if rung == self._lengths(batch) or padding.is_same(
                few, self._padded(few, rung, self._fill), thoroughly=False
            ):
                break
        else:
            rung = lengths
        self._rungs.append(rung)
        return rung

    def _find_fill(self, padding: Padding, batch: Batch) -> float | None:
        """Finds the value by which inputs may be padded without another result; None if there is
        none.
        """
        few = _slice(batch, 0, 2)
        shortest = min(itertools.compress(self._lengths(few), self._varies))
        parts = [
            self._drawn(self._cut(few, shortest - length))
            for length in SHORT_LENGTHS
            if length < shortest
        ]
        for fill in padding.fills:
            results = set()
            for part in parts:
                rung = self._above(self._raised(self._lengths(part), _raise))
                results.add(padding.is_same(part, self._padded(part, rung, fill), thoroughly=True))
            if False in results:
                continue
            # As they are, too. What cannot be computed for a few steps is checked thoroughly here.
            rung = self._above(self._lengths(few))
            results.add(
                padding.is_same(few, self._padded(few, rung, fill), thoroughly=True not in results)
            )
            if False not in results and True in results:
                return fill
        return None

    def _above(self, lengths: Lengths) -> Lengths:
        """Returns the next rung that is longer."""
        return self._raised(
            tuple(n + v for n, v in zip(lengths, self._varies, strict=True)), _raise
        )

    def _raised(self, lengths: Lengths, raise_one: Callable[[int], int]) -> Lengths:
        return tuple(
            raise_one(n) if varies else n for n, varies in zip(lengths, self._varies, strict=True)
        )

    def _lengths(self, batch: Batch) -> Lengths:
        leaves = tf.nest.flatten(batch)
        return tuple(int(leaves[j].shape[1]) for j in self._open)

    def _cut(self, batch: Batch, by: int) -> Batch:
        """Leaves so many of the last steps out of those lengths that vary."""
        leaves = tf.nest.flatten(batch)
        for j in itertools.compress(self._open, self._varies):
            leaves[j] = leaves[j][:, :-by]
        return tf.nest.pack_sequence_as(batch, leaves)

    def _drawn(self, batch: Batch) -> Batch:
        """Draws the steps of inputs anew, none of which is padding then: the first may all be
        silence, or padding.
        """
        leaves = tf.nest.flatten(batch)
        for j in itertools.compress(self._open, self._varies):
            if j in self._inputs:
                leaves[j] = _draw_like(leaves[j], seed=j)
        drawn = tf.nest.pack_sequence_as(batch, leaves)
        if drawn.weights is not None:
            drawn = drawn._replace(
                sample_weight=tf.nest.map_structure(tf.ones_like, drawn.sample_weight)
            )
        return drawn

    def _padded(self, batch: Batch, rung: Lengths, fill: float | None) -> Batch:
        """Pads inputs with `fill`, weights with 0, and targets with their last ones, of which it
        says which are real.

        A loss may be infinite for a target of 0, and its gradient NaN then, though it is not
        counted.
        """
        leaves = tf.nest.flatten(batch)
        real = {j: tf.ones(leaves[j].shape[:1], tf.bool) for j in self._targets}
        for j, length in zip(self._open, rung, strict=True):
            tensor = leaves[j]
            value = tf.zeros([], tensor.dtype)
            if j in self._inputs and tensor.dtype.is_floating:
                value = tf.cast(fill, tensor.dtype)
            if j in self._targets:
                real[j] = tf.broadcast_to(
                    tf.range(length) < tensor.shape[1], [tensor.shape[0], length]
                )
                value = tensor[:, -1:] if tensor.shape[1] else value
            leaves[j] = _pad(tensor, length, value)
        padded = tf.nest.pack_sequence_as(batch, leaves)
        if not any(j in self._targets for j in self._open):
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
    """Draws normal numbers; for integers, and what is 0 or 1 as a mask is, those that occur, but
    for 0.
    """
    values = np.unique(tensor.numpy())
    if tensor.dtype.is_floating and not np.isin(values, (0, 1)).all():
        return tf.cast(tf.random.stateless_normal(tensor.shape, seed=(0, seed)), tensor.dtype)
    others = values[values != 0]
    chosen = others if others.size else values
    return tf.constant(np.random.default_rng(seed).choice(chosen, tensor.shape), tensor.dtype)


def _raise(length: int) -> int:
    """Returns the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below: a third is wasted
    at most.
    """
    power = _raise_to_power(length)
    between = power * 3 // 4
    return between if power > 3 and between >= length else power


def _raise_to_power(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _raise_to_eight(length: int) -> int:
    return -(-length // 8) * 8


def _longest(lengths: Iterable[Lengths]) -> Lengths:
    return tuple(map(max, zip(*lengths, strict=True)))


def _rows(batch: Batch) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def _row_shapes(batch: Batch) -> tuple:
    return tuple(tuple(tensor.shape[1:]) for tensor in tf.nest.flatten(batch))


def _slice(batch: Batch, start: int, end: int) -> Batch:
    return tf.nest.map_structure(lambda tensor: tensor[start:end], batch)


def _join(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Joins batches that come one after the other and have rows of one shape."""
    for _, alike in itertools.groupby(batches, _row_shapes):
        parts = list(alike)
        yield (
            parts[0]
            if len(parts) == 1
            else tf.nest.map_structure(lambda *each: tf.concat(each, 0), *parts)
        )


def _one_by_one(batches: list[Batch], rows: list[int]) -> list[Batch]:
    """Splits a batch of all `rows`; batches that are not joined stay."""
    if len(batches) == len(rows):
        return batches
    (batch,) = batches
    columns = [tf.split(tensor, rows) for tensor in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, parts) for parts in zip(*columns, strict=True)]


def _all_valid(batch: Batch) -> Batch:
    return batch._replace(valid=tf.ones([_rows(batch)], tf.bool))


def _fill_up(batch: Batch, rows: int) -> Batch:
    """Repeats the last row up to so many, and says which rows are valid."""
    order = tf.range(rows)
    given = _rows(batch)
    if given < rows:
        taken = tf.minimum(order, given - 1)
        batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, taken), batch)
    return batch._replace(valid=order < given)
