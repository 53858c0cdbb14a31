"""What Keras reads batches from, as a tf.data.Dataset."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.trainers import data_adapters


def as_dataset(x: Any, shuffle: bool = False) -> tf.data.Dataset:
    """The batches of a `keras.utils.PyDataset`, generator or torch DataLoader, counted if their number is known.

    With `shuffle` the order of a PyDataset's batches is drawn anew for each pass.
    """
    adapter = data_adapters.get_data_adapter(x, shuffle=shuffle)
    dataset = adapter.get_tf_dataset()
    if adapter.num_batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
