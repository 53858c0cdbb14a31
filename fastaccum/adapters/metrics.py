"""Keras metrics inside the compiled loop: without the rows that only pad, and of logits that are
never held.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import arguments, row_counts, row_mixing, traces
from fastaccum.adapters.attributes import (
    kinds,
    known_name,
    of_keras,
    package,
    raw,
    replaced,
    runs_keras,
)
from fastaccum.adapters.outputs import Matched, Outputs, get_mask, make_distinct, require_known
from fastaccum.kernels import private
from fastaccum.kernels.cross_entropy import LabelScores
from fastaccum.kernels.shapes import lengths

_SHORTHANDS = ("accuracy", "acc", "crossentropy", "ce")  # Keras takes the one that fits the targets

# of weights, behind that of the rows: none, as many as y has, or those that a metric flattens
_AXES = (
    lambda y_true, y_pred: (),
    lambda y_true, y_pred: (1,) * (min(len(y_true), len(y_pred)) - 1),
    lambda y_true, y_pred: y_true[1:],
    lambda y_true, y_pred: y_true[1:-1],
)

# for what LinearCrossEntropy refuses
KERAS_LOSS = "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
TAKEN = (
    "SparseCategoricalAccuracy, SparseTopKCategoricalAccuracy, "
    "SparseCategoricalCrossentropy(from_logits=True) and "
    "keras_hub.metrics.Perplexity(from_logits=True)"
)


# Makes the logs of the losses by name, the total first, and the compiled metrics.
OwnResults = Callable[[Mapping[str, Any], keras.Metric], dict[str, Any]]


class ScoredLabels(NamedTuple):
    """The labels of one micro-batch and what the logits say of them: tensors of one shape."""

    ids: tf.Tensor  # int64
    counted: tf.Tensor  # bool, false for what pads, is masked or is ignored
    scores: LabelScores
    ignore_index: int


class Metrics:
    """A model's metrics: Keras names, `keras.Metric`s or functions, in a list or by output, as in
    `compile`.
    """

    def __init__(
        self,
        metrics: arguments.MetricsArgument = (),
        weighted_metrics: arguments.MetricsArgument = (),
    ):
        for name, nest in (("metrics", metrics), ("weighted_metrics", weighted_metrics)):
            for each in tf.nest.flatten(nest):
                if isinstance(each, type):
                    raise TypeError(
                        f"{name}={each!r} must be a Keras 3 metric object: call the class."
                    )
                require_known(name, each, "Keras 3 metric", keras.metrics.get, _SHORTHANDS)
        self._passed = metrics, weighted_metrics
        self.user = _of_keras_3(metrics), _of_keras_3(weighted_metrics)
        self.compiled: Any  # Keras's CompileMetrics, from `build` on
        self.own: list[keras.metrics.Metric] = []
        self.mixing: dict[str, str] = {}  # operations that mix rows, by the name of the metric
        self.calling_python: list[str] = []  # names of metrics that XLA cannot compile
        # What the model's own `compute_metrics` returned last, beyond the results of metrics, in
        # training and not.
        self._returned: dict[bool, dict[str, tf.Variable]] = {True: {}, False: {}}
        self.of_last_micro_batch: list[str] = []  # names of such values in training

    def build(
        self,
        outputs: Outputs,
        y_true: tf.Tensor,
        taken: Sequence[str] = (),
        own: Sequence[keras.metrics.Metric] = (),
        own_reset: Callable[[], None] | None = None,
        own_results: OwnResults | None = None,
    ) -> None:
        """Creates variables, for specs of a batch of targets.

        `taken` are names in the logs. `own` are the model's metrics; `own_reset` resets them, and
        `own_results` makes the logs, where the model does that itself.
        """
        self.own = list(own)
        self._own_reset = own_reset
        self._own_results = own_results
        targets = outputs.targets_of_metrics(y_true) if self.given else outputs.specs
        named = zip(("metrics", "weighted_metrics"), self.user, strict=True)
        plain, weighted = (self._with_targets(outputs, targets, name, each) for name, each in named)
        if len(targets) == 1:  # before 3.14 Keras takes no list of lists there
            plain, weighted = (metrics for (metrics,) in (plain, weighted))
        self.compiled = private.CompileMetrics(plain, weighted, output_names=outputs.names)
        with checks.naming("metrics"):
            self.compiled.build(targets, outputs.specs)
        self._plain, self._weighted = (
            [
                (i, metric)
                for i, metrics in enumerate(by_output)
                if metrics
                for metric in metrics.metrics
            ]
            for by_output in (
                private.flat_metrics(self.compiled),
                private.flat_weighted_metrics(self.compiled),
            )
        )
        self._axes = {}
        self.calling_python = []
        for i, metric in self._placed:
            if sum(metric is each for _, each in self._placed) > 1:
                raise ValueError(
                    f"The metric {metric.name!r} is given twice, and would count rows twice: "
                    "pass two."
                )
            y = targets[i], outputs.specs[i]
            specs = [tf.TensorSpec([n or a + 2 for a, n in enumerate(t.shape)], t.dtype) for t in y]
            if isinstance(metric, _TFKerasMetric):
                metric.build(*specs)
            if operation := _mixing(metric, *specs):
                self.mixing[metric.name] = operation
            if _calls_python(metric, *specs):
                self.calling_python.append(metric.name)
            self._axes[id(metric)] = _weight_axes(metric, *specs)
        self._named = self._with_names(outputs, taken)

    @property
    def _placed(self) -> list[tuple[int, keras.metrics.Metric]]:
        return [*self._plain, *self._weighted]

    @property
    def given(self) -> bool:
        """True if the user passed any."""
        return any(each is not None for each in self.user)

    @staticmethod
    def _with_targets(
        outputs: Outputs, targets: Sequence[Any], what: str, metrics: Any
    ) -> list[list[Any]]:
        found = [
            [m for m in each if m is not None] for each in outputs.place_metrics(what, metrics)
        ]
        for name, each, target in zip(outputs.names, found, targets, strict=True):
            may_be_missing = outputs.skips_missing_targets or outputs.pairs_in_order
            if each and target is None and not may_be_missing:
                raise ValueError(f"Output {name!r} has metrics but no target.")
        return [[] if target is None else each for each, target in zip(found, targets, strict=True)]

    def for_compile(self, foreign: str) -> dict[str, arguments.MetricsArgument]:
        """Returns what the user passed as arguments of the model's `compile`; none if some is of a
        `foreign` kind.
        """
        if any(foreign in kinds(each) for each in tf.nest.flatten(self._passed)):
            return {}
        return {
            name: each or None
            for name, each in zip(("metrics", "weighted_metrics"), self._passed, strict=True)
        }

    def _with_names(self, outputs: Outputs, taken: Sequence[str]) -> list[tuple[str, keras.Metric]]:
        """Lists the metrics with the names and in the order of Keras's logs."""
        prefixes = [f"{name}_" if len(outputs.names) > 1 else "" for name in outputs.names]
        names = [prefixes[i] + metric.name for i, metric in self._plain]
        for i, metric in self._weighted:
            is_alone = prefixes[i] + metric.name not in names
            names.append(prefixes[i] + (metric.name if is_alone else f"weighted_{metric.name}"))
        named = zip(self._placed, make_distinct(names, ("loss", *taken)), strict=True)
        return [
            (name, metric)
            for _, name, metric in outputs.sort_metrics([(i, name, m) for (i, m), name in named])
        ]

    def needed_ranks(self, output: int, name: str, ignore_index: int) -> bool | None:
        """Tells which labels' scores an output's metrics need: None, or True for ranks too;
        ValueError for logits.
        """
        found = [(m.name, find_values(m, ignore_index)) for i, m in self._placed if i == output]
        if others := [each for each, values in found if values is None]:
            raise ValueError(
                f"The metrics {others} of output {name!r} need the logits, which "
                f"LinearCrossEntropy never holds. It takes {TAKEN}, where an ignore_class is its "
                f"ignore_index. Leave others out, or use {KERAS_LOSS}."
            )
        return any(values.of_ranks for _, values in found if values) if found else None

    @property
    def variables(self) -> list[tf.Variable]:
        return [
            *(raw(v) for metric in (self.compiled, *self.own) for v in metric.variables),
            *self._kept,
        ]

    @property
    def need_exact_rows(self) -> bool:
        """True if some metric may count padded rows in spite of a weight of 0, as one of a user's
        class may.
        """
        return bool(self.own or self.mixing) or not all(self._axes.values())

    @property
    def has_own_functions(self) -> bool:
        """True if some metric computes otherwise than Keras's own: a user's class or function, or
        the model's.
        """
        return bool(self.own) or not all(
            _adds_up_as_keras(m) and _is_keras_function(m) for _, m in self._placed
        )

    @property
    def unknown_states(self) -> list[str]:
        """Names of metrics whose state may be no sum over rows: those of the user's classes, but
        for Means and Sums.
        """
        sums = keras.metrics.Mean, keras.metrics.Sum
        metrics: list[keras.metrics.Metric] = [*self.compiled.metrics, *self.own]
        return [m.name for m in metrics if not (_adds_up_as_keras(m) or isinstance(m, sums))]

    def update(self, batch: Matched, scored: Mapping[int, ScoredLabels]) -> None:
        """Updates every metric with one micro-batch's valid rows; `scored` has labels of outputs
        without logits.
        """
        for metrics, weights in ((self._plain, None), (self._weighted, batch.sample_weight)):
            for i, metric in metrics:
                y_true, y_pred = batch.y_true[i], batch.y_pred[i]
                valid = None if self.need_exact_rows else batch.valid[i]
                given = _undiluted(metric, valid, None if weights is None else weights[i])
                if (labels := scored.get(i)) is not None:
                    update_from_scores(
                        metric,
                        labels,
                        _row_weight(metric, labels.counted, labels.counted, given, ()),
                    )
                    continue
                with checks.naming(
                    f"metrics: {metric.name!r}, called with y of shape {y_true.shape}"
                ):
                    axes = self._axes[id(metric)]
                    # nor by the chance of so many rows
                    if axes is False and y_true.shape[0] == y_pred.shape[0]:
                        traces.trace(
                            lambda y, m=metric: m.update_state(*y, sample_weight=None),
                            (y_true, y_pred),
                        )
                    inner = (axes or _AXES[0])(lengths(y_true), lengths(y_pred))
                    weight = _row_weight(metric, y_pred, valid, given, inner)
                    keywords = {} if weight is None and axes is None else {"sample_weight": weight}
                    metric.update_state(y_true, y_pred, **keywords)

    def result(self, training: bool) -> dict[str, tf.Tensor]:
        """Returns every metric's value by its name in logs."""
        results = [(name, metric.result()) for name, metric in self._named]
        results += [(metric.name, metric.result()) for metric in self.own] + list(
            self._returned[training].items()
        )
        return _flat_results(dict(results))

    def logs(self, losses: Mapping[str, Any], training: bool) -> dict[str, Any]:
        """Returns the logs: the losses, whose first is the total, and every metric's value."""
        results = self.result(training)
        if self._own_results is None:
            return {**losses, **results}
        logs = {name: results[name] for name in self._returned[training]}
        return logs | _flat_results(self._own_results(losses, self.compiled))

    def expect(self, returned: Mapping[str, tf.Tensor], training: bool) -> None:
        """Creates variables for the values that `compute_metrics` returns beside the results of
        metrics.
        """
        results: dict[str, tf.Tensor] = self.compiled.result()
        known = {*results, *(metric.name for metric in self.own)}
        names = [name for name in returned if name not in known]
        for name in names:
            if len(getattr(returned[name], "shape", ())):
                shape = tuple(returned[name].shape)
                raise ValueError(
                    f"compute_metrics returned {name!r} of shape {shape}: return scalars."
                )
        self._returned[training] = {
            name: tf.Variable(0.0, trainable=False, name=name) for name in names
        }
        if training and self._own_results is None:  # which may make them anew of the whole epoch's
            self.of_last_micro_batch = names

    def keep(self, returned: Mapping[str, tf.Tensor], training: bool) -> None:
        """Keeps the values that `compute_metrics` returned last, for the logs."""
        for name, variable in self._returned[training].items():
            variable.assign(tf.cast(returned[name], tf.float32))

    @property
    def _kept(self) -> list[tf.Variable]:
        return [variable for by_name in self._returned.values() for variable in by_name.values()]

    def reset(self) -> None:
        self.compiled.reset_state()
        if self._own_reset is not None:
            self._own_reset()
        else:
            for metric in self.own:
                metric.reset_state()
        for variable in self._kept:
            variable.assign(0.0)


class _TFKerasMetric(keras.metrics.Metric):
    """A Keras 3 metric around one of tf_keras or tensorflow-addons, updated as tf_keras's `fit`
    does.
    """

    def __init__(self, wrapped: keras.metrics.Metric):
        super().__init__(name=wrapped.name)
        self.wrapped = wrapped

        @tf.function  # by AutoGraph, as in tf_keras
        def update(y_true, y_pred, sample_weight):
            wrapped.update_state(y_true, y_pred, sample_weight=sample_weight)

        by_itself = _adds_up_as_keras(wrapped) and _is_keras_function(wrapped)
        self._update, self._result = (
            wrapped.update_state if by_itself else update,
            tf.function(wrapped.result),
        )

    @property
    def variables(self) -> list[tf.Variable]:
        return list(self.wrapped.variables)

    def build(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
        """Creates the variables that the metric creates in its first update."""
        self.update_state(*(tf.zeros([2, *t.shape[1:]], t.dtype) for t in (y_true, y_pred)))
        self.reset_state()

    def update_state(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> None:
        self._update(_expanded(y_true, y_pred), y_pred, sample_weight)

    def result(self) -> tf.Tensor | dict[str, tf.Tensor]:
        return self._result()

    def reset_state(self) -> None:
        self.wrapped.reset_state()

    def get_config(self) -> dict[str, keras.metrics.Metric]:
        return {"wrapped": self.wrapped}

    @classmethod
    def from_config(cls, config: dict[str, keras.metrics.Metric]) -> _TFKerasMetric:
        wrapped = config["wrapped"]
        return cls(type(wrapped).from_config(wrapped.get_config()))


class Values(NamedTuple):
    """Values of a metric, one for each token, as a function of scores."""

    compute: Callable[[ScoredLabels], tf.Tensor]
    of_ranks: bool = False


def _flat_results(results: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns results of metrics as float32, those of a metric with several beside the others."""
    found = {}
    for name, value in results.items():
        values = value if isinstance(value, dict) else {name: value}
        for key, each in values.items():
            found[key] = tf.cast(tf.convert_to_tensor(each), tf.float32)
    return found


def update_from_scores(
    metric: keras.metrics.Metric, labels: ScoredLabels, weight: tf.Tensor
) -> None:
    """Updates a metric as Keras does with logits, from values in place of those that its function
    would compute.
    """
    found = find_values(metric, labels.ignore_index)
    assert found is not None
    values = tf.where(labels.counted, tf.cast(found.compute(labels), tf.float32), 0.0)
    owner, name = (
        (private.crossentropy(metric), "fn")
        if _is_perplexity(metric)
        else (metric, private.fn.name)
    )
    with replaced([(owner, name, lambda y_true, y_pred, **arguments: values)]):
        metric.update_state(labels.ids, tf.zeros([*labels.ids.shape, 2]), sample_weight=weight)


def find_values(metric: keras.metrics.Metric, ignore_index: int) -> Values | None:
    """Returns how a metric's values follow from scores; None where they take the logits."""
    function, arguments = private.fn(metric, None), private.fn_kwargs(metric, {})
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        name = known_name(function) if _adds_up_as_keras(metric) else ""
        if name == "keras.sparse_categorical_accuracy":
            return Values(lambda labels: tf.cast(labels.scores.best, tf.int64) == labels.ids)
        if name == "keras.sparse_top_k_categorical_accuracy" and not arguments.get(
            "from_sorted_ids"
        ):
            return Values(lambda labels: labels.scores.above < arguments.get("k", 5), of_ranks=True)
        known = name == "keras.sparse_categorical_crossentropy" and arguments.get("axis", -1) == -1
        known = (
            known
            and arguments.get("from_logits")
            and arguments.get("ignore_class") in (None, ignore_index)
        )
    else:
        known = _is_perplexity(metric) and metric.from_logits
    return Values(lambda labels: labels.scores.loss) if known else None


def _is_perplexity(metric: Any) -> bool:
    return (
        "keras_hub.Perplexity" in kinds(metric)
        and package(type(metric).update_state) == "keras_hub"
    )


def _adds_up_as_keras(metric: Any) -> bool:
    """Tells if a metric's `update_state` and `result` are Keras's or tf_keras's own."""
    if isinstance(metric, keras.metrics.Metric):
        return runs_keras(metric, "update_state") and runs_keras(metric, "result")
    # tf_keras sets wrappers of both on each metric.
    return of_keras(type(metric).update_state) and of_keras(type(metric).result)


def _is_keras_function(metric: Any) -> bool:
    """Tells if a metric has no function in it, or one of Keras's or tf_keras's."""
    return not private.fn.exists(metric) or of_keras(private.fn(metric))


def _expanded(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns the targets as tf_keras passes them to a metric."""
    return y_true[:, tf.newaxis] if len(y_true.shape) == 1 and len(y_pred.shape) == 2 else y_true


def _of_keras_3(metrics: arguments.MetricsArgument) -> arguments.MetricsArgument:
    """Wraps the metrics of tf_keras in a nest; returns None for an empty nest."""
    if not tf.nest.flatten(metrics):
        return None
    return tf.nest.map_structure(
        lambda m: _TFKerasMetric(m) if "tf_keras.Metric" in kinds(m) else m, metrics
    )


def _undiluted(
    metric: keras.Metric, valid: tf.Tensor | None, weight: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns `weight` for rows that padding made longer: Keras's means over rows are of the means
    of each row.
    """
    if (
        valid is None
        or valid.shape.rank < 2
        or not isinstance(metric, keras.metrics.MeanMetricWrapper)
    ):
        return weight
    real = tf.cast(valid, tf.float32)
    longer = tf.math.divide_no_nan(1.0, tf.reduce_mean(real, 1, keepdims=True))
    if weight is None:
        return longer
    return tf.cast(weight, tf.float32) * (longer if weight.shape.rank > 1 else longer[:, 0])


def _row_weight(
    metric: keras.Metric,
    prediction: tf.Tensor,
    valid: tf.Tensor | None,
    weight: tf.Tensor | None,
    axes: Sequence[Any],
) -> tf.Tensor | None:
    """Returns `weight` with 0 for padded rows, with the `axes` that the metric takes, or those of
    the mask.
    """
    dtype = metric.dtype if weight is None else tf.float32
    factors = [tf.cast(each, dtype) for each in (valid, weight) if each is not None]
    mask = get_mask(prediction)
    if mask is not None and isinstance(metric, _TFKerasMetric):
        factors.append(tf.cast(mask, dtype))
    elif mask is not None and isinstance(metric, keras.metrics.MeanMetricWrapper):
        axes = lengths(mask)[1:]
    if not factors:
        return None
    factors.append(tf.ones([1, *axes], dtype))
    rank = max(factor.shape.rank for factor in factors)
    shaped = [
        tf.reshape(factor, [*lengths(factor), *[1] * (rank - factor.shape.rank)])
        for factor in factors
    ]
    return functools.reduce(tf.multiply, shaped)


def _mixing(metric: keras.metrics.Metric, *specs: tf.TensorSpec) -> str | None:
    """Finds the operation by which a metric's function mixes rows or computes with their number, as
    a trace shows.
    """
    wrapper = getattr(metric, "wrapped", metric)

    def values(pair: Sequence[tf.Tensor]) -> tf.Tensor:
        if isinstance(metric, _TFKerasMetric):  # which makes them alike
            pair = [tf.cast(each, metric.dtype) for each in (_expanded(*pair), pair[1])]
            rank = min(len(each.shape) for each in pair)
            pair = [t[..., 0] if len(t.shape) > rank and t.shape[-1] == 1 else t for t in pair]
        return private.fn(wrapper)(*pair, **private.fn_kwargs(wrapper))

    # of one without a function, or whose function is of a fixed number of rows
    with contextlib.suppress(Exception):
        traced = traces.trace(values, specs)
        has_rows = len(getattr(traced.structured_outputs, "shape", ())) > 0
        found = row_mixing.find_mixing_op(traced, values, specs) or (
            None if has_rows else metric.name
        )
        return (
            found
            if found or of_keras(private.fn(wrapper))
            else row_counts.find_row_counter(traced, values, specs)
        )
    return None


def _calls_python(metric: keras.metrics.Metric, *specs: tf.TensorSpec) -> bool:
    """Tells if a metric of the user's calls Python, as by tf.numpy_function."""
    wrapper = getattr(metric, "wrapped", metric)
    if _adds_up_as_keras(wrapper) and _is_keras_function(wrapper):
        return False
    # of a fixed number of rows: XLA says it when it compiles the step
    with contextlib.suppress(Exception):
        traced = traces.trace(lambda pair: metric.update_state(*pair), specs)
        return bool(traces.list_python_calls(traced.graph))
    return False


def _update_with_ones(metric: keras.metrics.Metric, shape: list[int], pair: Any) -> object:
    return metric.update_state(*pair, sample_weight=tf.ones(shape, metric.dtype))


def _weight_axes(metric: keras.metrics.Metric, *specs: tf.TensorSpec) -> Any:
    """Finds which of `_AXES` a metric takes, by traces of a telling number of rows; else False,
    None if not Keras's.
    """
    # the variables of a first update are there before a step, to be saved
    with contextlib.suppress(Exception):
        traces.trace(lambda pair: metric.update_state(*pair), specs)
    wrapper = getattr(metric, "wrapped", metric)
    as_keras = _adds_up_as_keras(wrapper)
    for axes in _AXES if as_keras else ():
        with contextlib.suppress(Exception):
            shape = [traces.TELLING_ROWS, *axes(*(spec.shape for spec in specs))]
            update = functools.partial(_update_with_ones, metric, shape)
            if row_mixing.first_comparison_of_rows(traces.trace(update, specs).graph) is None:
                return axes
    return False if as_keras and _is_keras_function(wrapper) else None
