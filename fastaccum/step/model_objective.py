"""What a Keras model adds to the train step: its losses, metrics, state, penalty and input checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from fastaccum.adapters.callbacks import log_value
from fastaccum.adapters.losses import Losses, Term
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import Matched, Outputs
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.kernels.xla_ops import has_gpu, loop
from fastaccum.step.guards import PATIENCE, IndexChecks, StuckSteps
from fastaccum.step.options import Options
from fastaccum.step.running_state import RunningState
from fastaccum.step.train_step import Objective


class ModelObjective(Objective):
    """What a model adds to the train step; a stack is a `Batch` of [micro-batches, rows, ...] tensors.

    The objective is that of Keras on the full batch:

        sum_o loss_weight_o * loss_sum_o / weight_sum_o  +  added losses  +  regularisers

    where a scalar added loss is a mean over the rows of its micro-batch, as activity regularisers are.
    """

    def __init__(self, model: Model, outputs: Outputs, losses: Losses, metrics: Metrics, options: Options):
        self.model, self.outputs, self.losses, self.metrics = model, outputs, losses, metrics
        self.options = options
        self.state = model.state
        labelled = [(o.name, o.classes) for o in losses.outputs if o.classes is not None]
        lookups = [(f"labels of output {name!r}", classes) for name, classes in labelled]
        lookups += [(f"ids given to embedding {layer.name!r}", rows) for layer, rows in model.lookups]
        self._first_embedding = len(labelled)
        for output in losses.take_over_heads(model):
            metrics.require_none(output.position, output.name)
        self._added = model.added_reductions
        # The terms are the outputs' losses, then each kind of added loss.
        self.term_weights = [o.weight for o in losses.outputs] + [1.0] * len(self._added)
        self.reductions = [o.loss.reduction for o in losses.outputs] + self._added
        self.has_several_terms = len(self.term_weights) > 1
        self.running = RunningState(
            losses.log_names,
            metrics,
            IndexChecks(lookups),
            StuckSteps(patience=1 if options.on_nonfinite == "raise" else PATIENCE),
        )

    # One micro-batch.

    def terms(self, batch: Batch, training: bool, observe: bool = True) -> tuple[list[Term], Matched]:
        """Every output's loss sum and weight sum, then those of added losses; and the outputs with their targets.

        With `observe` the ids that embeddings look up are checked.
        """
        checks = self.running.index_checks
        with contextlib.ExitStack() as scopes:
            if observe:
                first = self._first_embedding
                scopes.enter_context(self.model.observed_ids(lambda i, ids: checks.observe(first + i, ids)))
            hidden = scopes.enter_context(self.losses.heads_left_out())
            y_pred = self.model(batch.x, training=training)
        matched = self.outputs.matched(batch.y, y_pred, batch.weights)
        terms = self.losses.terms(matched, batch.mask, hidden)
        rows = _rows(batch)
        for reduction in self._added:
            added = self.model.added_loss(reduction)
            terms.append(Term(added * rows if reduction == "mean" else added, rows))
        return terms, matched

    def sums(self, batch: Batch, prepared: list[tf.Tensor] | None) -> tuple[tf.Tensor, tf.Tensor]:
        terms, matched = self.terms(batch, training=True)
        self.metrics.update(matched, batch.mask)
        if prepared is None:
            (only,), (weight,) = terms, self.term_weights
            return weight * only.loss_sum, only.weight_sum
        *denominators, all_rows = prepared
        rows = _rows(batch)
        # The shares of a step's micro-batches in a sum add up to one.
        share = rows / all_rows
        counts = [share if r == "sum" else t.weight_sum for t, r in zip(terms, self.reductions, strict=True)]
        self.running.add_terms(terms, counts)
        parts = [
            weight * tf.math.divide_no_nan(t.loss_sum, denominator)
            for weight, t, denominator in zip(self.term_weights, terms, denominators, strict=True)
        ]
        return all_rows * tf.add_n(parts), rows

    # One step.

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as scopes:
            if self.options.fp32_weight_gradients:
                scopes.enter_context(self.model.fp32_weight_gradients())
            if self.options.jit_compile:
                scopes.enter_context(self.model.compiled_layers(fast_gradients=not has_gpu()))
            yield

    def prepare(self, stacks: Sequence[Batch], counts: list[tf.Tensor] | None = None) -> list[tf.Tensor] | None:
        """Each term's denominator and the number of valid rows, where there are several terms.

        Several losses, each with a denominator of its own, share one accumulator only if the denominators are known
        before the first gradient. XLA drops from the counting pass whatever they do not depend on.
        """
        self.observe_labels(stacks)
        if not self.has_several_terms:
            return None
        *weight_sums, rows = self.count(*stacks) if counts is None else counts
        sums = zip(self.reductions, weight_sums, strict=True)
        return [*(tf.constant(1.0) if reduction == "sum" else weight for reduction, weight in sums), rows]

    def count(self, *stacks: Batch) -> list[tf.Tensor]:
        """Each term's weight sum over the stacks, and the number of valid rows."""

        def count(batch):
            terms, _ = self.terms(batch, training=False, observe=False)
            return [*(t.weight_sum for t in terms), _rows(batch)]

        return _sum_over(stacks, count, len(self.term_weights) + 1)

    def observe_labels(self, stacks: Sequence[Batch]) -> None:
        """Checks the class indices among the targets."""
        for stack in stacks:
            for i, labels in enumerate(self.losses.class_indices(self.outputs.targets(stack.y))):
                self.running.index_checks.observe(i, labels)

    def denominator(self, weight_sum: tf.Tensor) -> tf.Tensor:
        return weight_sum if self.has_several_terms else self.losses.denominator(weight_sum)

    def penalty(self) -> tf.Tensor | None:
        return self.model.penalty()

    def accepts(self) -> tf.Tensor:
        return self.running.fine()

    def typical_weight(self, stacks: Sequence[Batch]) -> float:
        rows = sum(math.prod(tf.nest.flatten(stack.x)[0].shape[:2]) for stack in stacks)
        if self.has_several_terms:
            return float(rows)
        only = self.losses.outputs[0]
        target = self.outputs.targets(stacks[0].y)[only.position]
        inner = target.shape[2:-1] if only.classes is None else target.shape[2:]
        return float(rows * math.prod(inner))

    # An evaluation.

    def evaluate(self, *stacks: Batch) -> list[tf.Tensor]:
        """Sums over the stacks: every term's loss sum, then every term's weight sum. Updates the metrics."""

        def sums(batch):
            terms, matched = self.terms(batch, training=False)
            self.metrics.update(matched, batch.mask)
            return [*(t.loss_sum for t in terms), *(t.weight_sum for t in terms)]

        self.observe_labels(stacks)
        with self.scope():
            return _sum_over(stacks, sums, 2 * len(self.term_weights))

    def evaluated(self, sums: Sequence[float]) -> dict[str, float]:
        """The logs of an evaluation, from the sums of all its dispatches."""
        half = len(sums) // 2
        loss, logs = 0.0, {}
        names = [*self.running.losses] + [None] * (half - len(self.running.losses))
        for name, weight, reduction, loss_sum, weight_sum in zip(
            names, self.term_weights, self.reductions, sums[:half], sums[half:], strict=True
        ):
            value = loss_sum if reduction == "sum" else loss_sum / weight_sum if weight_sum else 0.0
            loss += weight * value
            if name is not None:
                logs[name] = value
        penalty = self.penalty()
        loss += 0.0 if penalty is None else float(penalty)
        return {"loss": loss, **logs, **{k: log_value(v) for k, v in self.metrics.result().items()}}


def _sum_over(stacks: Sequence[Batch], fn: Callable[[Batch], list[tf.Tensor]], size: int) -> list[tf.Tensor]:
    """The sums of `fn(micro_batch)`, a list of `size` float32 scalars, over every micro-batch."""
    totals = [tf.constant(0.0)] * size
    for stack in stacks:

        def body(i, *totals, stack=stack):
            values = fn(tf.nest.map_structure(lambda t: tf.gather(t, i), stack))
            return [a + b for a, b in zip(totals, values, strict=True)]

        totals = loop(trip_count(stack), body, totals)
    return totals


def _rows(batch: Batch) -> tf.Tensor:
    if batch.mask is None:
        return tf.constant(float(tf.nest.flatten(batch.x)[0].shape[0]))
    return tf.reduce_sum(tf.cast(batch.mask, tf.float32))
