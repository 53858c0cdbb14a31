"""A model's metrics in the compiled loop: their names, updates and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.label_metrics import ScoredLabels, need_ranks, update_from_scores
from fastaccum.adapters.metric_kinds import adds_up_as_keras, is_keras_function
from fastaccum.adapters.metric_traces import calls_python, find_mixing_op
from fastaccum.adapters.metric_weights import (
    Lengths,
    WeightForm,
    find_weight_form,
    row_weight,
    trace_without_weights,
    undiluted,
)
from fastaccum.adapters.outputs import Matched, Outputs, make_distinct, require_known
from fastaccum.adapters.tf_keras_metrics import as_keras_3, wraps_tf_keras
from fastaccum.basics import arguments
from fastaccum.basics.attributes import kinds, raw
from fastaccum.kernels import private
from fastaccum.kernels.shapes import lengths

_SHORTHANDS = ("accuracy", "acc", "crossentropy", "ce")  # Keras takes the one that fits the targets

# Makes the logs of the losses by name, the total first, and the compiled metrics.
OwnResults = Callable[[Mapping[str, Any], keras.Metric], dict[str, Any]]


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
        self.user = (as_keras_3(metrics), as_keras_3(weighted_metrics))
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

        self._forms: dict[int, WeightForm] = {}  # by the id of the metric
        self.calling_python = []
        for output, metric in self._placed:
            occurrences = [placed for placed in self._placed if placed.metric is metric]
            if len(occurrences) > 1:
                raise ValueError(
                    f"The metric {metric.name!r} is given twice, and would count rows twice: "
                    "pass two."
                )
            specs = (_with_lengths(targets[output]), _with_lengths(outputs.specs[output]))
            if wraps_tf_keras(metric):
                metric.build(*specs)
            operation = find_mixing_op(metric, specs)
            if operation:
                self.mixing[metric.name] = operation
            if calls_python(metric, specs):
                self.calling_python.append(metric.name)
            self._forms[id(metric)] = find_weight_form(metric, specs)
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
        return need_ranks(metrics, name, ignore_index)

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
            adds_up_as_keras(metric) and is_keras_function(metric) for _, metric in self._placed
        )

    @property
    def unknown_states(self) -> list[str]:
        """Names of metrics whose state may be no sum over rows.

        They are those of the user's classes, but for Means and Sums.
        """
        sums = (keras.metrics.Mean, keras.metrics.Sum)
        metrics: list[keras.metrics.Metric] = [*self.compiled.metrics, *self.own]
        return [m.name for m in metrics if not (adds_up_as_keras(m) or isinstance(m, sums))]

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
        valid = batch.valid[output]
        if self.need_exact_rows and not batch.by_element:
            valid = None
        weight = sample_weight
        if not batch.by_element:
            weight = undiluted(metric, valid, sample_weight)

        labels = scored.get(output)
        if labels is not None:
            weight = row_weight(metric, labels.counted, labels.counted, weight, ())
            update_from_scores(metric, labels, weight)
            return

        with checks.naming(f"metrics: {metric.name!r}, called with y of shape {y_true.shape}"):
            form = self._forms[id(metric)]
            if form.is_keras and form.axes is None and y_true.shape[0] == y_pred.shape[0]:
                # Keras refuses these shapes, or the metric compares rows. A trace of a telling
                # number of rows raises Keras's error also where a micro-batch has, by chance, as
                # many rows as another axis is long.
                trace_without_weights(metric, y_true, y_pred)
            y_true_lengths = lengths(y_true)
            y_pred_lengths = lengths(y_pred)
            axes: Lengths = ()
            if form.axes is not None:
                axes = form.axes(y_true_lengths, y_pred_lengths)
            weight = row_weight(metric, y_pred, valid, weight, axes)

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
