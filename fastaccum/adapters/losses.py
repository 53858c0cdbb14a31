"""The losses of a model's outputs: as a user passes them, and bound to outputs and targets."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import loss_kinds, scalar_losses
from fastaccum.adapters.head import FusedHeadLoss, LinearCrossEntropy
from fastaccum.adapters.label_metrics import KERAS_LOSS
from fastaccum.adapters.loss_terms import (
    Term,
    compute_scalar_term,
    compute_term,
    scale_by_rows,
)
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import Matched, Outputs, make_distinct, require_known, to_whole
from fastaccum.basics.attributes import Nest, Variable
from fastaccum.graphs import traces
from fastaccum.kernels import private
from fastaccum.kernels.shapes import as_float, lengths


class OutputLoss(NamedTuple):
    """The loss of one model output.

    Attributes:
        position: of the output, among those of the model.
        name: of the output.
        loss: Keras's loss, or a function as one.
        weight: the loss's factor; a variable is read in each step.
        classes: the number of classes if labels are class indices; else None.
        scalar: set if the loss is one number for a batch, or a pair of numbers.
        mixing: an operation that may mix the rows of a batch, or None.
        power: the exponent p if the loss of each row has a factor `rows**p`, where rows is the size
            of the batch. With reduction="sum" it is p + 1, since a sum over rows is `rows` times
            their mean.
        calls_python: True if the loss calls Python, which XLA cannot compile.
    """

    position: int
    name: str
    loss: keras.losses.Loss
    weight: float | Variable
    classes: int | None
    scalar: scalar_losses.ScalarLoss | None = None
    mixing: str | None = None
    power: float | None = None
    calls_python: bool = False

    @property
    def reduction(self) -> str:
        if self.scalar is not None and self.scalar.kind == "sum":
            return "sum"
        if self.scalar is not None or self.power is not None:
            return "mean"
        return self.loss.reduction


class Losses:
    """The losses that a user passes: `loss` and `loss_weights`, as `Trainer` takes them."""

    def __init__(self, loss: Any, loss_weights: Any = None):
        for part in tf.nest.flatten(loss):
            require_known("loss", part, "Keras loss", keras.losses.get, loss_kinds.SHORTHANDS)
        self.loss = loss
        self.loss_weights = loss_weights

    @property
    def take_class_indices(self) -> bool | None:
        """True if all losses take class indices as labels; None where the labels' shape decides."""
        return loss_kinds.sparse_labels(self.loss)

    def bind(
        self, outputs: Outputs, y_true: Nest, replicas: int = 1, targets_are_own: bool = False
    ) -> BoundLosses:
        """Matches the losses with a model's outputs, for specs of targets.

        The rows of a batch are shared by `replicas`. With `targets_are_own`, a `compute_loss` may
        match the targets with outputs.
        """
        if targets_are_own and self.loss is not None and not tf.nest.flatten(y_true):
            raise ValueError(
                "There is no y, so compute_loss makes the targets of its compiled loss by "
                "itself, which Trainer cannot take over micro-batches. Call a Keras loss in "
                "compute_loss, and compile with none; or write the step with "
                "fastaccum.TrainStep, whose loss function returns (model.compute_loss(...) * "
                "rows, rows)."
            )
        try:
            targets = outputs.targets(y_true)
        except ValueError:
            if not targets_are_own:
                raise
            targets = outputs.specs

        several = outputs.takes_lists and len(outputs.names) > 1
        weights = outputs.match(self.loss_weights, "loss_weights", repeat=True, several=several)
        losses = outputs.placed(self.loss, "loss", repeat=True, several=several)
        bound = []
        for position, losses_of_output in losses.items():
            name = outputs.names[position]
            if targets[position] is None and outputs.skips_missing_targets:
                continue
            _require_target(position, outputs, targets)
            for loss, weight in _with_weights(losses_of_output, weights[position], name):
                output_loss = OutputLoss(position, name, loss, weight, classes=None)
                bound.append(_examine(output_loss, targets[position], outputs.specs[position]))
        if not bound and self.loss is not None:
            raise ValueError(
                f"No output has both a loss and a target: the outputs are {outputs.names}."
            )

        log_names = []
        if outputs.logs_each_loss(len(bound)):
            log_names = [f"{outputs.log_names[output.position]}_loss" for output in bound]
        return BoundLosses(tuple(bound), tuple(make_distinct(log_names)), replicas)


@dataclasses.dataclass(frozen=True)
class BoundLosses:
    """The losses of a model's outputs, bound to these.

    Attributes:
        outputs: the losses, each with its output.
        log_names: of each output's loss, empty where there is but one.
        replicas: how many share the rows of a batch.
    """

    outputs: tuple[OutputLoss, ...]
    log_names: tuple[str, ...]
    replicas: int

    @property
    def mixing(self) -> dict[str, str]:
        """The operations that may mix rows, by the name of the output."""
        return {o.name: o.mixing for o in self.outputs if o.mixing is not None}

    @property
    def unproven(self) -> dict[str, scalar_losses.ScalarLoss]:
        """The scalar losses that may be no sum or mean over rows, by the name of the output."""
        unproven = {}
        for output in self.outputs:
            if output.scalar is not None and output.scalar.unproven is not None:
                unproven[output.name] = output.scalar
        return unproven

    @property
    def calling_python(self) -> list[str]:
        """The names of losses that XLA cannot compile."""
        return [loss_kinds.loss_name(o.loss) for o in self.outputs if o.calls_python]

    @property
    def weight_variables(self) -> list[Variable]:
        """The variables among the weights of losses."""
        by_id: dict[int, Variable] = {}
        for output in self.outputs:
            if not isinstance(output.weight, float):
                by_id[id(output.weight)] = output.weight
        return list(by_id.values())

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
        return any(o.mixing is not None or o.scalar is not None for o in self.outputs)

    def require_targets(self, outputs: Outputs, y_true: Nest) -> None:
        """Raises ValueError unless targets are for outputs that exist, and for each with a loss."""
        targets = outputs.targets(y_true)
        for o in self.outputs:
            _require_target(o.position, outputs, targets)

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

    # Losses that compute a layer of the model.

    def take_over_heads(
        self, model: Model, needed_ranks: Callable[[int, str, int], bool | None]
    ) -> BoundLosses:
        """Returns these losses; each `LinearCrossEntropy` has the layer that it leaves out.

        `needed_ranks(position, name, ignore_index)` tells if the metrics of an output need the
        ranks of labels; None if the output has no metrics.
        """
        positions = [output.position for output in self.outputs]
        outputs = []
        for output in self.outputs:
            if isinstance(output.loss, LinearCrossEntropy):
                if positions.count(output.position) > 1:
                    raise ValueError(
                        f"Output {output.name!r} has a loss beside LinearCrossEntropy: use "
                        f"{KERAS_LOSS}."
                    )
                ignore_index = output.loss.options["ignore_index"]
                ranks = needed_ranks(output.position, output.name, ignore_index)
                fused = FusedHeadLoss(output.loss, model, output.name, output.classes, ranks)
                output = output._replace(loss=fused)
            outputs.append(output)
        return dataclasses.replace(self, outputs=tuple(outputs))

    @property
    def with_heads(self) -> list[OutputLoss]:
        """The losses of outputs that are without logits, after `take_over_heads`."""
        return [o for o in self.outputs if isinstance(o.loss, FusedHeadLoss)]

    @contextlib.contextmanager
    def leave_heads_out(self) -> Iterator[dict[int, tf.Tensor]]:
        """Lets the heads that were taken over return their inputs.

        Yields the latest inputs by output position.
        """
        hidden: dict[int, tf.Tensor] = {}
        with contextlib.ExitStack() as scopes:
            for output in self.with_heads:

                def observe(tensor: tf.Tensor, position: int = output.position) -> None:
                    hidden[position] = tensor

                scopes.enter_context(output.loss.leave_head_out(observe))
            yield hidden

    # The losses of a micro-batch.

    def terms(
        self, batch: Matched, hidden: Mapping[int, tf.Tensor], rows: tf.Tensor | None = None
    ) -> list[Term]:
        """Returns one term per output with a loss.

        `hidden` is what `leave_heads_out` yielded, and `rows` is the number of rows of the step.
        """
        for output in self.with_heads:
            position = output.position
            output.loss.require_hidden(batch.y_pred[position], hidden.get(position))

        terms = []
        for output in self.outputs:
            y_true = batch.y_true[output.position]
            y_pred = batch.y_pred[output.position]
            weight = batch.sample_weight[output.position]
            valid = batch.valid[output.position]
            if output.scalar is not None:
                kind = output.scalar.kind
                terms.append(compute_scalar_term(output.loss, kind, y_true, y_pred, weight))
                continue
            term = compute_term(output.loss, y_true, y_pred, weight, valid)
            if output.power is not None:
                micro_rows = as_float(lengths(y_pred)[0])
                step_rows = rows
                if step_rows is None:
                    step_rows = micro_rows * self.replicas
                term = scale_by_rows(term, output.loss, output.power, step_rows, micro_rows, valid)
            terms.append(term)
        return terms

    def class_indices(self, y_true: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the labels of the outputs whose `classes` are set, with 0 for ignored labels.

        `y_true` has the targets by output.
        """
        indices = []
        for o in self.outputs:
            if o.classes is None:
                continue
            ignore_class_of_tf_keras = private.fn_kwargs(o.loss, {}).get("ignore_class")
            ignored = getattr(o.loss, "ignore_class", ignore_class_of_tf_keras)
            labels = to_whole(y_true[o.position])
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


def _examine(output: OutputLoss, target: keras.KerasTensor, spec: keras.KerasTensor) -> OutputLoss:
    """Finds what the loss of an output takes and returns, for specs of target and output.

    Raises ValueError for a loss that is no sum over rows.
    """
    loss = output.loss
    if not (hasattr(loss, "call") and hasattr(loss, "reduction")):
        loss = private.get_loss(loss, target, spec)

    scalar = None
    calls_python = False
    if not isinstance(loss, LinearCrossEntropy):

        def call(pair: scalar_losses.Pair) -> Any:
            return loss.call(*loss_kinds.as_called(loss, *pair))

        traced = scalar_losses.trace(call, (target, spec))
        if traced is not None:
            calls_python = bool(traces.list_python_calls(traced.graph))
        scalar = scalar_losses.find(call, (target, spec), loss_kinds.loss_name(loss), traced)
    loss_kinds.require_sum_of_rows(loss, output.name, spec, scalar is not None)
    classes = loss_kinds.count_classes(loss, output.name, spec)

    use_of_rows = loss_kinds.UseOfRows()
    if scalar is None:
        use_of_rows = loss_kinds.find_use_of_rows(loss, target, spec)
    power = use_of_rows.power
    if power is not None and loss.reduction == "sum":
        power += 1
    return output._replace(
        loss=loss,
        classes=classes,
        scalar=scalar,
        mixing=use_of_rows.operation,
        power=power,
        calls_python=calls_python,
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
