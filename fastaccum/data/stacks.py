"""Stacks of micro-batches: what the compiled program takes, and how rows are cut, joined and padded
into them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.basics.warnings import warn

Place = dict[str, Any]  # of a fit in its data, as plain values: numbers, lists and dicts of them


class Batch(NamedTuple):
    """Inputs, targets, weights and validity: of one micro-batch [rows, ...], or of a stack of them.

    A row that is not `valid` repeats a real one, to pad. What of a target is not `real` pads it
    along its second axis. An empty tuple stands for "no weights", "every row is valid", "nothing is
    padded".
    """

    x: Nest
    y: Nest
    sample_weight: Nest = ()
    valid: Any = ()
    # like y: bool [rows], or [rows, length] of a target that is longer than what was given
    real: Nest = ()

    @property
    def weights(self) -> Nest:
        """Returns `sample_weight`, or None."""
        return self.sample_weight if tf.nest.flatten(self.sample_weight) else None

    @property
    def mask(self) -> tf.Tensor | None:
        """Returns `valid`, or None."""
        return None if isinstance(self.valid, tuple) else self.valid


class Dispatch(NamedTuple):
    """Argument of one call of a program: stacks that make one step, or one stack [steps, ...] if
    `is_multi_step`.
    """

    stacks: tuple[Batch, ...]
    steps: int = 1  # those beyond hold no valid row
    is_multi_step: bool = False
    rows: int = 0  # valid ones, of this process
    # a program for each stack, of one micro-batch: such sizes seldom come together again
    by_micro_batch: bool = False

    @property
    def size(self) -> int:
        """Counts the steps, also those that only fill up the last dispatch of an epoch."""
        return trip_count(self.stacks) if self.is_multi_step else self.steps


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

    def is_same(self, given: Batch, padded: Batch, thoroughly: bool) -> bool | None:
        """Tells if the padded micro-batch has the results of the one given; None where that cannot
        be computed.
        """


class Layout(NamedTuple):
    """The rules by which rows become stacks."""

    accumulation: int  # micro-batches in a step
    steps_per_execution: int = 1  # steps in a dispatch
    # never pad, where a padded row would be felt (batch statistics); shapes then vary
    exact_rows: bool = False
    may_be_apart: bool = True  # a program may compute a single micro-batch of an update
    # If one trace of such a program takes any rows and lengths, for as long as none is compiled.
    one_trace: Literal["never", "at first", "always"] = "never"
    max_programs: int = 4  # sizes that micro-batches are filled up to
    padding: Padding | None = None  # None where lengths stay as they are
    replicas: int = 1  # equal shards that every micro-batch is cut into
    shards: slice = slice(0, 1)  # those of them that are for this process

    @property
    def all_here(self) -> bool:
        """Tells if every shard is for this process."""
        return self.shards == slice(0, self.replicas)

    def columns(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of a micro-batch that are for this process, and which of these are more
        than padding.
        """
        size = -(-rows // self.replicas)
        if self.exact_rows and rows % self.replicas:
            raise ValueError(
                f"A micro-batch of {rows} rows cannot be split equally over {self.replicas} "
                "replicas. Padding it would change the result, since in this model (batch "
                "statistics, added losses), its loss or its metrics a padded row counts. Use a "
                f"batch_size, and a number of rows, that {self.replicas} divides."
            )
        own = np.arange(size * self.replicas).reshape(self.replicas, size)[self.shards].ravel()
        return np.minimum(own, rows - 1), own < rows

    def shard(self, stack: Batch) -> Batch:
        """Takes this process's rows of a stack of [micro-batches, rows, ...]."""
        if self.replicas == 1:
            return stack
        columns, real = self.columns(int(tf.nest.flatten(stack)[0].shape[1]))
        if stack.mask is None and not real.all():
            stack = stack._replace(valid=tf.ones(tf.nest.flatten(stack)[0].shape[:2], tf.bool))
        own = tf.nest.map_structure(lambda t: tf.gather(t, columns, axis=1), stack)
        return own if own.mask is None else own._replace(valid=own.valid & real)


def warn_short(what: str, steps: int, wanted: int) -> None:
    """Warns that a pass, and with it the epoch, ended before as many steps as were asked for."""
    warn(
        f"{what} ran out of data after {steps} of the {wanted} steps asked for, which ends the "
        "epoch, as in Keras. Ask for fewer, or pass a dataset with .repeat().",
        UserWarning,
    )


def trip_count(stack: object) -> int:
    """Counts the micro-batches of a stack: the leading axis that all its tensors share, else
    ValueError.
    """
    shapes = [tuple(t.shape) for t in tf.nest.flatten(stack) if t is not None]
    if not shapes:
        raise ValueError("The stack holds no tensor. Pass a nest of tensors [micro-batches, ...].")
    if not all(shapes):
        raise ValueError(
            f"Every tensor of a stack has shape [micro-batches, ...]; shapes={shapes} holds a "
            "scalar."
        )
    count, *others = {shape[0] for shape in shapes}
    if others:
        raise ValueError(
            f"Tensors of one stack have different leading axes: shapes={shapes}. Stack as many "
            "micro-batches of each."
        )
    if not count:
        raise ValueError(
            f"A stack needs a known number of micro-batches of at least 1; shapes={shapes}."
        )
    return count


def group_steps(steps: Iterator[Dispatch], layout: Layout) -> Iterator[Dispatch]:
    """Groups `steps_per_execution` steps to a dispatch; what is left at the end is padded, or stays
    single.
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
        if len(pending) == size:
            yield from [_joined(pending, size)] if len(step.stacks) == 1 else pending
            pending = []
    if layout.exact_rows or not pending:
        yield from pending
        return
    last = pending[-1].stacks[0]
    nothing = Dispatch((last._replace(valid=tf.zeros_like(last.valid)),))
    yield _joined([*pending, *[nothing] * (size - len(pending))], len(pending))


def _joined(dispatches: list[Dispatch], steps: int) -> Dispatch:
    stack = tf.nest.map_structure(
        lambda *parts: tf.stack(parts), *(d.stacks[0] for d in dispatches)
    )
    return Dispatch((stack,), steps, is_multi_step=True, rows=sum(each.rows for each in dispatches))


def _shapes(dispatch: Dispatch) -> list[tuple]:
    return [tuple(t.shape) for t in tf.nest.flatten(dispatch.stacks)]


def reshape(batch: Batch, shape: list[int]) -> Batch:
    """Reshapes a batch: axes of `shape` stand in place of the first one."""
    return tf.nest.map_structure(lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), batch)


def split_rows(batch: Batch, lengths: list[int]) -> tuple[Batch, ...]:
    """Splits rows into stacks: one for each run of equal micro-batches."""
    runs = [list(run) for _, run in itertools.groupby(lengths)]
    stacks, start = [], 0
    for run in runs:
        length, count = run[0], len(run)
        span = slice(start, start := start + count * length)
        stacks.append(
            reshape(tf.nest.map_structure(lambda t, span=span: t[span], batch), [count, length])
        )
    return tuple(stacks)
