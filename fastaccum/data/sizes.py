"""The few sizes that micro-batches are filled up to, where batches differ in their rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.basics.warnings import warn
from fastaccum.data.buckets import LengthBuckets
from fastaccum.data.stacks import Batch, Layout, Place, count_rows, reshape, slice_rows, split_rows

# Warn of rows that only fill up if they are more than this share of all rows computed.
SHARE_WORTH_A_WARNING = 0.2
# The sizes are chosen after this many train steps whose rows vary. A shorter training does not earn
# the time back that XLA needs to compile them.
STEPS_TO_LEARN = 32
# Programs of several sizes are compiled after this many train steps whose rows vary. XLA compiles
# one for seconds, which saves about 10 ms a step of a small model on a CPU: a training that has
# come so far may be long enough.
STEPS_TO_EARN = 512
# Micro-batches have at most this many sizes beside the largest one: with two, a fifth of the rows
# computed fills up where batches have any number of rows.
MAX_SMALLER_SIZES = 2
# Where rows and lengths vary, a stack has half the rows of the first step's largest batch. The
# number of its rows is chosen anew when a batch would make more stacks than this.
MAX_STACKS_OF_BATCH = 8


class Arranged(NamedTuple):
    """The stacks of a train step, and whether a program computes each of them by itself."""

    stacks: tuple[Batch, ...]
    by_micro_batch: bool


class Sizes:
    """Arranges the rows of each train step as stacks of few shapes.

    - Rows are dealt out as equal micro-batches of one size, or of the least of a few sizes that
      holds them: what is left is filled up with rows that are not valid. The first steps that
      differ show which sizes waste least.
    - Where rows must be exact, or one trace takes all of them, they stay in the batches that they
      came in. Where XLA would compile whole steps, that ends when the training is long enough.
    - Batches of other lengths are padded to one of a few buckets, if the layout's `padding` shows
      that this changes no result; if not, they keep their lengths. Each is a stack of its own then.

    Args:
        what: the data's name in messages.
        spec: specs of a batch.
        layout: the rules.
        lengths_differ: those that the spec leaves open are known to differ.
    """

    def __init__(self, what: str, spec: Batch, layout: Layout, lengths_differ: bool = False):
        self._what = what
        self._layout = layout
        self._has_one_trace = layout.one_trace != "never"
        # A step of one micro-batch is computed as a whole, but for the trace that takes all sizes.
        self._allows_by_micro_batch = layout.allows_by_micro_batch and (
            layout.accumulation > 1 or self._has_one_trace
        )
        self._keeps_batches = layout.exact_rows or self._has_one_trace
        self._buckets = LengthBuckets(spec, layout)
        self._all_valid = functools.cache(lambda rows: tf.ones([1, rows], tf.bool))

        self.batch_size = 0  # the rows of a micro-batch
        self._largest = 0  # the most rows of a batch that came
        # The sizes that are used beside the largest, once they are chosen.
        self._smaller: list[int] | None = None
        self._totals: list[int] = []  # rows of the first steps, once these vary
        # Sizes of last micro-batches below the batch size. The data's last one alone is one size.
        self._short_sizes: list[int] = []
        self._varied_steps = 0  # steps from the first that showed that rows vary; 0 before it
        self._has_whole_step = False  # a program was made for one of full micro-batches
        # Known before a program is compiled for the first batch's length alone.
        self._lengths_vary = lengths_differ and self._buckets.are_open and self._has_one_trace
        self._rows_of_stack = 0  # where rows and lengths vary
        self._steps_by_micro_batch = 0

    def place(self) -> Place:
        """Returns what `restore` needs, as plain values."""
        # The keys are those of the checkpoints' format.
        return {
            "batch_size": self.batch_size,
            "largest": self._largest,
            "smaller": self._smaller,
            "short_sizes": [*self._short_sizes],
            "varied_steps": self._varied_steps,
            "has_whole_step": self._has_whole_step,
            "lengths_vary": self._lengths_vary,
            "piece_rows": self._rows_of_stack,
            "totals": [*self._totals],
            "steps_apart": self._steps_by_micro_batch,
            "rungs": self._buckets.place(),
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
        self._rows_of_stack = saved["piece_rows"]
        self._totals = [*saved["totals"]]
        self._steps_by_micro_batch = saved["steps_apart"]
        self._buckets.restore(saved["rungs"])

    def arrange(self, batches: list[Batch], rows: list[int]) -> Arranged:
        """Arranges the batches of a step, which have these numbers of `rows`.

        Where TensorFlow joined the batches, `batches` is one batch of all rows.
        """
        rows = [count for count in rows if count]
        self._note_rows(rows)
        batches = self._buckets.pad(batches, together=not self._allows_by_micro_batch)
        if len({_row_shapes(batch) for batch in batches}) > 1:
            self._require_one_replica()
            self._lengths_vary = True
        if self._has_one_trace and self._buckets.vary:
            self._lengths_vary = True

        if self._lengths_vary:
            self._note_step_by_micro_batch("lengths")
            stacks = self._make_stacks_by_micro_batch(batches, rows)
            return Arranged(stacks, by_micro_batch=self._allows_by_micro_batch)
        if self._layout.exact_rows:
            return self._arrange_exact(batches, rows)
        if self._runs_op_by_op:
            stacks = self._make_stacks_by_micro_batch(batches, rows)
            return Arranged(stacks, by_micro_batch=True)
        (batch,) = _join(batches)
        return Arranged((self._deal(batch, rows),), by_micro_batch=False)

    def _arrange_exact(self, batches: list[Batch], rows: list[int]) -> Arranged:
        """Arranges a step whose rows must stay in their batches."""
        has_all_batches = len(rows) == self._layout.accumulation
        is_full = has_all_batches and all(count == self.batch_size for count in rows)
        has_program = is_full and self._has_whole_step
        if self._allows_by_micro_batch and self.rows_vary and not has_program:
            self._note_step_by_micro_batch("rows, which may not be padded in this model")
            stacks = self._make_stacks_by_micro_batch(batches, rows)
            return Arranged(stacks, by_micro_batch=True)
        if is_full:
            self._has_whole_step = True
        (batch,) = _join(batches)
        all_valid = batch._replace(valid=tf.ones([count_rows(batch)], tf.bool))
        return Arranged(split_rows(all_valid, rows), by_micro_batch=False)

    @property
    def rows_vary(self) -> bool:
        """True once steps have shown that batches differ in their rows."""
        return self._varied_steps > 0

    @property
    def _runs_op_by_op(self) -> bool:
        """True where one trace takes any rows, and programs of few sizes do not pay off yet."""
        if not self.rows_vary or not self._has_one_trace:
            return False
        return self._layout.one_trace == "always" or self._varied_steps <= STEPS_TO_EARN

    def _note_rows(self, rows: list[int]) -> None:
        """Notes what the rows of a step's batches show of the batches to come."""
        self._largest = max(self._largest, max(rows))
        if not self.batch_size:
            self.batch_size = self._largest
        last = rows[-1]
        if last < self.batch_size and last not in self._short_sizes:
            self._short_sizes.append(last)
        is_larger = last > self.batch_size
        differs_before_last = any(count != self.batch_size for count in rows[:-1])
        ends_differ = len(self._short_sizes) > 1
        if not (self.rows_vary or is_larger or differs_before_last or ends_differ):
            return
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

    def _make_stacks_by_micro_batch(
        self, batches: list[Batch], rows: list[int]
    ) -> tuple[Batch, ...]:
        """Makes stacks of one micro-batch each."""
        stacks = []
        if self._keeps_batches:
            for batch in _split_by_batch(batches, rows):
                stack = tf.nest.map_structure(lambda tensor: tf.expand_dims(tensor, 0), batch)
                stacks.append(stack._replace(valid=self._all_valid(count_rows(batch))))
            return tuple(stacks)
        size = self._choose_rows_of_stack(rows)
        for batch in _join(sorted(batches, key=_row_shapes)):
            for start in range(0, count_rows(batch), size):
                part = slice_rows(batch, start, start + size)
                stacks.append(reshape(_fill_up(part, size), [1, size]))
        return tuple(stacks)

    def _choose_rows_of_stack(self, rows: list[int]) -> int:
        if not self.rows_vary:
            return self.batch_size
        most = max(rows)
        if not self._rows_of_stack or most > MAX_STACKS_OF_BATCH * self._rows_of_stack:
            self._rows_of_stack = math.ceil(most / 2)
        return self._rows_of_stack

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
            sizes = [self.batch_size, *self._smaller]
            size = min(size for size in sizes if size * micro_batches >= total)
        return reshape(_fill_up(batch, micro_batches * size), [micro_batches, size])

    def _choose_sizes(self) -> list[int]:
        """Chooses the sizes that waste least beside the largest; warns where that is still much."""
        needed = [math.ceil(total / self._layout.accumulation) for total in self._totals]
        count = min(self._layout.max_programs - 1, MAX_SMALLER_SIZES)
        smaller = _find_least_wasteful(needed, self.batch_size, count)
        sizes = sorted([*smaller, self.batch_size])
        computed = self._layout.accumulation * _count_computed(needed, sizes)
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

    def _note_step_by_micro_batch(self, differing: str) -> None:
        """Counts a step whose micro-batches differ; warns once where XLA might be faster."""
        self._steps_by_micro_batch += 1
        if self._steps_by_micro_batch == STEPS_TO_LEARN and self._layout.one_trace == "at first":
            warn(
                f"{self._what}: micro-batches differ in their {differing}. TensorFlow runs each as "
                "it is, op by op. XLA would compile for seconds for each size, or for a few "
                "lengths where padding does not change what the model computes. In a long training "
                "that may pay off (jit_compile=True); or make batches of one size "
                "(docs/guides/varying-batches.md).",
                UserWarning,
            )


def _find_least_wasteful(needed: list[int], largest: int, count: int) -> list[int]:
    """Finds at most `count` sizes that, beside the largest, waste least for what is needed."""
    smaller = sorted({*needed} - {largest})
    best: list[int] = []
    fewest_rows = math.inf
    for sizes in itertools.combinations(smaller, min(count, len(smaller))):
        rows = _count_computed(needed, [*sizes, largest])
        if rows < fewest_rows:
            fewest_rows = rows
            best = list(sizes)
    return best


def _count_computed(needed: list[int], sizes: list[int]) -> int:
    """Adds up, for all that is needed, the least of the sizes that holds it."""
    rows = 0
    for rows_needed in needed:
        rows += min(size for size in sizes if size >= rows_needed)
    return rows


def _row_shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape[1:]) for tensor in tf.nest.flatten(batch))


def _join(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Joins batches that come one after the other and have rows of one shape."""
    for _, run in itertools.groupby(batches, _row_shapes):
        alike = list(run)
        if len(alike) == 1:
            yield alike[0]
        else:
            yield tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *alike)


def _split_by_batch(batches: list[Batch], rows: list[int]) -> list[Batch]:
    """Splits one batch of all `rows` as these came; batches that are not joined stay."""
    if len(batches) == len(rows):
        return batches
    (batch,) = batches
    split_tensors = [tf.split(tensor, rows) for tensor in tf.nest.flatten(batch)]
    split_batches = []
    for tensors in zip(*split_tensors, strict=True):
        split_batches.append(tf.nest.pack_sequence_as(batch, tensors))
    return split_batches


def _fill_up(batch: Batch, rows: int) -> Batch:
    """Repeats the last row up to so many rows, and marks which rows are valid."""
    order = tf.range(rows)
    valid_rows = count_rows(batch)
    if valid_rows < rows:
        taken = tf.minimum(order, valid_rows - 1)
        batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, taken), batch)
    return batch._replace(valid=order < valid_rows)
