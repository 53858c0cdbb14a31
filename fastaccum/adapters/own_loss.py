"""A model's own `compute_loss`, and what a model was compiled with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.added_losses import get_reduction
from fastaccum.adapters.models import Model
from fastaccum.basics.attributes import Nest
from fastaccum.graphs.traces import TELLING_ROWS, WEIGHTS, list_python_calls, trace

Reduction = Literal["mean", "sum"]


def with_compiled_defaults(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `compile`, or what the model was compiled with in place of missing ones;
    no loss is None.
    """
    found = dict(given)
    if found["loss"] is None:
        compiled = model.compiled_with
        found["loss"] = compiled["loss"]
        if found["optimizer"] is None:
            found["optimizer"] = compiled["optimizer"]
        if found["loss"] is not None and found["loss_weights"] is None:
            found["loss_weights"] = compiled["loss_weights"]
        if not found["metrics"] and not found["weighted_metrics"]:
            found |= {name: compiled[name] for name in ("metrics", "weighted_metrics")}
    if found["optimizer"] is None:
        found["optimizer"] = "adamw"
    for name in found.keys() - {"optimizer"}:
        checks.require_nest(name, found[name])
    if all(each is None for each in tf.nest.flatten(found["loss"])):
        found["loss"] = None
        require_any(model)
        if (weights := found["loss_weights"]) is not None:
            raise ValueError(
                f"loss_weights={weights!r} without a loss: weight the model's own where it is "
                "computed."
            )
    return found


def require_any(model: Model, called: bool = False) -> None:
    """Raises ValueError for a model without a loss of its own; what it adds is known only once it
    has been `called`.
    """
    adds = model.added_reductions if called else model.may_do_more
    if not (adds or model.overrides("compute_loss") or model.returned_losses):
        raise ValueError(
            f"loss=None, and {type(model.model).__name__} has no loss of its own, compiled, "
            "added or in compute_loss. Pass a Keras loss, its name, or a function fn(y_true, "
            "y_pred) that returns one loss per example."
        )


def calls_python(model: Model, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> bool:
    """Tells if a `compute_loss` that a model overrides calls Python, for specs of a batch and of
    its outputs.

    An empty nest stands for no targets or no weights.
    """
    if not model.overrides("compute_loss"):
        return False

    def nothing(*tensors: Nest, **losses: Nest) -> tf.Tensor:
        """Stands for the compiled loss, and for each of the model's losses."""
        return tf.constant(0.0)

    def compute(batch: Sequence[Nest]) -> tf.Tensor:
        x, y, y_pred, sample_weight = batch
        y = y if tf.nest.flatten(y) else None
        sample_weight = sample_weight if tf.nest.flatten(sample_weight) else None
        with model.own_losses(nothing, nothing):
            return model.compute_loss(x, y, y_pred, sample_weight, training=True)

    for rows in (TELLING_ROWS, None):  # None for a model of a fixed batch size
        with contextlib.suppress(Exception):  # the step's own trace says errors better
            traced = trace(compute, (x, y, y_pred, sample_weight), rows)
            return bool(list_python_calls(traced.graph))
    return False


class OwnLoss:
    """The `compute_loss` that a model overrides, given what Keras gives it at a scale that is exact
    over all rows.
    """

    def __init__(self, model: Model, reduction: Reduction):
        self._model, self.reduction = model, reduction
        self.name = f"{type(model.model).__name__}.compute_loss"

    def __call__(
        self,
        x: Nest,
        y: Nest,
        y_pred: Nest,
        sample_weight: Nest,
        training: bool,
        compiled: Callable[[Nest, Nest, Nest], tf.Tensor] | None,
        share: tf.Tensor | None,
    ) -> tf.Tensor:
        """Returns the loss of a micro-batch, a `share` of a step's rows; `compiled` stands for the
        compiled one.
        """

        def given(
            y: Nest, y_pred: Nest, sample_weight: Nest = None, regularization_losses: Sequence = ()
        ) -> tf.Tensor:
            loss = compiled(y, y_pred, sample_weight)  # type: ignore[misc]
            return tf.add_n([loss, *(tf.cast(each, tf.float32) for each in regularization_losses)])

        def rescaled(loss: tf.Tensor, is_regularizer: bool) -> tf.Tensor:
            if share is None:
                return loss
            # a loss for each row is summed over all of them, as in Keras
            if self.reduction == "mean":
                return loss / tf.cast(share, loss.dtype) if get_reduction(loss) == "sum" else loss
            return loss * tf.cast(share, loss.dtype) if is_regularizer else loss

        with self._model.own_losses(None if compiled is None else given, rescaled):
            value = self._model.compute_loss(x, y, y_pred, sample_weight, training)
        if not tf.is_tensor(value) or value.shape.rank or not value.dtype.is_floating:
            raise ValueError(
                f"{self.name} returned {value!r}; it must return a floating-point scalar."
            )
        return tf.cast(value, tf.float32)


def named_weights(sample_weight: Nest) -> Nest:
    """Names the sample weights that `compute_loss` passes to its compiled loss, so that a probe
    finds them.
    """
    return tf.nest.map_structure(
        lambda w: None if w is None else tf.identity(w, name=WEIGHTS), sample_weight
    )
