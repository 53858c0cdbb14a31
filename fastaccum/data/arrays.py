"""In-memory arrays as stacks of micro-batches."""

from __future__ import annotations

import functools
import itertools
import math
import queue
import threading
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import optree
import tensorflow as tf

from fastaccum import checks
from fastaccum.data.stacks import Batch, Dispatch, Layout, Position, grouped, trip_count
from fastaccum.kernels.device import has_gpu

PREFETCH = 2


class ArraySource:
    """In-memory arrays, their rows gathered in a thread ahead of use; NumPy arrays are not copied as a whole.

    Args:
        batch: nests of arrays or tensors that share their first axis; `valid` is None.
        batch_size: rows in a micro-batch.
        layout: how rows become stacks.
        seed: shuffles every epoch anew, and the same way for the same seed; None keeps the order.

    Raises:
        TypeError: something that is no dense array of numbers.
        ValueError: no rows, or first axes that differ.
    """

    read_once = False
    what = "x, y and sample_weight"

    def __init__(self, batch: Batch, batch_size: int, layout: Layout, seed: int | None = None):
        self.arrays = as_arrays(batch)
        self.rows = common_rows(self.arrays)
        self.batch_size = min(checks.whole_number("batch_size", batch_size), self.rows)
        micro_batches = math.ceil(self.rows / self.batch_size)
        self.layout = layout._replace(accumulation=min(layout.accumulation, micro_batches))
        self.seed = seed
        self.rows_per_step = self.layout.accumulation * self.batch_size
        self.steps_per_epoch: int | None = math.ceil(self.rows / self.rows_per_step)
        self._all_valid = functools.cache(lambda shape: tf.ones(shape, tf.bool))

    @property
    def sample(self) -> Batch:
        """Specs of one micro-batch."""
        return tf.nest.map_structure(lambda a: tf.TensorSpec([self.batch_size, *a.shape[1:]], _dtype(a)), self.arrays)

    @property
    def plan(self) -> dict[str, Any]:
        """What must be the same for a fit to be resumed."""
        return {"rows": self.rows, "batch_size": self.batch_size, "shuffle": self.seed is not None}

    def position(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `restore` needs beside the steps done, as plain values and tensors: the order follows from the seed."""
        return {"seed": self.seed, "checksum": self.checksum()}, {}

    def track(self) -> None:
        """Keeps what `position` needs: nothing."""

    def restore(self, saved: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Takes up the order of the fit that `saved` comes from; warns where the rows are not what they were."""
        self.seed = saved["seed"]
        if saved["checksum"] != self.checksum():
            warnings.warn(
                "x, y or sample_weight hold other values than when the checkpoint was saved. If this is another "
                "training, name another checkpoint_dir.",
                RuntimeWarning,
                stacklevel=2,
            )

    def epochs(self, at: int | Position, steps_per_epoch: int | None) -> Iterator[Iterator[Dispatch]]:
        """One iterator of dispatches per epoch, from epoch or position `at` on, without end."""
        for size in {self.batch_size, self.rows % self.batch_size if self.layout.exact_rows else 0} - {0}:
            self.layout.columns(size)  # refuses, before the first step, what cannot be shared
        at = Position(at, at) if isinstance(at, int) else at
        if steps_per_epoch in (None, self.steps_per_epoch):
            per_dispatch = self.layout.steps_per_execution
            count, done = len(self._chunks(per_dispatch)), self._dispatches(per_dispatch, at.step)
            stream = _ahead(self._stream(at.epoch, per_dispatch, done))
            yield itertools.islice(stream, count - done)
            while True:
                yield itertools.islice(stream, count)
        passes, done = divmod((at.epoch - at.first) * steps_per_epoch + at.step, self.steps_per_epoch)
        stream = _ahead(self._stream(at.first + passes, 1, done))
        yield grouped(itertools.islice(stream, steps_per_epoch - at.step), self.layout)
        while True:
            yield grouped(itertools.islice(stream, steps_per_epoch), self.layout)

    def _chunks(self, per_dispatch: int) -> list[tuple[int, int]]:
        """(rows, steps) of each dispatch of a pass: padded to full steps, or cut where rows must be exact."""
        left, chunks = self.rows, []
        while left > 0:
            whole = left >= per_dispatch * self.rows_per_step or not self.layout.exact_rows
            size = per_dispatch * self.rows_per_step if whole else min(left, self.rows_per_step)
            taken = min(size, left)
            chunks.append((size, math.ceil(taken / self.rows_per_step)))
            left -= taken
        return chunks

    def checksum(self) -> int:
        """Of some rows from all over the arrays: who holds other rows finds another."""
        rows = np.linspace(0, self.rows - 1, min(self.rows, 64)).astype(int)
        return checksum(tf.nest.map_structure(lambda a: _taken(a, rows), self.arrays))

    def _dispatches(self, per_dispatch: int, steps: int) -> int:
        """How many of a pass's dispatches hold its first `steps` steps."""
        ends = itertools.accumulate(steps for _, steps in self._chunks(per_dispatch))
        return sum(end <= steps for end in ends)

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in the order of their use: int64 [rows]."""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng((self.seed, epoch)).permutation(self.rows)

    def _stream(self, first: int, per_dispatch: int, done: int) -> Iterator[Dispatch]:
        # NumPy, since tf.data costs several times that for every stack of a small model.
        chunks = self._chunks(per_dispatch)
        for epoch in itertools.count(first):
            order, start = self.order(epoch), 0
            for chunk, (size, steps) in enumerate(chunks):
                if epoch == first and chunk < done:
                    start += size
                    continue
                # Padded rows repeat the last real one, which belongs to the same step.
                position = np.arange(start, start + size)
                rows, valid = order[np.minimum(position, self.rows - 1)], position < self.rows
                start += size
                if per_dispatch > 1 and size == per_dispatch * self.rows_per_step:
                    shape = (per_dispatch, self.layout.accumulation, self.batch_size)
                    yield Dispatch((self._gathered(rows, valid, shape),), steps, is_multi_step=True)
                    continue
                whole, rest = divmod(size, self.batch_size)
                parts = [(0, (whole, self.batch_size)), (whole * self.batch_size, (1, rest))]
                spans = [(slice(at, at + math.prod(shape)), shape) for at, shape in parts if math.prod(shape)]
                yield Dispatch(tuple(self._gathered(rows[span], valid[span], shape) for span, shape in spans))

    def _gathered(self, rows: np.ndarray, valid: np.ndarray, shape: tuple[int, ...]) -> Batch:
        indices, valid = rows.reshape(shape), valid.reshape(shape)
        if self.layout.replicas > 1:
            columns, real = self.layout.columns(shape[-1])
            indices, valid = indices[..., columns], valid[..., columns] & real
        batch = optree.tree_map(lambda a: _taken(a, indices), self.arrays)
        return batch._replace(valid=self._all_valid(valid.shape) if valid.all() else tf.constant(valid))


def _ahead(items: Iterator, depth: int = PREFETCH) -> Iterator:
    """Endless items, made in a thread up to `depth` ahead of their use; the thread ends with the iterator."""
    # Written in C, where Queue is written in Python.
    ready, room = queue.SimpleQueue(), queue.SimpleQueue()
    ended = threading.Event()

    def produce():
        try:
            for item in items:
                ready.put((item, None))
                room.get()
                if ended.is_set():
                    return
        except Exception as error:  # raised where the items are used
            ready.put((None, error))

    for _ in range(depth - 1):
        room.put(None)
    threading.Thread(target=produce, name="fastaccum-data", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            room.put(None)
            yield item
    finally:
        ended.set()
        room.put(None)


def split(arrays: tuple, fraction: float) -> tuple[tuple, tuple]:
    """The first rows of every array, and the last `fraction` of them, as Keras's `validation_split` does."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation_split={fraction} must lie between 0 and 1.")
    if not is_array_nest(arrays[0]):
        raise ValueError(
            f"validation_split={fraction} needs arrays, but x is a {type(arrays[0]).__name__}: pass validation_data."
        )
    batch = as_arrays(arrays)
    rows = common_rows(batch)
    at = math.floor(rows * (1 - fraction))
    if at in (0, rows):
        raise ValueError(f"validation_split={fraction} of {rows} rows leaves one side empty.")
    parts = (tf.nest.map_structure(lambda t, s=s: t[s], batch) for s in (slice(at), slice(at, None)))
    first, last = ((part.x, part.y, part.weights) for part in parts)
    return first, last


def is_array_nest(x: Any) -> bool:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        return False
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(
        hasattr(leaf, "__array__") or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, int, float, str, bytes))
        for leaf in leaves
    )


def as_stack(stack: Any) -> Batch:
    """A stack `(x, y)` or `(x, y, sample_weight)` of [micro-batches, rows, ...] arrays as tensors."""
    if not isinstance(stack, (tuple, list)) or len(stack) not in (2, 3):
        raise ValueError(
            f"A train step takes (x, y) or (x, y, sample_weight); got {type(stack).__name__}"
            + (f" of {len(stack)} entries." if isinstance(stack, (tuple, list)) else ".")
        )
    if stack[1] is None:
        raise ValueError("y=None: a train step needs targets, as in (x, y).")
    given = [() if each is None else each for each in stack]
    batch = Batch(*(as_tensors(name, each) for name, each in zip(Batch._fields, given, strict=False)))
    trip_count(batch)
    rows = {tuple(t.shape[:2]) for t in tf.nest.flatten(batch)}
    if len(rows) > 1 or len(next(iter(rows))) < 2 or 0 in next(iter(rows)):
        shapes = [tuple(t.shape) for t in tf.nest.flatten(batch)]
        raise ValueError(
            f"Every tensor of a stack has shape [micro-batches, rows, ...], the same first two axes in all: {shapes}."
        )
    return batch


def as_tensors(name: str, nest: Any) -> Any:
    """Arrays as tensors, float64 as Keras's default float, as in Keras."""
    return tf.nest.map_structure(lambda leaf: _taken(_array(name, leaf), ...), nest)


def as_arrays(batch: tuple) -> Batch:
    """Arrays that hold numbers, as they are: NumPy's are not copied."""
    return Batch(
        *(
            tf.nest.map_structure(lambda leaf, name=name: _array(name, leaf), () if nest is None else nest)
            for name, nest in zip(Batch._fields, batch, strict=False)
        )
    )


def _array(name: str, leaf: Any) -> np.ndarray | tf.Tensor:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        remedy = "to_tensor()" if isinstance(leaf, tf.RaggedTensor) else "tf.sparse.to_dense"
        raise TypeError(f"{name} holds a {type(leaf).__name__}: XLA needs dense tensors. Use {remedy} first.")
    if hasattr(leaf, "toarray"):
        raise TypeError(f"{name} holds a {type(leaf).__name__}: XLA needs dense tensors. Use .toarray() first.")
    if not hasattr(leaf, "__array__"):
        raise TypeError(f"{name} holds {leaf!r} ({type(leaf).__name__}); pass arrays, such as np.asarray(...).")
    if isinstance(leaf, (tf.Tensor, tf.Variable)):
        leaf = tf.convert_to_tensor(leaf)
    require_unmasked(name, leaf)
    array = leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
    try:
        dtype = tf.as_dtype(array.dtype) if array.dtype != object else None
    except TypeError:  # datetimes, records, long doubles: TensorFlow has none
        dtype = None
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise TypeError(f"{name} has dtype {array.dtype}: pass numbers, with text and objects encoded beforehand.")
    if len(array.shape) == 0:
        raise ValueError(f"{name}={leaf!r} is a scalar: the first axis must count examples.")
    return array


def require_unmasked(name: str, leaf: Any) -> None:
    """Raises TypeError for a masked array with masked elements."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise TypeError(
            f"{name} is a masked array with {int(np.ma.count_masked(leaf)):,} masked elements, which would count as if "
            "they were not: fill them (.filled(value)), and leave them out by a sample_weight of 0."
        )


def _dtype(array: np.ndarray | tf.Tensor) -> tf.DType:
    """The dtype in which an array reaches the model: float64 as Keras's default float, as in Keras."""
    dtype = tf.as_dtype(array.dtype)
    return tf.as_dtype(keras.config.floatx()) if dtype == tf.float64 else dtype


def _taken(array: np.ndarray | tf.Tensor, rows: Any) -> tf.Tensor:
    """Rows of an array as a tensor; all of them for `...`."""
    if isinstance(array, tf.Tensor):
        return tf.cast(array if rows is ... else tf.gather(array, rows), _dtype(array))
    dtype = np.dtype(_dtype(array).as_numpy_dtype)
    if rows is ...:
        return tf.convert_to_tensor(array.astype(dtype, copy=False))
    if not array.flags.c_contiguous:  # `take` would make a copy of the whole array that is
        return tf.convert_to_tensor(array[rows].astype(dtype, copy=False))
    if dtype.kind not in "fiu" or has_gpu():
        return tf.convert_to_tensor(array.take(rows, axis=0).astype(dtype, copy=False))
    # Gathered to where TensorFlow can use it as it is: its own copy takes twice as long as the gather.
    taken = _aligned((*rows.shape, *array.shape[1:]), dtype)
    array.take(rows, axis=0, out=taken, mode="clip")  # "raise", the default, would gather into a buffer first
    return tf.experimental.dlpack.from_dlpack(taken.__dlpack__())


def _aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """An uninitialised array that starts where TensorFlow's own tensors may start."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def checksum(nest: Any) -> int:
    """CRC-32 of the bytes of all tensors of a nest."""
    value = 0
    for tensor in tf.nest.flatten(nest):
        value = zlib.crc32(np.ascontiguousarray(tensor.numpy()).view(np.uint8), value)
    return value


def common_rows(batch: Batch) -> int:
    sizes = {n: [int(t.shape[0]) for t in tf.nest.flatten(v)] for n, v in batch._asdict().items()}
    sizes = {name: rows for name, rows in sizes.items() if rows}
    rows = set(itertools.chain.from_iterable(sizes.values()))
    if len(rows) != 1:
        raise ValueError(
            f"x, y and sample_weight have different numbers of rows: {sizes}. Pass one of each per example."
        )
    (count,) = rows
    if not count:
        raise ValueError("x is empty: it has 0 rows.")
    return count
