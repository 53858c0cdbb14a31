"""In-memory arrays as stacks of micro-batches."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import optree
import tensorflow as tf

from fastaccum import checks
from fastaccum.data import rows
from fastaccum.data.stacks import Batch, Dispatch, Layout, Place, Position, group_steps, warn_short
from fastaccum.lines import warn

PREFETCH = 2


class ArraySource:
    """Arrays in memory that `rows.as_arrays` checked; `seed` shuffles each epoch anew, None keeps
    the order.
    """

    read_once = False
    what = "x, y and sample_weight"

    def __init__(self, arrays: Batch, batch_size: int, seed: int | None = None):
        self.arrays, self.seed = arrays, seed
        self.rows = rows.count(self.what, arrays)
        if not self.rows:
            raise ValueError("x is empty: it has 0 rows.")
        self.rebatch(batch_size)

    @property
    def sample(self) -> Batch:
        """Returns specs of one micro-batch."""
        return tf.nest.map_structure(
            lambda a: tf.TensorSpec([self.batch_size, *a.shape[1:]], rows.model_dtype(a)),
            self.arrays,
        )

    def most_rows(self, workers: int) -> int | None:
        """Returns the most rows of a micro-batch that `rebatch` can make; None for any number."""
        return self.rows

    def rebatch(self, batch_size: int) -> None:
        """Sets the rows of a micro-batch."""
        self.batch_size = min(checks.whole_number("batch_size", batch_size), self.rows)

    def stacks(
        self, layout: Layout, steps_per_epoch: int | None = None, epochs: int = 1
    ) -> ArrayStacks:
        """Makes stacks of the rows; an epoch is a pass, or the part of a pass that follows the last
        epoch's.
        """
        return ArrayStacks(self, layout, steps_per_epoch)


class ArrayStacks:
    """The stacks of an `ArraySource`, their rows gathered in a thread ahead of use."""

    has_known_end = True

    def __init__(self, source: ArraySource, layout: Layout, steps_per_epoch: int | None):
        self.what, self._arrays, self._seed = source.what, source.arrays, source.seed
        self._rows, self._batch_size = source.rows, source.batch_size
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
        for size in {self._batch_size, self._rows % self._batch_size or self._batch_size}:
            self.layout.columns(size)

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
        """Restores the order of the fit that `saved` comes from; warns if the rows are not what
        they were.
        """
        self._seed = saved["seed"]
        if saved["checksum"] != self.checksum():
            warn(
                "x, y or sample_weight hold other values than when the checkpoint was saved. If "
                "this is another training, name another checkpoint_dir."
            )

    def find(self, saved: Place, pieces: str, recut: bool) -> None:
        """Restores the order for other pieces; a step has as many rows as before, so that the place
        stays.
        """
        self.restore(saved, {})

    def checksum(self) -> int:
        """Returns a checksum of 64 rows from all over the arrays."""
        some = np.linspace(0, self._rows - 1, min(self._rows, 64)).astype(int)
        return rows.checksum(tf.nest.map_structure(lambda a: rows.take(a, some), self._arrays))

    def epochs(self, at: Position) -> Iterator[Iterator[Dispatch]]:
        """Yields an iterator of dispatches for each epoch from a position on, without end."""
        whole, wanted = self._steps_per_pass, self.steps_per_epoch
        # As in Keras, an epoch ends where a pass does.
        lengths = [min(wanted, whole - start) for start in range(0, whole, wanted)]
        passes_are_epochs = len(lengths) == 1
        passes, part = divmod(at.epoch - at.first, len(lengths))
        chunks = self._chunks(self.layout.steps_per_execution if passes_are_epochs else 1)
        done = sum(
            end <= part * wanted + at.step
            for end in itertools.accumulate(steps for _, steps in chunks)
        )
        stream, skipped = _ahead(self._stream(at.first + passes, chunks, done)), at.step
        for length in itertools.islice(itertools.cycle(lengths), part, None):
            dispatches, skipped = self._epoch(stream, length, length - skipped), 0
            yield dispatches if passes_are_epochs else group_steps(dispatches, self.layout)

    def _epoch(self, stream: Iterator[Dispatch], length: int, left: int) -> Iterator[Dispatch]:
        while left > 0:
            dispatch = next(stream)
            left -= dispatch.steps
            yield dispatch
        if length < self.steps_per_epoch:
            warn_short(self.what, length, self.steps_per_epoch)

    def _chunks(self, per_dispatch: int) -> list[tuple[int, int]]:
        """Lists (rows, steps) of each dispatch of a pass: padded to full steps, or cut where rows
        must be exact.
        """
        left, chunks, step = self._rows, [], self._rows_per_step
        while left > 0:
            size = (
                per_dispatch * step
                if left >= per_dispatch * step or not self.layout.exact_rows
                else min(left, step)
            )
            chunks.append((size, math.ceil(min(size, left) / step)))
            left -= size
        return chunks

    def order(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in the order of their use: int64 [rows]."""
        if self._seed is None:
            return np.arange(self._rows)
        return np.random.default_rng((self._seed, epoch)).permutation(self._rows)

    def _stream(self, first: int, chunks: list[tuple[int, int]], done: int) -> Iterator[Dispatch]:
        # NumPy, since tf.data costs several times that for every stack of a small model.
        per_step = (self.layout.accumulation, self._batch_size)
        for epoch in itertools.count(first):
            order, start = self.order(epoch), sum(size for size, _ in chunks[:done])
            for size, steps in chunks[done:]:
                # Padded rows repeat the last real one, which belongs to the same step.
                position = np.arange(start, start + size)
                taken, valid = order[np.minimum(position, self._rows - 1)], position < self._rows
                real = int(valid.sum())
                start += size
                if size > self._rows_per_step:
                    shape = (size // self._rows_per_step, *per_step)
                    stack = self._gathered(taken, valid, shape)
                    yield Dispatch((stack,), steps, is_multi_step=True, rows=real)
                    continue
                whole, rest = divmod(size, self._batch_size)
                parts = [(0, (whole, self._batch_size)), (whole * self._batch_size, (1, rest))]
                spans = [
                    (slice(at, at + math.prod(shape)), shape)
                    for at, shape in parts
                    if math.prod(shape)
                ]
                stacks = tuple(
                    self._gathered(taken[span], valid[span], shape) for span, shape in spans
                )
                yield Dispatch(stacks, rows=real)
            done = 0

    def _gathered(self, taken: np.ndarray, valid: np.ndarray, shape: tuple[int, ...]) -> Batch:
        indices, valid = taken.reshape(shape), valid.reshape(shape)
        if self.layout.replicas > 1:
            columns, real = self.layout.columns(shape[-1])
            indices, valid = indices[..., columns], valid[..., columns] & real
        batch: Any = optree.tree_map(lambda a: rows.take(a, indices), self._arrays)  # type: ignore[arg-type]
        return batch._replace(
            valid=self._all_valid(valid.shape) if valid.all() else tf.constant(valid)
        )


def _ahead(items: Iterator[Dispatch], depth: int = PREFETCH) -> Iterator[Dispatch]:
    """Prefetches endless items, up to `depth` of them, in a thread that ends with the iterator or
    the interpreter.
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
    """Splits off the last `fraction` of the rows of every array, as Keras's `validation_split`
    does.
    """
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
    first, last = (
        tf.nest.map_structure(lambda t, s=s: t[s], batch) for s in (slice(at), slice(at, None))
    )
    return (first.x, first.y, first.weights), (last.x, last.y, last.weights)
