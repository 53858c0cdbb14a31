"""Shows by numbers if a model and its losses leave padding out."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.attributes import kinds, of_keras, raw, replaced, restored
from fastaccum.data.stacks import Batch
from fastaccum.step.model_objective import ModelObjective

_RATES = "rate", "stddev", "dropout", "recurrent_dropout"  # of Keras's layers that draw


def fills(objective: ModelObjective) -> tuple[float, ...]:
    """Lists the values that may stand for padding in a model's inputs: 0, and those of its Masking layers."""
    masking = [each for each in objective.model.layers if "keras.Masking" in kinds(each)]
    return tuple(dict.fromkeys([0.0, *(float(each.mask_value) for each in masking)]))


def is_same(objective: ModelObjective, given: Batch, padded: Batch) -> bool | None:
    """Tells if losses, metrics and state come out of a micro-batch as they do of the same one padded.

    None if they cannot be computed for the one given. They are computed in training, without dropout, with the weights
    as they are and moved by 0.1: a weight that is 0 before the training would hide what it lets in.
    """
    variables = [raw(v) for v in objective.model.variables if raw(v).dtype.is_floating]
    with restored([*_state(objective), *variables]), replaced(_without_draws(objective)):
        for moved_by in (0.0, 0.1):
            for variable in variables:
                variable.assign_add(tf.cast(tf.fill(variable.shape, moved_by), variable.dtype))
            try:
                expected = _results(objective, given)
            except Exception:  # of whatever the model cannot take, such as too short a sequence
                return None
            try:
                found = _results(objective, padded)
            except Exception:
                return False
            tolerance = 1e-4 if objective.model.compute_dtype in ("float32", "float64") else 1e-2
            pairs = zip(found, expected, strict=True)
            if not all(np.allclose(a, b, rtol=tolerance, atol=1e-6) for a, b in pairs):  # nor where one is NaN
                return False
    return True


def _results(objective: ModelObjective, batch: Batch) -> list[np.ndarray]:
    """Returns the terms of a micro-batch, and what it leaves in the state and the metrics."""
    with restored(_state(objective)):
        terms, y_pred = objective.terms(batch, training=True, observe=False)
        objective.update_metrics(batch, terms, y_pred, training=True)
        numbers = [tensor for term in terms for tensor in (term.loss_sum, term.weight_sum)]
        left = [v for v in _state(objective) if v.dtype.is_floating]
        return [tf.cast(each, tf.float32).numpy() for each in (*numbers, *left)]


def _state(objective: ModelObjective) -> list[tf.Variable]:
    return [*objective.state, *objective.model.metric_variables, *objective.running.variables]


def _without_draws(objective: ModelObjective) -> Sequence[tuple[keras.layers.Layer, str, object]]:
    layers = [each for each in objective.model.called_layers if of_keras(type(each))]
    return [(each, name, 0.0) for each in layers for name in _RATES if isinstance(getattr(each, name, None), float)]
