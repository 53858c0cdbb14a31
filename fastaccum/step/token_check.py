"""Refuses losses and metrics that do not count the tokens of packed rows one by one.

A loss may compare neighbouring tokens, or divide by how many a row has. So losses and metrics are
computed for a row of documents: with the targets of every second document, of the others, and of
all; and with other tokens, and at other places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import raw, restored
from fastaccum.data.stacks import Batch
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.probe_rows import (
    ProbeRow,
    is_in_even_document,
    with_documents_reversed,
    with_other_tokens,
    with_targets_of,
)
from fastaccum.step.trial import Trial

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
    variables = objective.metrics.variables
    trial = _trace(objective, row)

    def sums_of(*rows: ProbeRow) -> _Sums:
        objective.metrics.reset()
        losses = [trial.compute(row) for row in rows]
        totals = [np.sum(of_rows, axis=0) for of_rows in zip(*losses, strict=True)]
        return _Sums(totals, [variable.numpy() for variable in variables])

    is_even = is_in_even_document(row)
    with restored(variables), trial.shifted_weights():
        of_even = sums_of(with_targets_of(row, is_even))
        among_others = sums_of(with_targets_of(with_other_tokens(row), is_even))
        what = "lets tokens of a row's documents see one another"
        _require_same(objective, of_even, among_others, what)

        of_row = sums_of(row)
        in_two_rows = sums_of(with_targets_of(row, is_even), with_targets_of(row, ~is_even))
        _require_same(objective, of_row, in_two_rows, "does not count by token")

        what = "computes by the place of a token in its row"
        tolerance = _DIFFERENCE_BY_PLACE.get(objective.model.compute_dtype, 0.05)
        numbers = row.x.documents[0]
        for number in (numbers[0], numbers[-1]):  # of which one comes first, and then the other
            of_one = with_targets_of(row, numbers == number)
            here = sums_of(of_one)
            # Metrics count hits, which rounding may change.
            elsewhere = sums_of(with_documents_reversed(of_one))._replace(metrics=here.metrics)
            _require_same(objective, here, elsewhere, what, tolerance)


def _trace(objective: ModelObjective, row: ProbeRow) -> Trial:
    """Traces the sums of losses and of their weights, by output, and the updates of metrics."""

    def compute(row: ProbeRow) -> list[tf.Tensor]:
        batch = Batch(*row)
        forward = objective.forward(batch, training=False, observe=False)
        objective.update_metrics(batch, forward, training=False)
        return [tf.stack([term.loss_sum, term.weight_sum]) for term in forward.terms]

    try:
        return Trial(objective, compute, row, counters=objective.metrics.variables)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(f"x holds packed rows. {_REMEDY} This failed: {error}") from error


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
