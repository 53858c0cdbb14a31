"""Stacks of micro-batches of arrays in memory."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import optree
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.warnings import warn
from fastaccum.data import rows
from fastaccum.data.stacks import Batch, Dispatch, Layout, Place, Position, group_steps, warn_short

# Stacks that are made ahead of use: one waits while the next is gathered.
PREFETCH = 2
# Rows of the arrays that a checkpoint's checksum is of.
ROWS_OF_CHECKSUM = 64


class Chunk(NamedTuple):
    """A part of a pass that makes one dispatch."""

    rows: int  # with those that only pad
    steps: int  # train steps that hold a real row


class ArraySource:
    """Arrays in memory that `rows.as_arrays` checked.

    `seed` shuffles the rows anew in each epoch; None keeps their order.
    """

    read_once = False
    what = "x, y and sample_weight"

    def __init__(self, arrays: Batch, batch_size: int, seed: int | None = None):
        self.arrays = arrays
        self.seed = seed
        self.rows = rows.count(self.what, arrays)
        if not self.rows:
            raise ValueError("x is empty: it has 0 rows.")
        self.rebatch(batch_size)

    @property
    def sample(self) -> Batch:
        """Returns specs of one micro-batch."""

        def spec(array):
            return tf.TensorSpec([self.batch_size, *array.shape[1:]], rows.model_dtype(array))

        return tf.nest.map_structure(spec, self.arrays)

    def most_rows(self, workers: int) -> int | None:
        """Returns the most rows of a micro-batch that `rebatch` can make; None for any number."""
        return self.rows

    def rebatch(self, batch_size: int) -> None:
        """Sets the rows of a micro-batch."""
        self.batch_size = min(checks.whole_number("batch_size", batch_size), self.rows)

    def stacks(
        self, layout: Layout, steps_per_epoch: int | None = None, epochs: int = 1
    ) -> ArrayStacks:
        """Makes stacks of the rows.

        An epoch is a pass, or the part of a pass that follows the last epoch's.
        """
        return ArrayStacks(self, layout, steps_per_epoch)


class ArrayStacks:
    """The stacks of an `ArraySource`, their rows gathered in a thread ahead of use."""

    has_known_end = True

    def __init__(self, source: ArraySource, layout: Layout, steps_per_epoch: int | None):
        self.what = source.what
        self._arrays = source.arrays
        self._seed = source.seed
        self._rows = source.rows
        self._batch_size = source.batch_size
        micro_batches = math.ceil(self._rows / self._batch_size)
        self.layout = layout._replace(accumulation=min(layout.accumulation, micro_batches))
        self._rows_per_step = self.layout.accumulation * self._batch_size
        self._steps_per_pass = math.ceil(self._rows / self._rows_per_step)
        self.steps_per_epoch = steps_per_epoch or self._steps_per_pass
        self.plan: dict[str, int | None] = {
            "rows": self._rows,
            "global_batch": min(self._rows_per_step, self._rows),
            "shuffle": self._seed is not None,
            "steps_per_epoch": steps_per_epoch,
        }
        self.cut = {"batch_size": self._batch_size}
        self._all_valid = functools.cache(lambda shape: tf.ones(shape, tf.bool))
        # Raise now for micro-batches that replicas cannot share, the last one of a pass too.
        self.layout.columns(self._batch_size)
        rest = self._rows % self._batch_size
        if rest:
            self.layout.columns(rest)

    def reset(self) -> None:
        """Does nothing: arrays have no hooks."""

    def close(self) -> None:
        """Does nothing: the thread that gathers rows ahead ends by itself."""

    def position(self) -> tuple[Place, dict[str, tf.Tensor]]:
        """Returns what `restore` needs beside the steps done: the order follows from the seed."""
        return {"seed": self._seed, "checksum": self.checksum()}, {}

    def track(self) -> None:
        """Does nothing: `position` needs no record of the passes."""

    def restore(self, saved: Place, tensors: dict[str, tf.Tensor]) -> None:
        """Restores the order of the fit that `saved` comes from; warns if the rows are others."""
        self._seed = saved["seed"]
        if saved["checksum"] != self.checksum():
            warn(
                "x, y or sample_weight hold other values than when the checkpoint was saved. If "
                "this is another training, name another checkpoint_dir."
            )

    def find(self, saved: Place, pieces: str, recut: bool) -> None:
        """Restores the order for other pieces.

        A step has as many rows as before, so that the place stays.
        """
        self.restore(saved, {})

    def checksum(self) -> int:
        """Returns a checksum of some rows from all over the arrays."""
        some = np.linspace(0, self._rows - 1, min(self._rows, ROWS_OF_CHECKSUM)).astype(int)
        return rows.checksum(tf.nest.map_structure(lambda a: rows.take(a, some), self._arrays))

    def epochs(self, at: Position) -> Iterator[Iterator[Dispatch]]:
        """Yields an iterator of dispatches for each epoch from a position on, without end."""
        steps_per_pass = self._steps_per_pass
        steps_per_epoch = self.steps_per_epoch
        # As in Keras, an epoch ends where a pass does.
        lengths = []
        for start in range(0, steps_per_pass, steps_per_epoch):
            lengths.append(min(steps_per_epoch, steps_per_pass - start))
        passes, epochs_of_pass = divmod(at.epoch - at.first, len(lengths))

        # A dispatch may hold several steps, but none of the next epoch.
        passes_are_epochs = len(lengths) == 1
        steps_per_dispatch = self.layout.steps_per_execution if passes_are_epochs else 1
        chunks = self._chunks(steps_per_dispatch)
        steps_done = epochs_of_pass * steps_per_epoch + at.step
        chunks_done = 0
        for end in itertools.accumulate(chunk.steps for chunk in chunks):
            if end <= steps_done:
                chunks_done += 1

        stream = _ahead(self._stream(at.first + passes, chunks, chunks_done))
        skipped = at.step
        for length in itertools.islice(itertools.cycle(lengths), epochs_of_pass, None):
            dispatches = self._epoch(stream, length, length - skipped)
            skipped = 0
            if passes_are_epochs:
                yield dispatches
            else:
                yield group_steps(dispatches, self.layout)

    def _epoch(self, stream: Iterator[Dispatch], length: int, left: int) -> Iterator[Dispatch]:
        while left > 0:
            dispatch = next(stream)
            left -= dispatch.steps
            yield dispatch
        if length < self.steps_per_epoch:
            warn_short(self.what, length, self.steps_per_epoch)

    def _chunks(self, steps_per_dispatch: int) -> list[Chunk]:
        """Cuts a pass: padded to full steps, or not where rows must be exact."""
        rows_per_step = self._rows_per_step
        rows_per_dispatch = steps_per_dispatch * rows_per_step
        left = self._rows
        chunks = []
        while left > 0:
            if left >= rows_per_dispatch or not self.layout.exact_rows:
                rows_taken = rows_per_dispatch
            else:
                rows_taken = min(left, rows_per_step)
            steps = math.ceil(min(rows_taken, left) / rows_per_step)
            chunks.append(Chunk(rows_taken, steps))
            left -= rows_taken
        return chunks

    def order(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in the order of their use: int64 [rows]."""
        if self._seed is None:
            return np.arange(self._rows)
        return np.random.default_rng((self._seed, epoch)).permutation(self._rows)

    def _stream(self, epoch: int, chunks: list[Chunk], chunks_done: int) -> Iterator[Dispatch]:
        """Yields the dispatches of this epoch behind the chunks done, then those of all others."""
        # NumPy, since tf.data costs several times that for every stack of a small model.
        start = sum(chunk.rows for chunk in chunks[:chunks_done])
        chunks_left = chunks[chunks_done:]
        while True:
            order = self.order(epoch)
            for chunk in chunks_left:
                # Padded rows repeat the last real one, which belongs to the same step.
                places = np.arange(start, start + chunk.rows)
                taken = order[np.minimum(places, self._rows - 1)]
                valid = places < self._rows
                start += chunk.rows
                yield self._dispatch(taken, valid, chunk.steps)
            epoch += 1
            start = 0
            chunks_left = chunks

    def _dispatch(self, taken: np.ndarray, valid: np.ndarray, steps: int) -> Dispatch:
        """Makes the dispatch of these rows: of several steps, or of one."""
        real = int(valid.sum())
        size = len(taken)
        batch_size = self._batch_size
        if size > self._rows_per_step:
            shape = (size // self._rows_per_step, self.layout.accumulation, batch_size)
            stack = self._gathered(taken, valid, shape)
            return Dispatch((stack,), steps, is_multi_step=True, rows=real)

        # Where rows are exact, the last step of a pass may have a short micro-batch.
        micro_batches, rest = divmod(size, batch_size)
        whole = micro_batches * batch_size
        stacks = []
        if micro_batches:
            full = self._gathered(taken[:whole], valid[:whole], (micro_batches, batch_size))
            stacks.append(full)
        if rest:
            stacks.append(self._gathered(taken[whole:], valid[whole:], (1, rest)))
        return Dispatch(tuple(stacks), rows=real)

    def _gathered(self, taken: np.ndarray, valid: np.ndarray, shape: tuple[int, ...]) -> Batch:
        taken = taken.reshape(shape)
        valid = valid.reshape(shape)
        if self.layout.replicas > 1:
            columns, real = self.layout.columns(shape[-1])
            taken = taken[..., columns]
            valid = valid[..., columns] & real
        batch: Any = optree.tree_map(lambda a: rows.take(a, taken), self._arrays)  # type: ignore[arg-type]
        if valid.all():
            return batch._replace(valid=self._all_valid(valid.shape))
        return batch._replace(valid=tf.constant(valid))


def _ahead(items: Iterator[Dispatch], depth: int = PREFETCH) -> Iterator[Dispatch]:
    """Prefetches endless items, up to `depth` of them, in a thread.

    The thread ends with the iterator, or with the interpreter, which waits for it: in TensorFlow
    it would end the process with SIGABRT. (`ReadAhead`, whose items come from code that may never
    return, is not waited for.)
    """
    executor = futures.ThreadPoolExecutor(1, "fastaccum-data")
    ready: collections.deque[futures.Future[Dispatch]] = collections.deque()
    try:
        while True:
            # once the main thread has ended, Python starts no call in another
            with contextlib.suppress(RuntimeError):
                while len(ready) <= depth:
                    ready.append(executor.submit(next, items))
            yield ready.popleft().result() if ready else next(items)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def split(arrays: tuple, fraction: float, text: bool = False) -> tuple[tuple, tuple]:
    """Splits off the last `fraction` of all arrays' rows, as Keras's `validation_split` does."""
    if not rows.is_array_nest(arrays[0]):
        raise ValueError(
            f"validation_split={fraction} needs arrays, but x is a {type(arrays[0]).__name__}: "
            "pass validation_data."
        )
    batch = rows.as_arrays(arrays, text)
    count = rows.count(ArraySource.what, batch)
    at = math.floor(count * (1 - fraction))
    if at in (0, count):
        raise ValueError(f"validation_split={fraction} of {count} rows leaves one side empty.")

    def part(span: slice) -> tuple:
        side = tf.nest.map_structure(lambda array: array[span], batch)
        return side.x, side.y, side.weights

    return part(slice(at)), part(slice(at, None))
