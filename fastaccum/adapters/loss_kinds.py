"""Reads what a loss takes and returns from its class, its function and its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.head import LinearCrossEntropy
from fastaccum.adapters.scalar_losses import Pair
from fastaccum.basics.attributes import function_of, kinds, known_name, of_keras, runs_keras
from fastaccum.graphs import row_counts, row_mixing, traces
from fastaccum.kernels import private

# Names of Keras for the cross-entropy that fits the labels.
SHORTHANDS = ("crossentropy", "ce")

_SPARSE_CLASSES = {"keras.SparseCategoricalCrossentropy", "tf_keras.SparseCategoricalCrossentropy"}
_SPARSE_FUNCTIONS = {
    "keras.sparse_categorical_crossentropy",
    "tf_keras.sparse_categorical_crossentropy",
}


def loss_name(loss: keras.losses.Loss) -> str:
    """Names a loss in a message."""
    function = getattr(loss, "fn", loss)
    name = getattr(loss, "name", loss)
    return getattr(function, "__name__", name)


def reduction_of(loss: keras.losses.Loss) -> str | None:
    """Returns a loss's reduction by Keras 3's name; None for one that reduces nothing."""
    if loss.reduction == "auto":  # tf_keras's name of "sum_over_batch_size"
        return "sum_over_batch_size"
    if loss.reduction == "none":
        return None
    return loss.reduction


def takes_class_indices(loss: keras.losses.Loss) -> bool:
    """Tells if a loss, a Keras loss's function or its name takes class indices as labels."""
    if isinstance(loss, LinearCrossEntropy):
        return True
    if isinstance(loss, str) and loss.lower() not in SHORTHANDS:
        loss = keras.losses.get(loss)
    if not _SPARSE_CLASSES.isdisjoint(kinds(loss)):
        return True
    function = loss
    if hasattr(loss, "call"):
        function = function_of(loss)
    return known_name(function) in _SPARSE_FUNCTIONS


def sparse_labels(loss: keras.losses.Loss) -> bool | None:
    """Tells if all losses of a nest take class indices; None where the labels' shape decides."""
    losses = [part for part in tf.nest.flatten(loss) if part is not None]
    if any(isinstance(part, str) and part.lower() in SHORTHANDS for part in losses):
        return None
    return bool(losses) and all(map(takes_class_indices, losses))


def count_classes(loss: keras.losses.Loss, name: str, spec: keras.KerasTensor) -> int | None:
    """Returns the length of the output's axis of classes if labels are class indices; else None."""
    if not takes_class_indices(loss):
        return None
    shape = tuple(spec.shape)
    axis = private.fn_kwargs(loss, {}).get("axis", -1)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"loss of output {name!r} has axis={axis}, and the output has shape {shape}."
        )
    return shape[axis]


def require_sum_of_rows(
    loss: keras.losses.Loss, name: str, spec: keras.KerasTensor, is_scalar: bool
) -> None:
    """Raises ValueError for a loss of output `name` that is no sum over the rows of a batch."""
    if not runs_keras(loss, "__call__"):
        called = next(c for c in type(loss).__mro__ if "__call__" in vars(c))
        raise ValueError(
            f"The loss of output {name!r} is {type(loss).__name__}, whose __call__ "
            f"{called.__name__} overrides: what it does with a batch is no sum over "
            "micro-batches. Override call(y_true, y_pred), which returns one loss for each row "
            "or one number for the batch; or the model's compute_loss, with a loss that "
            "compares rows."
        )
    if is_scalar:  # whatever its reduction
        return
    if reduction_of(loss) is None:
        raise ValueError(
            f"The loss of output {name!r} has reduction=None, which leaves no scalar to "
            "minimise. Pass reduction='sum_over_batch_size' (the mean) or 'sum'; or override "
            "the model's compute_loss with a loss that compares rows."
        )
    if known_name(function_of(loss)) in ("keras.dice", "keras.tversky"):
        axis = private.fn_kwargs(loss).get("axis")
        rank = len(spec.shape)
        axis_of_rows = {0, -rank}
        if axis is None or axis_of_rows & set(np.atleast_1d(axis).tolist()):
            inner_axes = tuple(range(1, rank))
            raise ValueError(
                f"The loss of output {name!r} is {type(loss).__name__}(axis={axis}), which "
                "compares the whole batch at once: no sum over micro-batches equals it. Pass "
                f"keras.losses.{loss_name(loss).title()}(axis={inner_axes}), one loss for each "
                "row."
            )


class UseOfRows(NamedTuple):
    """Use that a loss of one value for each row makes of the other rows of its batch.

    Attributes:
        operation: an operation that may mix rows, or counts them in a way that is not understood.
        power: p, not 0, if each row's loss has a factor `rows**p`.
    """

    operation: str | None = None
    power: float | None = None


def find_use_of_rows(loss: keras.losses.Loss, *specs: keras.KerasTensor) -> UseOfRows:
    """Traces a loss that is not Keras's, and finds what it does with the rows of its batch."""
    function = function_of(loss)
    if known_name(function) == "keras.circle":
        return UseOfRows(operation=loss.name)
    if of_keras(function):
        return UseOfRows()

    def call(pair: Sequence[tf.Tensor]) -> tf.Tensor:
        return loss.call(*as_called(loss, *pair))

    try:
        traced = traces.trace(call, specs)
    except Exception:  # of a distribution, or by AutoGraph: nothing is known
        return UseOfRows()
    _require_result_for_each_row(loss, traced.structured_outputs)
    mixing = row_mixing.find_mixing_op(traced, call, specs)
    if mixing:
        return UseOfRows(operation=mixing)
    counting = row_counts.find_row_counter(traced, call, specs)
    if not counting:
        return UseOfRows()
    power = row_counts.find_power_of_rows(call, specs)
    if power:
        return UseOfRows(power=power)
    return UseOfRows(operation=counting)


def _require_result_for_each_row(loss: keras.losses.Loss, values: Any) -> None:
    """Raises ValueError for a traced result whose first axis is as long for any number of rows."""
    if not tf.is_tensor(values) or not values.shape.rank or values.shape[0] is None:
        return
    if values.shape[0] % traces.TELLING_ROWS:
        raise ValueError(
            not_per_example(loss, f"shape {tuple(values.shape)} whatever the number of examples")
        )


def not_per_example(loss: keras.losses.Loss, returned: str) -> str:
    """Writes the error of a loss that returns neither a loss per example nor one number."""
    return (
        f"loss {loss_name(loss)!r} returned {returned}. It must return a floating-point tensor, "
        "one loss per example (or per token), or one number for the batch: a mean over the "
        "batch axis alone is neither."
    )


def as_called(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> Pair:
    """Casts a loss's arguments to its dtype, as Keras does."""
    dtype = getattr(loss, "dtype", None) or "float32"
    y_true = tf.cast(y_true, dtype)
    y_pred = tf.cast(y_pred, dtype)
    if not isinstance(loss, keras.Loss) and y_true.shape.rank == 1 and y_pred.shape[1:] == [1]:
        y_true = y_true[:, tf.newaxis]  # as tf_keras does, before it calls the loss
    return y_true, y_pred
