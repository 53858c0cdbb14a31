"""Batches of tf.data, PyDatasets and generators as stacks of micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.data_adapters import EpochBatches, is_read_once, read_python, wrap_sequence
from fastaccum.basics.warnings import warn
from fastaccum.data.arrays import PREFETCH
from fastaccum.data.passes import Origin, Passes, batch_size, used_up
from fastaccum.data.python_batches import PythonBatches
from fastaccum.data.rows import DENSE, NUMBERS, checksum, count, without_none
from fastaccum.data.sizes import Sizes
from fastaccum.data.stacks import (
    Batch,
    Dispatch,
    Layout,
    Place,
    Position,
    count_rows,
    group_steps,
    warn_short,
)

# What Keras hands over in place of a generator's None.
_OPTIONAL = tf.experimental.Optional
_SPEC_OF_NONE = type(tf.type_spec_from_value(None))


class StepBatches(NamedTuple):
    """The batches of a train step, and how many rows each of them came with."""

    batches: list[Batch]  # one of all rows, where TensorFlow joined them
    lengths: list[int]


class BegunPass(NamedTuple):
    """A pass that was begun, and what is known of the steps that were dropped of it."""

    dropped: int  # steps to drop: those that were done before
    steps: Iterator[StepBatches]  # the others
    rows: list[int]  # of each step that was dropped; fewer where the data ended
    checksum: int | None = None  # of the first one's rows
    largest_batch: int = 0  # the most rows of a batch of the first one


class DatasetSource:
    """A tf.data.Dataset, or what becomes one, whose batches are micro-batches of whatever size.

    The arguments are those of `make_data_source`; `weigh` maps (y, sample_weight) to the sample
    weight to use.
    """

    def __init__(
        self,
        x: Any,
        what: str,
        shuffle: bool = False,
        weigh: Callable[[Any, Any], tf.Tensor] | None = None,
        steps: str = "steps_per_epoch",
        needs_targets: bool = True,
        text: bool = False,
    ):
        self.what = f"{what} ({type(x).__name__})"
        self.read_once = is_read_once(x)
        x = wrap_sequence(x)
        origin = Origin(
            self.what, self.read_once, python=not isinstance(x, tf.data.Dataset), steps=steps
        )
        if isinstance(x, keras.utils.PyDataset):
            x = EpochBatches(x, shuffle)
            origin = origin._replace(epochs=x)
        self.origin = origin
        self._once: _ReadOnceBatches | None = None

        def without_optional(part):
            return None if isinstance(part, _OPTIONAL) else part

        def to_batch(element):
            element = tf.nest.map_structure(without_optional, element)
            inputs, y, weight = keras.utils.unpack_x_y_sample_weight(element)
            if weigh is not None:
                weight = weigh(y, weight)
            return tf.nest.map_structure(_dense, Batch(*without_none((inputs, y, weight))))

        self.python_batches: PythonBatches | None = None
        elements = x
        if origin.python:
            if self.read_once:
                self._once = _ReadOnceBatches(x)
                x = iter(self._once)
            with checks.naming(self.what):
                elements, begin_pass = read_python(x)
            self.python_batches = PythonBatches(
                self.what, begin_pass, elements.element_spec, to_batch
            )

        is_tuple = isinstance(elements.element_spec, tuple)

        def of_parts(*parts):  # as `map` hands an element over
            return to_batch(parts if is_tuple else parts[0])

        self.dataset = _untuned(elements.map(of_parts))
        _require_batched(self.dataset.element_spec, self.what, needs_targets, text)
        self.batch_size = None if origin.python else batch_size(self.dataset)
        self.batches = int(elements.cardinality())
        if origin.epochs is not None:
            length = origin.epochs.batches.num_batches
            self.batches = tf.data.INFINITE_CARDINALITY if length is None else length
        if self.batches == 0:
            raise ValueError(f"{self.what} is empty: it has no batch to work on.")

    @property
    def sample(self) -> Batch:
        """Returns specs of one micro-batch, whose number of rows is unknown."""

        def of_any_rows(spec):
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

        return tf.nest.map_structure(of_any_rows, self.dataset.element_spec)

    def most_rows(self, workers: int) -> int | None:
        """Returns None; raises ValueError for batches that Python code cuts or workers share."""
        if self.origin.python or workers > 1:
            among = "of its own"
            if workers > 1:
                among = f"which {workers} workers share"
            raise ValueError(
                f"{self.what} yields batches {among}, and batch_size='auto' cannot cut them "
                "anew: pass one to fastaccum.plan(trainer, (x, y), global_batch_size=...), "
                "yield plan.batch_size rows at a time, and set "
                "trainer.gradient_accumulation_steps = plan.accumulation_steps."
            )
        return None

    def rebatch(self, batch_size: int) -> None:
        """Rebatches the dataset: the same rows in the same order."""
        self.dataset = self.dataset.rebatch(batch_size)
        self.batch_size = batch_size
        self.batches = int(self.dataset.cardinality())

    def read_at_most(self, batches: int) -> None:
        """Reads no more batches of data that is read once: its owner can read the others."""
        if self._once is not None:
            self._once.at_most = batches

    def stacks(
        self, layout: Layout, steps_per_epoch: int | None = None, epochs: int = 1
    ) -> DatasetStacks:
        """Makes stacks of the batches.

        Raises ValueError if the data does not last for `epochs`, or never ends.
        """
        if self.read_once and steps_per_epoch is None and epochs > 1:
            raise used_up(self.origin)
        return DatasetStacks(self, layout, steps_per_epoch)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns TensorFlow's tuning off, unless the dataset's options say if it is on.

    A deleted iterator may wait a minute for the tuning's thread.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class DatasetStacks:
    """The stacks of a `DatasetSource`, arranged by `Sizes`."""

    def __init__(self, source: DatasetSource, layout: Layout, steps_per_epoch: int | None):
        self.what = source.what
        batches = source.batches
        if batches > 0:
            layout = layout._replace(accumulation=min(layout.accumulation, batches))
        self.layout = _own_shards(layout, source.dataset, source.what)

        # Epochs: so many steps, or passes.
        self._steps_asked_for = steps_per_epoch or 0
        self._epochs = source.origin.epochs
        if self._epochs is not None and steps_per_epoch:
            self._epochs.batches_per_epoch = steps_per_epoch * layout.accumulation
            if self._epochs.begins_anew:
                batches = min(batches, self._epochs.batches_per_epoch)
        if steps_per_epoch is None and batches == tf.data.INFINITE_CARDINALITY:
            counted = ", counted in train steps" if source.origin.steps == "steps_per_epoch" else ""
            raise ValueError(f"{self.what} is infinite: pass {source.origin.steps}{counted}.")
        steps_per_pass = None
        if batches > 0:
            steps_per_pass = math.ceil(batches / layout.accumulation)
        self.has_known_end = steps_per_pass is not None
        self.steps_per_epoch = steps_per_epoch or steps_per_pass

        # What checkpoints compare.
        spec = source.dataset.element_spec
        batch_size = tf.nest.flatten(spec)[0].shape[0]
        rows = None
        if batches > 0 and batch_size is not None:
            rows = batches * batch_size
        self.plan: dict[str, int | None] = {
            "steps_per_epoch": steps_per_epoch,
            "steps_per_pass": steps_per_pass,
            "rows": rows,
        }
        self.cut = {"batch_size": source.batch_size, "batches": batches}

        # Python code's first two batches have shown which lengths differ.
        self._sizes = Sizes(self.what, spec, self.layout, lengths_differ=source.origin.python)
        self._alike = not layout.all_here
        self._read_once = source.read_once
        # What one worker reads says nothing of the others where the dataset is sharded by workers.
        self._sharded_by_workers = self.layout.replicas != layout.replicas

        self._rest: Iterator[Dispatch] = iter(())
        self._checksum = 0
        self._first_step: dict[str, int] | None = None  # of the pass begun last
        # Rows of a pass's first step, until the first one after the checkpoint.
        self._rows_before: int | None = None
        self._full_rows = 0  # rows of a step, where training goes on in other pieces

        self._pools = _joins_rows(source)
        pipeline = _make_pipeline(source, self.layout.accumulation)
        self._passes = Passes(pipeline, spec, source.origin, self._alike, self._sizes.place)

    def reset(self) -> None:
        """Calls the hook of a PyDataset that Keras's `fit` and `evaluate` call before they read."""
        if self._epochs is not None:
            # A thread may still read ahead in an epoch that was left in its middle.
            self._passes.close()
            self._epochs.reset()

    def close(self) -> None:
        """Ends the threads that read ahead; nothing is read afterwards."""
        self._passes.close()

    def position(self) -> tuple[Place, dict[str, tf.Tensor]]:
        """Returns what `restore` needs to go on after the dispatch consumed last."""
        plain, tensors = self._passes.position()
        return {"first_step": self._first_step, **plain}, tensors

    def track(self) -> None:
        """Records what `position` needs, from the first pass on."""
        self._passes.tracked = True

    def restore(self, saved: Place, tensors: dict[str, tf.Tensor]) -> None:
        """Goes to the place that `position` returned; ValueError if that is of another dataset."""
        self._first_step = saved["first_step"]
        self._sizes.restore(saved["sizes"])
        self._rows_before = None if self._first_step is None else self._first_step["rows"]
        self._passes.restore(saved, tensors)

    def find(self, saved: Place, pieces: str, recut: bool) -> None:
        """Goes to that place in other pieces.

        Raises ValueError if the same rows do not make the same steps.
        """
        obstacle = self._find(saved.get("given", saved), saved["first_step"], recut)
        if obstacle is not None:
            raise ValueError(
                f"{self.what} cannot go on in other pieces ({pieces}), since {obstacle}. Nothing "
                "was changed: go on in the pieces that were saved, or name another "
                "checkpoint_dir."
            )

    def _find(self, place: Place, first_step: dict[str, int] | None, recut: bool) -> str | None:
        """Goes to a place in other pieces; returns what keeps it from that, or None."""
        if first_step is None or self._sharded_by_workers:
            return "each worker has sharded it itself"
        obstacle = self._passes.in_other_pieces(recut)
        if obstacle is not None:
            return obstacle
        return self._read_again(place, first_step)

    def _read_again(self, place: Place, first_step: dict[str, int]) -> str | None:
        """Drops the steps that were consumed; returns how they differ from those saved, or None."""
        full_rows = first_step["rows"]
        last_ended = self._passes.read_again(place)
        begun = self._begin_pass()
        check = begun.checksum
        if begun.dropped:
            self._sizes.batch_size = begun.largest_batch
        elif last_ended is not None and self._pools:
            joined, _ = last_ended
            check = checksum(joined)

        next_step = list(itertools.islice(begun.steps, 1))
        rows_of_first = full_rows
        if begun.rows:
            rows_of_first = begun.rows[0]
        elif next_step:
            rows_of_first = sum(next_step[0].lengths)
        if rows_of_first != full_rows:
            batches = f"batches of {full_rows} / gradient_accumulation_steps rows"
            return f"a train step would be of {rows_of_first} rows: {batches} would do"
        differs_before_last = any(rows != full_rows for rows in begun.rows[:-1])
        if sum(begun.rows) != place["rows"] or differs_before_last:
            return (
                f"its {begun.dropped} train steps so far, of {place['rows']} rows, would end with "
                f"{begun.rows[-3:]} rows"
            )
        if check is not None and check != first_step["checksum"]:
            return "it yields other rows than it did, or in another order"

        self._first_step = first_step
        self._full_rows = full_rows
        self._rest = self._steps(itertools.chain(next_step, begun.steps))
        return None

    def checksum(self) -> int:
        """Returns that of the last pass's first step where workers must read the same; else 0."""
        return self._checksum

    def epochs(self, at: Position) -> Iterator[Iterator[Dispatch]]:
        """Yields an iterator of dispatches for each epoch, from a position on."""
        held, ended = self._passes.pop_prefetched()
        if not self._full_rows:
            if ended:
                self._rest = iter(held)
            else:
                self._rest = itertools.chain(held, self._pass())
        done = at.step
        while not self._exhausted():
            yield self._passes.mark_consumed(group_steps(self._epoch(done), self.layout))
            done = 0

    def _exhausted(self) -> bool:
        """Tells if data that is read once has no step left for an epoch."""
        if not (self._read_once and self._steps_asked_for):
            return False
        first = next(self._rest, None)
        if first is not None:
            self._rest = itertools.chain([first], self._rest)
            return False
        warn(f"{self.what} is used up, which ends the training.", UserWarning)
        return True

    def _epoch(self, done: int) -> Iterator[Dispatch]:
        """Yields the steps of an epoch after the first `done`, as Keras at most those of a pass."""
        wanted = None
        if self._steps_asked_for:
            wanted = self._steps_asked_for - done
        limit = None  # a PyDataset's epochs end by themselves
        if self._epochs is None:
            limit = wanted
        taken = 0
        while True:
            for step in itertools.islice(self._rest, limit):
                taken += 1
                yield step
            if limit is None or taken < limit:
                if self._read_once and limit:
                    self._rest = iter(())
                else:
                    self._rest = self._pass()
            # A pass that ended with the last epoch leaves nothing for this one.
            if taken or not wanted:
                break
        if wanted is None or taken == wanted:
            return
        if self._alike:  # others may have more
            raise ValueError(
                f"{self.what} ran dry after {done + taken} train steps of "
                f"steps_per_epoch={self.steps_per_epoch}. Ask for fewer, or pass a dataset with "
                ".repeat()."
            )
        warn_short(self.what, done + taken, self._steps_asked_for)

    def _begin_pass(self) -> BegunPass:
        """Begins a pass and drops the steps that were done of it."""
        dropped = self._passes.begin()
        steps = self._pooled()
        rows: list[int] = []
        check = None
        largest_batch = 0
        for step in itertools.islice(steps, dropped):
            if not rows:
                check = _checksum_of_rows(step.batches)
                largest_batch = max(step.lengths)
            rows.append(sum(step.lengths))
        return BegunPass(dropped, steps, rows, check, largest_batch)

    def _pass(self) -> Iterator[Dispatch]:
        begun = self._begin_pass()
        rows = sum(begun.rows)
        # A pass that ended before has an error of its own.
        has_all = begun.dropped > 0 and len(begun.rows) == begun.dropped
        if has_all and rows != self._passes.rows and not self._sharded_by_workers:
            raise ValueError(
                f"{self.what}: the {begun.dropped} train steps of this pass that were done before "
                f"the checkpoint now have {rows} rows, where they had {self._passes.rows}: pass "
                "batches of as many rows as the checkpoint was made with."
            )
        if (
            begun.checksum is not None
            and self._first_step is not None
            and begun.checksum != self._first_step["checksum"]
        ):
            warn(
                f"{self.what} yields other values in this pass than before the checkpoint, or in "
                "another order: its place is found by the number of steps alone. For another "
                "training name another checkpoint_dir."
            )
        yield from self._steps(begun.steps)

    def _steps(self, steps: Iterator[StepBatches]) -> Iterator[Dispatch]:
        rows_of_last = self._full_rows
        names = f"{self.what}: x, y and sample_weight"
        for batches, lengths in steps:
            rows = sum(count(names, batch) for batch in batches)
            if not rows:
                raise ValueError(
                    f"{self.what} yielded only batches without rows in a whole train step."
                )
            if not self._passes.steps:
                self._note_first_step(batches, rows)
            if rows_of_last != self._full_rows:
                warn(
                    f"{self.what}: a train step in the middle of a pass has {rows_of_last} rows "
                    f"instead of {self._full_rows}, so a training that is resumed in other pieces "
                    "would differ from this one: make batches of one size, by a single .batch() "
                    "at the end of the pipeline."
                )
            rows_of_last = rows if self._full_rows else 0
            place = self._passes.mark()
            arranged = self._sizes.arrange(batches, lengths)
            stacks = tuple(self.layout.shard(stack) for stack in arranged.stacks)
            step = Dispatch(stacks, rows=rows, by_micro_batch=arranged.by_micro_batch)
            yield self._passes.read(step, rows, place)
        if not self._passes.steps:
            raise ValueError(f"{self.what} yielded no batch: there is nothing to work on.")
        self._passes.end()

    def _note_first_step(self, batches: list[Batch], rows: int) -> None:
        """Notes by what a pass is known again, and warns if it has other rows than it had."""
        is_for_all = self._passes.tracked or not self.layout.all_here
        if self._sharded_by_workers or not is_for_all:
            return
        expected = self._rows_before
        self._rows_before = None
        may_differ = self._full_rows or self._sizes.rows_vary
        if expected and expected != rows and not may_differ:
            warn(
                f"{self.what}: the first train step of a pass has {rows} rows, and it had "
                f"{expected} before the checkpoint. If the batches have changed, pass those that "
                "the checkpoint was made with."
            )
        self._checksum = _checksum_of_rows(batches)
        self._first_step = {"rows": rows, "checksum": self._checksum}

    def _pooled(self) -> Iterator[StepBatches]:
        """Yields the batches of each step, joined to one where TensorFlow joins them."""
        batches = self._passes.iterator()
        if self._pools:
            for batch, lengths in batches:
                yield StepBatches([batch], lengths.numpy().tolist())
            return
        while True:
            step = list(itertools.islice(batches, self.layout.accumulation))
            if not step:
                return
            lengths = [count_rows(batch) for batch in step]
            with_rows = list(itertools.compress(step, lengths))
            if not with_rows:
                with_rows = step[:1]  # `_steps` raises for a step without rows
            yield StepBatches(with_rows, lengths)


def _joins_rows(source: DatasetSource) -> bool:
    """Tells if TensorFlow joins the rows of a step's batches, which all are of one shape."""
    if source.python_batches is not None:
        return False
    specs = tf.nest.flatten(source.dataset.element_spec)
    return all(spec.shape[1:].is_fully_defined() for spec in specs)


def _make_pipeline(source: DatasetSource, micro_batches: int) -> tf.data.Dataset | PythonBatches:
    """Makes what the batches of steps are read from, some steps ahead of use."""
    ahead = PREFETCH * micro_batches
    if source.python_batches is not None:
        return dataclasses.replace(source.python_batches, ahead=ahead)
    if _joins_rows(source):
        return source.dataset.ragged_batch(micro_batches).map(_pool).prefetch(PREFETCH)
    return source.dataset.prefetch(ahead)


class _ReadOnceBatches:
    """Batches that can be read once, no more than `at_most` of them if that is set."""

    def __init__(self, batches: Iterator):
        self._batches = batches
        self.at_most: int | None = None

    def __iter__(self) -> Iterator:
        for read, batch in enumerate(self._batches, start=1):
            yield batch
            if self.at_most is not None and read >= self.at_most:
                return


def _checksum_of_rows(batches: list[Batch]) -> int:
    """Returns the checksum of the batches' rows, however they are cut into batches."""
    return checksum(list(zip(*map(tf.nest.flatten, batches), strict=True)))


def _own_shards(layout: Layout, dataset: tf.data.Dataset, what: str) -> Layout:
    """Returns the layout for a dataset of which each worker reads all.

    Under a policy of OFF each reads a part of its own.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if layout.all_here or policy in (policies.AUTO, policies.DATA):
        return layout
    if policy != policies.OFF:
        raise ValueError(
            f"{what} has auto_shard_policy={policy.name}, which divides what is read before it "
            "is batched. Use DATA: each worker takes its share of every batch; or OFF with a "
            "dataset that each worker has sharded itself."
        )
    local = layout.shards.stop - layout.shards.start
    return layout._replace(replicas=local, shards=slice(0, local))


def _pool(batch: Batch) -> tuple[Batch, tf.Tensor]:
    """Joins the rows of several batches; returns the number of rows of each batch, too."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        lengths = first.row_lengths()
    else:
        lengths = tf.fill([tf.shape(first)[0]], tf.shape(first)[1])

    def join(tensor):
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.values
        return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))

    return tf.nest.map_structure(join, batch), lengths


def _dense(tensor: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor | tf.RaggedTensor:
    """Returns a sparse tensor as a dense one, and any other as it is."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor
    return tf.ensure_shape(tf.sparse.to_dense(tf.sparse.reorder(tensor)), tensor.shape)


def _require_batched(spec: Batch, what: str, needs_targets: bool, text: bool) -> None:
    """Raises ValueError or TypeError for elements that are no batches of numbers, or of text."""
    if needs_targets and not tf.nest.flatten(spec.y):
        raise ValueError(
            f"{what} yields no targets: it must yield (x, y) or (x, y, sample_weight)."
        )
    inputs = tf.nest.flatten(spec.x)
    for leaf in tf.nest.flatten(spec):
        if isinstance(leaf, _SPEC_OF_NONE):
            raise ValueError(
                f"{what} yields None for inputs: it must yield arrays for each of them."
            )
        if not isinstance(leaf, tf.TensorSpec):
            raise TypeError(f"{what} yields {leaf}: {DENSE}")
        is_input = any(leaf is spec_of_input for spec_of_input in inputs)
        is_text = text and is_input and leaf.dtype == tf.string
        is_number = leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
        if not (is_text or is_number):
            raise TypeError(f"{what} yields dtype {leaf.dtype.name}: {NUMBERS}")
        if leaf.shape.rank is None:
            raise ValueError(
                f"{what} yields a tensor of unknown rank: give it a shape (output_signature, "
                "ensure_shape)."
            )
        if leaf.shape.rank == 0:
            raise ValueError(
                f"{what} is not batched: it yields scalars ({leaf}). Call .batch(batch_size) on it."
            )
    leading = {leaf.shape[0] for leaf in tf.nest.flatten(spec)} - {None}
    if len(leading) > 1:
        raise ValueError(
            f"{what} is not batched, or x and y differ in rows: first axes {sorted(leading)}. "
            "Call .batch(batch_size)."
        )
