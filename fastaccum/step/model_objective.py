"""The objective of a Keras model: its losses, metrics, state, penalty and input checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from fastaccum.adapters import layers
from fastaccum.adapters.attention import FusedAttention
from fastaccum.adapters.attributes import Nest, Variable, raw, restored
from fastaccum.adapters.callbacks import log_value
from fastaccum.adapters.interceptors import intercepting
from fastaccum.adapters.losses import Losses, Term
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import Matched, Outputs
from fastaccum.adapters.own_loss import OwnLoss, Reduction, named_weights
from fastaccum.adapters.scalar_losses import Factor, ScalarLoss, divide_out
from fastaccum.adapters.traces import COMPILED
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.kernels.shapes import as_float, lengths
from fastaccum.kernels.xla_ops import loop
from fastaccum.lines import warn
from fastaccum.step.guards import PATIENCE, IndexChecks, StuckSteps
from fastaccum.step.objective import Objective
from fastaccum.step.options import Options
from fastaccum.step.running_state import RunningState


class ModelObjective(Objective):
    """Minimises the losses of a Keras model; a stack is a `Batch` of [micro-batches, rows, ...]
    tensors.

    The objective is that of Keras on the full batch:

        sum_o loss_weight_o * loss_sum_o / weight_sum_o  +  added losses  +  regularisers

    where a scalar added loss is a mean over the rows of a micro-batch, as activity regularisers
    are; or it is the
    model's own: an overridden `compute_loss`, or the loss that a Hugging Face model returns.
    """

    def __init__(
        self, model: Model, outputs: Outputs, losses: Losses, metrics: Metrics, options: Options
    ):
        self.model, self.outputs, self.losses, self.metrics = model, outputs, losses, metrics
        self.options = options
        self.state = model.state
        self.own = (
            OwnLoss(model, options.own_loss_reduction) if model.overrides("compute_loss") else None
        )
        # It may ask for derivatives of another kind, which fused attention and batch norm lack.
        fused = False if options.flash_attention == "auto" and self.own else options.flash_attention
        self.attention = FusedAttention(fused) if fused else None
        labelled = [(o.name, o.classes) for o in losses.outputs if o.classes is not None]
        lookups = [(f"labels of output {name!r}", classes) for name, classes in labelled]
        lookups += [
            (f"ids given to embedding {layer.name!r}", rows) for layer, rows in model.lookups
        ]
        self._first_embedding = len(labelled)
        self.has_own_metrics = model.overrides("compute_metrics")
        for output in losses.take_over_heads(model):
            output.loss.ranks = metrics.needed_ranks(
                output.position, output.name, output.loss.ignore_class
            )
            if self.own is not None or self.has_own_metrics:
                raise ValueError(
                    f"{type(model.model).__name__} has a compute_loss or compute_metrics of its "
                    "own, for logits that LinearCrossEntropy never has: use "
                    "keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
                )
        # The terms are the outputs' losses, then each kind of added loss, or what the model
        # computes itself.
        self._returned = 0 if losses.outputs or self.own is not None else model.returned_losses
        # a sum is refused for a `compute_loss` too
        added = _added_kinds(model, options.own_loss_reduction)
        # What mixes rows, with the operation by which it does; a step warns of it where it splits
        # the rows.
        self.mixing = {
            f"The metric {name!r}": operation for name, operation in metrics.mixing.items()
        }
        self._unproven_losses = {**losses.unproven}
        self._added = [] if self.own else added
        others = [self.own.reduction] if self.own else ["mean"] * self._returned + self._added
        self.term_weights = [o.weight for o in losses.outputs] + [1.0] * len(others)
        self.reductions = [o.reduction for o in losses.outputs] + list(others)
        several = len(self.term_weights) > 1 or self.own is not None or bool(losses.log_names)
        self._scalars = losses.scalar_positions
        counted = bool(self._scalars) or any(o.power for o in losses.outputs)
        self.has_several_terms = several or counted
        self.running = RunningState(
            losses.log_names,
            metrics,
            IndexChecks(lookups),
            StuckSteps(patience=1 if options.on_nonfinite == "raise" else PATIENCE),
        )

    # One micro-batch.

    def terms(
        self,
        batch: Batch,
        training: bool,
        observe: bool = True,
        prepared: list[tf.Tensor] | None = None,
    ) -> tuple[list[Term], Nest]:
        """Returns the terms of outputs, then of other losses, and what the model returned;
        `observe` checks its ids.
        """
        with contextlib.ExitStack() as scopes:
            if observe:
                first, checks = self._first_embedding, self.running.index_checks
                note = lambda i, ids: checks.observe(first + i, ids)  # noqa: E731
                observers = layers.make_id_observers(
                    self.model.lookups, note, self.options.uses_xla
                )
                scopes.enter_context(intercepting(observers))
            hidden = scopes.enter_context(self.losses.leave_heads_out())
            if self._returned:
                if any(each is not None for each in tf.nest.flatten(batch.weights)):
                    raise ValueError(
                        f"The loss that {type(self.model.model).__name__} returns by itself "
                        "takes no sample_weight or class_weight: pass a loss to the Trainer."
                    )
                y_pred, means = self.model.with_losses(
                    batch.x, _targets(batch), training, batch.mask
                )
            else:
                y_pred, means = self.model(batch.x, training=training), []
        rows = _rows(batch)
        if self.own is not None:
            return self._own_terms(self.own, batch, y_pred, training, observe, prepared), y_pred
        terms = [Term(value * weight_sum, weight_sum) for value, weight_sum in means]
        if self.losses.outputs:
            matched = self._matched(batch, y_pred)
            if observe and self.model.takes_targets_apart:
                self._observe(matched.y_true)
            terms = self.losses.terms(self._in_range(matched), hidden, prepared and prepared[-1])
        for reduction, counted_as in zip(self.model.added_reductions, self._added, strict=True):
            added = self.model.added_loss(reduction)
            terms.append(Term(added * rows if counted_as == "mean" else added, rows))
        return terms, y_pred

    def _own_terms(
        self,
        own: OwnLoss,
        batch: Batch,
        y_pred: Nest,
        training: bool,
        observe: bool,
        prepared: list[tf.Tensor] | None,
    ) -> list[Term]:
        asked: list[Term] = []
        rows = _rows(batch)
        share = None if prepared is None else rows / prepared[-1]

        def part() -> tf.Tensor:
            denominators = prepared
            if denominators is None:
                factors = self._factors(asked)
                denominators = self._denominators([t.weight_sum for t in asked], factors)
            return _weighted(self.term_weights, asked, denominators)

        def compiled(y: Nest, y_pred: Nest, sample_weight: Nest) -> tf.Tensor:
            if asked:
                raise ValueError(
                    f"{own.name} computes the compiled loss more than once, and each would need "
                    "denominators of its own: call a Keras loss object for the others."
                )
            matched = self.outputs.matched(y, y_pred, named_weights(sample_weight))
            if observe:
                self._observe(matched.y_true)
            asked.extend(self.losses.terms(self._in_range(matched), {}, prepared and prepared[-1]))
            return tf.identity(
                part() if share is None or own.reduction == "sum" else part() / share, name=COMPILED
            )

        given = compiled if self.losses.outputs else None
        value = own(batch.x, _targets(batch), y_pred, batch.weights, training, given, share)
        if prepared is None and asked:
            value -= tf.identity(part(), name=COMPILED)
        nothing = [Term(tf.constant(0.0), tf.constant(0.0))] * (
            len(self.losses.outputs) - len(asked)
        )
        return [*asked, *nothing, Term(value * rows if own.reduction == "mean" else value, rows)]

    def _matched(self, batch: Batch, y_pred: Nest) -> Matched:
        matched = self.outputs.matched(*self.model.matched(batch.x, batch.y, y_pred), batch.weights)
        return matched._replace(valid=self._valid(batch, self.outputs.targets))

    def _valid(
        self, batch: Batch, by_position: Callable[[Nest], list[tf.Tensor | None]]
    ) -> list[tf.Tensor | None]:
        """Lists what is more than padding by output; None where all is."""
        rows = batch.mask
        real: list[tf.Tensor | None] = [None] * len(self.outputs.names)
        if tf.nest.flatten(batch.real):
            real = by_position(batch.real)
        valid: list[tf.Tensor | None] = []
        for elements in real:
            if elements is None or rows is None:
                valid.append(rows if elements is None else elements)
            else:
                valid.append(elements & tf.reshape(rows, [-1, *[1] * (elements.shape.rank - 1)]))
        return valid

    def _in_range(self, batch: Matched) -> Matched:
        return batch if self.options.uses_xla else self.losses.in_range(batch)

    def update_metrics(
        self, batch: Batch, terms: Sequence[Term], y_pred: Nest, training: bool
    ) -> dict[str, tf.Tensor]:
        """Updates the metrics with one micro-batch; returns what a `compute_metrics` of the model's
        own returns.
        """
        if not self.has_own_metrics:
            if self.metrics.compiled.metrics:
                of_outputs = zip(self.losses.outputs, terms, strict=False)
                scored = {o.position: t.scored for o, t in of_outputs if t.scored is not None}
                y, y_pred = self.model.matched(batch.x, batch.y, y_pred)
                matched = self.outputs.matched_for_metrics(y, y_pred, batch.weights)
                matched = matched._replace(
                    valid=self._valid(batch, self.outputs.targets_of_metrics)
                )
                self.metrics.update(self._in_range(matched), scored)
            return {}

        def update(y: Nest, y_pred: Nest, sample_weight: Nest = None) -> None:
            self.metrics.update(
                self._in_range(self.outputs.matched_for_metrics(y, y_pred, sample_weight)), {}
            )

        returned = self.model.compute_metrics(
            batch.x, _targets(batch), y_pred, batch.weights, update
        )
        nested = [
            value.items() if isinstance(value, dict) else [(name, value)]
            for name, value in returned.items()
        ]
        returned = {name: value for items in nested for name, value in items}
        self.metrics.keep(returned, training)
        return {
            name: value
            for name, value in returned.items()
            if name not in ("loss", *self.running.losses)
        }

    def sums(self, batch: Batch, prepared: list[tf.Tensor] | None) -> tuple[tf.Tensor, tf.Tensor]:
        terms, y_pred = self.terms(batch, training=True, prepared=prepared)
        self.update_metrics(batch, terms, y_pred, training=True)
        if prepared is None:
            (only,), (weight,) = terms, self.term_weights
            return _read(weight) * only.loss_sum, only.weight_sum
        *denominators, all_rows = prepared
        rows = _rows(batch)
        parts = [
            tf.math.divide_no_nan(t.loss_sum, d) for t, d in zip(terms, denominators, strict=True)
        ]
        self.running.add_parts(parts, rows, all_rows)
        # A `compute_loss` of the model's own has those of the outputs in it.
        first = 0 if self.own is None else len(self.losses.outputs)
        total = _weighted(self.term_weights[first:], terms[first:], denominators[first:])
        return all_rows * total, tf.minimum(rows, all_rows)

    # One step.

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        called = self.model.called_layers
        forms = (
            layers.make_forms(called, self.options.uses_xla)
            if self.options.uses_xla or not self.own
            else []
        )
        fp32 = layers.make_fp32(called) if self.options.fp32_weight_gradients else []
        fused = self.attention.make_forms(called) if self.attention else []
        answering = self.attention.entered() if self.attention else contextlib.nullcontext()
        with answering, intercepting([*forms, *fused, *fp32]):
            yield

    def prepare(
        self, stacks: Sequence[Batch], counts: list[tf.Tensor] | None = None
    ) -> list[tf.Tensor] | None:
        """Counts the terms' denominators, so that they share one accumulator, and the valid rows;
        None for one term.
        """
        if sum(map(trip_count, stacks)) * self.losses.replicas > 1:
            self.warn_of_parts()
        self.observe_labels(stacks)
        if not self.has_several_terms:
            return None
        if counts is None:
            counts = self.count(*stacks)
        size = len(self.term_weights)
        weight_sums = counts[:size]
        factors = counts[size:-1]
        rows = counts[-1]
        # no valid element: no update
        rows *= tf.cast(tf.reduce_any(tf.not_equal(weight_sums, 0.0)), rows.dtype)
        return [*self._denominators(weight_sums, factors), rows]

    def warn_of_parts(self) -> None:
        """Warns, once each, of losses, metrics and layers whose results for parts of an update are
        not its own.
        """
        while self.mixing:
            _warn_of_mixing(*self.mixing.popitem())
        while self._unproven_losses:
            _warn_of_scalar(*self._unproven_losses.popitem())
        if found := self.model.row_counter:
            self.model.row_counter = None
            warn(
                f"A layer of {self.model.model.name!r} computes with the number of rows in its "
                f"batch (see {found}): here that of each micro-batch on each replica, not that "
                "of the update. Give the layer a number of its own, such as batch_size * "
                "gradient_accumulation_steps.",
                UserWarning,
            )
        if names := self.metrics.of_last_micro_batch:
            self.metrics.of_last_micro_batch = []
            warn(
                f"compute_metrics of {self.model.model.name!r} returned {names} as plain "
                "numbers, whose logs are those of the last micro-batch. For the whole epoch's, "
                "update a keras.metrics.Mean that the model holds, in place of each.",
                UserWarning,
            )

    def _denominators(
        self, weight_sums: Sequence[tf.Tensor], factors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the divisors of the first terms' loss sums, for what `_factors` counted."""
        sums = zip(self.reductions, weight_sums, strict=False)
        found = [tf.constant(1.0) if reduction == "sum" else weight for reduction, weight in sums]
        for i, k in enumerate(self._scalars):
            factor = Factor(factors[2 * i], factors[2 * i + 1])
            found[k] = divide_out(found[k], factor)
        return found

    def _factors(self, terms: Sequence[Term]) -> list[tf.Tensor]:
        """Lists both sums of the factor of each scalar loss; zeros where it was not computed."""
        sums: list[tf.Tensor] = []
        for k in self._scalars:
            sums.extend(terms[k].factor or Factor(tf.constant(0.0), tf.constant(0.0)))
        return sums

    def count(self, *stacks: Batch) -> list[tf.Tensor]:
        """Counts each term's weight sum over the stacks, factors and the valid rows; leaves all
        state as it was.
        """

        def count(batch):
            if not self.losses.outputs and not self._returned:
                return [_rows(batch)] * (len(self.term_weights) + 1)
            terms, _ = self.terms(batch, training=False, observe=False)
            return [*(t.weight_sum for t in terms), *self._factors(terms), _rows(batch)]

        size = len(self.term_weights) + 2 * len(self._scalars) + 1
        with restored([*self.state, *self.model.metric_variables]):
            return _sum_over(stacks, count, size)

    def count_stacked(self, *stacks: Batch) -> tf.Tensor:
        """Stacks what `count` lists, for the parts of an update to add up: float32 [counts]."""
        return tf.stack(self.count(*stacks))

    def rows(self, stacks: Sequence[Batch]) -> tf.Tensor:
        """Counts the valid rows in the stacks."""
        return tf.add_n([_rows(stack, axes=2) for stack in stacks])

    def observe_labels(self, stacks: Sequence[Batch]) -> None:
        """Checks the class indices among the targets, unless targets are only known in a
        micro-batch.
        """
        for stack in () if self.model.takes_targets_apart else stacks:
            self._observe(self.outputs.targets(stack.y))

    def _observe(self, y_true: list[tf.Tensor]) -> None:
        for i, labels in enumerate(self.losses.class_indices(y_true)):
            self.running.index_checks.observe(i, labels)

    def denominator(self, weight_sum: tf.Tensor) -> tf.Tensor:
        if self.has_several_terms or self.reductions != ["sum"]:
            return weight_sum
        return tf.cast(weight_sum > 0.0, weight_sum.dtype)

    def penalty(self) -> tf.Tensor | None:
        # A `compute_loss` of the model's own adds it, or does not.
        return None if self.own is not None else self.model.penalty()

    def accepts(self) -> tf.Tensor:
        return self.running.fine()

    def typical_weight(self, stacks: Sequence[Batch]) -> float:
        rows = sum(math.prod(tf.nest.flatten(stack.x)[0].shape[:2]) for stack in stacks)
        if self.has_several_terms or not self.losses.outputs:
            return float(rows)
        only = self.losses.outputs[0]
        target = self.outputs.targets(stacks[0].y)[only.position]
        return float(
            rows * math.prod(target.shape[2:-1] if only.classes is None else target.shape[2:])
        )

    # An evaluation.

    def evaluate(self, *stacks: Batch) -> list[tf.Tensor]:
        """Sums every term's loss sum, then weight sums and factors, over the stacks; updates the
        metrics.
        """

        def sums(batch):
            terms, y_pred = self.terms(batch, training=False)
            self.update_metrics(batch, terms, y_pred, training=False)
            return [
                *(t.loss_sum for t in terms),
                *(t.weight_sum for t in terms),
                *self._factors(terms),
            ]

        self.observe_labels(stacks)
        with self.scope():
            return _sum_over(stacks, sums, 2 * len(self.term_weights) + 2 * len(self._scalars))

    def evaluated(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the logs of an evaluation, from the sums of its dispatches so far;
        `model.metrics` has them too.
        """
        size = len(self.term_weights)
        loss_sums = sums[:size]
        weight_sums = sums[size : 2 * size]
        factors = sums[2 * size :]
        loss, logs = 0.0, {}
        names = [*self.running.losses] + [None] * (size - len(self.running.losses))
        denominators = self._denominators(weight_sums, factors)
        terms = zip(names, self.term_weights, loss_sums, denominators, strict=True)
        for name, weight, loss_sum, denominator in terms:
            value = loss_sum / float(denominator) if denominator else 0.0
            loss += float(_read(weight)) * value
            if name is not None:
                logs[name] = value
        loss += float(self.penalty() or 0.0)
        losses = {"loss": loss, **logs}
        self.running.show(losses)
        logs = self.metrics.logs(losses, training=False)
        return {
            name: log_value(value) if tf.is_tensor(value) else value for name, value in logs.items()
        }

    def in_order(self, logs: Mapping[str, float]) -> list[str]:
        """Returns the logs' names in the order of Keras's `evaluate`."""
        known = [
            "loss",
            *(metric.name for metric in self.metrics.compiled.metrics),
            *self.losses.log_names,
        ]
        return self.outputs.sort_logs(logs, known)


def _added_kinds(model: Model, scalars: Reduction) -> list[str]:
    """Returns how each kind of the model's added losses is reduced over rows, if its scalars are so
    by `scalars`.
    """
    if scalars == "mean":
        return model.added_reductions
    if regularised := [
        each.name
        for each in model.layers
        if getattr(each, "activity_regularizer", None) is not None
    ]:
        raise ValueError(
            f"own_loss_reduction='sum', but the activity regularisers of {regularised} are means "
            "over rows: add what they compute by add_loss, as a sum, or one value for each row, "
            "which needs no own_loss_reduction."
        )
    if model.compute_loss_adds_penalty:
        raise ValueError(
            "own_loss_reduction='sum', but the compute_loss of a tf_keras model has its weight "
            "regularisers in each micro-batch: let it return a mean over rows, to which they add "
            "up once."
        )
    return ["sum"] * len(model.added_reductions)


def _read(weight: float | Variable) -> float | tf.Tensor:
    """Returns a loss's weight, as a variable has it now: read in each step, as in Keras."""
    return weight if isinstance(weight, float) else tf.cast(raw(weight).read_value(), tf.float32)


def _weighted(
    weights: Sequence[float | Variable], terms: Sequence[Term], denominators: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Sums weighted terms over their denominators; there may be more weights and denominators than
    terms.
    """
    parts = zip(map(_read, weights), terms, denominators, strict=False)
    return tf.add_n(
        [
            weight * tf.math.divide_no_nan(t.loss_sum, denominator)
            for weight, t, denominator in parts
        ]
    )


def _sum_over(
    stacks: Sequence[Batch], fn: Callable[[Batch], list[tf.Tensor]], size: int
) -> list[tf.Tensor]:
    """Sums `fn(micro_batch)`, a list of `size` float32 scalars, over every micro-batch."""
    totals = [tf.constant(0.0)] * size
    for stack in stacks:

        def body(i, *totals, stack=stack):
            values = fn(tf.nest.map_structure(lambda t: tf.gather(t, i), stack))
            return [a + b for a, b in zip(totals, values, strict=True)]

        totals = loop(trip_count(stack), body, totals)
    return totals


def _targets(batch: Batch) -> Nest:
    return batch.y if tf.nest.flatten(batch.y) else None


def _warn_of_mixing(what: str, operation: str) -> None:
    """Warns of a loss or a metric in which an operation mixes rows."""
    warn(
        f"{what} may be no sum or mean over the rows of a batch, each on its own: operation "
        f"{operation!r} may mix them. The value is computed for each micro-batch and averaged; "
        "where rows are mixed, that is not the value for the whole batch. For a mean over some "
        "rows or tokens, pass a Keras loss or metric with reduction='mean_with_sample_weight', "
        "and sample_weight=0 for the others. A comparison of rows compares the batch_size rows "
        "of one micro-batch.",
        UserWarning,
    )


def _warn_of_scalar(output: str, scalar: ScalarLoss) -> None:
    """Warns of a loss that is one number for a batch, and may not follow from those of
    micro-batches.
    """
    combined = "averaged by their rows"
    if scalar.kind == "sum":
        combined = "added up"
    warn(
        f"The loss of output {output!r} is one number for a whole batch, and may be no mean or "
        f"sum over its rows, each on its own: see operation {scalar.unproven!r}. The values of "
        f"micro-batches are {combined}, which is then not the value for the whole batch. If it "
        "is a quotient of two sums, as a masked mean is, `return loss_sum, weight_sum`, the "
        "pair of them, and it is exact. Or return one loss per row or token, as Keras's Dice "
        "and Tversky do with axis=(1, 2, ...). A comparison of rows compares the batch_size "
        "rows of one micro-batch.",
        UserWarning,
    )


def _rows(batch: Batch, axes: int = 1) -> tf.Tensor:
    if batch.mask is None:
        return as_float(math.prod(lengths(tf.nest.flatten(batch.x)[0])[:axes]))
    return tf.reduce_sum(tf.cast(batch.mask, tf.float32))
