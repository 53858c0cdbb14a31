"""Checks of all that Keras's `fit` takes as data, and the choice of the class that reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from fastaccum import checks
from fastaccum.data import rows
from fastaccum.data.arrays import ArraySource, ArrayStacks
from fastaccum.data.datasets import DatasetSource, DatasetStacks
from fastaccum.data.stacks import Batch

Source: TypeAlias = ArraySource | DatasetSource
Stacks: TypeAlias = ArrayStacks | DatasetStacks


def make_data_source(
    # nests of arrays; or, without y, a Dataset, PyDataset, Sequence, generator or DataLoader of
    # batches
    x: Any,
    y: object = None,
    sample_weight: object = None,
    *,
    batch_size: int | None,
    # arrays anew in every epoch, a PyDataset by batches; others keep their own order
    shuffle: bool = False,
    seed: int | None = None,
    class_weight: dict[int, float] | None = None,  # multiplied into the sample weights
    # whether a `y` of several axes holds class indices; None for not known
    sparse_labels: bool | None = False,
    needs_targets: bool = True,  # False for a model whose loss is its own
    text: bool = False,  # whether x may hold strings
    # of a batch, for the model: arrays then keep their order
    preprocess: Callable[..., object] | None = None,
    what: str = "x",  # the name of x in errors
    steps: str = "steps_per_epoch",  # and of the argument that says how much of x is read at a time
) -> Source:
    """Makes the source of the data in `x`; its method `stacks` makes the stacks of a layout."""
    weigh = None if class_weight is None else functools.partial(_weigh, class_weight, sparse_labels)
    require_some(what, x)
    checks.require_nest("y", y)
    checks.require_nest("sample_weight", sample_weight)
    if preprocess is not None and not isinstance(x, tf.data.Dataset):
        x = _batches(x, y, sample_weight, batch_size, what)
        y = sample_weight = None
    if rows.is_array_nest(x) or isinstance(x, (list, tuple, dict)):
        if y is None and needs_targets:
            raise ValueError(
                f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y)."
            )
        arrays = rows.as_arrays((x, y, sample_weight), text)
        if weigh is not None:
            rows.count(ArraySource.what, arrays)
            weights = (
                None if arrays.weights is None else rows.as_tensors("sample_weight", arrays.weights)
            )
            arrays = arrays._replace(sample_weight=weigh(rows.as_tensors("y", arrays.y), weights))
        return ArraySource(
            arrays, 32 if batch_size is None else batch_size, seed if shuffle else None
        )
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"{what} ({type(x).__name__}) yields y and sample_weight itself: leave them out."
        )
    if isinstance(x, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        raise TypeError(
            f"{what} is a {type(x).__name__}: pass the tf.data.Dataset itself, which the Trainer "
            "of a model made under a strategy distributes."
        )
    if preprocess is not None:
        x = x.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    return DatasetSource(x, what, shuffle, weigh, steps, needs_targets, text)


def require_some(what: str, x: object) -> None:
    """Raises TypeError or ValueError for an x that holds nothing, or cannot be taken apart."""
    checks.require_nest(what, x)
    if x is None:
        raise ValueError(f"{what}=None: there is no data to work on.")
    if isinstance(x, (list, tuple, dict)) and not tf.nest.flatten(x):
        raise ValueError(f"{what}={x!r} holds no array: there is no data to work on.")


def require_predictable(x: object, text: bool) -> None:
    """Raises TypeError or ValueError for an x of no rows of numbers or text, or of unequal numbers
    of rows.
    """
    require_some("x", x)
    if rows.is_array_nest(x) and not any(
        isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(x)
    ):
        rows.count("x: its arrays", rows.as_arrays((x, None, None), text))


def _batches(
    x: object, y: object, sample_weight: object, batch_size: int | None, what: str
) -> tf.data.Dataset:
    """Batches what a model's own preprocessing takes; a list is one tensor, as in KerasHub."""

    def tensors(nest):
        if isinstance(nest, tuple):
            return tuple(map(tensors, nest))
        if isinstance(nest, dict):
            return {name: tensors(each) for name, each in nest.items()}
        return nest if isinstance(nest, tf.RaggedTensor) else tf.convert_to_tensor(nest)

    if not rows.is_array_nest(x):
        raise TypeError(
            f"{what} is a {type(x).__name__}, but this model preprocesses its inputs: pass arrays, "
            "lists or a tf.data.Dataset of raw inputs, or set model.preprocessor = None for "
            "batches that are preprocessed."
        )
    if y is None and sample_weight is not None:
        raise ValueError(
            "sample_weight without y: this model's preprocessor makes y and its weights from x. "
            "Leave sample_weight out, or pass y too."
        )
    batch = Batch(*(() if each is None else tensors(each) for each in (x, y, sample_weight)))
    if any(each.shape.rank == 0 for each in tf.nest.flatten(batch)):
        raise ValueError(
            f"{what} holds a scalar: the first axis must count examples, as in a list of strings."
        )
    rows.count(ArraySource.what, batch)
    size = checks.whole_number("batch_size", 32 if batch_size is None else batch_size)
    given = tuple(each for each in batch if not isinstance(each, tuple) or each)
    return tf.data.Dataset.from_tensor_slices(given).batch(size)


@tf.autograph.experimental.do_not_convert  # `map` would, and warn of what it cannot
def _weigh(
    class_weight: dict[int, float], sparse_labels: bool | None, y: Any, sample_weight: Any
) -> tf.Tensor:
    """Multiplies sample weights by the factors of the classes in `y`, indices or one-hot; 1 for
    other classes.
    """
    targets, weights = (
        [t for t in tf.nest.flatten(nest) if t is not None] for nest in (y, sample_weight)
    )
    if not targets:
        raise ValueError(
            f"class_weight={class_weight} needs the labels as y, and there is none: weight the "
            "rows in the model."
        )
    if len(targets) != 1 or len(weights) > 1:
        raise ValueError(
            f"class_weight={class_weight} needs a single output, but y holds several: pass "
            "sample_weight, by output, as in sample_weight={'a': weights_a[labels_a], 'b': "
            "weights_b[labels_b]}."
        )
    labels = (y := targets[0])
    if sparse_labels is None and y.shape.rank > 1 and y.shape[-1] != 1:
        raise ValueError(
            f"class_weight={class_weight} needs to know whether y of shape {tuple(y.shape)} "
            "holds class indices: name the loss 'sparse_categorical_crossentropy' or "
            "'categorical_crossentropy'."
        )
    if not sparse_labels and y.shape.rank > 1:
        if y.shape[-1] not in (None, 1) and max(class_weight) >= y.shape[-1]:
            raise ValueError(
                f"class_weight={class_weight} names class {max(class_weight)}, but y has "
                f"{y.shape[-1]} classes, from 0 to {y.shape[-1] - 1}."
            )
        labels = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)
    matches = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)[..., tf.newaxis] == classes
    factor = tf.where(
        tf.reduce_any(matches, -1), tf.reduce_sum(tf.cast(matches, tf.float32) * factors, -1), 1.0
    )
    if not weights:
        return factor
    weight = tf.cast(weights[0], tf.float32)
    missing = factor.shape.rank - weight.shape.rank
    return weight[(..., *[tf.newaxis] * missing)] * factor[(..., *[tf.newaxis] * -missing)]
