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
    """Traces one micro-batch of a model that computes losses or metrics itself.

    A step of several micro-batches warns of losses that are no sum or mean over rows. The names of
    these losses are returned, and `objective.split_warnings` holds the operation that mixes rows in
    each.
    Nothing is traced for a model that computes neither.

    Args:
        objective: the objective whose losses and metrics are traced.
        sample: a nest of specs that the micro-batch is like.

    Raises:
        ValueError: raised for a loss that would not be exact, and for a model that assigns
            variables which no step could restore.
    """
    for output, operation in objective.losses.mixing.items():
        objective.split_warnings.mixing[f"The loss of output {output!r}"] = operation
    outputs = [*objective.losses.mixing, *objective.losses.unproven]
    names = [f"the loss of output {output!r}" for output in outputs]
    if (
        objective.own_loss is None
        and not objective.has_own_metrics
        and not objective.model.effects.added_reductions
    ):
        return names

    def forward(training: bool, batch: Batch) -> tuple[list[tf.Tensor], Mapping[str, tf.Tensor]]:
        computed = objective.forward(batch, training=training, observe=False)
        logs = objective.update_metrics(batch, computed, training)
        return [term.loss_sum for term in computed.terms], logs

    def trace(training: bool, rows: int | None) -> ConcreteFunction:
        return traces.trace(functools.partial(forward, training), sample, rows)

    rows: int | None = traces.TELLING_ROWS
    has_fixed_batch_size = False
    try:
        training_trace = trace(True, rows)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError):
        # The model takes no other number of rows than the sample's, which does not tell by its
        # shapes what mixes rows.
        has_fixed_batch_size = True
        rows = None
        training_trace = trace(True, rows)

    if objective.has_own_metrics:
        evaluation_trace = trace(False, rows)
        _, training_logs = training_trace.structured_outputs
        _, evaluation_logs = evaluation_trace.structured_outputs
        objective.metrics.expect(training_logs, training=True)
        objective.metrics.expect(evaluation_logs, training=False)
    _require_restorable(objective, training_trace.graph)
    if has_fixed_batch_size:
        return names

    _refuse_normalized_sum(objective, training_trace.graph)
    mixing_op = _find_mixing_op(objective, training_trace)
    if mixing_op is not None:
        model_name = type(objective.model.model).__name__
        objective.split_warnings.mixing[f"A loss that {model_name} computes itself"] = mixing_op
        names.append(f"a loss of {model_name}'s own")
    return names


def _require_restorable(objective: ModelObjective, graph: tf.Graph) -> None:
    """Raises ValueError if the graph assigns variables that a step does not restore."""
    restored = (*objective.state, *objective.model.metric_variables, *objective.running.variables)
    unknown = []
    for variable in traces.list_assigned(graph, []):
        if not any(variable is known for known in restored):
            unknown.append(variable.name)
    if unknown:
        raise ValueError(
            f"{type(objective.model.model).__name__} assigns {unknown} as it computes its loss or "
            "metrics, which no step could restore. Make them by add_weight(..., "
            "trainable=False), or hold a keras.metrics.Metric."
        )


def _refuse_normalized_sum(objective: ModelObjective, graph: tf.Graph) -> None:
    """Raises ValueError for a compiled loss that is a sum, with weights made from all rows.

    A `compute_loss` may normalise weights by their sum over the batch, say. Each micro-batch would
    normalise its own, and their sums would not add up to the batch's.
    """
    normalizer = row_mixing.first_sum_in_weights(graph)
    if normalizer is None:
        return
    reductions_of_outputs = objective.reductions[: len(objective.losses.outputs)]
    if "sum" in reductions_of_outputs:
        raise ValueError(
            f"{type(objective.model.model).__name__}.compute_loss weights its compiled loss by "
            f"what it computes from the whole batch ({normalizer}), and the loss's reduction is "
            "'sum'. Each micro-batch would compute weights of its own, so the sums would not add "
            "up to the batch's loss. Write the step with fastaccum.TrainStep, whose loss function "
            "returns (model.compute_loss(x, y, model(x, training=True), None) * rows, rows)."
        )


def _find_mixing_op(objective: ModelObjective, trace: ConcreteFunction) -> str | None:
    """Names an operation by which a loss of the model's own is no sum or mean over rows.

    Returns None if there is none. The losses of the outputs are checked where they are bound.
    """
    comparison = row_mixing.first_comparison_of_rows(trace.graph)
    if comparison is not None:
        return comparison
    normalizer = row_mixing.first_sum_in_weights(trace.graph)
    if normalizer is not None:
        return normalizer

    # Each row's outputs follow from that row alone.
    model_is_by_row = not objective.model.effects.mixes_rows and not objective.model.moving_layers
    loss_sums, _ = trace.structured_outputs
    for loss_sum in loss_sums[len(objective.losses.outputs) :]:
        operation = row_mixing.first_op_beyond_sums(loss_sum, model_is_by_row)
        if operation is not None:
            return operation
    return None
