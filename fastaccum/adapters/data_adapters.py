"""Reads batches from Keras's PyDatasets, generators and PyTorch's loaders."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.basics.attributes import kinds
from fastaccum.kernels import private


class _Sequence(keras.utils.PyDataset):
    """A `tf_keras.utils.Sequence` as a PyDataset: tf_keras calls no hook but `on_epoch_end`."""

    def __init__(self, sequence: keras.utils.PyDataset):
        super().__init__()
        self._sequence = sequence
        self.on_epoch_end = sequence.on_epoch_end

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> Any:
        return self._sequence[index]


class EpochBatches(keras.utils.PyDataset):
    """The batches that one epoch reads of a PyDataset, which Keras's adapter takes for a whole one.

    An epoch reads `batches_per_epoch` batches, at most to the end of a pass, and the next epoch
    goes on from there. Nothing is read ahead of an epoch's end, so what the PyDataset changes in
    `on_epoch_end` holds for all that follows. The calls are those of Keras's `fit`: `reset` once,
    then `begin_epoch` and `end_epoch` for each epoch. A `tf_keras.utils.Sequence` is wrapped first,
    and begins anew in each epoch, as in tf_keras.
    """

    def __init__(self, batches: keras.utils.PyDataset, shuffle: bool = False):
        super().__init__(batches.workers, batches.use_multiprocessing, batches.max_queue_size)
        self.batches = batches
        self.begins_anew = isinstance(batches, _Sequence)  # each epoch is a pass
        self.batches_per_epoch: int | None = None
        self.shuffled = shuffle and batches.num_batches is not None
        self._order: list[int] | None = None  # of the pass, where it is shuffled
        self._length = batches.num_batches  # of a pass
        self._start = 0  # the epoch's first batch in the pass
        self._stop = self._length
        self._epochs_of_pass = 0  # how many have ended
        self._random: tuple | None = None  # the state that the pass's order was drawn with
        self._process = os.getpid()

    @property
    def num_batches(self) -> int | None:
        if self._stop is None:
            return None
        return self._stop - self._start

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self._process and threading.current_thread() is threading.main_thread():
            # Ctrl-C reaches the workers too. One that it ends leaves a batch that fit would wait
            # for without end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        index += self._start
        if self._order is not None:
            index = self._order[index]
        return self.batches[index]

    def reset(self) -> None:
        """Goes to the start of a pass, as Keras's `fit` and `evaluate` do before they read."""
        if not self.begins_anew:
            self.batches.on_epoch_end()
        self._length = self.batches.num_batches
        self._start_pass()

    def begin_epoch(self) -> None:
        """Calls the PyDataset's hook, and draws the order of the batches where a pass begins."""
        starts_pass = not self._epochs_of_pass
        if self.shuffled and starts_pass:
            self._random = random.getstate()
        self.batches.on_epoch_begin()
        length = self.batches.num_batches
        if self.shuffled and starts_pass:
            self._order = list(range(length))
            random.shuffle(self._order)
        if self.begins_anew:
            self._length = length
        stops = []
        if length is not None:
            stops += [length, self._length]  # in Keras a pass never grows
        if self.batches_per_epoch is not None:
            stops.append(self._start + self.batches_per_epoch)
        self._stop = min(stops, default=None)

    def end_epoch(self) -> None:
        """Calls the PyDataset's hook, and finds where the next epoch begins."""
        length = self.batches.num_batches
        pass_ended = length is not None and self._stop >= min(length, self._length)
        self.batches.on_epoch_end()
        if self.begins_anew or pass_ended:
            self._start_pass()
        else:
            self._start = self._stop
            self._epochs_of_pass += 1

    def place(self) -> dict[str, Any]:
        """Returns what `replay` needs beside the number of epochs."""
        if not self.shuffled:
            return {}
        state = random.getstate() if self._random is None else self._random
        return {"random": state, "epochs_of_pass": self._epochs_of_pass}

    def replay(self, epochs: int, place: dict[str, Any]) -> None:
        """Repeats the calls of epochs that had ended, and restores Python's `random`.

        The pass that the place is in draws its order from the state that the place holds.
        """
        first_of_pass = epochs - place.get("epochs_of_pass", 0)
        for epoch in range(epochs):
            if epoch == first_of_pass:
                _set_random_state(place)
            self.begin_epoch()
            self.end_epoch()
        if first_of_pass == epochs:
            _set_random_state(place)

    def _start_pass(self) -> None:
        self._start = 0
        self._stop = self._length
        self._order = None
        self._epochs_of_pass = 0
        self._random = None


def _set_random_state(place: dict[str, Any]) -> None:
    if "random" in place:
        version, numbers, gauss = place["random"]
        random.setstate((version, tuple(numbers), gauss))


def wrap_sequence(x: Any) -> Any:
    """Wraps a `tf_keras.utils.Sequence` as a `keras.utils.PyDataset`; other data stay."""
    if "tf_keras.Sequence" in kinds(x):
        return _Sequence(x)
    return x


def is_read_once(x: object) -> bool:
    """Tells if `x` can be read only once.

    The iterators of an ImageDataGenerator, which number their batches, can be read again.
    """
    return hasattr(x, "__next__") and not isinstance(wrap_sequence(x), keras.utils.PyDataset)


class PythonData(NamedTuple):
    """The batches of Python code, in two forms."""

    dataset: tf.data.Dataset
    begin_pass: Callable[[], Generator]  # yields nests of arrays, dense or sparse


def read_python(x: Any) -> PythonData:
    """Returns the batches of a PyDataset, generator or DataLoader; of an epoch's `EpochBatches`."""
    adapter = private.data_adapters.get_data_adapter(x)
    dataset = adapter.get_tf_dataset()
    if adapter.num_batches is not None and not isinstance(x, EpochBatches):
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))

    def begin_pass() -> Generator:
        try:
            yield from adapter.get_numpy_iterator()
        finally:
            workers = getattr(adapter, "enqueuer", None)
            if workers is not None:  # they go on reading if the pass is left in its middle
                workers.stop()

    return PythonData(dataset, begin_pass)
