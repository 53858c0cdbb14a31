"""Turns the objects that Keras reads batches from into a tf.data.Dataset."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.attributes import kinds
from fastaccum.kernels import private


class _Sequence(keras.utils.PyDataset):
    def __init__(self, sequence: keras.utils.PyDataset):
        super().__init__()
        self._sequence = sequence
        self.on_epoch_end = sequence.on_epoch_end

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> Any:
        return self._sequence[index]


def wrap_sequence(x: Any) -> Any:
    """Wraps a `tf_keras.utils.Sequence` as a `keras.utils.PyDataset`, and returns anything else as it is."""
    return _Sequence(x) if "tf_keras.Sequence" in kinds(x) else x


def is_read_once(x: object) -> bool:
    """Tells if `x` can be read only once; ImageDataGenerator's iterators, which number their batches, can be again."""
    return hasattr(x, "__next__") and not isinstance(wrap_sequence(x), keras.utils.PyDataset)


def as_dataset(x: Any, shuffle: bool = False) -> tf.data.Dataset:
    """Returns the batches of a PyDataset, in a new order for each pass if `shuffle`, generator or torch DataLoader."""
    adapter = private.data_adapters.get_data_adapter(x, shuffle=shuffle)
    dataset = adapter.get_tf_dataset()
    if adapter.num_batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
