"""Every metric of both Kerases on outputs of every rank: of padded micro-batches what Keras makes
of their rows.
"""

import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.outputs import Matched, Outputs


def difference(y_true, y_pred):
    return keras.losses.mean_absolute_error(y_true, y_pred) + 1.0


# The arguments of the metrics that need some, or that are worth more than one way of making them.
ARGUMENTS = {
    "AUC": [
        {},
        {"curve": "PR", "num_thresholds": 7},
        {"multi_label": True},
        {"thresholds": [0.2, 0.7]},
    ],
    "CategoricalCrossentropy": [{}, {"axis": 1}],
    "ConcordanceCorrelation": [{}, {"axis": 0}, {"axis": 1}],
    "CosineSimilarity": [{}, {"axis": 0}, {"axis": 1}],
    "F1Score": [{}, {"average": "micro"}, {"average": "macro", "threshold": 0.4}],
    "FBetaScore": [{"beta": 2.0}, {"average": "micro"}],
    "IoU": [
        {"num_classes": 5, "target_class_ids": [1]},
        {"num_classes": 5, "target_class_ids": [0], "sparse_y_pred": False},
    ],
    "MeanIoU": [
        {"num_classes": 5},
        {"num_classes": 5, "ignore_class": 0},
        {"num_classes": 5, "sparse_y_pred": False},
    ],
    "MeanMetricWrapper": [{"fn": difference}],
    "MeanRelativeError": [{"normalizer": 2.0}],
    "OneHotIoU": [
        {"num_classes": 5, "target_class_ids": [1]},
        {"num_classes": 5, "target_class_ids": [0], "axis": 1},
    ],
    "OneHotMeanIoU": [
        {"num_classes": 5},
        {"num_classes": 5, "sparse_y_pred": True},
        {"num_classes": 5, "axis": 1},
    ],
    "PearsonCorrelation": [{}, {"axis": 0}, {"axis": 1}],
    "Precision": [{}, {"class_id": 1}, {"top_k": 1}, {"thresholds": [0.2, 0.7]}],
    "PrecisionAtRecall": [{"recall": 0.5}],
    "R2Score": [{}, {"class_aggregation": None}],
    "Recall": [{}, {"class_id": 0}, {"top_k": 2, "class_id": 1}],
    "RecallAtPrecision": [{"precision": 0.5}],
    "SensitivityAtSpecificity": [{"specificity": 0.5}],
    "SparseCategoricalCrossentropy": [{}, {"axis": 1}],
    "SparseTopKCategoricalAccuracy": [{"k": 2}],
    "SpecificityAtSensitivity": [{"sensitivity": 0.5}, {"sensitivity": 0.5, "class_id": 1}],
    "TopKCategoricalAccuracy": [{"k": 2}],
}


def every_metric(K):
    """Each metric class of a Keras, with each way of making it; the base class has no update."""
    found = [
        each
        for each in vars(K.metrics).values()
        if isinstance(each, type) and issubclass(each, K.metrics.Metric)
    ]
    classes = {each.__name__: each for each in found if each is not K.metrics.Metric}
    assert len(classes) > 40
    return [
        (classes[name], arguments)
        for name in sorted(classes)
        for arguments in ARGUMENTS.get(name, [{}])
    ]


class Case:
    """Rows of targets, predictions, weights and masks, in micro-batches of which the last may be
    short.
    """

    def __init__(self, seed, rank):
        rng = np.random.default_rng(seed)
        self.micro = int(rng.integers(1, 6))
        rows = self.micro * int(rng.integers(0, 3)) + int(rng.integers(1, self.micro + 1))
        # Axes as long as a micro-batch or as all rows may be taken for them.
        shape = [rows, *(int(rng.choice([1, 2, 3, 5, self.micro, rows])) for _ in range(rank - 1))]
        self.kind = str(rng.choice(["values", "one-hot", "sparse", "labels", "column", "flat"]))
        if rank == 1 and self.kind != "labels":
            self.kind = "values"
        self.y_pred = rng.random(shape, "float32")
        labels = rng.integers(0, min(shape[-1], 5), shape[: max(rank - 1, 1)])
        if self.kind == "values":
            self.y_true = (rng.random(shape) < 0.5).astype("float32")
        elif self.kind == "labels":
            self.y_true, self.y_pred = (
                labels.astype("int32"),
                rng.integers(0, 2, labels.shape).astype("float32"),
            )
        elif self.kind == "column":
            self.y_true, self.y_pred = (
                (rng.random(shape[:-1]) < 0.5).astype("float32"),
                self.y_pred[..., :1],
            )
        elif self.kind == "flat":
            self.y_true, self.y_pred = rng.integers(0, 2, [*shape[:-1], 1]), self.y_pred[..., 0]
        else:
            self.y_true = (
                np.eye(shape[-1], dtype="float32")[labels] if self.kind == "one-hot" else labels
            )
            self.y_pred /= self.y_pred.sum(-1, keepdims=True)
        of_weight = self.y_pred.shape[
            : rng.integers(1, min(self.y_true.ndim, self.y_pred.ndim) + 1)
        ]
        self.weighted = bool(rng.integers(2))
        has_weight = self.weighted and rng.integers(4)
        self.weight = (
            rng.choice([0.0, 1.0, 2.0], of_weight).astype("float32") if has_weight else None
        )
        masked = self.y_pred.ndim > 1 and not rng.integers(3)
        self.mask = (
            rng.random(self.y_pred.shape[: max(self.y_pred.ndim - 1, 2)]) < 0.7 if masked else None
        )

    def __str__(self):
        shapes = {name: None if each is None else each.shape for name, each in self.arrays.items()}
        return f"{self.kind}, micro-batches of {self.micro}, {shapes}, weighted={self.weighted}"

    @property
    def arrays(self):
        return {name: getattr(self, name) for name in ("y_true", "y_pred", "weight", "mask")}

    def with_arrays(self, **arrays):
        other = object.__new__(Case)
        vars(other).update({**vars(self), **arrays})
        return other

    def repeated(self):
        more = {
            name: None if each is None else np.concatenate([each] * 17)
            for name, each in self.arrays.items()
        }
        return self.with_arrays(**more)

    def batch(self, rows):
        """Returns rows as tensors: y_true, y_pred and the weights."""
        y_true, y_pred, weight, mask = (
            None if a is None else tf.constant(a[rows]) for a in self.arrays.values()
        )
        if mask is not None:
            y_pred._keras_mask = mask
        return y_true, y_pred, weight

    def lists(self, metric):
        """`metrics` and `weighted_metrics`."""
        return ([], [metric]) if self.weighted else ([metric], [])


def of_keras(K, metric, case, batches):
    """The value after Keras's own update of compiled metrics with each batch."""
    if K is keras:
        compiled = CompileMetrics(*case.lists(metric))
    else:
        from tf_keras.src.engine.compile_utils import MetricsContainer

        compiled = MetricsContainer(*case.lists(metric))
    for rows in batches:
        compiled.update_state(*case.batch(rows))
    return np.asarray(metric.result())


def of_fastaccum(metric, case, batches):
    """The value after micro-batches, padded unless rows must be exact; and whether the metric is
    one of each batch.
    """
    specs = [
        keras.KerasTensor((None, *each.shape[1:]), each.dtype.name)
        for each in (case.y_true, case.y_pred)
    ]
    metrics = Metrics(*case.lists(metric))
    metrics.build(Outputs(["out"], specs[1]), specs[0])
    for rows in batches:
        valid = None
        if not metrics.need_exact_rows:
            valid = tf.constant(np.arange(case.micro) < len(rows))
        y_true, y_pred, weight = case.batch(rows if valid is None else np.resize(rows, case.micro))
        metrics.update(Matched([y_true], [y_pred], [weight], [valid]), {})
    (value,) = metrics.result(training=True).values()
    return np.asarray(value), bool(metrics.mixing)


def attempt(function, *arguments):
    """Returns the result of a call, or the error that it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def whatever_the_rows(K, make, case):
    """Returns Keras's value over all rows, or an error if Keras does not take another number of
    rows too.
    """
    more = case.repeated()
    other = attempt(of_keras, K, make(), more, [np.arange(len(more.y_pred))])
    return (
        other
        if isinstance(other, Exception)
        else attempt(of_keras, K, make(), case, [np.arange(len(case.y_pred))])
    )


def with_aligned_weights(K, case):
    """Cases whose weights begin with the axes of y, as those of losses: Keras takes some with fewer
    only by chance.
    """
    weight = case.weight
    for shape in (
        (case.y_true.shape, case.y_pred.shape, case.y_pred.shape[:-1]) if weight is not None else ()
    ):
        aligned = weight.reshape([*weight.shape, *[1] * (len(shape) - weight.ndim)])
        fits = aligned.ndim == len(shape) and all(
            a in (1, b) for a, b in zip(aligned.shape, shape, strict=True)
        )
        for each in (aligned, np.broadcast_to(aligned, shape)) if fits else (aligned,):
            yield case.with_arrays(weight=each)
            if K is not keras and case.mask is not None and each.ndim >= case.mask.ndim:
                mask = case.mask.reshape([*case.mask.shape, *[1] * (each.ndim - case.mask.ndim)])
                yield case.with_arrays(weight=each * mask, mask=None)


def fault(K, make, case):
    """Describes how a metric differs from Keras. Returns None if it agrees, or if both refuse."""
    rows = np.arange(len(case.y_pred))
    batches = np.split(rows, range(case.micro, len(rows), case.micro))
    found, expected = attempt(of_fastaccum, make(), case, batches), whatever_the_rows(K, make, case)
    if isinstance(found, Exception):
        return (
            None if isinstance(expected, Exception) else f"refused for Keras's {expected}: {found}"
        )
    value, by_batch = found
    if by_batch:
        expected = attempt(of_keras, K, make(), case, batches)
    others = with_aligned_weights(K, case)
    while isinstance(expected, Exception) and (other := next(others, None)):
        expected = whatever_the_rows(K, make, other)
    if isinstance(expected, Exception):
        return f"taken, with {value}, where Keras refuses it"
    is_equal = np.allclose(value, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    return None if is_equal else f"{value} for Keras's {expected}"


def faults(K, rank, draws=1):
    """Lists the faults of each metric of a Keras on outputs of a rank, by how it was made."""
    found = []
    for i, (made, arguments) in enumerate(every_metric(K)):
        name = made.__name__
        of_classes = (
            {"class_id", "top_k", "sparse_y_pred"} & {*arguments}
            or "Categorical" in name
            or "OneHot" in name
        )
        for draw in range(draws):
            case = Case(zlib.crc32(f"{name} {i} {rank} {draw}".encode()), rank)
            if of_classes and case.y_pred.ndim == 1:  # there is no axis of classes
                continue
            weighted = case.mask is not None or case.weight is not None
            # which these cannot take
            if K is not keras and name in ("R2Score", "F1Score", "FBetaScore") and weighted:
                continue
            if wrong := fault(K, lambda made=made, arguments=arguments: made(**arguments), case):
                found.append(f"{name}({arguments}), {case}: {wrong}")
    return found


@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")
def test_on_tokens(K):
    assert not faults(K, rank=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_on_outputs_of_each_rank(K, rank):
    assert not faults(K, rank)
