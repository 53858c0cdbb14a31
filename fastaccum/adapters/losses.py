"""Computes any Keras loss as two sums, of losses and of weights, exact over micro-batches."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import scalar_losses
from fastaccum.adapters.head import FusedHeadLoss, LinearCrossEntropy
from fastaccum.adapters.metrics import KERAS_LOSS, ScoredLabels
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import (
    Matched,
    Outputs,
    get_mask,
    make_distinct,
    require_known,
    to_whole,
)
from fastaccum.basics.attributes import (
    Nest,
    Variable,
    function_of,
    kinds,
    known_name,
    of_keras,
    runs_keras,
)
from fastaccum.graphs import row_counts, row_mixing, traces
from fastaccum.kernels import private
from fastaccum.kernels.shapes import as_float, lengths

_SHORTHANDS = ("crossentropy", "ce")  # Keras takes the one that fits the labels


class Term(NamedTuple):
    """One output's loss over one micro-batch: float32 scalars."""

    loss_sum: tf.Tensor  # of weight x loss over valid elements
    weight_sum: tf.Tensor  # over the full batch, what the loss's reduction divides by
    scored: ScoredLabels | None = None  # where metrics need the labels' scores
    factor: scalar_losses.Factor | None = None  # of a scalar, by its weights and mask


class Output(NamedTuple):
    """The loss of one model output."""

    position: int
    name: str
    loss: keras.losses.Loss
    weight: float | Variable  # a variable is read in each step
    classes: int | None  # set if labels are class indices
    # The exponent p if the loss of each row has a factor `rows**p`, where rows is the size of the
    # batch. With reduction="sum" it is p + 1, since a sum over rows is `rows` times their mean.
    power: float | None = None
    # set if the loss is one number for a batch, or a pair of numbers
    scalar: scalar_losses.ScalarLoss | None = None

    @property
    def reduction(self) -> str:
        if self.scalar is not None and self.scalar.kind == "sum":
            return "sum"
        if self.scalar is not None or self.power is not None:
            return "mean"
        return self.loss.reduction


class Losses:
    """The losses of a model's outputs, `loss` and `loss_weights` as `Trainer` takes them."""

    def __init__(self, loss: Any, loss_weights: Any = None):
        for part in tf.nest.flatten(loss):
            require_known("loss", part, "Keras loss", keras.losses.get, _SHORTHANDS)
        self._loss = loss
        self._loss_weights = loss_weights
        self.outputs: list[Output] = []
        self.mixing: dict[str, str] = {}  # operations that mix rows, by the name of the output
        # Scalar losses that may be no sum or mean over rows, by the name of the output.
        self.unproven: dict[str, scalar_losses.ScalarLoss] = {}
        self.calling_python: list[str] = []  # names of losses that XLA cannot compile
        self.replicas = 1  # that share the rows of a batch
        self.log_names: list[str] = []  # of each output's loss, empty where there is but one

    def build(self, outputs: Outputs, y_true: Nest, targets_are_own: bool = False) -> None:
        """Matches losses with outputs, for specs of targets.

        With `targets_are_own`, a `compute_loss` may match the targets with outputs.
        """
        self.outputs = []
        self.calling_python = []
        try:
            targets = outputs.targets(y_true)
        except ValueError:
            if not targets_are_own:
                raise
            targets = outputs.specs
        if targets_are_own and self._loss is not None and not tf.nest.flatten(y_true):
            raise ValueError(
                "There is no y, so compute_loss makes the targets of its compiled loss by "
                "itself, which Trainer cannot take over micro-batches. Call a Keras loss in "
                "compute_loss, and compile with none; or write the step with "
                "fastaccum.TrainStep, whose loss function returns (model.compute_loss(...) * "
                "rows, rows)."
            )
        several = outputs.takes_lists and len(outputs.names) > 1
        weights = outputs.match(self._loss_weights, "loss_weights", repeat=True, several=several)
        losses = outputs.placed(self._loss, "loss", repeat=True, several=several)
        for position, losses_of_output in losses.items():
            name = outputs.names[position]
            target = targets[position]
            spec = outputs.specs[position]
            if target is None and outputs.skips_missing_targets:
                continue
            _require_target(position, outputs, targets)
            for loss, weight in _with_weights(losses_of_output, weights[position], name):
                if not (hasattr(loss, "call") and hasattr(loss, "reduction")):
                    loss = private.get_loss(loss, target, spec)
                scalar = self._find_scalar(loss, target, spec)
                _require_sum_of_rows(loss, name, spec, scalar is not None)
                classes = _count_classes(loss, name, spec)
                self.outputs.append(Output(position, name, loss, weight, classes, scalar=scalar))
        if not self.outputs and self._loss is not None:
            raise ValueError(
                f"No output has both a loss and a target: the outputs are {outputs.names}."
            )

        self._find_uses_of_rows(targets, outputs.specs)

        log_names = []
        if outputs.logs_each_loss(len(self.outputs)):
            log_names = [f"{outputs.log_names[o.position]}_loss" for o in self.outputs]
        self.log_names = make_distinct(log_names)

    def _find_uses_of_rows(self, targets: Sequence[Any], specs: Sequence[Any]) -> None:
        """Notes which losses mix rows, or may be no sums over them, and which have a factor."""
        self.mixing = {}
        self.unproven = {}
        for k, output in enumerate(self.outputs):
            if output.scalar is not None:
                if output.scalar.unproven is not None:
                    self.unproven[output.name] = output.scalar
                continue
            target = targets[output.position]
            spec = specs[output.position]
            operation, power = _trace_rows(output.loss, target, spec)
            if operation is not None:
                self.mixing[output.name] = operation
            if power:
                if output.reduction == "sum":  # which then counts as a mean
                    power += 1
                self.outputs[k] = output._replace(power=power)

    def _find_scalar(
        self, loss: keras.losses.Loss, *specs: keras.KerasTensor
    ) -> scalar_losses.ScalarLoss | None:
        """Finds what a loss that returns one number, or a pair, is over rows; else None.

        Notes the loss in `calling_python` if it calls Python.
        """
        if isinstance(loss, LinearCrossEntropy):
            return None

        def call(pair: scalar_losses.Pair) -> Any:
            return loss.call(*_as_called(loss, *pair))

        traced = scalar_losses.trace(call, specs)
        if traced is not None and traces.list_python_calls(traced.graph):
            self.calling_python.append(_loss_name(loss))
        return scalar_losses.find(call, specs, _loss_name(loss), traced)

    @property
    def weight_variables(self) -> list[Variable]:
        """The variables among the weights of losses."""
        by_id: dict[int, Variable] = {}
        for output in self.outputs:
            if not isinstance(output.weight, float):
                by_id[id(output.weight)] = output.weight
        return list(by_id.values())

    def require_targets(self, outputs: Outputs, y_true: Nest) -> None:
        """Raises ValueError unless targets are for outputs that exist, and for each with a loss."""
        targets = outputs.targets(y_true)
        for o in self.outputs:
            _require_target(o.position, outputs, targets)

    def take_over_heads(self, model: Model) -> list[Output]:
        """Gives each `LinearCrossEntropy` the layer that it leaves out.

        Returns the outputs that are without logits then.
        """
        positions = [output.position for output in self.outputs]
        for k, output in enumerate(self.outputs):
            if not isinstance(output.loss, LinearCrossEntropy):
                continue
            if positions.count(output.position) > 1:
                raise ValueError(
                    f"Output {output.name!r} has a loss beside LinearCrossEntropy: use "
                    f"{KERAS_LOSS}."
                )
            fused = FusedHeadLoss(output.loss, model, output.name, output.classes)
            self.outputs[k] = output._replace(loss=fused)
        return self._with_heads

    @property
    def _with_heads(self) -> list[Output]:
        return [o for o in self.outputs if isinstance(o.loss, FusedHeadLoss)]

    @contextlib.contextmanager
    def leave_heads_out(self) -> Iterator[dict[int, tf.Tensor]]:
        """Lets the heads that were taken over return their inputs.

        Yields the latest inputs by output position.
        """
        hidden: dict[int, tf.Tensor] = {}
        with contextlib.ExitStack() as scopes:
            for output in self._with_heads:

                def observe(tensor: tf.Tensor, position: int = output.position) -> None:
                    hidden.update({position: tensor})

                scopes.enter_context(output.loss.leave_head_out(observe))
            yield hidden

    def terms(
        self, batch: Matched, hidden: Mapping[int, tf.Tensor], rows: tf.Tensor | None = None
    ) -> list[Term]:
        """Returns one term per output with a loss.

        `hidden` is what `leave_heads_out` yielded, and `rows` is the number of rows of the step.
        """
        for output in self._with_heads:
            position = output.position
            output.loss.require_hidden(batch.y_pred[position], hidden.get(position))

        terms = []
        for output in self.outputs:
            loss = output.loss
            y_true = batch.y_true[output.position]
            y_pred = batch.y_pred[output.position]
            weight = batch.sample_weight[output.position]
            if output.scalar is None:
                valid = batch.valid[output.position]
                terms.append(compute_term(loss, y_true, y_pred, weight, valid))
            else:
                kind = output.scalar.kind
                terms.append(_compute_scalar_term(loss, kind, y_true, y_pred, weight))

        for k, output in enumerate(self.outputs):
            if output.power is not None:
                y_pred = batch.y_pred[output.position]
                valid = batch.valid[output.position]
                terms[k] = self._scale_by_rows(
                    terms[k], output.loss, output.power, y_pred, valid, rows
                )
        return terms

    def _scale_by_rows(
        self,
        term: Term,
        loss: keras.losses.Loss,
        power: float,
        y_pred: tf.Tensor,
        valid: tf.Tensor | None,
        rows: tf.Tensor | None,
    ) -> Term:
        """Gives the term of a loss the factor `rows**power` of the whole step's rows."""
        micro_rows = as_float(lengths(y_pred)[0])
        if rows is None:
            rows = micro_rows * self.replicas
        loss_sum = term.loss_sum * (rows / micro_rows) ** power
        weight_sum = term.weight_sum
        if loss.reduction == "sum":
            weight_sum = micro_rows
            if valid is not None:
                weight_sum = tf.reduce_sum(tf.cast(valid, tf.float32))
            loss_sum *= micro_rows
        return Term(loss_sum, weight_sum)

    @property
    def scalar_positions(self) -> list[int]:
        """Lists the positions of scalar losses, whose terms have a factor, among the terms."""
        positions = []
        for k, output in enumerate(self.outputs):
            if output.scalar is not None and output.scalar.kind != "pair":
                positions.append(k)
        return positions

    @property
    def need_exact_rows(self) -> bool:
        """True if some loss would count padded rows: a scalar says nothing of single rows."""
        return bool(self.mixing) or any(o.scalar is not None for o in self.outputs)

    def require_classes(self, class_weight: dict[int, float] | None) -> None:
        """Raises ValueError for a class that no label can be."""
        if not class_weight:
            return
        largest = max(class_weight)
        for o in self.outputs:
            if o.classes is not None and largest >= o.classes:
                raise ValueError(
                    f"class_weight={class_weight} names class {largest}, but {o.name!r} has "
                    f"{o.classes} classes, from 0 to {o.classes - 1}."
                )

    def class_indices(self, y_true: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the labels of the outputs whose `classes` are set, with 0 for ignored labels.

        `y_true` has the targets by output.
        """
        indices = []
        for o in self.outputs:
            if o.classes is None:
                continue
            of_tf_keras = private.fn_kwargs(o.loss, {}).get("ignore_class")
            labels = to_whole(y_true[o.position])
            ignored = getattr(o.loss, "ignore_class", of_tf_keras)
            if ignored is not None:
                labels = tf.where(labels == ignored, tf.zeros_like(labels), labels)
            indices.append(labels)
        return indices

    def in_range(self, batch: Matched) -> Matched:
        """Replaces labels that are no class by 0.

        The index checks report such labels, and TensorFlow's operations would raise.
        """
        y_true = list(batch.y_true)
        with_classes = [o for o in self.outputs if o.classes is not None]
        for o, labels in zip(with_classes, self.class_indices(y_true), strict=True):
            targets = y_true[o.position]
            is_class = (labels >= 0) & (labels < o.classes)
            y_true[o.position] = tf.where(is_class, targets, tf.zeros_like(targets))
        return batch._replace(y_true=y_true)


def compute_term(
    loss: keras.losses.Loss,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    valid: tf.Tensor | None = None,
) -> Term:
    """Computes the sums behind `loss(y_true, y_pred, sample_weight)` over the `valid` elements.

    With `l = loss.call(y_true, y_pred)`, `v` the valid elements or rows (what does not merely pad,
    and where a Keras mask is true) and `w` the sample weights:

        loss_sum = sum(v * w * l)
        weight_sum = sum(v)      # "sum_over_batch_size", "mean", "sum": as in Keras, a 0 counts
        weight_sum = sum(v * w)  # "mean_with_sample_weight"

    so that `loss_sum / weight_sum` is what Keras computes ("sum" divides by nothing). Raises
    ValueError if the loss returns a mean instead of one value per example, or if a shape does not
    fit.
    """
    masks = [get_mask(y_pred)]
    if isinstance(loss, FusedHeadLoss):
        # in place of the losses, which only their sum may need
        values = loss.labels(y_true, y_pred)
    elif hasattr(y_pred, "log_prob"):
        # tensorflow-probability's distributions, which a cast would draw from
        function = function_of(loss) or loss.call
        values = function(y_true, y_pred)
    else:
        values = _call(loss, y_true, y_pred)
    masks.append(get_mask(values))
    if not isinstance(loss, FusedHeadLoss):
        _require_per_example(loss, values, y_pred.shape[0])
        values = tf.cast(values, tf.float32)

    rows = lengths(values)[0]
    elements = tf.ones([rows, *[1] * (values.shape.rank - 1)], tf.bool)
    if valid is not None:
        elements = elements & _aligned("mask of padding", valid, values)
    for mask in masks:
        if mask is not None:
            elements = elements & _aligned("mask", tf.cast(mask, tf.bool), values)
    weights = None
    if sample_weight is not None:
        weights = _aligned("sample_weight", tf.cast(sample_weight, tf.float32), values)
        if sample_weight.shape.rank < values.shape.rank:
            weights = tf.broadcast_to(weights, lengths(values))

    scored = None
    if isinstance(loss, FusedHeadLoss):
        loss_sum, scored = loss.sum(values, y_pred, elements, weights)
    else:
        weighted_values = values
        if weights is not None:
            weighted_values = values * weights
        loss_sum = tf.reduce_sum(tf.where(elements, weighted_values, 0.0))
    if weights is not None and _reduction(loss) == "mean_with_sample_weight":
        weight_sum = tf.reduce_sum(tf.where(elements, weights, 0.0))
    else:
        weight_sum = tf.reduce_sum(tf.cast(tf.broadcast_to(elements, lengths(values)), tf.float32))
    return Term(loss_sum, weight_sum, scored)


def _call(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> Any:
    """Calls a loss as Keras does, with tensors of its dtype."""
    y_true, y_pred = _as_called(loss, y_true, y_pred)
    _require_same_shape(loss, y_true, y_pred)
    shapes = f"y of shape {tuple(y_true.shape)} and predictions of shape {tuple(y_pred.shape)}"
    with checks.naming(f"loss {_loss_name(loss)!r}, called with {shapes}"):
        return loss.call(y_true, y_pred)


def _as_called(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> scalar_losses.Pair:
    dtype = getattr(loss, "dtype", None) or "float32"
    y_true = tf.cast(y_true, dtype)
    y_pred = tf.cast(y_pred, dtype)
    if not isinstance(loss, keras.Loss) and y_true.shape.rank == 1 and y_pred.shape[1:] == [1]:
        y_true = y_true[:, tf.newaxis]  # as tf_keras does, before it calls the loss
    return y_true, y_pred


def _compute_scalar_term(
    loss: keras.losses.Loss,
    kind: str,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None,
) -> Term:
    """Computes the sums behind the value of a loss that is a scalar, or a pair of scalars.

    A mean counts by its rows: `value * rows` over `rows`. A sum is added up, and divided by
    nothing. Weights and masks scale the value of the whole batch, by a factor that the divisor gets
    once all micro-batches are counted.
    """
    returned = _call(loss, y_true, y_pred)
    rows = as_float(lengths(y_pred)[0])
    if kind == "pair":
        if sample_weight is not None:
            raise ValueError(
                f"loss {_loss_name(loss)!r} returns a pair (loss_sum, weight_sum), which "
                "sample_weight and class_weight cannot weigh. Return one loss per row or token, "
                "and they weigh it; reduction='mean_with_sample_weight' divides by the sum of "
                "the weights."
            )
        loss_sum, weight_sum = returned
        return Term(_as_scalar(loss_sum), _as_scalar(weight_sum))
    value = _as_scalar(returned)
    if kind == "mean":
        value *= rows
    factor = scalar_losses.make_factor(
        _reduction(loss), rows, sample_weight, get_mask(y_pred), _loss_name(loss)
    )
    return Term(value, rows, factor=factor)


def _as_scalar(number: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(number, tf.float32), [])


def _trace_rows(
    loss: keras.losses.Loss, *specs: keras.KerasTensor
) -> tuple[str | None, float | None]:
    """Traces a loss that is not Keras's, and finds what it does with rows.

    Returns an operation that mixes or counts rows, or None; and p of a factor `rows**p`, or None.
    """
    function = function_of(loss)
    if known_name(function) == "keras.circle":
        return loss.name, None
    if of_keras(function):
        return None, None

    def call(pair: Sequence[tf.Tensor]) -> tf.Tensor:
        return loss.call(*_as_called(loss, *pair))

    try:
        traced = traces.trace(call, specs)
    except Exception:  # of a distribution, or by AutoGraph: nothing is known
        return None, None
    _require_result_for_each_row(loss, traced.structured_outputs)
    operation = row_mixing.find_mixing_op(traced, call, specs)
    if operation:
        return operation, None
    operation = row_counts.find_row_counter(traced, call, specs)
    if not operation:
        return None, None
    power = row_counts.find_power_of_rows(call, specs)
    if power:
        return None, power
    return operation, None


def _require_result_for_each_row(loss: keras.losses.Loss, values: Any) -> None:
    """Raises ValueError for a traced result whose first axis is as long for any number of rows."""
    if not tf.is_tensor(values) or not values.shape.rank or values.shape[0] is None:
        return
    if values.shape[0] % traces.TELLING_ROWS:
        raise ValueError(
            _not_per_example(loss, f"shape {tuple(values.shape)} whatever the number of examples")
        )


def _require_target(
    position: int, outputs: Outputs, targets: Sequence[keras.KerasTensor | None]
) -> None:
    if targets[position] is not None:
        return
    with_target = []
    for name, target in zip(outputs.names, targets, strict=True):
        if target is not None:
            with_target.append(name)
    raise ValueError(
        f"Output {outputs.names[position]!r} has a loss but no target: y holds {with_target}."
    )


def _count_classes(loss: keras.losses.Loss, name: str, spec: keras.KerasTensor) -> int | None:
    """Returns the length of the output's axis of classes if labels are class indices; else None."""
    if not takes_class_indices(loss):
        return None
    shape = tuple(spec.shape)
    axis = private.fn_kwargs(loss, {}).get("axis", -1)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"loss of output {name!r} has axis={axis}, and the output has shape {shape}."
        )
    return shape[axis]


def _with_weights(
    loss: keras.losses.Loss, weight: Any, name: str
) -> list[tuple[keras.losses.Loss, float | Variable]]:
    """Lists the losses of one output, each with its weight as a float or a variable."""
    losses = [loss]
    if isinstance(loss, (list, tuple)):
        losses = [part for part in loss if part is not None]

    if isinstance(weight, (list, tuple)):
        weights = list(weight)
    elif weight is None:
        weights = [1.0] * len(losses)
    else:
        weights = [weight] * len(losses)
    if len(weights) != len(losses):
        raise ValueError(
            f"loss_weights={weights} for the {len(losses)} losses of output {name!r}: pass one "
            "for each."
        )

    with_weights: list[tuple[keras.losses.Loss, float | Variable]] = []
    for part, factor in zip(losses, weights, strict=True):
        if isinstance(factor, (keras.Variable, tf.Variable)):
            _require_scalar(factor, name)
            with_weights.append((part, factor))
            continue
        if not (isinstance(factor, numbers.Real) and checks.in_float32(factor)):  # type: ignore[arg-type]
            raise ValueError(
                f"loss_weights={factor!r} of output {name!r} must be a finite number that float32 "
                "does not round to 0."
            )
        with_weights.append((part, float(factor)))
    return with_weights


def _require_scalar(weight: Variable, name: str) -> None:
    dtype = tf.as_dtype(weight.dtype)
    if len(weight.shape) or not dtype.is_floating:
        raise ValueError(
            f"loss_weights of output {name!r} holds a variable of shape {tuple(weight.shape)} "
            f"and dtype {dtype.name}: make it a scalar of float32."
        )


def _require_sum_of_rows(
    loss: keras.losses.Loss, name: str, spec: keras.KerasTensor, is_scalar: bool
) -> None:
    if not runs_keras(loss, "__call__"):
        called = next(c for c in type(loss).__mro__ if "__call__" in vars(c))
        raise ValueError(
            f"The loss of output {name!r} is {type(loss).__name__}, whose __call__ "
            f"{called.__name__} overrides: what it does with a batch is no sum over "
            "micro-batches. Override call(y_true, y_pred), which returns one loss for each row "
            "or one number for the batch; or the model's compute_loss, with a loss that "
            "compares rows."
        )
    if is_scalar:  # whatever its reduction
        return
    if _reduction(loss) is None:
        raise ValueError(
            f"The loss of output {name!r} has reduction=None, which leaves no scalar to "
            "minimise. Pass reduction='sum_over_batch_size' (the mean) or 'sum'; or override "
            "the model's compute_loss with a loss that compares rows."
        )
    if known_name(function_of(loss)) in ("keras.dice", "keras.tversky"):
        axis = private.fn_kwargs(loss).get("axis")
        rank = len(spec.shape)
        axis_of_rows = {0, -rank}
        if axis is None or axis_of_rows & set(np.atleast_1d(axis).tolist()):
            inner_axes = tuple(range(1, rank))
            raise ValueError(
                f"The loss of output {name!r} is {type(loss).__name__}(axis={axis}), which "
                "compares the whole batch at once: no sum over micro-batches equals it. Pass "
                f"keras.losses.{_loss_name(loss).title()}(axis={inner_axes}), one loss for each "
                "row."
            )


def _aligned(what: str, tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Adds or drops trailing axes of 1 until the rank of `tensor` is that of `values`."""
    original_shape = tensor.shape
    while tensor.shape.rank > values.shape.rank and tensor.shape[-1] == 1:
        tensor = tf.squeeze(tensor, -1)
    while tensor.shape.rank < values.shape.rank:
        tensor = tf.expand_dims(tensor, -1)
    axes = zip(tensor.shape, values.shape, strict=False)
    if tensor.shape.rank != values.shape.rank or not all(
        length in (1, of_values) for length, of_values in axes
    ):
        raise ValueError(
            f"A {what} of shape {original_shape} does not fit losses of shape {values.shape}, from "
            "the first axis."
        )
    return tensor


def _require_per_example(loss: keras.losses.Loss, values: tf.Tensor, rows: int | None) -> None:
    if not tf.is_tensor(values):
        returned = repr(values)
    elif not values.dtype.is_floating:
        returned = f"dtype {values.dtype.name}"
    elif values.shape.rank == 0 and rows == 1:
        raise ValueError(
            f"loss {_loss_name(loss)!r} returned a single number for a micro-batch of one row, "
            "as tf.squeeze makes it, and one for each row of others. Squeeze the last axis "
            "alone (axis=-1), or pass batch_size=2 or more."
        )
    elif values.shape.rank == 0 or values.shape[0] != rows:
        returned = f"shape {tuple(values.shape)} for {rows} examples"
    else:
        return
    raise ValueError(_not_per_example(loss, returned))


def _not_per_example(loss: keras.losses.Loss, returned: str) -> str:
    return (
        f"loss {_loss_name(loss)!r} returned {returned}. It must return a floating-point tensor, "
        "one loss per example (or per token), or one number for the batch: a mean over the "
        "batch axis alone is neither."
    )


_SPARSE_CLASSES = {"keras.SparseCategoricalCrossentropy", "tf_keras.SparseCategoricalCrossentropy"}
_SPARSE_FUNCTIONS = {
    "keras.sparse_categorical_crossentropy",
    "tf_keras.sparse_categorical_crossentropy",
}

# Keras's other losses compare target and prediction element by element, and would broadcast one to
# the other.
_TAKE_INDICES = (
    "sparse_categorical_crossentropy",
    "categorical_generalized_cross_entropy",
    "ctc",
    "circle",
)


def _require_same_shape(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    function = function_of(loss)
    _, _, name = known_name(function).partition(".")
    if not of_keras(function):
        return
    target_shape = tuple(y_true.shape)
    output_shape = tuple(y_pred.shape)
    if name in _TAKE_INDICES:
        has_classes = len(output_shape) > 1 and output_shape[-1] != 1
        is_sparse = name == "sparse_categorical_crossentropy"
        if is_sparse and has_classes and target_shape == output_shape:
            raise ValueError(
                f"y and the predictions both have shape {output_shape} (rows first), but loss "
                f"{_loss_name(loss)!r} takes class indices, without the axis of classes: for "
                "one-hot targets, use 'categorical_crossentropy'."
            )
        return

    short, long = sorted([target_shape, output_shape], key=len)
    if short == long or (*short, 1) == long:
        return
    hint = ""
    if "categorical" in name and (len(target_shape) < len(output_shape) or target_shape[-1] == 1):
        hint = " for class indices, use 'sparse_categorical_crossentropy';"
    raise ValueError(
        f"y has shape {target_shape} and the predictions have {output_shape} (rows first), which "
        f"loss {_loss_name(loss)!r} compares element by element:{hint} give the model's last "
        "layer as many units as y has columns, or reshape y."
    )


def _loss_name(loss: keras.losses.Loss) -> str:
    """Names a loss in a message."""
    function = getattr(loss, "fn", loss)
    name = getattr(loss, "name", loss)
    return getattr(function, "__name__", name)


def _reduction(loss: keras.losses.Loss) -> str | None:
    if loss.reduction == "auto":  # tf_keras's name of "sum_over_batch_size"
        return "sum_over_batch_size"
    if loss.reduction == "none":
        return None
    return loss.reduction


def sparse_labels(loss: keras.losses.Loss) -> bool | None:
    """Tells if all losses of a nest take class indices; None where the labels' shape decides."""
    losses = [part for part in tf.nest.flatten(loss) if part is not None]
    if any(isinstance(part, str) and part.lower() in _SHORTHANDS for part in losses):
        return None
    return bool(losses) and all(map(takes_class_indices, losses))


def takes_class_indices(loss: keras.losses.Loss) -> bool:
    """Tells if a loss, a Keras loss's function or its name takes class indices as labels."""
    if isinstance(loss, LinearCrossEntropy):
        return True
    if isinstance(loss, str) and loss.lower() not in _SHORTHANDS:
        loss = keras.losses.get(loss)
    if not _SPARSE_CLASSES.isdisjoint(kinds(loss)):
        return True
    function = loss
    if hasattr(loss, "call"):
        function = function_of(loss)
    return known_name(function) in _SPARSE_FUNCTIONS
