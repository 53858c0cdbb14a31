"""Keras's metrics of an output whose logits are never held, from scores of the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.adapters.attributes import kinds, of_keras, package, replaced
from fastaccum.kernels.cross_entropy import LabelScores

TAKEN = (
    "SparseCategoricalAccuracy, SparseTopKCategoricalAccuracy, SparseCategoricalCrossentropy(from_logits=True) and "
    "keras_hub.metrics.Perplexity(from_logits=True)"
)


class ScoredLabels(NamedTuple):
    """The labels of one micro-batch and what the logits say of them: tensors of one shape.

    Attributes:
        ids: int64.
        counted: bool, false for what pads, is masked or is ignored.
    """

    ids: tf.Tensor
    counted: tf.Tensor
    scores: LabelScores
    ignore_index: int


class Values(NamedTuple):
    """Values of a metric, one for each token, as a function of scores; `of_ranks` if it takes the labels' ranks."""

    compute: Callable[[ScoredLabels], tf.Tensor]
    of_ranks: bool = False


def update(metric: keras.metrics.Metric, labels: ScoredLabels, weight: tf.Tensor) -> None:
    """Updates a metric's own state as Keras does with the logits, each token by its weight.

    The metric's function, which would compute each token's value from logits, is replaced for the call.
    """
    found = find_values(metric, labels.ignore_index)
    assert found is not None
    values = tf.where(labels.counted, tf.cast(found.compute(labels), tf.float32), 0.0)
    owner, name = (metric._crossentropy, "fn") if _is_perplexity(metric) else (metric, "_fn")
    with replaced([(owner, name, lambda y_true, y_pred, **arguments: values)]):
        metric.update_state(labels.ids, tf.zeros([*labels.ids.shape, 2]), sample_weight=weight)


def find_values(metric: keras.metrics.Metric, ignore_index: int) -> Values | None:
    """Returns how a metric's values follow from scores; None where they take the logits."""
    function, arguments = getattr(metric, "_fn", None), getattr(metric, "_fn_kwargs", {})
    if isinstance(metric, keras.metrics.MeanMetricWrapper) and of_keras(type(metric)) and of_keras(function):
        name = getattr(function, "__name__", "")
        if name == "sparse_categorical_accuracy":
            return Values(lambda labels: tf.cast(labels.scores.best, tf.int64) == labels.ids)
        if name == "sparse_top_k_categorical_accuracy" and not arguments.get("from_sorted_ids"):
            return Values(lambda labels: labels.scores.above < arguments.get("k", 5), of_ranks=True)
        known = name == "sparse_categorical_crossentropy" and arguments.get("axis", -1) == -1
        known = known and arguments.get("from_logits") and arguments.get("ignore_class") in (None, ignore_index)
    else:
        known = _is_perplexity(metric) and metric.from_logits
    return Values(lambda labels: labels.scores.loss) if known else None


def _is_perplexity(metric: Any) -> bool:
    return package(type(metric)) == "keras_hub" and "keras_hub.Perplexity" in kinds(metric)
