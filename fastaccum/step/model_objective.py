"""The objective of a Keras model: its losses, metrics, state, penalty and input checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from fastaccum.adapters.callbacks import log_value
from fastaccum.adapters.label_metrics import ScoredLabels
from fastaccum.adapters.loss_terms import Term
from fastaccum.adapters.losses import BoundLosses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import Matched, Outputs
from fastaccum.adapters.own_loss import OwnLoss, Reduction, named_weights
from fastaccum.adapters.scalar_losses import Factor, divide_out
from fastaccum.basics.attributes import Nest, Variable, raw, restored
from fastaccum.basics.packed_rows import PackedRows
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.graphs.traces import COMPILED
from fastaccum.kernels.shapes import as_float, lengths
from fastaccum.kernels.xla_ops import loop
from fastaccum.layers import documents, float8, forms, lookups
from fastaccum.layers.attention import FusedAttention
from fastaccum.layers.float8 import Float8Layers
from fastaccum.layers.interceptors import Interceptor, intercepting
from fastaccum.layers.scan import ScannedLayers
from fastaccum.step.guards import PATIENCE, IndexChecks, StuckSteps
from fastaccum.step.objective import Objective
from fastaccum.step.options import Options
from fastaccum.step.running_state import RunningState
from fastaccum.step.split_warnings import SplitWarnings

S = TypeVar("S", bound=tuple)  # a nest of scalars


class ForwardPass(NamedTuple):
    """The results of a micro-batch's forward pass."""

    terms: list[Term]  # of the outputs' losses, then of other losses
    y_pred: Nest  # what the model returned
    # Targets, outputs and weights, with labels in range; None if no loss and no metric takes them.
    matched: Matched | None


class Counts(NamedTuple):
    """Sums over micro-batches that the divisors of their losses are computed from: float32."""

    weight_sums: list[tf.Tensor]  # of each term
    factors: list[Factor]  # of each scalar loss
    rows: tf.Tensor  # the valid rows


class Totals(NamedTuple):
    """Totals over all micro-batches of an update, by which each of them computes its part."""

    denominators: list[tf.Tensor]  # of the terms' loss sums
    rows: tf.Tensor  # the valid rows; 0 if no element of them counts in any term


class EvaluationSums(NamedTuple):
    """Sums over the micro-batches of an evaluation: float32, or floats once they are read."""

    loss_sums: list[Any]  # of each term
    weight_sums: list[Any]  # of each term
    factors: list[Factor]  # of each scalar loss


class ModelObjective(Objective):
    """Minimises the losses of a Keras model.

    A stack is a `Batch` of [micro-batches, rows, ...] tensors. The objective is that of Keras on
    the full batch:

        sum_o loss_weight_o * loss_sum_o / weight_sum_o  +  added losses  +  regularisers

    where a scalar added loss is a mean over the rows of a micro-batch, as activity regularisers
    are; or it is the model's own: an overridden `compute_loss`, or the loss that a Hugging Face
    model returns.
    """

    def __init__(
        self,
        model: Model,
        outputs: Outputs,
        losses: BoundLosses,
        metrics: Metrics,
        options: Options,
    ):
        losses = losses.take_over_heads(model, metrics.needed_ranks)
        self.model = model
        self.outputs = outputs
        self.losses = losses
        self.metrics = metrics
        self.options = options
        self.state = model.state
        self.own_loss = None
        if model.overrides("compute_loss"):
            self.own_loss = OwnLoss(model, options.own_loss_reduction)
        self.attention = None
        flash_attention = options.flash_attention
        if flash_attention == "auto" and self.own_loss is not None:
            # A `compute_loss` may ask for derivatives of another kind, which fused attention and
            # batch norm lack.
            flash_attention = False
        if flash_attention:
            self.attention = FusedAttention(flash_attention)

        self.float8 = None
        if options.float8:
            self.float8 = Float8Layers(options.float8, model.exempt_from_float8)
            self.float8_kernels = float8.kernels(model.called_layers)

        scan_layers = options.scan_layers
        if self.own_loss is not None or not options.uses_xla:
            # A `compute_loss` may ask for second derivatives, which loops lack.
            scan_layers = False
        self.scanned = ScannedLayers(
            model.model,
            scan_layers,
            model.trainable_variables,
            self.state,
            model.chains,
            model.apart,
        )
        self.weight_stacks = self.scanned.weight_stacks

        # The class indices come first, then the ids of each embedding.
        checked_lookups = []
        for output in losses.outputs:
            if output.classes is not None:
                checked_lookups.append((f"labels of output {output.name!r}", output.classes))
        self._first_embedding = len(checked_lookups)
        for layer, table_rows in model.lookups:
            checked_lookups.append((f"ids given to embedding {layer.name!r}", table_rows))

        self.has_own_metrics = model.overrides("compute_metrics")
        self._require_logits_unused()

        self.split_warnings = SplitWarnings(model, losses, metrics)

        # The terms are the outputs' losses, then each kind of added loss, or what the model
        # computes itself.
        returned_losses = 0
        if not losses.outputs and self.own_loss is None:
            returned_losses = model.returned_losses
        self._takes_returned_losses = returned_losses > 0
        # A sum is refused for a `compute_loss` too.
        self._added = _added_kinds(model, options.own_loss_reduction)
        reductions_of_model: list[str]
        if self.own_loss is not None:
            self._added = []
            reductions_of_model = [self.own_loss.reduction]
        else:
            reductions_of_model = ["mean"] * returned_losses + self._added
        self.term_weights = [o.weight for o in losses.outputs] + [1.0] * len(reductions_of_model)
        self.reductions = [o.reduction for o in losses.outputs] + reductions_of_model
        self._scalars = losses.scalar_positions
        self.has_several_terms = (
            len(self.term_weights) > 1
            or self.own_loss is not None
            or bool(losses.log_names)
            or bool(self._scalars)
            or any(o.power for o in losses.outputs)
        )

        patience = PATIENCE
        if options.on_nonfinite == "raise":
            patience = 1
        self.running = RunningState(
            losses.log_names, metrics, IndexChecks(checked_lookups), StuckSteps(patience)
        )

    def _require_logits_unused(self) -> None:
        """Raises ValueError if the model's own methods take logits that are never computed."""
        has_own_methods = self.own_loss is not None or self.has_own_metrics
        if self.losses.with_heads and has_own_methods:
            raise ValueError(
                f"{type(self.model.model).__name__} has a compute_loss or compute_metrics of "
                "its own, for logits that LinearCrossEntropy never has: use "
                "keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
            )

    # One micro-batch.

    def forward(
        self,
        batch: Batch,
        training: bool,
        observe: bool = True,
        totals: Totals | None = None,
    ) -> ForwardPass:
        """Computes the terms of the losses of a micro-batch.

        If `observe`, the indices in the micro-batch are checked.
        """
        with contextlib.ExitStack() as scopes:
            if observe:
                scopes.enter_context(intercepting(self._make_id_observers()))
            hidden = scopes.enter_context(self.losses.leave_heads_out())
            if self._takes_returned_losses:
                y_pred, means = self._call_with_losses(batch, training)
            else:
                y_pred = self.model(batch.x, training=training)
                means = []

        if self.own_loss is not None:
            terms = self._own_terms(self.own_loss, batch, y_pred, training, observe, totals)
            matched = None
            if self._has_compiled_metrics:
                matched = self._in_range(self._match(batch, y_pred))
            return ForwardPass(terms, y_pred, matched)

        matched = None
        terms = [Term(mean * weight_sum, weight_sum) for mean, weight_sum in means]
        if self.losses.outputs:
            matched = self._match(batch, y_pred)
            if observe and self.model.takes_targets_apart:
                self._observe(matched.y_true)
            matched = self._in_range(matched)
            terms = self._compiled_terms(matched, hidden, totals)
        elif self._has_compiled_metrics:
            matched = self._in_range(self._match(batch, y_pred))
        return ForwardPass([*terms, *self._added_terms(_rows(batch))], y_pred, matched)

    def _added_terms(self, rows: tf.Tensor) -> list[Term]:
        """Returns the terms of losses that layers have added."""
        terms = []
        for reduction, counted_as in zip(
            self.model.effects.added_reductions, self._added, strict=True
        ):
            loss_sum = self.model.added_loss(reduction)
            if counted_as == "mean":
                loss_sum = loss_sum * rows
            terms.append(Term(loss_sum, rows))
        return terms

    def _make_id_observers(self) -> list[Interceptor]:
        def observe(embedding: int, ids: tf.Tensor) -> None:
            self.running.index_checks.observe(self._first_embedding + embedding, ids)

        return lookups.make_id_observers(self.model.lookups, observe, self.options.uses_xla)

    def _call_with_losses(
        self, batch: Batch, training: bool
    ) -> tuple[Nest, list[tuple[tf.Tensor, tf.Tensor]]]:
        """Calls a model that returns its loss: its outputs, and the means with their weights."""
        if any(weights is not None for weights in tf.nest.flatten(batch.weights)):
            raise ValueError(
                f"The loss that {type(self.model.model).__name__} returns by itself "
                "takes no sample_weight or class_weight: pass a loss to the Trainer."
            )
        return self.model.with_losses(batch.x, _targets(batch), training, batch.mask)

    def _compiled_terms(
        self, matched: Matched, hidden: Mapping[int, tf.Tensor], totals: Totals | None
    ) -> list[Term]:
        """Returns the terms of the outputs' losses."""
        if totals is None:
            return self.losses.terms(matched, hidden)
        return self.losses.terms(matched, hidden, totals.rows)

    def _own_terms(
        self,
        own_loss: OwnLoss,
        batch: Batch,
        y_pred: Nest,
        training: bool,
        observe: bool,
        totals: Totals | None,
    ) -> list[Term]:
        """Returns the terms of a model with a `compute_loss` of its own.

        The terms of the outputs come first, each 0 unless `compute_loss` asks for the compiled
        loss. The last is what `compute_loss` returns.
        """
        rows = _rows(batch)
        if totals is None:
            output_terms, value = self._own_loss_alone(own_loss, batch, y_pred, training, observe)
        else:
            output_terms, value = self._own_loss_of_part(
                own_loss, batch, y_pred, training, observe, totals, rows / totals.rows
            )

        no_loss = Term(tf.constant(0.0), tf.constant(0.0))
        if not output_terms:
            output_terms = [no_loss] * len(self.losses.outputs)
        if own_loss.reduction == "mean":
            value = value * rows
        return [*output_terms, Term(value, rows)]

    def _own_loss_of_part(
        self,
        own_loss: OwnLoss,
        batch: Batch,
        y_pred: Nest,
        training: bool,
        observe: bool,
        totals: Totals,
        share: tf.Tensor,
    ) -> tuple[list[Term], tf.Tensor]:
        """Computes the outputs' terms and `compute_loss` for a micro-batch of an update.

        The train step adds up `share * compute_loss(...)` for a mean over rows, where `share` is
        the micro-batch's part of the rows, and `compute_loss(...)` for a sum. So `compute_loss` is
        given this as its compiled loss:

            compiled = sum_o loss_weight_o * loss_sum_o / denominator_o    # for a sum
            compiled = sum_o loss_weight_o * loss_sum_o / denominator_o / share  # for a mean

        With the update's denominators, either adds up to the compiled loss of all rows.
        """
        output_terms: list[Term] = []

        def compiled(y: Nest, y_pred: Nest, sample_weight: Nest) -> tf.Tensor:
            _require_first(own_loss, output_terms)
            output_terms.extend(self._terms_for_own_loss(y, y_pred, sample_weight, observe, totals))
            loss = _weighted(self.term_weights, output_terms, totals.denominators)
            if own_loss.reduction != "sum":
                loss = loss / share
            return tf.identity(loss, name=COMPILED)

        compute_compiled = None
        if self.losses.outputs:
            compute_compiled = compiled
        value = own_loss(
            batch.x, _targets(batch), y_pred, batch.weights, training, compute_compiled, share
        )
        return output_terms, value

    def _own_loss_alone(
        self, own_loss: OwnLoss, batch: Batch, y_pred: Nest, training: bool, observe: bool
    ) -> tuple[list[Term], tf.Tensor]:
        """Computes the outputs' terms, and what `compute_loss` adds to the compiled loss.

        No totals are known: evaluations and counts add up terms, and divide at the end. The
        compiled loss of the micro-batch alone goes into `compute_loss` and is taken off its result,

            value = compute_loss(..., compiled) - compiled

        since the outputs' terms hold it, with denominators over all rows in the end.
        """
        output_terms: list[Term] = []

        def weighted_sum() -> tf.Tensor:
            factors = self._factors(output_terms)
            weight_sums = [term.weight_sum for term in output_terms]
            denominators = self._denominators(weight_sums, factors)
            loss = _weighted(self.term_weights, output_terms, denominators)
            return tf.identity(loss, name=COMPILED)

        def compiled(y: Nest, y_pred: Nest, sample_weight: Nest) -> tf.Tensor:
            _require_first(own_loss, output_terms)
            output_terms.extend(self._terms_for_own_loss(y, y_pred, sample_weight, observe, None))
            return weighted_sum()

        compute_compiled = None
        if self.losses.outputs:
            compute_compiled = compiled
        value = own_loss(
            batch.x, _targets(batch), y_pred, batch.weights, training, compute_compiled, share=None
        )
        if output_terms:
            value -= weighted_sum()
        return output_terms, value

    def _terms_for_own_loss(
        self, y: Nest, y_pred: Nest, sample_weight: Nest, observe: bool, totals: Totals | None
    ) -> list[Term]:
        """Returns the outputs' terms for what `compute_loss` passes to the compiled loss."""
        matched = self.outputs.matched(y, y_pred, named_weights(sample_weight))
        if observe:
            self._observe(matched.y_true)
        return self._compiled_terms(self._in_range(matched), {}, totals)

    @property
    def _has_compiled_metrics(self) -> bool:
        """True if the metrics that the Trainer was given are updated with each micro-batch."""
        return not self.has_own_metrics and bool(self.metrics.compiled.metrics)

    def _match(self, batch: Batch, y_pred: Nest) -> Matched:
        """Matches a micro-batch's targets and weights with the outputs."""
        y, y_pred = self.model.matched(batch.x, batch.y, y_pred)
        # Where losses and metrics may differ in their targets, `compute_loss` has those of losses.
        valid = self._valid(batch)
        matched = self.outputs.matched_for_metrics(y, y_pred, batch.weights, valid)
        return matched._replace(by_element=isinstance(batch.x, PackedRows))

    def _valid(self, batch: Batch) -> list[tf.Tensor | None]:
        """Lists by output which elements are no padding, in valid rows; None where all are."""
        rows = batch.mask
        unpadded: list[tf.Tensor | None] = [None] * len(self.outputs.names)
        if isinstance(batch.x, PackedRows):
            unpadded = [batch.x.predicts] * len(self.outputs.names)
        elif tf.nest.flatten(batch.real):
            unpadded = self.outputs.targets_of_metrics(batch.real)
        valid: list[tf.Tensor | None] = []
        for elements in unpadded:
            if elements is None:
                valid.append(rows)
            elif rows is None:
                valid.append(elements)
            else:
                other_axes = [1] * (elements.shape.rank - 1)
                valid.append(elements & tf.reshape(rows, [-1, *other_axes]))
        return valid

    def _in_range(self, batch: Matched) -> Matched:
        if self.options.uses_xla:
            return batch
        return self.losses.in_range(batch)

    def update_metrics(
        self, batch: Batch, forward: ForwardPass, training: bool
    ) -> dict[str, tf.Tensor]:
        """Updates the metrics with one micro-batch.

        Returns what a `compute_metrics` of the model's own returns.
        """
        if not self.has_own_metrics:
            if forward.matched is not None and self._has_compiled_metrics:
                self.metrics.update(forward.matched, self._scored_labels(forward.terms))
            return {}

        def update(y: Nest, y_pred: Nest, sample_weight: Nest = None) -> None:
            matched = self.outputs.matched_for_metrics(y, y_pred, sample_weight)
            self.metrics.update(self._in_range(matched), {})

        returned = self.model.compute_metrics(
            batch.x, _targets(batch), forward.y_pred, batch.weights, update
        )
        logs = {}
        for name, value in returned.items():
            if isinstance(value, dict):  # one metric with several results
                logs.update(value)
            else:
                logs[name] = value
        self.metrics.keep(logs, training)
        computed_here = {"loss", *self.running.losses}
        return {name: value for name, value in logs.items() if name not in computed_here}

    def _scored_labels(self, terms: Sequence[Term]) -> dict[int, ScoredLabels]:
        """Returns the scores of labels by output, of those whose logits are never held."""
        scored = {}
        for output, term in zip(self.losses.outputs, terms, strict=False):
            if term.scored is not None:
                scored[output.position] = term.scored
        return scored

    def sums(self, batch: Batch, totals: Totals | None) -> tuple[tf.Tensor, tf.Tensor]:
        forward = self.forward(batch, training=True, totals=totals)
        self.update_metrics(batch, forward, training=True)
        if self.running.tokens is not None and isinstance(batch.x, PackedRows):
            self.running.tokens.add(batch.x, batch.mask)
        terms = forward.terms
        if totals is None:
            (term,) = terms
            (weight,) = self.term_weights
            return _read(weight) * term.loss_sum, term.weight_sum

        rows = _rows(batch)
        parts = []
        for term, denominator in zip(terms, totals.denominators, strict=True):
            parts.append(tf.math.divide_no_nan(term.loss_sum, denominator))
        self.running.add_parts(parts, rows, totals.rows)

        first = 0
        if self.own_loss is not None:
            # A `compute_loss` of the model's own has those of the outputs in it.
            first = len(self.losses.outputs)
        loss = _weighted(self.term_weights[first:], terms[first:], totals.denominators[first:])
        return totals.rows * loss, tf.minimum(rows, totals.rows)

    # One step.

    @contextlib.contextmanager
    def scope(self, training: bool = True, loops: bool = True) -> Iterator[None]:
        """Lets the model compute in other forms inside the block."""
        called = self.model.called_layers
        interceptors: list[Interceptor] = []
        if self.options.uses_xla or self.own_loss is None:
            interceptors += forms.make_forms(called, self.options.uses_xla)
        precision = []
        if self.options.fp32_weight_gradients:
            precision = forms.make_fp32(called)
        if training and self.float8 is not None:
            precision += self.float8.make_forms(called)
        answering: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.attention is not None:
            interceptors += self.attention.make_forms(called)
            answering = self.attention.entered()
        interceptors += documents.make_interceptors(called)
        if loops:
            interceptors += self.scanned.make_loops()
        with answering, intercepting([*interceptors, *precision]):
            yield

    def prepare(self, stacks: Sequence[Batch], counts: Counts | None = None) -> Totals | None:
        """Counts the terms' denominators, so that they share one accumulator, and the valid rows.

        Returns None for one term, whose weight sum the micro-batches add up themselves.
        """
        micro_batches = sum(trip_count(stack) for stack in stacks)
        if micro_batches * self.losses.replicas > 1:
            self.split_warnings.give()
        self.observe_labels(stacks)
        if not self.has_several_terms:
            return None
        if counts is None:
            counts = self.count(*stacks)
        # Without a valid element there is no update.
        any_counts = tf.reduce_any(tf.not_equal(counts.weight_sums, 0.0))
        rows = counts.rows * tf.cast(any_counts, counts.rows.dtype)
        return Totals(self._denominators(counts.weight_sums, counts.factors), rows)

    def _denominators(
        self, weight_sums: Sequence[tf.Tensor], factors: Sequence[Factor]
    ) -> list[tf.Tensor]:
        """Returns the divisor of each term's loss sum.

        There are as many as there are weight sums, which may be those of the outputs' terms alone.
        """
        denominators = []
        for reduction, weight_sum in zip(self.reductions, weight_sums, strict=False):
            if reduction == "sum":
                denominators.append(tf.constant(1.0))
            else:
                denominators.append(weight_sum)
        for k, factor in zip(self._scalars, factors, strict=True):
            denominators[k] = divide_out(denominators[k], factor)
        return denominators

    def _factors(self, terms: Sequence[Term]) -> list[Factor]:
        """Lists the factor of each scalar loss; zeros where it was not computed."""
        factors = []
        for k in self._scalars:
            factor = terms[k].factor
            if factor is None:
                factor = Factor(weighted=tf.constant(0.0), counted=tf.constant(0.0))
            factors.append(factor)
        return factors

    def count(self, *stacks: Batch) -> Counts:
        """Counts over the stacks what the divisors of their losses are computed from.

        All state is left as it was.
        """

        def count(batch: Batch) -> Counts:
            rows = _rows(batch)
            if not self.losses.outputs and not self._takes_returned_losses:
                return Counts([rows] * len(self.term_weights), [], rows)
            terms = self.forward(batch, training=False, observe=False).terms
            weight_sums = [term.weight_sum for term in terms]
            return Counts(weight_sums, self._factors(terms), rows)

        with restored([*self.state, *self.model.metric_variables]):
            return _sum_over(stacks, count, self._zero_counts)

    @property
    def _zero_counts(self) -> Counts:
        zeros = [0.0] * len(self.term_weights)
        return Counts(zeros, [Factor(0.0, 0.0)] * len(self._scalars), 0.0)

    def count_stacked(self, *stacks: Batch) -> tf.Tensor:
        """Counts as `count`, in one tensor that the parts of an update add up: float32 [counts]."""
        return tf.stack(tf.nest.flatten(self.count(*stacks)))

    def unstack_counts(self, stacked: tf.Tensor) -> Counts:
        """Returns the counts that `count_stacked` has stacked."""
        return tf.nest.pack_sequence_as(self._zero_counts, tf.unstack(stacked))

    def rows(self, stacks: Sequence[Batch]) -> tf.Tensor:
        """Counts the valid rows in the stacks."""
        return tf.add_n([_rows(stack, axes=2) for stack in stacks])

    def observe_labels(self, stacks: Sequence[Batch]) -> None:
        """Checks the class indices among the targets, unless a micro-batch alone knows these."""
        if self.model.takes_targets_apart:
            return
        for stack in stacks:
            self._observe(self.outputs.targets(stack.y))

    def _observe(self, y_true: list[tf.Tensor]) -> None:
        for i, labels in enumerate(self.losses.class_indices(y_true)):
            self.running.index_checks.observe(i, labels)

    def denominator(self, weight_sum: tf.Tensor) -> tf.Tensor:
        if self.has_several_terms or self.reductions != ["sum"]:
            return weight_sum
        return tf.cast(weight_sum > 0.0, weight_sum.dtype)

    def penalty(self) -> tf.Tensor | None:
        if self.own_loss is not None:
            return None  # a `compute_loss` of the model's own adds it, or does not
        return self.model.penalty()

    def accepts(self) -> tf.Tensor:
        return self.running.fine()

    def typical_weight(self, stacks: Sequence[Batch]) -> float:
        rows = 0
        for stack in stacks:
            first_input = tf.nest.flatten(stack.x)[0]
            rows += math.prod(first_input.shape[:2])
        if self.has_several_terms or not self.losses.outputs:
            return float(rows)
        (output,) = self.losses.outputs
        target = self.outputs.targets(stacks[0].y)[output.position]
        axes_within_row = target.shape[2:]
        if output.classes is None:
            axes_within_row = target.shape[2:-1]  # without the values of one element
        return float(rows * math.prod(axes_within_row))

    # An evaluation.

    def evaluate(self, *stacks: Batch) -> list[tf.Tensor]:
        """Sums over the stacks what `evaluated` takes, and updates the metrics."""

        def sums(batch: Batch) -> EvaluationSums:
            forward = self.forward(batch, training=False)
            self.update_metrics(batch, forward, training=False)
            loss_sums = [term.loss_sum for term in forward.terms]
            weight_sums = [term.weight_sum for term in forward.terms]
            return EvaluationSums(loss_sums, weight_sums, self._factors(forward.terms))

        self.observe_labels(stacks)
        with self.scope(training=False):
            return tf.nest.flatten(_sum_over(stacks, sums, self._zero_evaluation))

    @property
    def _zero_evaluation(self) -> EvaluationSums:
        zeros = [0.0] * len(self.term_weights)
        return EvaluationSums(zeros, zeros, [Factor(0.0, 0.0)] * len(self._scalars))

    def evaluated(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the logs of an evaluation, from the sums of its dispatches so far.

        `model.metrics` has them too.
        """
        loss_sums, weight_sums, factors = tf.nest.pack_sequence_as(self._zero_evaluation, sums)
        denominators = self._denominators(weight_sums, factors)
        unnamed = len(self.term_weights) - len(self.running.losses)
        names = [*self.running.losses, *[None] * unnamed]

        loss = 0.0
        loss_by_name = {}
        terms = zip(names, self.term_weights, loss_sums, denominators, strict=True)
        for name, weight, loss_sum, denominator in terms:
            value = 0.0
            if denominator:
                value = loss_sum / float(denominator)
            loss += float(_read(weight)) * value
            if name is not None:
                loss_by_name[name] = value
        penalty = self.penalty()
        if penalty is not None:
            loss += float(penalty)

        losses = {"loss": loss, **loss_by_name}
        self.running.show(losses)
        logs = {}
        for name, value in self.metrics.logs(losses, training=False).items():
            if tf.is_tensor(value):
                value = log_value(value)
            logs[name] = value
        return logs

    def in_order(self, logs: Mapping[str, float]) -> list[str]:
        """Returns the logs' names in the order of Keras's `evaluate`."""
        known = [
            "loss",
            *(metric.name for metric in self.metrics.compiled.metrics),
            *self.losses.log_names,
        ]
        return self.outputs.sort_logs(logs, known)


def _added_kinds(model: Model, scalars: Reduction) -> list[str]:
    """Returns how each kind of the model's added losses is reduced over rows.

    `scalars` is the reduction of those losses that are scalars.
    """
    if scalars == "mean":
        return model.effects.added_reductions
    regularised = []
    for layer in model.layers:
        if getattr(layer, "activity_regularizer", None) is not None:
            regularised.append(layer.name)
    if regularised:
        raise ValueError(
            f"own_loss_reduction='sum', but the activity regularisers of {regularised} are means "
            "over rows. Call add_loss in their place, with a sum, or with one value for each row, "
            "which needs no own_loss_reduction."
        )
    if model.compute_loss_adds_penalty:
        raise ValueError(
            "own_loss_reduction='sum', but the compute_loss of a tf_keras model adds the weight "
            "regularisers in each micro-batch, and a sum would count them once for each: let "
            "compute_loss return a mean over rows."
        )
    return ["sum"] * len(model.effects.added_reductions)


def _require_first(own_loss: OwnLoss, output_terms: Sequence[Term]) -> None:
    """Raises ValueError if `compute_loss` has computed the compiled loss before."""
    if output_terms:
        raise ValueError(
            f"{own_loss.name} computes the compiled loss more than once, and each would "
            "need denominators of its own: call a Keras loss object for the others."
        )


def _read(weight: float | Variable) -> float | tf.Tensor:
    """Returns a loss's weight, as a variable has it now: read in each step, as in Keras."""
    if isinstance(weight, float):
        return weight
    return tf.cast(raw(weight).read_value(), tf.float32)


def _weighted(
    weights: Sequence[float | Variable], terms: Sequence[Term], denominators: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Sums weighted terms over their denominators.

    There may be more weights and denominators than terms.
    """
    parts = []
    for weight, term, denominator in zip(weights, terms, denominators, strict=False):
        parts.append(_read(weight) * tf.math.divide_no_nan(term.loss_sum, denominator))
    return tf.add_n(parts)


def _sum_over(stacks: Sequence[Batch], fn: Callable[[Batch], S], zeros: S) -> S:
    """Sums `fn(micro_batch)`, float32 scalars in the nest of `zeros`, over every micro-batch."""
    zero = tf.constant(0.0)
    totals = tf.nest.map_structure(lambda _: zero, zeros)
    for stack in stacks:

        def body(i: tf.Tensor, totals: S, stack: Batch = stack) -> list[S]:
            micro_batch = tf.nest.map_structure(lambda t: tf.gather(t, i), stack)
            return [tf.nest.map_structure(tf.add, totals, fn(micro_batch))]

        (totals,) = loop(trip_count(stack), body, [totals])
    return totals


def _targets(batch: Batch) -> Nest:
    if not tf.nest.flatten(batch.y):
        return None
    return batch.y


def _rows(batch: Batch, axes: int = 1) -> tf.Tensor:
    if batch.mask is None:
        first_input = tf.nest.flatten(batch.x)[0]
        return as_float(math.prod(lengths(first_input)[:axes]))
    return tf.reduce_sum(tf.cast(batch.mask, tf.float32))
