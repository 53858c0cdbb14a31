"""The outputs of a model by position, and what a user passes for each of them: targets, labels among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

NOT_WHOLE = tf.int64.min


class Matched(NamedTuple):
    """One micro-batch by output, in the order of `Outputs.names`; None where an output has no target or no weight."""

    y_true: list[Any]
    y_pred: list[Any]
    sample_weight: list[Any]


class Outputs:
    """The outputs of a model. A model that returns a dict names them itself.

    Args:
        names: the model's own names, empty or too few for a model that names none.
        y_pred: symbolic outputs: one tensor, a list or a dict.

    Attributes:
        names: one for each output; two may be equal.
        specs: the symbolic outputs by position.
    """

    def __init__(self, names: list[str], y_pred: Any):
        self.is_dict = isinstance(y_pred, dict)
        if self.is_dict:
            names = list(y_pred)
        count = len(y_pred) if isinstance(y_pred, (dict, list, tuple)) else 1
        self.names = list(names) if len(names) == count else [f"output_{i}" for i in range(count)]
        self.specs = self.predictions(y_pred)

    def predictions(self, y_pred: Any) -> list[Any]:
        """What the model returned, by position."""
        if self.is_dict:
            return [y_pred[name] for name in self.names]
        return list(y_pred) if isinstance(y_pred, (list, tuple)) else [y_pred]

    def match(self, value: Any, what: str, repeat: bool = False) -> list[Any]:
        """What a user passed as `what` for the outputs, by position; None where there is nothing for one.

        Args:
            value: one value, a list or a dict by name; None or () for nothing.
            repeat: whether one value stands for every output.
        """
        if value is None or (isinstance(value, tuple) and not value):
            return [None] * len(self.names)
        if isinstance(value, dict):
            if unknown := set(value) - set(self.names):
                raise ValueError(f"{what} names {sorted(unknown)}, but the model's outputs are {self.names}.")
            return [value.get(name) for name in self.names]
        if isinstance(value, (list, tuple)):
            if len(value) != len(self.names):
                raise ValueError(f"{what} has {len(value)} entries for the {len(self.names)} outputs {self.names}.")
            return list(value)
        if len(self.names) > 1 and not repeat:
            raise ValueError(
                f"{what} is one value, but the model has {len(self.names)} outputs {self.names}: pass a list or dict."
            )
        return [value] * len(self.names)

    def matched(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Matched:
        """One micro-batch's targets, predictions and weights."""
        weights = self.match(sample_weight, "sample_weight", repeat=True)
        return Matched(self.match(y_true, "y"), self.predictions(y_pred), weights)


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that Keras's layers attached to a tensor, if any."""
    return getattr(tensor, "_keras_mask", None)


def whole(indices: tf.Tensor) -> tf.Tensor:
    """As int64, with fractions and NaN, which a cast would make some index, as `NOT_WHOLE`."""
    as_int = tf.cast(indices, tf.int64)
    if not indices.dtype.is_floating:
        return as_int
    return tf.where(tf.cast(as_int, indices.dtype) == indices, as_int, NOT_WHOLE)


def require_known(what: str, value: Any, kind: str, get: Callable[[str], Any], shorthands: Sequence[str]) -> None:
    """Raises unless a loss or metric is an object, a function, or a name: one that `get` knows, or of `shorthands`,
    of which an output's shape decides what they stand for.
    """
    if value is None or callable(value):
        return
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r} must be a {kind}, its name, or fn(y_true, y_pred).")
    try:
        if value.lower() not in shorthands:
            get(value)
    except ValueError:
        raise ValueError(
            f"{what}={value!r} is not a {kind}. Pass a name such as 'mse', a Keras object, or fn(y_true, y_pred)."
        ) from None
