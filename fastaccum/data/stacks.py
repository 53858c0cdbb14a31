"""Stacks of micro-batches, which the compiled program takes, and how rows become stacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.basics.warnings import warn

# The place of a fit in its data, as plain values: numbers, and lists and dicts of them.
Place = dict[str, Any]
# Micro-batches are filled up to this many sizes or lengths where the Trainer's `max_programs` is
# "auto". Each is a program that XLA compiles for seconds.
DEFAULT_MAX_PROGRAMS = 4


class Batch(NamedTuple):
    """Inputs, targets, weights and validity: of one micro-batch [rows, ...], or of a stack of them.

    A row that is not `valid` repeats a real one, to pad. Steps of a target that are not `real` pad
    its second axis. An empty tuple stands for "no weights", "every row is valid", "nothing is
    padded".
    """

    x: Nest
    y: Nest
    sample_weight: Nest = ()
    valid: Any = ()
    real: Nest = ()  # like y: bool [rows], or [rows, length] of a target that was padded

    @property
    def weights(self) -> Nest:
        """Returns `sample_weight`, or None."""
        return self.sample_weight if tf.nest.flatten(self.sample_weight) else None

    @property
    def mask(self) -> tf.Tensor | None:
        """Returns `valid`, or None."""
        return None if isinstance(self.valid, tuple) else self.valid


class Dispatch(NamedTuple):
    """Argument of one call of a program.

    It holds the stacks of one train step, or one stack [steps, ...] if `is_multi_step`.
    """

    stacks: tuple[Batch, ...]
    steps: int = 1  # those beyond hold no valid row
    is_multi_step: bool = False
    rows: int = 0  # valid ones, of this process
    # True where each stack is one micro-batch, and a program computes it by itself: the sizes of a
    # step's stacks seldom come together again.
    by_micro_batch: bool = False

    @property
    def size(self) -> int:
        """Counts the steps, also those that only fill up the last dispatch of an epoch."""
        if self.is_multi_step:
            return trip_count(self.stacks)
        return self.steps


class Position(NamedTuple):
    """The place of a fit that began with epoch `first`: `step` train steps are done of `epoch`."""

    first: int
    epoch: int
    step: int = 0


class Padding(Protocol):
    """Tells if micro-batches may be padded along their second axis."""

    @property
    def fills(self) -> Sequence[float]:
        """The values for padded inputs to try."""

    def is_same(self, unpadded: Batch, padded: Batch, thoroughly: bool) -> bool | None:
        """Tells if padding changes no result of a micro-batch; None if none can be computed."""


class Layout(NamedTuple):
    """The rules by which rows become stacks."""

    accumulation: int  # micro-batches in a step
    steps_per_execution: int = 1  # steps in a dispatch
    # True where a padded row would change results, as by batch statistics: shapes then vary.
    exact_rows: bool = False
    allows_by_micro_batch: bool = True  # a program may compute a single micro-batch of an update
    # When one trace of such a program takes any rows and lengths: "at first" is as long as no
    # program of a size is compiled.
    one_trace: Literal["never", "at first", "always"] = "never"
    max_programs: int = DEFAULT_MAX_PROGRAMS  # sizes that micro-batches are filled up to
    padding: Padding | None = None  # None where lengths stay as they are
    replicas: int = 1  # equal shards that every micro-batch is cut into
    shards: slice = slice(0, 1)  # those of them that are for this process

    @property
    def all_here(self) -> bool:
        """Tells if every shard is for this process."""
        return self.shards == slice(0, self.replicas)

    def columns(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns this process's rows of a micro-batch, and which of them are not padding."""
        rows_per_replica = -(-rows // self.replicas)
        if self.exact_rows and rows % self.replicas:
            raise ValueError(
                f"A micro-batch of {rows} rows cannot be split equally over {self.replicas} "
                "replicas. Padding it would change the result, since in this model (batch "
                "statistics, added losses), its loss or its metrics a padded row counts. Use a "
                f"batch_size, and a number of rows, that {self.replicas} divides."
            )
        by_replica = np.arange(rows_per_replica * self.replicas).reshape(
            self.replicas, rows_per_replica
        )
        columns = by_replica[self.shards].ravel()
        return np.minimum(columns, rows - 1), columns < rows

    def shard(self, stack: Batch) -> Batch:
        """Takes this process's rows of a stack of [micro-batches, rows, ...]."""
        if self.replicas == 1:
            return stack
        micro_batches, rows, *_ = tf.nest.flatten(stack)[0].shape
        columns, is_real = self.columns(int(rows))
        if stack.mask is None and not is_real.all():
            stack = stack._replace(valid=tf.ones([micro_batches, rows], tf.bool))
        shard = tf.nest.map_structure(lambda t: tf.gather(t, columns, axis=1), stack)
        if shard.mask is None:
            return shard
        return shard._replace(valid=shard.valid & is_real)


def warn_short(what: str, steps: int, wanted: int) -> None:
    """Warns that a pass, and with it the epoch, ended before as many steps as were asked for."""
    warn(
        f"{what} ran out of data after {steps} of the {wanted} steps asked for, which ends the "
        "epoch, as in Keras. Ask for fewer, or pass a dataset with .repeat().",
        UserWarning,
    )


def trip_count(stack: object) -> int:
    """Counts the micro-batches of a stack: the leading axis that all its tensors share.

    Raises:
        ValueError: raised if they share none.
    """
    shapes = [tuple(t.shape) for t in tf.nest.flatten(stack) if t is not None]
    if not shapes:
        raise ValueError("The stack holds no tensor. Pass a nest of tensors [micro-batches, ...].")
    if not all(shapes):
        raise ValueError(
            f"Every tensor of a stack has shape [micro-batches, ...]; shapes={shapes} holds a "
            "scalar."
        )
    leading = {shape[0] for shape in shapes}
    if len(leading) > 1:
        raise ValueError(
            f"Tensors of one stack have different leading axes: shapes={shapes}. Stack as many "
            "micro-batches of each."
        )
    count = leading.pop()
    if not count:
        raise ValueError(
            f"A stack needs a known number of micro-batches of at least 1; shapes={shapes}."
        )
    return count


def group_steps(steps: Iterator[Dispatch], layout: Layout) -> Iterator[Dispatch]:
    """Groups `steps_per_execution` steps to a dispatch.

    Steps that are left at the end are padded to a dispatch, or stay single where rows must be
    exact.
    """
    size = layout.steps_per_execution
    if size == 1:
        yield from steps
        return
    pending: list[Dispatch] = []
    for step in steps:
        if step.by_micro_batch:
            yield from [*pending, step]
            pending = []
            continue
        if pending and _shapes(step) != _shapes(pending[0]):
            yield from pending
            pending = []
        pending.append(step)
        if len(pending) < size:
            continue
        if len(step.stacks) == 1:
            yield _join_steps(pending, steps=size)
        else:
            yield from pending
        pending = []

    if layout.exact_rows or not pending:
        yield from pending
        return
    last = pending[-1].stacks[0]
    without_rows = Dispatch((last._replace(valid=tf.zeros_like(last.valid)),))
    padding = [without_rows] * (size - len(pending))
    yield _join_steps([*pending, *padding], steps=len(pending))


def _join_steps(dispatches: list[Dispatch], steps: int) -> Dispatch:
    """Joins dispatches of a step each, of which the first `steps` hold valid rows."""
    step_stacks = [dispatch.stacks[0] for dispatch in dispatches]
    stack = tf.nest.map_structure(lambda *tensors: tf.stack(tensors), *step_stacks)
    rows = sum(dispatch.rows for dispatch in dispatches)
    return Dispatch((stack,), steps, is_multi_step=True, rows=rows)


def _shapes(dispatch: Dispatch) -> list[tuple]:
    return [tuple(t.shape) for t in tf.nest.flatten(dispatch.stacks)]


def count_rows(batch: Batch) -> int:
    """Counts the rows of a batch of tensors."""
    return int(tf.nest.flatten(batch)[0].shape[0])


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Takes the rows from `start` to before `stop`."""
    return tf.nest.map_structure(lambda t: t[start:stop], batch)


def reshape(batch: Batch, shape: list[int]) -> Batch:
    """Reshapes a batch: axes of `shape` stand in place of the first one."""
    return tf.nest.map_structure(lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), batch)


def split_rows(batch: Batch, lengths: list[int]) -> tuple[Batch, ...]:
    """Splits rows into stacks: one for each run of equal micro-batches."""
    stacks = []
    start = 0
    for length, run in itertools.groupby(lengths):
        micro_batches = len(list(run))
        stop = start + micro_batches * length
        stacks.append(reshape(slice_rows(batch, start, stop), [micro_batches, length]))
        start = stop
    return tuple(stacks)
