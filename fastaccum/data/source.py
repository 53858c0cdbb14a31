"""Checks of all that Keras's `fit` takes as data, and the choice of the class that reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.packed_rows import PackedRows, restored_rows
from fastaccum.data import rows
from fastaccum.data.arrays import ArraySource, ArrayStacks
from fastaccum.data.datasets import DatasetSource, DatasetStacks
from fastaccum.data.stacks import Batch

Source: TypeAlias = ArraySource | DatasetSource
Stacks: TypeAlias = ArrayStacks | DatasetStacks
# Rows of a micro-batch of arrays where none is named, as in Keras.
DEFAULT_BATCH_SIZE = 32


def make_data_source(
    x: Any,
    y: object = None,
    sample_weight: object = None,
    *,
    batch_size: int | None,
    shuffle: bool = False,
    seed: int | None = None,
    class_weight: dict[int, float] | None = None,
    sparse_labels: bool | None = False,
    needs_targets: bool = True,
    text: bool = False,
    preprocess: Callable[..., object] | None = None,
    what: str = "x",
    steps: str = "steps_per_epoch",
) -> Source:
    """Makes the source of the data in `x`; its method `stacks` makes the stacks of a layout.

    Args:
        x: nests of arrays; or, without y, a Dataset, PyDataset, Sequence, generator or DataLoader
            of batches.
        y: targets beside arrays.
        sample_weight: weights beside arrays.
        batch_size: rows of a micro-batch of arrays; None for 32, as in Keras.
        shuffle: shuffles arrays anew in every epoch, and a PyDataset by batches. Other data keep
            their own order.
        seed: of the order of arrays.
        class_weight: factors of the sample weights, by class.
        sparse_labels: tells if a `y` of several axes holds class indices; None for not known.
        needs_targets: False for a model whose loss is its own.
        text: tells if x may hold strings.
        preprocess: prepares a batch for the model. Arrays then keep their order.
        what: the name of x in errors.
        steps: the name of the argument that says how much of x is read at a time.
    """
    weigh = None
    if class_weight is not None:
        weigh = functools.partial(_weigh, class_weight, sparse_labels)
    x = restored_rows(x)
    if _holds_packed_rows(x):
        preprocess = None
        spec = x.element_spec
        packed = spec if isinstance(spec, PackedRows) else spec[0]
        if packed.documents.shape.rank == 1:
            raise ValueError(
                f"{what} holds packed rows, one at a time: pass batches of them, {what}.batch(8)."
            )
    require_some(what, x)
    checks.require_nest("y", y)
    checks.require_nest("sample_weight", sample_weight)
    if preprocess is not None and not isinstance(x, tf.data.Dataset):
        x = _batches(x, y, sample_weight, batch_size, what)
        y = None
        sample_weight = None
    if rows.is_array_nest(x) or isinstance(x, (list, tuple, dict)):
        if y is None and needs_targets:
            raise ValueError(
                f"y=None: arrays need targets beside {what}. Pass y, or a dataset of (x, y)."
            )
        arrays = rows.as_arrays((x, y, sample_weight), text)
        if weigh is not None:
            rows.count(ArraySource.what, arrays)
            targets = rows.as_tensors("y", arrays.y)
            weights = None
            if arrays.weights is not None:
                weights = rows.as_tensors("sample_weight", arrays.weights)
            arrays = arrays._replace(sample_weight=weigh(targets, weights))
        batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        return ArraySource(arrays, batch_size, seed if shuffle else None)
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


def _holds_packed_rows(x: object) -> bool:
    """Tells if x is a dataset of packed rows."""
    if not isinstance(x, tf.data.Dataset):
        return False
    spec = x.element_spec
    if isinstance(spec, tuple) and not isinstance(spec, PackedRows):
        spec = spec[0]
    return isinstance(spec, PackedRows)


def require_some(what: str, x: object) -> None:
    """Raises TypeError or ValueError for an x that holds nothing, or cannot be taken apart."""
    checks.require_nest(what, x)
    if x is None:
        raise ValueError(f"{what}=None: there is no data to work on.")
    if isinstance(x, (list, tuple, dict)) and not tf.nest.flatten(x):
        raise ValueError(f"{what}={x!r} holds no array: there is no data to work on.")


def require_predictable(x: object, text: bool) -> None:
    """Raises TypeError or ValueError for arrays of no numbers or text, of unequal rows or none."""
    require_some("x", x)
    if _holds_packed_rows(x) or isinstance(x, PackedRows):
        raise ValueError(
            "x holds packed rows, which `fit` and `evaluate` take: pass `predict` the documents, "
            "padded where they differ in length."
        )
    is_ragged = any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(x))
    if rows.is_array_nest(x) and not is_ragged:
        row_count = rows.count("x: its arrays", rows.as_arrays((x, None, None), text))
        if row_count == 0:
            raise ValueError("x is empty: it has 0 rows.")


def _batches(
    x: object, y: object, sample_weight: object, batch_size: int | None, what: str
) -> tf.data.Dataset:
    """Batches what a model's own preprocessing takes; a list is one tensor, as in KerasHub."""

    def tensors(nest):
        if isinstance(nest, tuple):
            return tuple(map(tensors, nest))
        if isinstance(nest, dict):
            return {name: tensors(part) for name, part in nest.items()}
        if isinstance(nest, tf.RaggedTensor):
            return nest
        return tf.convert_to_tensor(nest)

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
    y = () if y is None else y
    sample_weight = () if sample_weight is None else sample_weight
    batch = Batch(tensors(x), tensors(y), tensors(sample_weight))
    if any(tensor.shape.rank == 0 for tensor in tf.nest.flatten(batch)):
        raise ValueError(
            f"{what} holds a scalar: the first axis must count examples, as in a list of strings."
        )
    rows.count(ArraySource.what, batch)
    batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    size = checks.whole_number("batch_size", batch_size)
    parts = [batch.x]
    for part in (batch.y, batch.sample_weight):
        if not isinstance(part, tuple) or part:
            parts.append(part)
    return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(size)


@tf.autograph.experimental.do_not_convert  # `map` would, and warn of what it cannot
def _weigh(
    class_weight: dict[int, float], sparse_labels: bool | None, y: Any, sample_weight: Any
) -> tf.Tensor:
    """Multiplies sample weights by the factors of the classes in `y`, indices or one-hot.

    Classes without a factor keep their weights.
    """
    targets = [t for t in tf.nest.flatten(y) if t is not None]
    weights = [t for t in tf.nest.flatten(sample_weight) if t is not None]
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
    y = targets[0]
    labels = y
    if sparse_labels is None and y.shape.rank > 1 and y.shape[-1] != 1:
        raise ValueError(
            f"class_weight={class_weight} needs to know whether y of shape {tuple(y.shape)} "
            "holds class indices: name the loss 'sparse_categorical_crossentropy' or "
            "'categorical_crossentropy'."
        )
    is_one_hot = not sparse_labels and y.shape.rank > 1
    if is_one_hot and y.shape[-1] == 1:
        labels = tf.squeeze(y, -1)
    elif is_one_hot:
        count = y.shape[-1]
        if count is not None and max(class_weight) >= count:
            raise ValueError(
                f"class_weight={class_weight} names class {max(class_weight)}, but y has {count} "
                f"classes, from 0 to {count - 1}."
            )
        labels = tf.argmax(y, -1)
    classes = tf.constant(list(class_weight), tf.int64)
    factors = tf.constant(list(class_weight.values()), tf.float32)
    indices = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)
    matches = indices[..., tf.newaxis] == classes
    matched = tf.reduce_sum(tf.cast(matches, tf.float32) * factors, -1)
    factor = tf.where(tf.reduce_any(matches, -1), matched, 1.0)
    if not weights:
        return factor
    weight = tf.cast(weights[0], tf.float32)
    rank = max(factor.shape.rank, weight.shape.rank)
    return _with_rank(weight, rank) * _with_rank(factor, rank)


def _with_rank(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    """Appends axes of length 1."""
    missing = rank - tensor.shape.rank
    return tensor[(..., *[tf.newaxis] * missing)]
