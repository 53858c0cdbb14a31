"""Keras's metrics of class labels, computed from the labels' scores where no logits are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.adapters.metric_kinds import adds_up_as_keras
from fastaccum.basics.attributes import kinds, known_name, package, replaced
from fastaccum.kernels import private
from fastaccum.kernels.cross_entropy import LabelScores

# The loss that errors name in place of LinearCrossEntropy, and the metrics that it takes.
KERAS_LOSS = "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
_TAKEN = (
    "SparseCategoricalAccuracy, SparseTopKCategoricalAccuracy, "
    "SparseCategoricalCrossentropy(from_logits=True) and "
    "keras_hub.metrics.Perplexity(from_logits=True)"
)


class ScoredLabels(NamedTuple):
    """The labels of one micro-batch and what the logits say of them: tensors of one shape."""

    ids: tf.Tensor  # int64
    counted: tf.Tensor  # bool, false for what pads, is masked or is ignored
    scores: LabelScores
    ignore_index: int


class _Values(NamedTuple):
    """Values of a metric, one for each token, as a function of scores."""

    compute: Callable[[ScoredLabels], tf.Tensor]
    of_ranks: bool = False


def need_ranks(
    metrics: Sequence[keras.metrics.Metric], output_name: str, ignore_index: int
) -> bool:
    """Tells if an output's metrics need the ranks of labels.

    Raises ValueError if one of them needs the logits.
    """
    needs_ranks = False
    needing_logits = []
    for metric in metrics:
        values = find_values(metric, ignore_index)
        if values is None:
            needing_logits.append(metric.name)
        elif values.of_ranks:
            needs_ranks = True
    if needing_logits:
        raise ValueError(
            f"The metrics {needing_logits} of output {output_name!r} need the logits, which "
            f"LinearCrossEntropy never holds. It takes {_TAKEN}, where an ignore_class is its "
            f"ignore_index. Leave others out, or use {KERAS_LOSS}."
        )
    return needs_ranks


def update_from_scores(
    metric: keras.metrics.Metric, labels: ScoredLabels, weight: tf.Tensor
) -> None:
    """Updates a metric as Keras does, with values in place of those that its function computes."""
    values = find_values(metric, labels.ignore_index)
    assert values is not None
    computed = tf.where(labels.counted, tf.cast(values.compute(labels), tf.float32), 0.0)
    if _is_perplexity(metric):
        owner = private.crossentropy(metric)
        name = "fn"
    else:
        owner = metric
        name = private.fn.name
    with replaced([(owner, name, lambda y_true, y_pred, **arguments: computed)]):
        metric.update_state(labels.ids, tf.zeros([*labels.ids.shape, 2]), sample_weight=weight)


def find_values(metric: keras.metrics.Metric, ignore_index: int) -> _Values | None:
    """Returns how a metric's values follow from scores; None where they take the logits."""
    function = private.fn(metric, None)
    keywords = private.fn_kwargs(metric, {})
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        if _is_perplexity(metric) and metric.from_logits:
            return _Values(lambda labels: labels.scores.loss)
        return None
    if not adds_up_as_keras(metric):
        return None

    name = known_name(function)
    if name == "keras.sparse_categorical_accuracy":
        return _Values(lambda labels: tf.cast(labels.scores.best, tf.int64) == labels.ids)
    if name == "keras.sparse_top_k_categorical_accuracy":
        if keywords.get("from_sorted_ids"):
            return None
        return _Values(lambda labels: labels.scores.above < keywords.get("k", 5), of_ranks=True)
    if (
        name == "keras.sparse_categorical_crossentropy"
        and keywords.get("axis", -1) == -1
        and keywords.get("from_logits")
        and keywords.get("ignore_class") in (None, ignore_index)
    ):
        return _Values(lambda labels: labels.scores.loss)
    return None


def _is_perplexity(metric: Any) -> bool:
    return (
        "keras_hub.Perplexity" in kinds(metric)
        and package(type(metric).update_state) == "keras_hub"
    )
