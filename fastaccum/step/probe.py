"""What a model computes itself, looked at in a trace before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from fastaccum.adapters.own_loss import WEIGHTS
from fastaccum.data.stacks import Batch
from fastaccum.step.model_objective import ModelObjective

# Of a batch that is only traced: no other axis of a model is as long.
_TELLING_ROWS = 1031


def probe(objective: ModelObjective, sample: Batch) -> None:
    """Traces one micro-batch like `sample`, a nest of specs, where the model computes losses or metrics itself.

    Notes what its `compute_metrics` returns, and warns of a loss that compares rows. Raises ValueError for a
    `compute_loss` whose weights normalise a sum over the batch.
    """
    if objective.own is None and not objective.has_own_metrics and not objective.model.added_reductions:
        return

    def traced(training: bool, rows: int | None) -> Any:
        def forward(batch: Batch) -> Any:
            terms, y_pred = objective.terms(batch, training=training, observe=False)
            return [t.loss_sum for t in terms], objective.update_metrics(batch, y_pred, training)

        specs = tf.nest.map_structure(lambda s: tf.TensorSpec([rows or s.shape[0] or 1, *s.shape[1:]], s.dtype), sample)
        return tf.function(forward, autograph=False).get_concrete_function(specs)

    rows: int | None = _TELLING_ROWS
    try:
        training = traced(True, rows)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError):  # a model of a fixed batch size
        rows = None
        training = traced(True, rows)
    if objective.has_own_metrics:
        for mode, trace in ((True, training), (False, traced(False, rows))):
            objective.metrics.expect(trace.structured_outputs[1], mode)
    if rows is not None:
        _require_sum_of_micro_batches(objective, training.graph)


def _require_sum_of_micro_batches(objective: ModelObjective, graph: tf.Graph) -> None:
    name = type(objective.model.model).__name__
    normalized = _batch_sum(graph, _TELLING_ROWS)
    if normalized is not None and "sum" in objective.reductions[: len(objective.losses.outputs)]:
        raise ValueError(
            f"{name}.compute_loss weights its compiled loss by what it finds in the whole batch ({normalized}), "
            "and the loss's reduction is 'sum': over micro-batches, each with weights of its own, the sums add up "
            "to something else. Write the step with fastaccum.TrainStep, whose loss function returns "
            "(model.compute_loss(x, y, model(x, training=True), None) * rows, rows)."
        )
    coupling = _coupled_rows(graph, _TELLING_ROWS) or normalized
    if coupling is not None:
        warnings.warn(
            f"{name} compares the rows of a batch with each other ({coupling}): that loss is of each micro-batch "
            "as if it were the batch: batch_size says how many rows are compared, not gradient_accumulation_steps.",
            stacklevel=2,
        )


def _coupled_rows(graph: tf.Graph, rows: int) -> str | None:
    """The name of an operation of a traced loss that compares the rows of a batch with each other, where there is one:
    its result has two axes of so many rows.
    """
    for operation in graph.get_operations():
        for output in operation.outputs:
            if output.shape.rank and list(output.shape).count(rows) > 1:
                return operation.name
    return None


def _batch_sum(graph: tf.Graph, rows: int) -> str | None:
    """The name of an operation over all rows of a batch on which `named_weights` depend, where there is one."""

    def has_rows(tensors: Sequence[tf.Tensor]) -> bool:
        return any(t.shape.rank is None or any(d and d % rows == 0 for d in t.shape) for t in tensors)

    pending = [op for op in graph.get_operations() if WEIGHTS in op.name.rpartition("/")[2]]
    seen = set()
    while pending:
        operation = pending.pop()
        if operation.name in seen or operation.type in ("Shape", "ShapeN", "Size", "Rank"):
            continue
        seen.add(operation.name)
        if has_rows(operation.inputs) and not has_rows(operation.outputs):
            return operation.name
        pending += [tensor.op for tensor in operation.inputs]
    return None
