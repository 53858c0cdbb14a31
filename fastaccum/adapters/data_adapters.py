"""What Keras reads batches from, as a tf.data.Dataset."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters

from fastaccum.adapters.packages import kinds


class _Sequence(keras.utils.PyDataset):
    def __init__(self, sequence: Any):
        super().__init__()
        self._sequence = sequence
        self.on_epoch_end = sequence.on_epoch_end

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> Any:
        return self._sequence[index]


def with_sequences(x: Any) -> Any:
    """A `tf_keras.utils.Sequence` as the `keras.utils.PyDataset` that it is in all but its class; else `x` itself."""
    return _Sequence(x) if "tf_keras.Sequence" in kinds(x) else x


def read_once(x: Any) -> bool:
    """Whether `x` is an iterator; ImageDataGenerator's have batches by their numbers too, and can be read again."""
    return hasattr(x, "__next__") and not isinstance(with_sequences(x), keras.utils.PyDataset)


def as_dataset(x: Any, shuffle: bool = False) -> tf.data.Dataset:
    """The batches of a `keras.utils.PyDataset`, generator or torch DataLoader, counted if their number is known.

    With `shuffle` the order of a PyDataset's batches is drawn anew for each pass.
    """
    adapter = data_adapters.get_data_adapter(x, shuffle=shuffle)
    dataset = adapter.get_tf_dataset()
    if adapter.num_batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
