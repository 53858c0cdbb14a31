"""Keras metrics in the compiled loop: without padded rows, and of logits that are never held."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.outputs import Matched, Outputs, get_mask, make_distinct, require_known
from fastaccum.basics import arguments
from fastaccum.basics.attributes import (
    kinds,
    known_name,
    of_keras,
    package,
    raw,
    replaced,
    runs_keras,
)
from fastaccum.graphs import row_counts, row_mixing, traces
from fastaccum.kernels import private
from fastaccum.kernels.cross_entropy import LabelScores
from fastaccum.kernels.shapes import lengths

_SHORTHANDS = ("accuracy", "acc", "crossentropy", "ce")  # Keras takes the one that fits the targets

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


# Lengths of a tensor's axes, the rows first, as a shape or as a list.
_Lengths = Sequence[Any]
# Returns the axes that weights have behind the rows, from the lengths of y_true and y_pred.
_WeightAxes = Callable[[_Lengths, _Lengths], _Lengths]
# The specs of one output's y_true and y_pred.
_Specs = tuple[tf.TensorSpec, tf.TensorSpec]


def _row_axes(y_true: _Lengths, y_pred: _Lengths) -> _Lengths:
    return ()


def _unit_axes(y_true: _Lengths, y_pred: _Lengths) -> _Lengths:
    return (1,) * (min(len(y_true), len(y_pred)) - 1)


def _target_axes(y_true: _Lengths, y_pred: _Lengths) -> _Lengths:
    return y_true[1:]


def _flattened_axes(y_true: _Lengths, y_pred: _Lengths) -> _Lengths:
    return y_true[1:-1]


# What a metric may want behind the rows of its weights, in the order in which it is tried: no axis,
# as many axes as y has, the axes of y_true, or those that a metric flattens.
_AXES = (_row_axes, _unit_axes, _target_axes, _flattened_axes)


class _WeightForm(NamedTuple):
    """The form in which a metric takes the weights of rows."""

    axes: _WeightAxes | None  # of `_AXES`; None if none is known to fit
    is_keras: bool  # the metric and its function are Keras's or tf_keras's


class _PlacedMetric(NamedTuple):
    """A metric and the position of its output."""

    output: int
    metric: keras.metrics.Metric


class Metrics:
    """A model's metrics: names, `keras.Metric`s or functions, in a list or by output."""

    def __init__(
        self,
        metrics: arguments.MetricsArgument = (),
        weighted_metrics: arguments.MetricsArgument = (),
    ):
        _require_metrics("metrics", metrics)
        _require_metrics("weighted_metrics", weighted_metrics)
        self._passed = (metrics, weighted_metrics)
        self.user = (_of_keras_3(metrics), _of_keras_3(weighted_metrics))
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
        targets: list[Any] = outputs.specs
        if self.given:
            targets = outputs.targets_of_metrics(y_true)
        metrics, weighted_metrics = self.user
        plain = self._with_targets(outputs, targets, "metrics", metrics)
        weighted = self._with_targets(outputs, targets, "weighted_metrics", weighted_metrics)
        if len(targets) == 1:  # before 3.14 Keras takes no list of lists there
            plain = plain[0]
            weighted = weighted[0]

        self.compiled = private.CompileMetrics(plain, weighted, output_names=outputs.names)
        with checks.naming("metrics"):
            self.compiled.build(targets, outputs.specs)
        metrics_by_output = private.flat_metrics(self.compiled)
        weighted_by_output = private.flat_weighted_metrics(self.compiled)
        self._plain = _place(metrics_by_output)
        self._weighted = _place(weighted_by_output)

        self._forms: dict[int, _WeightForm] = {}  # by the id of the metric
        self.calling_python = []
        for output, metric in self._placed:
            occurrences = [placed for placed in self._placed if placed.metric is metric]
            if len(occurrences) > 1:
                raise ValueError(
                    f"The metric {metric.name!r} is given twice, and would count rows twice: "
                    "pass two."
                )
            specs = (_with_lengths(targets[output]), _with_lengths(outputs.specs[output]))
            if isinstance(metric, _TFKerasMetric):
                metric.build(*specs)
            operation = _mixing(metric, specs)
            if operation:
                self.mixing[metric.name] = operation
            if _calls_python(metric, specs):
                self.calling_python.append(metric.name)
            self._forms[id(metric)] = _find_weight_form(metric, specs)
        self._named = self._with_names(outputs, taken)

    @property
    def _placed(self) -> list[_PlacedMetric]:
        return [*self._plain, *self._weighted]

    @property
    def given(self) -> bool:
        """True if the user passed any."""
        return any(nest is not None for nest in self.user)

    @staticmethod
    def _with_targets(
        outputs: Outputs, targets: Sequence[Any], what: str, metrics: Any
    ) -> list[list[Any]]:
        """Lists the metrics of each output, none for an output without a target."""
        by_output = []
        for passed in outputs.place_metrics(what, metrics):
            by_output.append([metric for metric in passed if metric is not None])

        may_be_missing = outputs.skips_missing_targets or outputs.pairs_in_order
        with_target: list[list[Any]] = []
        for name, of_output, target in zip(outputs.names, by_output, targets, strict=True):
            if target is not None:
                with_target.append(of_output)
                continue
            if of_output and not may_be_missing:
                raise ValueError(f"Output {name!r} has metrics but no target.")
            with_target.append([])
        return with_target

    def for_compile(self, foreign: str) -> dict[str, arguments.MetricsArgument]:
        """Returns the arguments of the model's `compile`; none if one is of a `foreign` kind."""
        if any(foreign in kinds(metric) for metric in tf.nest.flatten(self._passed)):
            return {}
        metrics, weighted_metrics = self._passed
        return {"metrics": metrics or None, "weighted_metrics": weighted_metrics or None}

    def _with_names(self, outputs: Outputs, taken: Sequence[str]) -> list[tuple[str, keras.Metric]]:
        """Lists the metrics with the names and in the order of Keras's logs."""
        prefixes = [f"{name}_" for name in outputs.names]
        if len(prefixes) == 1:
            prefixes = [""]

        names = [prefixes[output] + metric.name for output, metric in self._plain]
        for output, metric in self._weighted:
            name = prefixes[output] + metric.name
            if name in names:
                name = f"{prefixes[output]}weighted_{metric.name}"
            names.append(name)
        distinct_names = make_distinct(names, ("loss", *taken))

        placed = []
        for (output, metric), name in zip(self._placed, distinct_names, strict=True):
            placed.append((output, name, metric))
        return [(name, metric) for _, name, metric in outputs.sort_metrics(placed)]

    def needed_ranks(self, output: int, name: str, ignore_index: int) -> bool | None:
        """Tells if an output's metrics need the ranks of labels; None if there are no metrics.

        Raises ValueError if one of them needs the logits.
        """
        metrics = [placed.metric for placed in self._placed if placed.output == output]
        if not metrics:
            return None
        need_ranks = False
        needing_logits = []
        for metric in metrics:
            values = find_values(metric, ignore_index)
            if values is None:
                needing_logits.append(metric.name)
            elif values.of_ranks:
                need_ranks = True
        if needing_logits:
            raise ValueError(
                f"The metrics {needing_logits} of output {name!r} need the logits, which "
                f"LinearCrossEntropy never holds. It takes {TAKEN}, where an ignore_class is its "
                f"ignore_index. Leave others out, or use {KERAS_LOSS}."
            )
        return need_ranks

    @property
    def variables(self) -> list[tf.Variable]:
        variables: list[tf.Variable] = []
        for metric in (self.compiled, *self.own):
            variables.extend(raw(variable) for variable in metric.variables)
        return [*variables, *self._kept]

    @property
    def need_exact_rows(self) -> bool:
        """True if a metric may count padded rows of weight 0, as one of a user's class may."""
        if self.own or self.mixing:
            return True
        return any(form.axes is None for form in self._forms.values())

    @property
    def has_own_functions(self) -> bool:
        """True if some metric computes otherwise than Keras's own.

        It is of a user's class or function, or the model's.
        """
        if self.own:
            return True
        return not all(
            _adds_up_as_keras(metric) and _is_keras_function(metric) for _, metric in self._placed
        )

    @property
    def unknown_states(self) -> list[str]:
        """Names of metrics whose state may be no sum over rows.

        They are those of the user's classes, but for Means and Sums.
        """
        sums = (keras.metrics.Mean, keras.metrics.Sum)
        metrics: list[keras.metrics.Metric] = [*self.compiled.metrics, *self.own]
        return [m.name for m in metrics if not (_adds_up_as_keras(m) or isinstance(m, sums))]

    def update(self, batch: Matched, scored: Mapping[int, ScoredLabels]) -> None:
        """Updates every metric with one micro-batch's valid rows.

        `scored` has the labels of outputs without logits.
        """
        for placed in self._plain:
            self._update_metric(placed, batch, None, scored)
        for placed in self._weighted:
            self._update_metric(placed, batch, batch.sample_weight[placed.output], scored)

    def _update_metric(
        self,
        placed: _PlacedMetric,
        batch: Matched,
        sample_weight: tf.Tensor | None,
        scored: Mapping[int, ScoredLabels],
    ) -> None:
        output, metric = placed
        y_true = batch.y_true[output]
        y_pred = batch.y_pred[output]
        valid = None if self.need_exact_rows else batch.valid[output]
        weight = _undiluted(metric, valid, sample_weight)

        labels = scored.get(output)
        if labels is not None:
            weight = _row_weight(metric, labels.counted, labels.counted, weight, ())
            update_from_scores(metric, labels, weight)
            return

        with checks.naming(f"metrics: {metric.name!r}, called with y of shape {y_true.shape}"):
            form = self._forms[id(metric)]
            if form.is_keras and form.axes is None and y_true.shape[0] == y_pred.shape[0]:
                # Keras refuses these shapes, or the metric compares rows. A trace of a telling
                # number of rows raises Keras's error also where a micro-batch has, by chance, as
                # many rows as another axis is long.
                traces.trace(functools.partial(_update_without_weights, metric), (y_true, y_pred))
            y_true_lengths = lengths(y_true)
            y_pred_lengths = lengths(y_pred)
            axes: _Lengths = ()
            if form.axes is not None:
                axes = form.axes(y_true_lengths, y_pred_lengths)
            weight = _row_weight(metric, y_pred, valid, weight, axes)

            may_lack_argument = form.axes is None and not form.is_keras
            if weight is None and may_lack_argument:
                metric.update_state(y_true, y_pred)
            else:
                metric.update_state(y_true, y_pred, sample_weight=weight)

    def result(self, training: bool) -> dict[str, tf.Tensor]:
        """Returns every metric's value by its name in logs."""
        results = {}
        for name, metric in self._named:
            results[name] = metric.result()
        for metric in self.own:
            results[metric.name] = metric.result()
        results.update(self._returned[training])
        return _flat_results(results)

    def logs(self, losses: Mapping[str, Any], training: bool) -> dict[str, Any]:
        """Returns the logs: the losses, whose first is the total, and every metric's value."""
        results = self.result(training)
        if self._own_results is None:
            return {**losses, **results}
        logs = {name: results[name] for name in self._returned[training]}
        logs.update(_flat_results(self._own_results(losses, self.compiled)))
        return logs

    def expect(self, returned: Mapping[str, tf.Tensor], training: bool) -> None:
        """Creates variables for what `compute_metrics` returns beside the results of metrics."""
        results: dict[str, tf.Tensor] = self.compiled.result()
        known = {*results, *(metric.name for metric in self.own)}
        names = [name for name in returned if name not in known]
        for name in names:
            shape = getattr(returned[name], "shape", ())
            if len(shape):
                raise ValueError(
                    f"compute_metrics returned {name!r} of shape {tuple(shape)}: return scalars."
                )
        self._returned[training] = {
            name: tf.Variable(0.0, trainable=False, name=name) for name in names
        }
        # The model's own results may make these values anew, of the whole epoch's.
        if training and self._own_results is None:
            self.of_last_micro_batch = names

    def keep(self, returned: Mapping[str, tf.Tensor], training: bool) -> None:
        """Keeps the values that `compute_metrics` returned last, for the logs."""
        for name, variable in self._returned[training].items():
            variable.assign(tf.cast(returned[name], tf.float32))

    @property
    def _kept(self) -> list[tf.Variable]:
        return [*self._returned[True].values(), *self._returned[False].values()]

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
    """A Keras 3 metric around one of tf_keras or tensorflow-addons, updated as by tf_keras."""

    def __init__(self, wrapped: keras.metrics.Metric):
        super().__init__(name=wrapped.name)
        self.wrapped = wrapped

        @tf.function  # by AutoGraph, as in tf_keras
        def update(y_true, y_pred, sample_weight):
            wrapped.update_state(y_true, y_pred, sample_weight=sample_weight)

        self._update = update
        if _adds_up_as_keras(wrapped) and _is_keras_function(wrapped):
            self._update = wrapped.update_state
        self._result = tf.function(wrapped.result)

    @property
    def variables(self) -> list[tf.Variable]:
        return list(self.wrapped.variables)

    def build(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
        """Creates the variables that the metric creates in its first update."""
        targets = tf.zeros([2, *y_true.shape[1:]], y_true.dtype)
        predictions = tf.zeros([2, *y_pred.shape[1:]], y_pred.dtype)
        self.update_state(targets, predictions)
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


def _require_metrics(name: str, nest: arguments.MetricsArgument) -> None:
    """Raises TypeError or ValueError unless the argument `name` holds metrics alone."""
    for metric in tf.nest.flatten(nest):
        if isinstance(metric, type):
            raise TypeError(f"{name}={metric!r} must be a Keras 3 metric object: call the class.")
        require_known(name, metric, "Keras 3 metric", keras.metrics.get, _SHORTHANDS)


def _place(by_output: Iterable[Any]) -> list[_PlacedMetric]:
    """Lists the metrics in Keras's containers, of which an output without metrics has none."""
    placed: list[_PlacedMetric] = []
    for output, container in enumerate(by_output):
        if container:
            placed.extend(_PlacedMetric(output, metric) for metric in container.metrics)
    return placed


def _with_lengths(spec: keras.KerasTensor) -> tf.TensorSpec:
    """Returns a spec with a length for each axis, another one for each that has none."""
    shape = []
    for axis, length in enumerate(spec.shape):
        if not length:
            length = axis + 2
        shape.append(length)
    return tf.TensorSpec(shape, spec.dtype)


def _flat_results(results: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns results of metrics as float32, those of a metric with several beside the others."""
    flat = {}
    for name, value in results.items():
        values = value if isinstance(value, dict) else {name: value}
        for key, number in values.items():
            flat[key] = tf.cast(tf.convert_to_tensor(number), tf.float32)
    return flat


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


def find_values(metric: keras.metrics.Metric, ignore_index: int) -> Values | None:
    """Returns how a metric's values follow from scores; None where they take the logits."""
    function = private.fn(metric, None)
    keywords = private.fn_kwargs(metric, {})
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        if _is_perplexity(metric) and metric.from_logits:
            return Values(lambda labels: labels.scores.loss)
        return None
    if not _adds_up_as_keras(metric):
        return None

    name = known_name(function)
    if name == "keras.sparse_categorical_accuracy":
        return Values(lambda labels: tf.cast(labels.scores.best, tf.int64) == labels.ids)
    if name == "keras.sparse_top_k_categorical_accuracy":
        if keywords.get("from_sorted_ids"):
            return None
        return Values(lambda labels: labels.scores.above < keywords.get("k", 5), of_ranks=True)
    if (
        name == "keras.sparse_categorical_crossentropy"
        and keywords.get("axis", -1) == -1
        and keywords.get("from_logits")
        and keywords.get("ignore_class") in (None, ignore_index)
    ):
        return Values(lambda labels: labels.scores.loss)
    return None


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
    if len(y_true.shape) == 1 and len(y_pred.shape) == 2:
        return y_true[:, tf.newaxis]
    return y_true


def _of_keras_3(metrics: arguments.MetricsArgument) -> arguments.MetricsArgument:
    """Wraps the metrics of tf_keras in a nest; returns None for an empty nest."""
    if not tf.nest.flatten(metrics):
        return None

    def wrap(metric: Any) -> Any:
        if "tf_keras.Metric" in kinds(metric):
            return _TFKerasMetric(metric)
        return metric

    return tf.nest.map_structure(wrap, metrics)


def _undiluted(
    metric: keras.Metric, valid: tf.Tensor | None, weight: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns `weight` for rows that padding made longer.

    Keras's means over rows are of the means of each row, which padding dilutes.
    """
    if (
        valid is None
        or valid.shape.rank < 2
        or not isinstance(metric, keras.metrics.MeanMetricWrapper)
    ):
        return weight
    real = tf.cast(valid, tf.float32)
    times_longer = tf.math.divide_no_nan(1.0, tf.reduce_mean(real, 1, keepdims=True))
    if weight is None:
        return times_longer
    weight = tf.cast(weight, tf.float32)
    if weight.shape.rank <= 1:
        times_longer = times_longer[:, 0]
    return weight * times_longer


def _row_weight(
    metric: keras.Metric,
    prediction: tf.Tensor,
    valid: tf.Tensor | None,
    weight: tf.Tensor | None,
    axes: Sequence[Any],
) -> tf.Tensor | None:
    """Returns `weight` with 0 for padded rows, with the metric's `axes` or those of the mask."""
    dtype = metric.dtype if weight is None else tf.float32
    factors = []
    if valid is not None:
        factors.append(tf.cast(valid, dtype))
    if weight is not None:
        factors.append(tf.cast(weight, dtype))
    mask = get_mask(prediction)
    if mask is not None and isinstance(metric, _TFKerasMetric):
        factors.append(tf.cast(mask, dtype))
    elif mask is not None and isinstance(metric, keras.metrics.MeanMetricWrapper):
        axes = lengths(mask)[1:]
    if not factors:
        return None
    factors.append(tf.ones([1, *axes], dtype))

    rank = max(factor.shape.rank for factor in factors)
    shaped = []
    for factor in factors:
        axes_of_one = [1] * (rank - factor.shape.rank)
        shaped.append(tf.reshape(factor, [*lengths(factor), *axes_of_one]))
    return functools.reduce(tf.multiply, shaped)


def _mixing(metric: keras.metrics.Metric, specs: _Specs) -> str | None:
    """Finds the operation by which a metric's function mixes rows or computes with their number.

    A trace shows it. None is returned also for a metric without a function, and for one whose
    function takes a fixed number of rows.
    """
    wrapper = getattr(metric, "wrapped", metric)

    def values(pair: Sequence[tf.Tensor]) -> tf.Tensor:
        y_true, y_pred = pair
        if isinstance(metric, _TFKerasMetric):  # which makes their dtypes and ranks alike
            y_true = tf.cast(_expanded(y_true, y_pred), metric.dtype)
            y_pred = tf.cast(y_pred, metric.dtype)
            rank = min(len(y_true.shape), len(y_pred.shape))
            y_true = _without_unit_axis(y_true, rank)
            y_pred = _without_unit_axis(y_pred, rank)
        return private.fn(wrapper)(y_true, y_pred, **private.fn_kwargs(wrapper))

    with contextlib.suppress(Exception):
        traced = traces.trace(values, specs)
        has_rows = len(getattr(traced.structured_outputs, "shape", ())) > 0
        operation = row_mixing.find_mixing_op(traced, values, specs)
        if operation:
            return operation
        if not has_rows:
            return metric.name
        if not of_keras(private.fn(wrapper)):
            return row_counts.find_row_counter(traced, values, specs)
    return None


def _without_unit_axis(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    """Drops a last axis of length 1 that is beyond `rank`."""
    if len(tensor.shape) > rank and tensor.shape[-1] == 1:
        return tensor[..., 0]
    return tensor


def _calls_python(metric: keras.metrics.Metric, specs: _Specs) -> bool:
    """Tells if a metric of the user's calls Python, as by tf.numpy_function."""
    wrapper = getattr(metric, "wrapped", metric)
    if _adds_up_as_keras(wrapper) and _is_keras_function(wrapper):
        return False
    # A trace fails for a fixed number of rows: XLA says it when it compiles the step.
    with contextlib.suppress(Exception):
        traced = traces.trace(lambda pair: metric.update_state(*pair), specs)
        return bool(traces.list_python_calls(traced.graph))
    return False


def _update_without_weights(metric: keras.metrics.Metric, y: Any) -> object:
    return metric.update_state(*y, sample_weight=None)


def _update_with_ones(metric: keras.metrics.Metric, shape: list[int], pair: Any) -> object:
    return metric.update_state(*pair, sample_weight=tf.ones(shape, metric.dtype))


def _find_weight_form(metric: keras.metrics.Metric, specs: _Specs) -> _WeightForm:
    """Finds which of `_AXES` a metric takes, by traces of a telling number of rows.

    There is none for a metric of the user's, and none where each makes Keras's metric fail or
    compare rows.
    """
    # the variables of a first update are there before a step, to be saved
    with contextlib.suppress(Exception):
        traces.trace(lambda pair: metric.update_state(*pair), specs)
    wrapper = getattr(metric, "wrapped", metric)
    if not _adds_up_as_keras(wrapper):
        return _WeightForm(None, is_keras=False)

    is_keras = _is_keras_function(wrapper)
    y_true, y_pred = specs
    for axes in _AXES:
        with contextlib.suppress(Exception):
            shape = [traces.TELLING_ROWS, *axes(y_true.shape, y_pred.shape)]
            update = functools.partial(_update_with_ones, metric, shape)
            traced = traces.trace(update, specs)
            if row_mixing.first_comparison_of_rows(traced.graph) is None:
                return _WeightForm(axes, is_keras)
    return _WeightForm(None, is_keras)
