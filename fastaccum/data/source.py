"""Whatever Keras's `fit` takes as data, checked: arrays, tf.data, PyDatasets and generators."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from fastaccum.data import rows
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
    sparse_labels: bool | None = False,
    needs_targets: bool = True,
    what: str = "x",
    steps: str = "steps_per_epoch",
) -> ArraySource | DatasetSource:
    """The source of the data in `x`, from which `stacks` makes the stacks of a layout.

    Args:
        x, y, sample_weight: nests of arrays; or `x` alone: a tf.data.Dataset, `keras.utils.PyDataset`, generator or
            torch DataLoader of batches.
        shuffle: arrays anew in every epoch, a PyDataset by batches; a dataset or generator keeps its own order.
        class_weight: a factor for each class, multiplied into the sample weights.
        sparse_labels: whether `y` holds class indices even where it has more than one axis; None for not known.
        needs_targets: False for a model whose loss is its own.
        what, steps: the names of `x`, and of the argument that says how much of it is read at a time, for errors.
    """
    weigh = None
    if class_weight is not None:
        weigh = functools.partial(_weigh, class_weight, sparse_labels)
    if x is None:
        raise ValueError(f"{what}=None: there is no data to work on.")
    if isinstance(x, (list, tuple, dict)) and not tf.nest.flatten(x):
        raise ValueError(f"{what}={x!r} holds no array: there is no data to work on.")
    if rows.is_array_nest(x) or isinstance(x, (list, tuple, dict)) or hasattr(x, "toarray"):
        if y is None and needs_targets:
            raise ValueError(f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y).")
        arrays = rows.as_arrays((x, y, sample_weight))
        if weigh is not None:
            rows.count(ArraySource.what, arrays)
            weights = None if arrays.weights is None else rows.as_tensors("sample_weight", arrays.weights)
            arrays = arrays._replace(sample_weight=weigh(rows.as_tensors("y", arrays.y), weights))
        return ArraySource(arrays, 32 if batch_size is None else batch_size, seed if shuffle else None)
    if y is not None or sample_weight is not None:
        raise ValueError(f"{what} is a {type(x).__name__}, which yields y and sample_weight itself: leave them out.")
    return DatasetSource(x, what, shuffle, weigh, steps, needs_targets)


def _weigh(class_weight: dict[int, float], sparse_labels: bool | None, y: Any, sample_weight: Any) -> tf.Tensor:
    """The sample weights times the factors of the classes in `y`, indices or one-hot; 1 for a class that has none."""
    targets, weights = ([t for t in tf.nest.flatten(nest) if t is not None] for nest in (y, sample_weight))
    if len(targets) != 1 or len(weights) > 1:
        raise ValueError(f"class_weight={class_weight} needs a single output, but y holds several.")
    labels = (y := targets[0])
    if sparse_labels is None and y.shape.rank > 1 and y.shape[-1] != 1:
        raise ValueError(
            f"class_weight={class_weight} needs to know whether y of shape {tuple(y.shape)} holds class indices: name "
            "the loss 'sparse_categorical_crossentropy' or 'categorical_crossentropy'."
        )
    if not sparse_labels and y.shape.rank > 1:
        if y.shape[-1] not in (None, 1) and max(class_weight) >= y.shape[-1]:
            raise ValueError(
                f"class_weight={class_weight} names class {max(class_weight)}, but y has {y.shape[-1]} classes, "
                f"from 0 to {y.shape[-1] - 1}."
            )
        labels = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)
    matches = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)[..., tf.newaxis] == classes
    factor = tf.where(tf.reduce_any(matches, -1), tf.reduce_sum(tf.cast(matches, tf.float32) * factors, -1), 1.0)
    if not weights:
        return factor
    weight = tf.cast(weights[0], tf.float32)
    missing = factor.shape.rank - weight.shape.rank
    return weight[(..., *[tf.newaxis] * missing)] * factor[(..., *[tf.newaxis] * -missing)]
