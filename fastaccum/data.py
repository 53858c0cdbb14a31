"""Arrays, tf.data, PyDataset and generators as stacks of micro-batches: padded, marked, and nothing dropped."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters

from fastaccum import checks

PREFETCH = 2


class Batch(NamedTuple):
    """Inputs, targets, weights and validity: of one micro-batch [rows, ...], or of a stack of them.

    `valid` is False for rows that only pad the stack. A padded row repeats a real one, so that it cannot bring in a
    NaN of its own. An empty tuple, a nest without leaves, stands for "no weights" and "every row is valid".
    """

    x: Any
    y: Any
    sample_weight: Any = ()
    valid: Any = ()

    @property
    def weights(self) -> Any | None:
        """`sample_weight`, or None."""
        return self.sample_weight if tf.nest.flatten(self.sample_weight) else None

    @property
    def mask(self) -> tf.Tensor | None:
        """`valid`, or None."""
        return None if isinstance(self.valid, tuple) else self.valid


class Dispatch(NamedTuple):
    """What one call of the compiled program takes.

    Attributes:
        stacks: one stack with a leading axis for steps if `many`; else stacks that together make one step.
        steps: train steps in it; stacks beyond them hold no valid row.
        many: whether the program loops over steps too.
    """

    stacks: tuple[Batch, ...]
    steps: int = 1
    many: bool = False


class Layout(NamedTuple):
    """How rows become stacks.

    Attributes:
        accumulation: micro-batches in a step.
        steps_per_execution: steps in a dispatch.
        exact_rows: never pad, where a padded row would be felt (batch statistics); shapes then vary.
    """

    accumulation: int
    steps_per_execution: int = 1
    exact_rows: bool = False


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

    def __init__(self, batch: Batch, batch_size: int, layout: Layout, seed: int | None = None):
        self.arrays = _as_arrays(batch)
        self.rows = _common_rows(self.arrays)
        self.batch_size = min(checks.whole_number("batch_size", batch_size), self.rows)
        micro_batches = math.ceil(self.rows / self.batch_size)
        self.layout = layout._replace(accumulation=min(layout.accumulation, micro_batches))
        self.seed = seed
        self.rows_per_step = self.layout.accumulation * self.batch_size
        self.steps_per_epoch: int | None = math.ceil(self.rows / self.rows_per_step)

    @property
    def sample(self) -> Batch:
        """Specs of one micro-batch."""
        return tf.nest.map_structure(lambda a: tf.TensorSpec([self.batch_size, *a.shape[1:]], _dtype(a)), self.arrays)

    def epochs(self, first: int, steps_per_epoch: int | None) -> Iterator[Iterator[Dispatch]]:
        """One iterator of dispatches per epoch, from epoch `first` on, without end."""
        if steps_per_epoch in (None, self.steps_per_epoch):
            per_dispatch = self.layout.steps_per_execution
            stream, count = _ahead(self._stream(first, per_dispatch)), len(self._chunks(per_dispatch))
            while True:
                yield itertools.islice(stream, count)
        stream = _ahead(self._stream(first, 1))
        while True:
            yield _grouped(itertools.islice(stream, steps_per_epoch), self.layout)

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

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in the order of their use: int64 [rows]."""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng((self.seed, epoch)).permutation(self.rows)

    def _stream(self, first: int, per_dispatch: int) -> Iterator[Dispatch]:
        # NumPy, since tf.data costs several times that for every stack of a small model.
        chunks = self._chunks(per_dispatch)
        for epoch in itertools.count(first):
            order, start = self.order(epoch), 0
            for size, steps in chunks:
                # Padded rows repeat the last real one, which belongs to the same step.
                position = np.arange(start, start + size)
                rows, valid = order[np.minimum(position, self.rows - 1)], position < self.rows
                start += size
                if per_dispatch > 1 and size == per_dispatch * self.rows_per_step:
                    shape = (per_dispatch, self.layout.accumulation, self.batch_size)
                    yield Dispatch((self._gathered(rows, valid, shape),), steps, many=True)
                    continue
                whole, rest = divmod(size, self.batch_size)
                parts = [(0, (whole, self.batch_size)), (whole * self.batch_size, (1, rest))]
                spans = [(slice(at, at + math.prod(shape)), shape) for at, shape in parts if math.prod(shape)]
                yield Dispatch(tuple(self._gathered(rows[span], valid[span], shape) for span, shape in spans))

    def _gathered(self, rows: np.ndarray, valid: np.ndarray, shape: tuple[int, ...]) -> Batch:
        indices = rows.reshape(shape)
        batch = tf.nest.map_structure(lambda a: _taken(a, indices), self.arrays)
        return batch._replace(valid=tf.constant(valid.reshape(shape)))


def _ahead(items: Iterator, depth: int = PREFETCH) -> Iterator:
    """Endless items, made in a thread up to `depth` ahead of their use; the thread ends with the iterator."""
    ready: queue.Queue = queue.Queue(depth)
    ended = threading.Event()

    def produce():
        try:
            for item in items:
                ready.put((item, None))
                if ended.is_set():
                    return
        except Exception as error:  # raised where the items are used
            ready.put((None, error))

    threading.Thread(target=produce, name="fastaccum-data", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            yield item
    finally:
        ended.set()
        with contextlib.suppress(queue.Empty):  # makes room, should the thread be waiting for it
            while True:
                ready.get_nowait()


def _nothing() -> None:
    """The hook of a pass that needs none."""


def _only_once(what: str) -> Callable[[], None]:
    """A hook that refuses a second pass: Keras would begin it with the batches it peeked at for their shapes."""
    passes = itertools.count()

    def begin():
        if next(passes):
            raise used_up(what)

    return begin


def used_up(what: str) -> ValueError:
    """The error of data that would be read a second time."""
    return ValueError(
        f"{what} is used up after one pass, and cannot be read again: pass steps_per_epoch, a keras.utils.PyDataset or "
        "a tf.data.Dataset."
    )


class DatasetSource:
    """A batched tf.data.Dataset: each of its batches is a micro-batch, of whatever size.

    The rows of a step's batches are pooled and dealt out again as equal micro-batches, which changes nothing in
    their sum and lets batches of varying size share one program. Where rows must be exact, batches stay as
    they are.

    Args:
        dataset: yields (x, y) or (x, y, sample_weight).
        layout: how micro-batches become stacks.
        what: what the user passed, for errors.
        weigh: maps (y, sample_weight) to the sample weight to use (class weights).
        hooks: called before and after each pass over the data.
        read_once: whether a second pass is impossible.

    Raises:
        TypeError: elements that hold no dense numbers.
        ValueError: an empty or unbatched dataset.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        layout: Layout,
        what: str,
        weigh: Callable | None = None,
        hooks: tuple[Callable[[], None], Callable[[], None]] = (_nothing, _nothing),
        read_once: bool = False,
    ):
        self.what, self._hooks, self.read_once = what, hooks, read_once

        def batch(*element):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(element[0] if len(element) == 1 else element)
            weight = weight if weigh is None else weigh(y, weight)
            return Batch(x, () if y is None else y, () if weight is None else weight)

        self.dataset = dataset.map(batch)
        _require_batched(self.dataset.element_spec, what)
        self.batches = int(dataset.cardinality())
        if self.batches == 0:
            raise ValueError(f"{what} is empty: it has no batch to work on.")
        if self.batches > 0:
            layout = layout._replace(accumulation=min(layout.accumulation, self.batches))
        self.layout = layout
        self.batch_size = 0

    @property
    def steps_per_epoch(self) -> int | None:
        """Train steps in a pass; None where the dataset does not know, or never ends."""
        return math.ceil(self.batches / self.layout.accumulation) if self.batches > 0 else None

    @property
    def sample(self) -> Batch:
        """Specs of one micro-batch, its rows unknown."""
        spec = self.dataset.element_spec
        return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), spec)

    def epochs(self, first: int, steps_per_epoch: int | None) -> Iterator[Iterator[Dispatch]]:
        """One iterator of dispatches per epoch; ValueError where the data runs dry before its time."""
        if steps_per_epoch is None and self.batches == tf.data.INFINITE_CARDINALITY:
            raise ValueError(f"{self.what} is infinite: pass steps_per_epoch, counted in train steps.")
        known = self.steps_per_epoch
        if steps_per_epoch is not None and known is not None and known < steps_per_epoch:
            raise self._dry(known, steps_per_epoch)
        return self._epochs(steps_per_epoch)

    def _epochs(self, steps_per_epoch):
        endless = self._endless(steps_per_epoch)
        while True:
            steps = self._pass() if steps_per_epoch is None else itertools.islice(endless, steps_per_epoch)
            yield _grouped(steps, self.layout)

    def _endless(self, steps_per_epoch):
        while True:
            count = 0
            for step in self._pass():
                yield step
                count += 1
            if count < steps_per_epoch:
                raise self._dry(count, steps_per_epoch)

    def _dry(self, available: int, wanted: int) -> ValueError:
        return ValueError(
            f"{self.what} ran dry after {available} train steps of steps_per_epoch={wanted}. Ask for fewer, or pass a "
            "dataset with .repeat()."
        )

    def _pass(self) -> Iterator[Dispatch]:
        begin, end = self._hooks
        begin()
        empty = True
        for pooled, lengths in self._pooled():
            empty = False
            self._require_rows(pooled, lengths)
            if self.layout.exact_rows:
                yield Dispatch(_split(pooled._replace(valid=tf.ones([sum(lengths)], tf.bool)), lengths))
            else:
                yield Dispatch((self._dealt(pooled, lengths),))
        if empty:
            raise ValueError(f"{self.what} yielded no batch: there is nothing to work on.")
        end()

    def _pooled(self) -> Iterator[tuple[Batch, list[int]]]:
        """The rows of each step's batches, one after the other, and how many each batch had."""
        count = self.layout.accumulation
        spec = tf.nest.flatten(self.dataset.element_spec)
        if all(s.shape[1:].is_fully_defined() for s in spec):
            pooled = self.dataset.ragged_batch(count).map(_pool).prefetch(PREFETCH)
            for batch, lengths in pooled:
                yield batch, lengths.numpy().tolist()
            return
        batches = iter(self.dataset.prefetch(PREFETCH * count))
        while step := list(itertools.islice(batches, count)):
            self._require_same_shapes(step)
            lengths = [int(tf.nest.flatten(batch)[0].shape[0]) for batch in step]
            yield tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *step), lengths

    def _dealt(self, batch: Batch, lengths: list[int]) -> Batch:
        count, rows = self.layout.accumulation, sum(lengths)
        if not self.batch_size:
            self.batch_size = max(lengths)
        if rows > count * self.batch_size:
            larger = max(math.ceil(rows / count), max(lengths))
            warnings.warn(
                f"{self.what}: batches of up to {max(lengths)} rows after micro-batches of {self.batch_size}; the "
                f"train step is compiled again for {larger}. Put the largest batch first to compile once.",
                stacklevel=2,
            )
            self.batch_size = larger
        shape = [count, self.batch_size]
        order = tf.range(math.prod(shape))
        valid = order < rows
        if rows < math.prod(shape):
            order = tf.minimum(order, rows - 1)
            batch = tf.nest.map_structure(lambda t: tf.gather(t, order), batch)
        return _reshaped(batch._replace(valid=valid), shape)

    def _require_rows(self, batch: Batch, lengths: list[int]) -> None:
        rows = {int(t.shape[0]) for t in tf.nest.flatten(batch)}
        if rows == {0}:
            raise ValueError(f"{self.what} yielded only batches without rows in a whole train step.")
        if len(rows) > 1:
            sizes = {k: [int(t.shape[0]) for t in tf.nest.flatten(v)] for k, v in batch._asdict().items()}
            raise ValueError(f"{self.what}: x, y and sample_weight have different numbers of rows: {sizes}.")

    def _require_same_shapes(self, step: list[Batch]) -> None:
        for parts in zip(*map(tf.nest.flatten, step), strict=True):
            shapes = {tuple(t.shape[1:]) for t in parts}
            if len(shapes) > 1:
                raise ValueError(
                    f"{self.what}: the micro-batches of one train step have rows of different shapes {sorted(shapes)}. "
                    "Pad them alike: .padded_batch(..., padded_shapes=...), or group equal lengths."
                )


def source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    layout: Layout,
    shuffle: bool = False,
    seed: int | None = None,
    class_weight: dict[int, float] | None = None,
    sparse_labels: bool = False,
    what: str = "x",
) -> ArraySource | DatasetSource:
    """The source for whatever Keras's `fit` takes as `x`.

    Args:
        x, y, sample_weight: nests of arrays; or `x` alone: a tf.data.Dataset, `keras.utils.PyDataset`, generator or
            torch DataLoader of batches.
        batch_size: rows of a micro-batch, for arrays; None means 32.
        layout: how rows become stacks.
        shuffle: arrays anew in every epoch, a PyDataset by batches; a dataset or generator keeps its own order.
        seed: of the shuffling.
        class_weight: a factor for each class, multiplied into the sample weights.
        sparse_labels: whether `y` holds class indices even where it has more than one axis.
        what: the argument's name, for errors.
    """
    weigh = None if class_weight is None else _class_weights(class_weight, sparse_labels)
    if x is None:
        raise ValueError(f"{what}=None: there is no data to work on.")
    if _is_array_nest(x):
        if y is None:
            raise ValueError(f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y).")
        batch = _as_arrays((x, y, sample_weight))
        if weigh is not None:
            _common_rows(batch)
            weights = None if batch.weights is None else as_tensors("sample_weight", batch.weights)
            batch = batch._replace(sample_weight=weigh(as_tensors("y", batch.y), weights))
        size = 32 if batch_size is None else batch_size
        return ArraySource(batch, size, layout, seed if shuffle else None)
    if y is not None or sample_weight is not None:
        raise ValueError(f"{what} is a {type(x).__name__}, which yields y and sample_weight itself: leave them out.")
    name, hooks, read_once = f"{what} ({type(x).__name__})", (_nothing, _nothing), hasattr(x, "__next__")
    if not isinstance(x, tf.data.Dataset):
        if isinstance(x, keras.utils.PyDataset):
            hooks = x.on_epoch_begin, x.on_epoch_end
        elif read_once:
            hooks = _only_once(name), _nothing
        adapter = data_adapters.get_data_adapter(x, shuffle=shuffle and isinstance(x, keras.utils.PyDataset))
        x = adapter.get_tf_dataset()
        if adapter.num_batches is not None:
            x = x.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
    return DatasetSource(x, layout, name, weigh, hooks, read_once)


def split(arrays: tuple, fraction: float) -> tuple[tuple, tuple]:
    """The first rows of every array, and the last `fraction` of them, as Keras's `validation_split` does."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation_split={fraction} must lie between 0 and 1.")
    if not _is_array_nest(arrays[0]):
        raise ValueError(
            f"validation_split={fraction} needs arrays, but x is a {type(arrays[0]).__name__}: pass validation_data."
        )
    batch = _as_arrays(arrays)
    rows = _common_rows(batch)
    at = math.floor(rows * (1 - fraction))
    if at in (0, rows):
        raise ValueError(f"validation_split={fraction} of {rows} rows leaves one side empty.")
    parts = (tf.nest.map_structure(lambda t, s=s: t[s], batch) for s in (slice(at), slice(at, None)))
    first, last = ((part.x, part.y, part.weights) for part in parts)
    return first, last


def _grouped(steps: Iterator[Dispatch], layout: Layout) -> Iterator[Dispatch]:
    """Dispatches of `steps_per_execution` steps each; what is left at the end is padded, or stays single."""
    size = layout.steps_per_execution
    if size == 1:
        yield from steps
        return
    pending: list[Dispatch] = []
    for step in steps:
        if pending and _shapes(step) != _shapes(pending[0]):
            yield from pending
            pending = []
        pending.append(step)
        if len(pending) == size and len(step.stacks) == 1:
            yield _joined(pending, size)
            pending = []
    if layout.exact_rows or not pending:
        yield from pending
        return
    nothing = tf.nest.map_structure(tf.identity, pending[-1].stacks[0])
    nothing = Dispatch((nothing._replace(valid=tf.zeros_like(nothing.valid)),))
    yield _joined([*pending, *[nothing] * (size - len(pending))], len(pending))


def _joined(dispatches: list[Dispatch], steps: int) -> Dispatch:
    stack = tf.nest.map_structure(lambda *parts: tf.stack(parts), *(d.stacks[0] for d in dispatches))
    return Dispatch((stack,), steps, many=True)


def _shapes(dispatch: Dispatch) -> list:
    return [tuple(t.shape) for t in tf.nest.flatten(dispatch.stacks)]


def _pool(batch: Batch):
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        lengths = first.row_lengths()
    else:
        lengths = tf.fill([tf.shape(first)[0]], tf.shape(first)[1])

    def rows(t):
        if isinstance(t, tf.RaggedTensor):
            return t.values
        return tf.reshape(t, tf.concat([[-1], tf.shape(t)[2:]], 0))

    return tf.nest.map_structure(rows, batch), lengths


def _reshaped(batch: Batch, shape: list[int]) -> Batch:
    return tf.nest.map_structure(lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), batch)


def _split(batch: Batch, lengths: list[int]) -> tuple[Batch, ...]:
    """Stacks of equal micro-batches: one per run of equal lengths."""
    stacks, start = [], 0
    for length, run in itertools.groupby(filter(None, lengths)):
        count = len(list(run))
        end = start + count * length
        part = tf.nest.map_structure(lambda t, s=start, e=end: t[s:e], batch)
        stacks.append(_reshaped(part, [count, length]))
        start = end
    return tuple(stacks)


def _class_weights(class_weight: dict[int, float], sparse_labels: bool) -> Callable:
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)

    def weigh(y, sample_weight):
        if tf.nest.is_nested(y):
            raise ValueError(f"class_weight={class_weight} needs a single output, but y holds several.")
        labels = y
        if not sparse_labels and y.shape.rank > 1:
            labels = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
        matches = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)[..., tf.newaxis] == classes
        factor = tf.where(tf.reduce_any(matches, -1), tf.reduce_sum(tf.cast(matches, tf.float32) * factors, -1), 1.0)
        if sample_weight is None:
            return factor
        weight = tf.cast(sample_weight, tf.float32)
        extra = [1] * abs(factor.shape.rank - weight.shape.rank)
        if weight.shape.rank < factor.shape.rank:
            weight = tf.reshape(weight, tf.concat([tf.shape(weight), extra], 0))
        elif extra:
            factor = tf.reshape(factor, tf.concat([tf.shape(factor), extra], 0))
        return weight * factor

    return weigh


def _is_array_nest(x: Any) -> bool:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        return False
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(
        hasattr(leaf, "__array__") or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, int, float, str, bytes))
        for leaf in leaves
    )


def as_tensors(name: str, nest: Any) -> Any:
    """Arrays as tensors, float64 as Keras's default float, as in Keras."""
    return tf.nest.map_structure(lambda leaf: _taken(_array(name, leaf), ...), nest)


def _as_arrays(batch: tuple) -> Batch:
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
    if not hasattr(leaf, "__array__"):
        raise TypeError(f"{name} holds {leaf!r} ({type(leaf).__name__}); pass arrays, such as np.asarray(...).")
    if isinstance(leaf, (tf.Tensor, tf.Variable)):
        leaf = tf.convert_to_tensor(leaf)
    array = leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
    dtype = tf.as_dtype(array.dtype) if array.dtype != object else None
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise TypeError(f"{name} has dtype {array.dtype}: pass numbers, with text and objects encoded beforehand.")
    if len(array.shape) == 0:
        raise ValueError(f"{name}={leaf!r} is a scalar: the first axis must count examples.")
    return array


def _dtype(array: np.ndarray | tf.Tensor) -> tf.DType:
    """The dtype in which an array reaches the model: float64 as Keras's default float, as in Keras."""
    dtype = tf.as_dtype(array.dtype)
    return tf.as_dtype(keras.config.floatx()) if dtype == tf.float64 else dtype


def _taken(array: np.ndarray | tf.Tensor, rows: Any) -> tf.Tensor:
    """Rows of an array as a tensor; all of them for `...`."""
    if isinstance(array, tf.Tensor):
        return tf.cast(array if rows is ... else tf.gather(array, rows), _dtype(array))
    taken = array if rows is ... else array.take(rows, axis=0)
    return tf.convert_to_tensor(taken.astype(_dtype(array).as_numpy_dtype, copy=False))


def _common_rows(batch: Batch) -> int:
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


def _require_batched(spec: Batch, what: str) -> None:
    if not tf.nest.flatten(spec.y):
        raise ValueError(f"{what} yields no targets: it must yield (x, y) or (x, y, sample_weight).")
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            raise TypeError(f"{what} yields {leaf}: XLA needs dense tensors. Map them to dense ones first.")
        if not (leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool):
            raise TypeError(f"{what} yields dtype {leaf.dtype.name}: pass numbers, with text encoded beforehand.")
        if leaf.shape.rank is None:
            raise ValueError(
                f"{what} yields a tensor of unknown rank: give it a shape (output_signature, ensure_shape)."
            )
        if leaf.shape.rank == 0:
            raise ValueError(f"{what} is not batched: it yields scalars ({leaf}). Call .batch(batch_size) on it.")
    leading = {leaf.shape[0] for leaf in tf.nest.flatten(spec)} - {None}
    if len(leading) > 1:
        raise ValueError(
            f"{what} is not batched, or x and y differ in rows: first axes {sorted(leading)}. Call .batch(batch_size)."
        )
