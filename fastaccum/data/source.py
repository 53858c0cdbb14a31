"""Whatever Keras's `fit` takes as data, checked: arrays, tf.data, PyDatasets and generators."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from fastaccum.data import class_weights, rows
from fastaccum.data.arrays import ArraySource
from fastaccum.data.datasets import DatasetSource


def of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    shuffle: bool = False,
    seed: int | None = None,
    class_weight: dict[int, float] | None = None,
    sparse_labels: bool = False,
    what: str = "x",
) -> ArraySource | DatasetSource:
    """The source of the data in `x`, from which `stacks` makes the stacks of a layout.

    Args:
        x, y, sample_weight: nests of arrays; or `x` alone: a tf.data.Dataset, `keras.utils.PyDataset`, generator or
            torch DataLoader of batches.
        batch_size: rows of a micro-batch, for arrays; None means 32.
        shuffle: arrays anew in every epoch, a PyDataset by batches; a dataset or generator keeps its own order.
        seed: of the shuffling.
        class_weight: a factor for each class, multiplied into the sample weights.
        sparse_labels: whether `y` holds class indices even where it has more than one axis.
        what: the argument's name, for errors.

    Raises:
        TypeError, ValueError: raised if this is not data, or does not fit together.
    """
    weigh = None
    if class_weight is not None:
        weigh = functools.partial(class_weights.weigh, class_weight, sparse_labels)
    if x is None:
        raise ValueError(f"{what}=None: there is no data to work on.")
    if isinstance(x, (list, tuple, dict)) and not tf.nest.flatten(x):
        raise ValueError(f"{what}={x!r} holds no array: there is no data to work on.")
    if rows.is_array_nest(x) or isinstance(x, (list, tuple, dict)) or hasattr(x, "toarray"):
        if y is None:
            raise ValueError(f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y).")
        arrays = rows.as_arrays((x, y, sample_weight))
        if weigh is not None:
            rows.count(ArraySource.what, arrays)
            weights = None if arrays.weights is None else rows.as_tensors("sample_weight", arrays.weights)
            arrays = arrays._replace(sample_weight=weigh(rows.as_tensors("y", arrays.y), weights))
        return ArraySource(arrays, 32 if batch_size is None else batch_size, seed if shuffle else None)
    if y is not None or sample_weight is not None:
        raise ValueError(f"{what} is a {type(x).__name__}, which yields y and sample_weight itself: leave them out.")
    return DatasetSource(x, what, shuffle, weigh)
