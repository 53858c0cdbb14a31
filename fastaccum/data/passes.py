"""Passes over a dataset, whose place can be saved and found again in another process."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.adapters.data_adapters import EpochBatches
from fastaccum.basics.attributes import kinds
from fastaccum.basics.warnings import warn
from fastaccum.data.python_batches import PythonBatches, ReadAhead
from fastaccum.data.stacks import Batch, Dispatch, Place
from fastaccum.kernels import private

# Names of tensors in a checkpoint: the states of the iterator, and of one that has read nothing.
_ITERATOR = "iterator"
_START = "start of the pass"
# The name in a shuffle's state of how many seeds it has drawn.
_SEEDS_DRAWN = b"epoch_num_random_samples"
# Parts of a pipeline within which a shuffle begins anew at other moments than a pass.
_HOLDERS = {
    "CacheDataset": "a cache",
    "ConcatenateDataset": "a concatenation",
    "RepeatDataset": "a finite repetition",
}
# Parts behind `batch` that let other batches hold other rows.
_OF_BATCHES = {
    "ShuffleDataset": "shuffles",
    "RepeatDataset": "repeats",
    "ConcatenateDataset": "concatenates",
    "DirectedInterleave": "chooses between",
}


class Origin(NamedTuple):
    """The source of the batches; messages name it by `what`."""

    what: str
    read_once: bool  # a second pass is impossible
    python: bool  # Python code yields the elements
    epochs: EpochBatches | None = None  # of a PyDataset, of which each epoch begins a pass here
    steps: str = "steps_per_epoch"  # the argument that says how much of it is read at a time


def used_up(origin: Origin) -> ValueError:
    """Returns the error of data that would be read a second time."""
    return ValueError(
        f"{origin.what} is used up after one pass, and cannot be read again: pass {origin.steps} "
        "that it lasts for, a keras.utils.PyDataset or a tf.data.Dataset."
    )


class Passes:
    """Reads a dataset of `structure` pass by pass, and knows its place in it.

    The place is behind what was consumed, not behind what was prefetched. It is TensorFlow's
    iterator state, or the number of steps, which are read again and dropped. The number is used
    where there is no such state (Python code, several shuffles, a cache of shuffled elements), and
    where other processes read the same (`alike`). `steps` and `rows` count this pass.
    """

    def __init__(
        self,
        pipeline: tf.data.Dataset | PythonBatches,
        structure: Batch,
        origin: Origin,
        alike: bool,
        sizes: Callable[[], Place],
    ):
        self._pipeline = pipeline
        self._structure = structure
        self._origin = origin
        self._alike = alike
        self._sizes = sizes  # what the steps so far have shown, a part of the place
        self.tracked = False  # True if the place will be asked for

        self.steps = 0  # of this pass
        self.rows = 0
        self._ended = 0  # passes
        self._skip = 0  # steps to drop of the next pass

        self._iterator: Any = None
        self._resumed: tf.data.Iterator | None = None  # in the state that a checkpoint had
        self._start: tf.Tensor | None = None  # the state of an iterator that has read nothing
        # Steps that were read but not consumed, each with the place before it; and those of them
        # that a checkpoint held.
        self._read: collections.deque[tuple[Place, Dispatch]] = collections.deque()
        self._held: list[Dispatch] = []
        self._held_marks: list[Place] = []

    # A pass: begin, iterator, read for each step, end.

    def begin(self) -> int:
        """Begins a pass; returns how many of its steps are to be dropped."""
        self.steps = self._skip
        self._skip = 0
        if self._resumed is not None:
            return 0
        # Keras would begin with the batches that it peeked at for shapes.
        if self._origin.read_once and self._ended:
            raise used_up(self._origin)
        if self._origin.epochs is not None:
            self.close()  # what may still read ahead in an epoch that was left in its middle
            self._origin.epochs.begin_epoch()
        return self.steps

    def iterator(self) -> Iterator:
        """Returns the pass's iterator: a new one, or the one that a checkpoint left."""
        if self._resumed is not None:
            self._iterator = self._resumed
            self._resumed = None
            return self._iterator
        self._iterator = _iterator(self._pipeline)
        if self.tracked and self._savable and not _endless(self._pipeline):
            self._start = self._serialized()
        return self._iterator

    def close(self) -> None:
        """Ends the iterator and its threads, also where a traceback holds it."""
        for iterator in (self._iterator, self._resumed):
            if isinstance(iterator, ReadAhead):
                iterator.close()
            elif iterator is not None:
                private.iterator_resource.set(iterator, None)
        self._iterator = None
        self._resumed = None

    def read(self, step: Dispatch, rows: int, mark: Place) -> Dispatch:
        """Notes a step that was read; `mark` is the place before it."""
        self._read.append((mark, step))
        self.steps += 1
        self.rows += rows
        return step

    def end(self) -> None:
        """Ends a pass of which all was read."""
        self._ended += 1
        self.steps = 0
        self.rows = 0
        if self._origin.epochs is not None:
            self._origin.epochs.end_epoch()

    # What becomes of the steps read.

    def mark_consumed(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Yields the dispatches that the steps were grouped to, and no longer holds their steps."""
        for dispatch in dispatches:
            for _ in range(dispatch.steps):
                self._read.popleft()
            yield dispatch

    def pop_prefetched(self) -> tuple[list[Dispatch], bool]:
        """Returns the steps that a checkpoint held, read but not consumed.

        Returns, too, if they end their pass.
        """
        held = []
        for step, mark in zip(self._held, self._held_marks, strict=True):
            rows = sum(int(np.count_nonzero(stack.valid)) for stack in step.stacks)
            step = step._replace(rows=rows)
            held.append(step)
            self._read.append((mark, step))
        self._held = []
        end_their_pass = bool(held) and not self._skip
        return held, end_their_pass

    # Its place.

    def position(self) -> tuple[Place, dict[str, tf.Tensor]]:
        """Returns the place after the dispatch consumed last, as plain values and tensors."""
        place_of_consumed = self.mark()
        if self._read:
            place_of_consumed, _ = self._read[0]
        if not self._savable:
            return place_of_consumed, {}

        tensors = {}
        if self._start is not None:
            tensors[_START] = self._start
        if self.steps:
            tensors[_ITERATOR] = self._serialized()
            if self._forgets_seeds(tensors[_ITERATOR]):
                return place_of_consumed, {}

        # The iterator's state is behind the steps that were read ahead: these are saved beside it.
        held = [step for _, step in self._read]
        for i, step in enumerate(held):
            for j, stack in enumerate(step.stacks):
                for k, leaf in enumerate(tf.nest.flatten(stack)):
                    tensors[f"held/{i}/{j}/{k}"] = leaf
        # The keys are those of the checkpoints' format.
        place = {
            **self.mark(),
            "given": place_of_consumed,
            "held": [len(step.stacks) for step in held],
            "held_marks": [mark for mark, _ in self._read],
            "held_apart": [step.by_micro_batch for step in held],
            "held_real": [bool(tf.nest.flatten(step.stacks[0].real)) for step in held],
        }
        return place, tensors

    def _forgets_seeds(self, state: tf.Tensor) -> bool:
        """Tells if a state lacks how many seeds a shuffle has drawn.

        So it does at the end of an endless repetition that is batched.
        """
        shuffles = _parts(self._pipeline, "ShuffleDataset")
        repetitions = _parts(self._pipeline, "RepeatDataset")
        repeats_batches = any(_parts(each, "BatchDataset") for each in repetitions)
        if not shuffles or not repeats_batches:
            return False
        return tf.io.serialize_tensor(state).numpy().count(_SEEDS_DRAWN) < len(shuffles)

    def _serialized(self) -> tf.Tensor:
        return tf.raw_ops.SerializeIterator(
            resource_handle=private.iterator_resource(self._iterator),
            external_state_policy=tf.data.experimental.ExternalStatePolicy.FAIL.value,
        )

    @functools.cached_property
    def _savable(self) -> bool:
        """Tells if TensorFlow can save the iterator's state; warns where it cannot."""
        if self._alike or self._origin.python:
            return False
        obstacle = _obstacle(self._pipeline)
        if obstacle is None:
            try:
                self._serialized()
            except tf.errors.OpError as error:
                first_line = str(error).splitlines()[0]
                obstacle = re.sub(r"\{\{.*?\}\} |\[Op:.*", "", first_line).strip()
        what = self._origin.what
        if obstacle is not None:
            read_again = "a pass"
            if _moves_state(self._pipeline):
                read_again = "a pass and all earlier passes"
            warn(
                f"{what}: TensorFlow cannot save the iterator's state ({obstacle}). A resumed fit "
                f"reads {read_again} again and drops the batches that were used. That is exact if "
                "the data come again in the same order, as lists and arrays do; then there is "
                "nothing to do."
            )
        if _unseeded(self._pipeline):
            warn(
                f"{what} shuffles without a seed: a resumed fit ends the pass in the same order, "
                "but later passes have an order of their own. Pass shuffle(seed=...), or call "
                "keras.utils.set_random_seed first."
            )
        return obstacle is None

    def mark(self) -> Place:
        """Returns the place after the steps read so far, as plain values."""
        mark: Place = {
            "passes": self._ended,
            "steps": self.steps,
            "rows": self.rows,
            "sizes": self._sizes(),
        }
        if self._origin.epochs is not None:
            mark |= self._origin.epochs.place()
        return mark

    def restore(self, saved: Place, tensors: dict[str, tf.Tensor]) -> None:
        """Goes to the place that `position` returned.

        Raises ValueError if the state is not of such a dataset.
        """
        if "held" not in saved:
            self.read_again(saved)
            return
        self._ended = saved["passes"]
        self._skip = saved["steps"]
        self.rows = saved["rows"]
        self.steps = self._skip  # those that are held among them
        if self._skip:
            self._resumed = self._deserialized(tensors[_ITERATOR])
            self._iterator = self._resumed
        # What a shuffle draws for the next pass hangs on its dataset, and is in the state of an
        # iterator only as long as that has not read all of its input. A new one always has it.
        self._start = tensors.get(_START)
        if self._start is not None:
            self._deserialized(self._start)
        self._held_marks = saved["held_marks"]
        held = zip(saved["held"], saved["held_apart"], saved["held_real"], strict=True)
        for i, (count, by_micro_batch, is_marked) in enumerate(held):
            structure = self._structure._replace(valid=0)
            if is_marked:
                structure = structure._replace(real=self._structure.y)
            leaves = range(len(tf.nest.flatten(structure)))
            stacks = []
            for j in range(count):
                flat = [tensors[f"held/{i}/{j}/{k}"] for k in leaves]
                stacks.append(tf.nest.pack_sequence_as(structure, flat))
            self._held.append(Dispatch(tuple(stacks), by_micro_batch=by_micro_batch))

    def read_again(self, place: Place) -> Any:
        """Goes to a place by its number of steps.

        Returns the first element of the last pass that ended, if that was read.
        """
        self._ended = place["passes"]
        self._skip = place["steps"]
        self.rows = place["rows"]
        if self._origin.epochs is not None:
            self._origin.epochs.replay(self._ended, place)
        if self._origin.python:
            return None
        first = None
        needs_whole_passes = _shuffled_within(self._pipeline) or _moves_state(self._pipeline)
        for _ in range(self._ended):
            elements = iter(self._pipeline)  # a shuffle draws its seeds as a pass begins
            first = next(elements, None)
            if needs_whole_passes:
                collections.deque(elements, maxlen=0)
        return first

    def in_other_pieces(self, recut: bool) -> str | None:
        """Returns what keeps rows from coming in the same order again, or None.

        In other batches if they are `recut`.
        """
        if recut and self._origin.epochs is not None and self._origin.epochs.shuffled:
            return "its batches are shuffled (shuffle=True), whatever rows they hold"
        if self._origin.python:
            return None
        if _unseeded(self._pipeline):
            return "it shuffles without a seed, so that its order cannot be found again"
        if not recut:
            return None
        for kind, does in _OF_BATCHES.items():
            if any(_parts(each, "BatchDataset") for each in _parts(self._pipeline, kind)):
                return f"it {does} batches: do so before .batch(...)"
        return None

    def _deserialized(self, state: tf.Tensor) -> tf.data.Iterator:
        iterator = _iterator(self._pipeline)
        try:
            tf.raw_ops.DeserializeIterator(
                resource_handle=private.iterator_resource(iterator), serialized=state
            )
        except tf.errors.OpError as error:
            raise ValueError(
                f"{self._origin.what} is another dataset than the one that the checkpoint was "
                f"made with: its state does not fit ({str(error).splitlines()[0]}). Pass the "
                "same dataset, or name another checkpoint_dir."
            ) from error
        return iterator


def _iterator(pipeline: tf.data.Dataset | PythonBatches) -> Iterator:
    """Returns an iterator that a Ctrl-C may interrupt at any time.

    TensorFlow asks each `TensorShape` for its rank as it reads an element. That is Python code,
    which a Ctrl-C may interrupt. TensorFlow takes the failure for a rank of -1, and writes outside
    its memory. A tuple answers without Python code.
    """
    iterator = iter(pipeline)
    shapes = private.iterator_shapes(iterator, None)
    if shapes is not None:
        plain = [None if shape.rank is None else tuple(shape.as_list()) for shape in shapes]
        private.iterator_shapes.set(iterator, plain)
    return iterator


def _chain(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Lists a dataset and all that it is made from, the last transformation first."""
    chain = [dataset]
    for source in private.dataset_inputs(dataset):
        chain.extend(_chain(source))
    return chain


def _parts(dataset: tf.data.Dataset, kind: str) -> list[tf.data.Dataset]:
    """Lists the parts of a pipeline whose class, of TensorFlow's, has `kind` in its name."""

    def is_of_kind(part: tf.data.Dataset) -> bool:
        for name in kinds(part):
            package, _, _ = name.partition(".")
            if package == "tensorflow" and kind in name:
                return True
        return False

    return [part for part in _chain(dataset) if is_of_kind(part)]


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the rows of a pipeline's last `batch`; None where none is seen."""
    for part in _parts(dataset, "BatchDataset"):
        size = private.batch_size(part, None)
        if size is not None:
            return int(size)
    return None


def _unseeded(dataset: tf.data.Dataset) -> bool:
    """Tells if a part of a pipeline shuffles without a seed."""
    for shuffle in _parts(dataset, "ShuffleDataset"):
        seeds = int(private.shuffle_seed(shuffle)), int(private.shuffle_seed2(shuffle))
        if seeds == (0, 0):
            return True
    return False


def _endless(dataset: tf.data.Dataset) -> bool:
    return any(int(private.repeat_count(part)) < 0 for part in _parts(dataset, "RepeatDataset"))


def _moves_state(dataset: tf.data.Dataset) -> bool:
    """Tells if a function assigns variables.

    Augmentation layers assign their seeds, which go on from pass to pass.
    """
    for part in _chain(dataset):
        for function in private.dataset_functions(part):
            graph = function.function.graph.as_graph_def()
            nodes = [*graph.node]
            for called in graph.library.function:
                nodes.extend(called.node_def)
            if any("Assign" in node.op or node.op == "RngReadAndSkip" for node in nodes):
                return True
    return False


def _shuffled_within(dataset: tf.data.Dataset) -> str | None:
    """Returns the part within which a shuffle begins anew at other moments than a pass, or None."""
    for kind, what in _HOLDERS.items():
        for part in _parts(dataset, kind):
            if _parts(part, "ShuffleDataset") and not _endless(part):
                return f"{what} of shuffled elements"
    return None


def _obstacle(dataset: tf.data.Dataset) -> str | None:
    """Returns the part whose saved state would not let later passes go on as before, or None."""
    if any(private.cache_filename(cache).numpy() for cache in _parts(dataset, "CacheDataset")):
        return "a cache in a file"  # which goes on being written after the state was saved
    shuffles = _parts(dataset, "ShuffleDataset")
    if any(len(_parts(shuffle, "ShuffleDataset")) > 1 for shuffle in shuffles):
        return "a shuffle of a shuffle"
    if _parts(dataset, "DirectedInterleave"):
        # Taken up near the end of one of them, it may hang when it is saved again.
        return "a choice between datasets"
    return _shuffled_within(dataset)
