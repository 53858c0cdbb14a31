"""Passes over a dataset, whose place can be saved and found again in another process."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.adapters.attributes import kinds
from fastaccum.adapters.data_adapters import EpochBatches
from fastaccum.data.python_batches import PythonBatches, ReadAhead
from fastaccum.data.stacks import Batch, Dispatch, Place
from fastaccum.kernels import private
from fastaccum.lines import warn

_ITERATOR, _START = "iterator", "start of the pass"
_SEEDS_DRAWN = b"epoch_num_random_samples"  # in a shuffle's state
_HOLDERS = {
    "CacheDataset": "a cache",
    "ConcatenateDataset": "a concatenation",
    "RepeatDataset": "a finite repetition",
}
_OF_BATCHES = {"ShuffleDataset": "shuffles", "RepeatDataset": "repeats"}
_OF_BATCHES |= {"ConcatenateDataset": "concatenates", "DirectedInterleave": "chooses between"}


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
    """The iterators over a dataset of `structure`, one after the other, and the steps that were
    read from them.

    The place is what was consumed, not what was prefetched: TensorFlow's iterator state. Where
    there is none (Python code, several shuffles, a cache of shuffled elements), and where other
    processes read the same (`alike`), it is the number of steps, which are read again and dropped.
    `steps` and `rows` count this pass.
    """

    def __init__(
        self,
        pipeline: tf.data.Dataset | PythonBatches,
        structure: Batch,
        origin: Origin,
        alike: bool,
        sizes: Callable[[], Place],
    ):
        self._pipeline, self._structure, self._origin, self._alike = (
            pipeline,
            structure,
            origin,
            alike,
        )
        self._sizes = sizes  # what the steps so far have shown, a part of the place
        self.tracked = False  # True if the place will be asked for
        self.steps = self.rows = 0
        self._ended = self._skip = 0
        self._held: list[Dispatch] = []
        self._held_marks: list[Place] = []
        self._iterator: Any = None
        self._resumed: tf.data.Iterator | None = None
        self._start: tf.Tensor | None = None
        self._read: collections.deque[tuple[dict, Dispatch]] = collections.deque()

    # A pass: begin, iterator, read for each step, end.

    def begin(self) -> int:
        """Begins a pass; returns how many of its steps are to be dropped."""
        self.steps, self._skip = self._skip, 0
        if self._resumed is not None:
            return 0
        # Keras would begin with the batches that it peeked at for shapes
        if self._origin.read_once and self._ended:
            raise used_up(self._origin)
        if self._origin.epochs is not None:
            self.close()  # what may still read ahead in an epoch that was left in its middle
            self._origin.epochs.begin_epoch()
        return self.steps

    def iterator(self) -> Iterator:
        if self._resumed is None:
            self._iterator = iter(self._pipeline)
            if self.tracked and self._savable and not _endless(self._pipeline):
                self._start = self._serialized()
        else:
            self._iterator, self._resumed = self._resumed, None
        return self._iterator

    def close(self) -> None:
        """Ends the iterator and its threads, also where a traceback holds it."""
        for iterator in (self._iterator, self._resumed):
            if isinstance(iterator, ReadAhead):
                iterator.close()
            elif iterator is not None:
                private.iterator_resource.set(iterator, None)
        self._iterator = self._resumed = None

    def read(self, step: Dispatch, rows: int, mark: Place) -> Dispatch:
        """Notes a step that was read; `mark` is the place before it."""
        self._read.append((mark, step))
        self.steps, self.rows = self.steps + 1, self.rows + rows
        return step

    def end(self) -> None:
        self._ended += 1
        self.steps = self.rows = 0
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
        """Returns the steps that were prefetched but not consumed before a resume, and whether they
        end their pass.
        """
        held = []
        for step, mark in zip(self._held, self._held_marks, strict=True):
            step = step._replace(
                rows=sum(int(np.count_nonzero(stack.valid)) for stack in step.stacks)
            )
            held.append(step)
            self._read.append((mark, step))
        self._held = []
        return held, bool(held) and not self._skip

    # Its place.

    def position(self) -> tuple[Place, dict[str, tf.Tensor]]:
        """Returns the place after the dispatch consumed last, as plain values and tensors."""
        given = self._read[0][0] if self._read else self.mark()
        if not self._savable:
            return given, {}
        tensors = {} if self._start is None else {_START: self._start}
        if self.steps:
            tensors[_ITERATOR] = self._serialized()
            if self._forgets_seeds(tensors[_ITERATOR]):
                return given, {}
        for i, (_, step) in enumerate(self._read):
            for j, stack in enumerate(step.stacks):
                tensors |= {
                    f"held/{i}/{j}/{k}": leaf for k, leaf in enumerate(tf.nest.flatten(stack))
                }
        held = [step for _, step in self._read]
        return {
            **self.mark(),
            "given": given,
            "held": [len(step.stacks) for step in held],
            "held_marks": [mark for mark, _ in self._read],
            "held_apart": [step.by_micro_batch for step in held],
            "held_real": [bool(tf.nest.flatten(step.stacks[0].real)) for step in held],
        }, tensors

    def _forgets_seeds(self, state: tf.Tensor) -> bool:
        """Tells if a state lacks how many seeds a shuffle has drawn, as at the end of a batched
        endless repetition.
        """
        shuffles = _parts(self._pipeline, "ShuffleDataset")
        if not shuffles or not any(
            _parts(d, "BatchDataset") for d in _parts(self._pipeline, "RepeatDataset")
        ):
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
                obstacle = re.sub(r"\{\{.*?\}\} |\[Op:.*", "", str(error).splitlines()[0]).strip()
        what = self._origin.what
        if obstacle is not None:
            warn(
                f"{what}: TensorFlow cannot save the iterator's state ({obstacle}). To resume, "
                "fit reads again and drops what was used of a "
                f"pass{' and all earlier passes' if _moves_state(self._pipeline) else ''}: "
                "exact, with nothing to do, if the data are the same in the same order then, as "
                "lists and arrays are."
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
        """Goes to the place that `position` returned; raises ValueError if the state is not of such
        a dataset.
        """
        if "held" not in saved:
            self.read_again(saved)
            return
        self._ended, self._skip, self.rows = (saved[name] for name in ("passes", "steps", "rows"))
        self.steps = self._skip  # those that are held among them
        if self._skip:
            self._iterator = self._resumed = self._deserialized(tensors[_ITERATOR])
        # What a shuffle draws for the next pass hangs on its dataset, and is in the state of an
        # iterator only as long as that has not read all of its input. A new one always has it.
        self._start = tensors.get(_START)
        if self._start is not None:
            self._deserialized(self._start)
        self._held_marks = saved["held_marks"]
        kinds_of_held = zip(saved["held"], saved["held_apart"], saved["held_real"], strict=True)
        for i, (count, apart, is_marked) in enumerate(kinds_of_held):
            structure = self._structure._replace(
                valid=0, real=self._structure.y if is_marked else ()
            )
            leaves = range(len(tf.nest.flatten(structure)))
            flat = [[tensors[f"held/{i}/{j}/{k}"] for k in leaves] for j in range(count)]
            stacks = tuple(tf.nest.pack_sequence_as(structure, each) for each in flat)
            self._held.append(Dispatch(stacks, by_micro_batch=apart))

    def read_again(self, given: Place) -> Any:
        """Goes to a place by its number of steps; returns the first element of the last pass that
        ended, if read.
        """
        first = None
        self._ended, self._skip, self.rows = given["passes"], given["steps"], given["rows"]
        if self._origin.epochs is not None:
            self._origin.epochs.replay(self._ended, given)
        if self._origin.python:
            return None
        whole = _shuffled_within(self._pipeline) or _moves_state(self._pipeline)
        for _ in range(self._ended):
            elements = iter(self._pipeline)  # a shuffle draws its seeds as a pass begins
            first = next(elements, None)
            collections.deque(elements if whole else (), 0)
        return first

    def in_other_pieces(self, recut: bool) -> str | None:
        """Returns what keeps rows from coming in the same order again, in other batches if `recut`;
        else None.
        """
        if recut and self._origin.epochs is not None and self._origin.epochs.shuffled:
            return "its batches are shuffled (shuffle=True), whatever rows they hold"
        if self._origin.python:
            return None
        if _unseeded(self._pipeline):
            return "it shuffles without a seed, so that its order cannot be found again"
        for kind, does in _OF_BATCHES.items() if recut else ():
            if any(_parts(each, "BatchDataset") for each in _parts(self._pipeline, kind)):
                return f"it {does} batches: do so before .batch(...)"
        return None

    def _deserialized(self, state: tf.Tensor) -> tf.data.Iterator:
        iterator = iter(self._pipeline)
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


def _chain(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Lists a dataset and all that it is made from, the last transformation first."""
    return [
        dataset,
        *(each for source in private.dataset_inputs(dataset) for each in _chain(source)),
    ]


def _parts(dataset: tf.data.Dataset, kind: str) -> list[tf.data.Dataset]:
    """Lists the parts of a pipeline that are of a kind of TensorFlow's, whose class has these words
    in its name.
    """
    return [
        each
        for each in _chain(dataset)
        if any(kind in name for name in kinds(each) if _is_tensorflow(name))
    ]


def _is_tensorflow(known_name: str) -> bool:
    return known_name.partition(".")[0] == "tensorflow"


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the rows of a batch, as the last `batch` of a pipeline has them; None where no
    `batch` is seen.
    """
    sizes = (private.batch_size(each, None) for each in _parts(dataset, "BatchDataset"))
    return next((int(size) for size in sizes if size is not None), None)


def _unseeded(dataset: tf.data.Dataset) -> bool:
    return any(
        int(private.shuffle_seed(shuffle)) == 0 == int(private.shuffle_seed2(shuffle))
        for shuffle in _parts(dataset, "ShuffleDataset")
    )


def _endless(dataset: tf.data.Dataset) -> bool:
    return any(int(private.repeat_count(each)) < 0 for each in _parts(dataset, "RepeatDataset"))


def _moves_state(dataset: tf.data.Dataset) -> bool:
    """Tells if a function assigns variables, as augmentation layers assign seeds that go on from
    pass to pass.
    """
    graphs = (
        f.function.graph.as_graph_def()
        for each in _chain(dataset)
        for f in private.dataset_functions(each)
    )
    nodes = (
        node
        for g in graphs
        for nodes in (g.node, *(f.node_def for f in g.library.function))
        for node in nodes
    )
    return any("Assign" in node.op or node.op == "RngReadAndSkip" for node in nodes)


def _shuffled_within(dataset: tf.data.Dataset) -> str | None:
    """Returns which part of a pipeline holds shuffles that begin anew at other moments than a pass;
    else None.
    """
    for kind, what in _HOLDERS.items():
        if any(
            _parts(each, "ShuffleDataset") and not _endless(each) for each in _parts(dataset, kind)
        ):
            return f"{what} of shuffled elements"
    return None


def _obstacle(dataset: tf.data.Dataset) -> str | None:
    """Returns the part of a pipeline whose saved state would not let later passes go on as before;
    else None.
    """
    if any(private.cache_filename(each).numpy() for each in _parts(dataset, "CacheDataset")):
        return "a cache in a file"  # which goes on being written after the state was saved
    if any(
        len(_parts(shuffle, "ShuffleDataset")) > 1 for shuffle in _parts(dataset, "ShuffleDataset")
    ):
        return "a shuffle of a shuffle"
    if _parts(dataset, "DirectedInterleave"):
        # taken up near the end of one of them, it may hang when it is saved again
        return "a choice between datasets"
    return _shuffled_within(dataset)
