"""Traces what a model computes itself, and losses of the user's own, before the first step."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.data.stacks import Batch
from fastaccum.graphs import row_mixing, traces
from fastaccum.step.model_objective import ModelObjective


def probe(objective: ModelObjective, sample: Batch) -> list[str]:
    """Traces one micro-batch like `sample`, a nest of specs, if the model computes losses or
    metrics itself.

    Returns the names of losses that are no sum or mean over rows, of which a step of several
    micro-batches warns. Raises ValueError for what is not exact, or cannot be restored.
    """
    for output, operation in objective.losses.mixing.items():
        objective.mixing[f"The loss of output {output!r}"] = operation
    outputs = [*objective.losses.mixing, *objective.losses.unproven]
    mixing = [f"the loss of output {output!r}" for output in outputs]
    if (
        objective.own_loss is None
        and not objective.has_own_metrics
        and not objective.model.added_reductions
    ):
        return mixing

    def forward(training: bool, batch: Batch) -> tuple[list[tf.Tensor], Mapping[str, tf.Tensor]]:
        computed = objective.forward(batch, training=training, observe=False)
        logs = objective.update_metrics(batch, computed, training)
        return [term.loss_sum for term in computed.terms], logs

    def traced(training: bool, **rows: None) -> ConcreteFunction:
        return traces.trace(functools.partial(forward, training), sample, **rows)

    rows: dict[str, None] = {}
    try:
        training = traced(True)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError):  # a model of a fixed batch size
        training = traced(True, **(rows := {"rows": None}))
    if objective.has_own_metrics:
        for mode, trace in ((True, training), (False, traced(False, **rows))):
            objective.metrics.expect(trace.structured_outputs[1], mode)
    known = (*objective.state, *objective.model.metric_variables, *objective.running.variables)
    if left := [
        v.name
        for v in traces.list_assigned(training.graph, [])
        if not any(v is each for each in known)
    ]:
        raise ValueError(
            f"{type(objective.model.model).__name__} assigns {left} as it computes its loss or "
            "metrics, which no step could restore. Make them by add_weight(..., "
            "trainable=False), or hold a keras.metrics.Metric."
        )
    return mixing if rows else [*mixing, *_require_sums(objective, training)]


def _require_sums(objective: ModelObjective, traced: ConcreteFunction) -> list[str]:
    name = type(objective.model.model).__name__
    normalized = row_mixing.first_sum_in_weights(traced.graph)
    of_outputs = len(objective.losses.outputs)
    if normalized is not None and "sum" in objective.reductions[:of_outputs]:
        raise ValueError(
            f"{name}.compute_loss weights its compiled loss by what it computes from the whole "
            f"batch ({normalized}), and the loss's reduction is 'sum'. Each micro-batch would "
            "compute weights of its own, so the sums would not add up to the batch's loss. Write "
            "the step with fastaccum.TrainStep, whose loss function returns "
            "(model.compute_loss(x, y, model(x, training=True), None) * rows, rows)."
        )
    by_row = not objective.model.mixes_rows and not objective.model.moving_layers
    beyond = [
        row_mixing.first_op_beyond_sums(loss, by_row)
        for loss in traced.structured_outputs[0][of_outputs:]
    ]
    found = [
        each
        for each in (row_mixing.first_comparison_of_rows(traced.graph), normalized, *beyond)
        if each
    ]
    if found:
        objective.mixing[f"A loss that {name} computes itself"] = found[0]
    return [f"a loss of {name}'s own"] if found else []
