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


def with_compiled_defaults(model: Model, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fills missing arguments of `compile` in with what the model was compiled with.

    If the loss, or each entry of its nest, is still None, the returned loss is None: the model then
    trains with the losses that it computes itself.
    """
    completed = dict(arguments)
    if completed["loss"] is None:
        completed.update(_compiled_arguments(model, arguments))
    if completed["optimizer"] is None:
        completed["optimizer"] = "adamw"

    for name in completed.keys() - {"optimizer"}:
        checks.require_nest(name, completed[name])
    if all(loss is None for loss in tf.nest.flatten(completed["loss"])):
        completed["loss"] = None
        require_any(model)
        weights = completed["loss_weights"]
        if weights is not None:
            raise ValueError(
                f"loss_weights={weights!r} without a loss: weight the model's own where it is "
                "computed."
            )
    return completed


def _compiled_arguments(model: Model, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the model was compiled with for the loss and other missing arguments."""
    compiled = model.compiled_with
    taken = {"loss": compiled["loss"]}
    if arguments["optimizer"] is None:
        taken["optimizer"] = compiled["optimizer"]
    if compiled["loss"] is not None and arguments["loss_weights"] is None:
        taken["loss_weights"] = compiled["loss_weights"]
    if not arguments["metrics"] and not arguments["weighted_metrics"]:
        taken["metrics"] = compiled["metrics"]
        taken["weighted_metrics"] = compiled["weighted_metrics"]
    return taken


def require_any(model: Model, called: bool = False) -> None:
    """Raises ValueError for a model without a loss of its own.

    Only a call of the model shows if it adds losses. If it has not been `called`, a model that may
    add some is accepted.
    """
    if called:
        adds_losses = bool(model.effects.added_reductions)
    else:
        adds_losses = model.may_do_more
    if not (adds_losses or model.overrides("compute_loss") or model.returned_losses):
        raise ValueError(
            f"loss=None, and {type(model.model).__name__} has no loss of its own, compiled, "
            "added or in compute_loss. Pass a Keras loss, its name, or a function fn(y_true, "
            "y_pred) that returns one loss per example."
        )


def calls_python(model: Model, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> bool:
    """Tells if a `compute_loss` that a model overrides calls Python.

    The arguments are specs of a batch and of its outputs. An empty nest stands for no targets or
    no weights.
    """
    if not model.overrides("compute_loss"):
        return False

    def no_loss(*tensors: Nest, **losses: Nest) -> tf.Tensor:
        """Replaces the compiled loss and each of the model's losses: theirs are not the model's."""
        return tf.constant(0.0)

    def compute(batch: Sequence[Nest]) -> tf.Tensor:
        x, y, y_pred, sample_weight = batch
        if not tf.nest.flatten(y):
            y = None
        if not tf.nest.flatten(sample_weight):
            sample_weight = None
        with model.own_losses(no_loss, no_loss):
            return model.compute_loss(x, y, y_pred, sample_weight, training=True)

    for rows in (TELLING_ROWS, None):  # None for a model of a fixed batch size
        # An error is not raised here: the step is traced later, and explains it better.
        with contextlib.suppress(Exception):
            traced = trace(compute, (x, y, y_pred, sample_weight), rows)
            return bool(list_python_calls(traced.graph))
    return False


class OwnLoss:
    """The `compute_loss` that a model overrides, computed a micro-batch at a time.

    Losses inside it are rescaled, so that the update of all micro-batches has the loss that
    `compute_loss` would return for the whole batch.

    Args:
        model: overrides `compute_loss`.
        reduction: whether `compute_loss` is a mean or a sum over rows.
    """

    def __init__(self, model: Model, reduction: Reduction):
        self._model = model
        self.reduction = reduction
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
        """Returns what `compute_loss` returns for a micro-batch.

        Args:
            x, y, y_pred, sample_weight, training: the arguments of `compute_loss`.
            compiled: computes the compiled loss where `compute_loss` asks for it; None without one.
            share: the micro-batch's rows divided by those of the train step. None if its loss is
                not a part of a train step's; nothing is rescaled then.
        """

        def compiled_loss(
            y: Nest, y_pred: Nest, sample_weight: Nest = None, regularization_losses: Sequence = ()
        ) -> tf.Tensor:
            loss = compiled(y, y_pred, sample_weight)  # type: ignore[misc]
            penalties = [tf.cast(penalty, tf.float32) for penalty in regularization_losses]
            return tf.add_n([loss, *penalties])

        def rescaled(loss: tf.Tensor, is_regularizer: bool) -> tf.Tensor:
            if share is None:
                return loss
            if self.reduction == "mean":
                # The train step multiplies what `compute_loss` returns by the share and adds it
                # up: right for a mean over rows. For a sum over rows this cancels the factor.
                if get_reduction(loss) == "sum":
                    return loss / tf.cast(share, loss.dtype)
                return loss
            # The train step adds up what `compute_loss` returns. Each micro-batch has the whole
            # regularisation loss, and the shares add up to 1: it counts once.
            if is_regularizer:
                return loss * tf.cast(share, loss.dtype)
            return loss

        replacement = None
        if compiled is not None:
            replacement = compiled_loss
        with self._model.own_losses(replacement, rescaled):
            value = self._model.compute_loss(x, y, y_pred, sample_weight, training)
        if not tf.is_tensor(value) or value.shape.rank or not value.dtype.is_floating:
            raise ValueError(
                f"{self.name} returned {value!r}; it must return a floating-point scalar."
            )
        return tf.cast(value, tf.float32)


def named_weights(sample_weight: Nest) -> Nest:
    """Gives sample weights a name in the graph, by which `step.probe` finds them."""

    def named(weight: tf.Tensor | None) -> tf.Tensor | None:
        if weight is None:
            return None
        return tf.identity(weight, name=WEIGHTS)

    return tf.nest.map_structure(named, sample_weight)
