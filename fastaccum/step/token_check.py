"""Refuses losses and metrics that do not count the tokens of packed rows one by one.

A loss may compare neighbouring tokens, or divide by how many a row has. So losses and metrics are
computed for a row of documents: with the targets of every second document, of the others, and of
all; and with other tokens, and at other places.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import raw, restored
from fastaccum.data.stacks import Batch
from fastaccum.layers import documents
from fastaccum.layers.interceptors import intercepting
from fastaccum.layers.scan import probe_layers
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.probe_rows import (
    ProbeRow,
    as_tensors,
    is_watched,
    moved,
    predicting,
    shifted_weights,
    split_variables,
    with_other_tokens,
)

# By how much sums over a row may differ, as fractions of them. Predictions at other places round
# otherwise, in half precision more.
_DIFFERENCE = 1e-3
_DIFFERENCE_BY_PLACE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.05}
_REMEDY = (
    "Packed rows take losses and metrics with a value for each token ([rows, tokens]), of that "
    "token alone. For others pad the documents, and mask what is padding."
)


class _Sums(NamedTuple):
    """The sums of a row, or of several."""

    losses: list[np.ndarray]  # by output: [sum of losses, sum of weights]
    metrics: list[np.ndarray]  # the variables of the metrics


def require_counts_by_token(objective: ModelObjective, row: ProbeRow) -> None:
    """Raises ValueError if a loss or metric makes something else of documents in one row.

    Args:
        objective: the model's, which keeps documents apart.
        row: arrays [1, T, ...].
    """
    watched = is_watched(row)
    with _SumsOfRows(objective, row) as sums_of:
        of_watched = sums_of(predicting(row, watched))
        _require_same(
            objective,
            of_watched,
            sums_of(predicting(with_other_tokens(row), watched)),
            "lets tokens of a row's documents see one another",
        )
        of_both = sums_of(predicting(row, watched), predicting(row, ~watched))
        of_row = sums_of(row)
        _require_same(objective, of_row, of_both, "does not count by token")

        tolerance = _DIFFERENCE_BY_PLACE.get(objective.model.compute_dtype, 0.05)
        numbers = row.x.documents[0]
        for number in (numbers[0], numbers[-1]):  # of which one comes first, and then the other
            of_one = predicting(row, numbers == number)
            here = sums_of(of_one)
            # Metrics count hits, which rounding may change.
            elsewhere = sums_of(moved(of_one))._replace(metrics=here.metrics)
            what = "computes by the place of a token in its row"
            _require_same(objective, here, elsewhere, what, tolerance)


class _SumsOfRows:
    """Computes the sums of losses and metrics over rows, with weights that are moved a little."""

    def __init__(self, objective: ModelObjective, row: ProbeRow):
        self._objective = objective
        self._metrics = objective.metrics
        self._traced = self._trace(row)
        self._scopes = contextlib.ExitStack()

    def _trace(self, row: ProbeRow) -> tf.types.experimental.ConcreteFunction:
        objective = self._objective
        called = objective.model.called_layers

        def compute(row: ProbeRow) -> list[tf.Tensor]:
            batch = Batch(*row)
            interceptors = documents.make_interceptors(called)
            attending: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if objective.attention is not None:
                interceptors += objective.attention.make_forms(called)
                attending = objective.attention.entered()
            # Of blocks that repeat the first one is called alone.
            interceptors += probe_layers(objective.model.model).interceptors
            with attending, intercepting(interceptors):
                forward = objective.forward(batch, training=False, observe=False)
                objective.update_metrics(batch, forward, training=False)
            return [tf.stack([term.loss_sum, term.weight_sum]) for term in forward.terms]

        traced = tf.function(compute, autograph=False)
        try:
            return traced.get_concrete_function(as_tensors(row))
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(f"x holds packed rows. {_REMEDY} This failed: {error}") from error

    def __enter__(self) -> _SumsOfRows:
        metric_variables = self._metrics.variables
        metric_ids = {id(variable) for variable in metric_variables}
        state_ids = {id(raw(variable)) for variable in self._objective.state} | metric_ids
        weights, state = split_variables(self._traced, self._objective.model, state_ids)
        self._state = [variable for variable in state if id(variable) not in metric_ids]
        self._scopes.enter_context(restored(metric_variables))
        self._scopes.enter_context(shifted_weights(weights))
        return self

    def __exit__(self, *exception: object) -> None:
        self._scopes.close()

    def __call__(self, *rows: ProbeRow) -> _Sums:
        """Returns the sums over some rows."""
        self._metrics.reset()
        losses = []
        for row in rows:
            with restored(self._state):
                losses.append([loss.numpy() for loss in self._traced(as_tensors(row))])
        totals = [np.sum(of_rows, axis=0) for of_rows in zip(*losses, strict=True)]
        return _Sums(totals, [variable.numpy() for variable in self._metrics.variables])


def _require_same(
    objective: ModelObjective, sums: _Sums, others: _Sums, what: str, tolerance: float = _DIFFERENCE
) -> None:
    """Raises ValueError that names the loss or the metric whose sums differ."""
    for number, (loss, other) in enumerate(zip(sums.losses, others.losses, strict=True)):
        if not _are_close(loss, other, tolerance):
            name = objective.losses.outputs[number].name
            raise ValueError(
                f"x holds packed rows, and the loss of output {name!r} {what}. {_REMEDY}"
            )
    variables = objective.metrics.variables
    for variable, value, other in zip(variables, sums.metrics, others.metrics, strict=True):
        if not _are_close(value, other, tolerance):
            name = _name_of_metric(objective, variable)
            raise ValueError(f"x holds packed rows, and the metric {name!r} {what}. {_REMEDY}")


def _are_close(sums: np.ndarray, others: np.ndarray, tolerance: float) -> bool:
    smallest = 1e-6 * np.max(np.abs(sums), initial=0.0)  # that is no rounding
    return bool(np.allclose(others, sums, rtol=tolerance, atol=smallest, equal_nan=True))


def _name_of_metric(objective: ModelObjective, variable: tf.Variable) -> str:
    """Names the metric that a variable belongs to."""
    for metric in objective.metrics.compiled.metrics:
        if any(raw(own) is variable for own in metric.variables):
            return metric.name
    return variable.name
