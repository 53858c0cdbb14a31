"""Arrays, tf.data, PyDataset and generators as stacks of micro-batches: padded, marked, and nothing dropped."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters

from fastaccum.data.arrays import (
    PREFETCH,
    ArraySource,
    as_arrays,
    as_tensors,
    checksum,
    common_rows,
    is_array_nest,
    require_unmasked,
)
from fastaccum.data.passes import Passes
from fastaccum.data.stacks import Batch, Dispatch, Layout, Position, grouped, reshaped, split_rows


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
    if isinstance(x, (list, tuple, dict)) and not tf.nest.flatten(x):
        raise ValueError(f"{what}={x!r} holds no array: there is no data to work on.")
    if is_array_nest(x) or isinstance(x, (list, tuple, dict)) or hasattr(x, "toarray"):
        if y is None:
            raise ValueError(f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y).")
        batch = as_arrays((x, y, sample_weight))
        if weigh is not None:
            common_rows(batch)
            weights = None if batch.weights is None else as_tensors("sample_weight", batch.weights)
            batch = batch._replace(sample_weight=weigh(as_tensors("y", batch.y), weights))
        size = 32 if batch_size is None else batch_size
        return ArraySource(batch, size, layout, seed if shuffle else None)
    if y is not None or sample_weight is not None:
        raise ValueError(f"{what} is a {type(x).__name__}, which yields y and sample_weight itself: leave them out.")
    name, hooks, read_once = f"{what} ({type(x).__name__})", (_nothing, _nothing), hasattr(x, "__next__")
    python, shuffled = not isinstance(x, tf.data.Dataset), shuffle and isinstance(x, keras.utils.PyDataset)
    if python:
        if isinstance(x, keras.utils.PyDataset):
            hooks = x.on_epoch_begin, x.on_epoch_end
        elif read_once:
            hooks = _only_once(name), _nothing
            x = _without_masks(x, name)
        adapter = data_adapters.get_data_adapter(x, shuffle=shuffled)
        x = adapter.get_tf_dataset()
        if adapter.num_batches is not None:
            x = x.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
    return DatasetSource(x, layout, name, weigh, hooks, read_once, python, shuffled)


def used_up(what: str) -> ValueError:
    """The error of data that would be read a second time."""
    return ValueError(
        f"{what} is used up after one pass, and cannot be read again: pass steps_per_epoch, a keras.utils.PyDataset or "
        "a tf.data.Dataset."
    )


def _nothing() -> None:
    """The hook of a pass that needs none."""


def _only_once(what: str) -> Callable[[], None]:
    """A hook that refuses a second pass: Keras would begin it with the batches it peeked at for their shapes."""
    passes = itertools.count()

    def begin():
        if next(passes):
            raise used_up(what)

    return begin


def _without_masks(batches: Iterator, what: str) -> Iterator:
    """The batches; TypeError at a masked array, whose mask TensorFlow would drop."""
    for batch in batches:
        for leaf in tf.nest.flatten(batch):
            require_unmasked(what, leaf)
        yield batch


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
        python: whether Python code yields the batches.
        shuffled: whether each pass draws its order from Python's `random`, as Keras does for a PyDataset.

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
        python: bool = False,
        shuffled: bool = False,
    ):
        self.what, self.read_once = what, read_once

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
        alike = not layout.all_here
        self.layout = _own_shares(layout, dataset, what)
        self.batch_size = 0
        self._checksum = 0
        self._passes = Passes(lambda: self._steps, self.dataset.element_spec, what, hooks, python, shuffled, alike)

    @property
    def plan(self) -> dict[str, Any]:
        """What must be the same for a fit to be resumed."""
        return {"batches": self.batches}

    def position(self) -> tuple[dict[str, Any], dict[str, tf.Tensor]]:
        """What `restore` needs to go on after the dispatch given out last, as plain values and tensors."""
        plain, tensors = self._passes.position()
        return {"batch_size": self.batch_size, **plain}, tensors

    def track(self) -> None:
        """Keeps what `position` needs, from the first pass on."""
        self._passes.tracked = True

    def restore(self, saved: dict[str, Any], tensors: dict[str, tf.Tensor]) -> None:
        """Goes to the place that `position` returned; ValueError for that of another dataset."""
        self.batch_size = saved["batch_size"]
        self._passes.restore(saved, tensors)

    @property
    def steps_per_epoch(self) -> int | None:
        """Train steps in a pass; None where the dataset does not know, or never ends."""
        return math.ceil(self.batches / self.layout.accumulation) if self.batches > 0 else None

    @property
    def sample(self) -> Batch:
        """Specs of one micro-batch, its rows unknown."""
        spec = self.dataset.element_spec
        return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), spec)

    def epochs(self, at: int | Position, steps_per_epoch: int | None) -> Iterator[Iterator[Dispatch]]:
        """One iterator of dispatches per epoch; ValueError where the data runs dry before its time."""
        done = 0 if isinstance(at, int) else at.step
        if steps_per_epoch is None and self.batches == tf.data.INFINITE_CARDINALITY:
            raise ValueError(f"{self.what} is infinite: pass steps_per_epoch, counted in train steps.")
        known = self.steps_per_epoch
        if steps_per_epoch is not None and known is not None and known < steps_per_epoch:
            raise self._dry(known, steps_per_epoch)
        return self._epochs(steps_per_epoch, done)

    def _epochs(self, steps_per_epoch, done):
        held, last_of_pass = self._passes.take_held()
        endless = itertools.chain(held, self._endless(steps_per_epoch))
        while True:
            if steps_per_epoch is None:
                steps = itertools.chain(held, () if last_of_pass else self._pass())
                held, last_of_pass = [], False
            else:
                steps = itertools.islice(endless, steps_per_epoch - done)
            done = 0
            yield self._passes.given_out(grouped(steps, self.layout))

    def _endless(self, steps_per_epoch):
        while True:
            yield from self._pass()
            if self._passes.steps_in_last < steps_per_epoch:
                raise self._dry(self._passes.steps_in_last, steps_per_epoch)

    def _dry(self, available: int, wanted: int) -> ValueError:
        return ValueError(
            f"{self.what} ran dry after {available} train steps of steps_per_epoch={wanted}. Ask for fewer, or pass a "
            "dataset with .repeat()."
        )

    def _pass(self) -> Iterator[Dispatch]:
        dropped = self._passes.begin()
        for pooled, lengths in itertools.islice(self._pooled(), dropped, None):
            self._require_rows(pooled, lengths)
            if not self._passes.steps and not self.layout.all_here:
                self._checksum = checksum(pooled)
            if self.layout.exact_rows:
                stacks = split_rows(pooled._replace(valid=tf.ones([sum(lengths)], tf.bool)), lengths)
            else:
                stacks = (self._dealt(pooled, lengths),)
            yield self._passes.read(Dispatch(tuple(self.layout.shard(stack) for stack in stacks)))
        if not self._passes.steps:
            raise ValueError(f"{self.what} yielded no batch: there is nothing to work on.")
        self._passes.end()

    def _pooled(self) -> Iterator[tuple[Batch, list[int]]]:
        """The rows of each step's batches, one after the other, and how many each batch had."""
        batches = self._passes.iterator()
        if self._equal_rows:
            for batch, lengths in batches:
                yield batch, lengths.numpy().tolist()
            return
        while step := list(itertools.islice(batches, self.layout.accumulation)):
            self._require_same_shapes(step)
            lengths = [int(tf.nest.flatten(batch)[0].shape[0]) for batch in step]
            yield tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *step), lengths

    @property
    def _equal_rows(self) -> bool:
        """Whether all rows have the same shape, so that TensorFlow can pool them."""
        return all(s.shape[1:].is_fully_defined() for s in tf.nest.flatten(self.dataset.element_spec))

    @functools.cached_property
    def _steps(self) -> tf.data.Dataset:
        """What a pass iterates over: the rows pooled by step, or else the batches."""
        count = self.layout.accumulation
        if self._equal_rows:
            return self.dataset.ragged_batch(count).map(_pool).prefetch(PREFETCH)
        return self.dataset.prefetch(PREFETCH * count)

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
        return reshaped(batch._replace(valid=valid), shape)

    def _require_rows(self, batch: Batch, lengths: list[int]) -> None:
        rows = {int(t.shape[0]) for t in tf.nest.flatten(batch)}
        if rows == {0}:
            raise ValueError(f"{self.what} yielded only batches without rows in a whole train step.")
        if len(rows) > 1:
            sizes = {k: [int(t.shape[0]) for t in tf.nest.flatten(v)] for k, v in batch._asdict().items()}
            raise ValueError(f"{self.what}: x, y and sample_weight have different numbers of rows: {sizes}.")

    def checksum(self) -> int:
        """Of the first step of the pass begun last, where workers must read the same; else 0."""
        return self._checksum

    def _require_same_shapes(self, step: list[Batch]) -> None:
        for parts in zip(*map(tf.nest.flatten, step), strict=True):
            shapes = {tuple(t.shape[1:]) for t in parts}
            if len(shapes) > 1:
                raise ValueError(
                    f"{self.what}: the micro-batches of one train step have rows of different shapes {sorted(shapes)}. "
                    "Pad them alike: .padded_batch(..., padded_shapes=...), or group equal lengths."
                )


def _own_shares(layout: Layout, dataset: tf.data.Dataset, what: str) -> Layout:
    """The layout for a dataset of which each worker reads all, or with a sharding policy of OFF its own part."""
    policy, policies = dataset.options().experimental_distribute.auto_shard_policy, tf.data.experimental.AutoShardPolicy
    if layout.all_here or policy in (policies.AUTO, policies.DATA):
        return layout
    if policy != policies.OFF:
        raise ValueError(
            f"{what} has auto_shard_policy={policy.name}, which divides what is read before it is batched. Use DATA, "
            "where each worker reads all and takes its share of every batch, or OFF with a dataset that each worker "
            "has sharded itself."
        )
    local = layout.shards.stop - layout.shards.start
    return layout._replace(replicas=local, shards=slice(0, local))


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


def _class_weights(class_weight: dict[int, float], sparse_labels: bool) -> Callable:
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)

    def weigh(y, sample_weight):
        if tf.nest.is_nested(y):
            raise ValueError(f"class_weight={class_weight} needs a single output, but y holds several.")
        labels = y
        if not sparse_labels and y.shape.rank > 1:
            if y.shape[-1] not in (None, 1) and max(class_weight) >= y.shape[-1]:
                raise ValueError(
                    f"class_weight={class_weight} names class {max(class_weight)}, but y has {y.shape[-1]} classes, "
                    f"from 0 to {y.shape[-1] - 1}."
                )
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
