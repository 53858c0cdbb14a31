"""The train step of a Keras model: its losses, metrics, state and input checks around the fused cycle."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.autograph.impl import api as autograph

from fastaccum.adapters import models
from fastaccum.adapters.callbacks import log_value
from fastaccum.adapters.losses import Losses, Term
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.outputs import Matched, Outputs
from fastaccum.data.stacks import Batch, Dispatch, trip_count
from fastaccum.kernels.device import has_gpu
from fastaccum.step import diagnosis
from fastaccum.step.index_checks import IndexChecks
from fastaccum.step.nonfinite import PATIENCE, StuckSteps
from fastaccum.step.program import Program
from fastaccum.step.train_step import StepResult, TrainStep


class Executed(NamedTuple):
    """What one dispatch of the compiled program returns: all on the device, to be read late.

    Attributes:
        result: the last train step's.
        logs: running means since the last reset, by log name.
        indices: what `IndexChecks.require` needs to find labels or ids out of range.
        stuck: what `StuckSteps.since_end` needs to find training that can only skip.
        fine: whether there is nothing of either to find: bool.
    """

    result: StepResult
    logs: dict[str, tf.Tensor]
    indices: tf.Tensor
    stuck: tf.Tensor
    fine: tf.Tensor


class Unread:
    """A dispatch whose outcome has not been read yet: `require` reads it, raises what it has to say, and lets go of its
    data, which whoever keeps the logs would hold with them.
    """

    def __init__(self, step: ModelStep, executed: Executed, dispatch: Dispatch):
        self._parts: tuple[ModelStep, Executed, Dispatch] | None = (step, executed, dispatch)

    def require(self) -> None:
        if self._parts is not None:
            step, executed, dispatch = self._parts
            step.require(executed, dispatch)
            self._parts = None


class ModelStep(TrainStep):
    """`TrainStep` for a model: a stack is a `Batch` of [micro-batches, rows, ...] tensors.

    The objective is that of Keras on the full batch:

        sum_o loss_weight_o * loss_sum_o / weight_sum_o  +  added losses  +  regularisers

    where a scalar added loss is a mean over the rows of its micro-batch, as activity regularisers are.
    """

    def __init__(
        self,
        model: models.Model,
        outputs: Outputs,
        losses: Losses,
        metrics: Metrics,
        optimizer: Any,
        *,
        jit_compile: bool,
        fp32_weight_gradients: bool,
        on_nonfinite: str,
        **options,
    ):
        self.model, self.outputs, self.losses, self.metrics = model, outputs, losses, metrics
        self.on_nonfinite = on_nonfinite
        self.stuck_steps = StuckSteps(patience=1 if on_nonfinite == "raise" else PATIENCE)
        self._jit_compile = jit_compile
        self._fp32_weight_gradients = fp32_weight_gradients
        labelled = [(o.name, o.classes) for o in losses.outputs if o.classes is not None]
        self.index_checks = IndexChecks(
            [(f"labels of output {name!r}", classes) for name, classes in labelled]
            + [(f"ids given to embedding {layer.name!r}", layer.input_dim) for layer in model.embeddings]
        )
        self._first_embedding = len(labelled)
        for output in losses.take_over_heads(model):
            metrics.require_none(output)
        self._added = model.added_reductions
        self._loss_means = {
            f"{output.name}_loss": keras.metrics.Mean() for output in losses.outputs if len(losses.outputs) > 1
        }
        self._loss_mean = keras.metrics.Mean()
        self._skipped = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
        self._denominators: list[tf.Tensor] | None = None
        super().__init__(
            self._objective,
            model.trainable_variables,
            optimizer,
            state=model.state,
            jit_compile=jit_compile,
            **options,
        )
        self.compiled_execute = Program(self.execute, jit_compile)
        self.compiled_execute_many = Program(self.execute_many, jit_compile)
        self.compiled_evaluate = Program(self.evaluate, jit_compile)

    # One micro-batch.

    def terms(self, batch: Batch, training: bool) -> tuple[list[Term], Matched]:
        """Every output's loss sum and weight sum, then those of added losses; and the batch by output."""
        checks = self.index_checks
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(self.model.observed_ids(lambda i, ids: checks.observe(self._first_embedding + i, ids)))
            hidden = scopes.enter_context(self.losses.heads_left_out())
            y_pred = self.model(batch.x, training=training)
        matched = self.outputs.matched(batch.y, y_pred, batch.weights)
        terms = self.losses.terms(matched, batch.mask, hidden)
        rows = _rows(batch)
        for reduction in self._added:
            added = self.model.added_loss(reduction)
            terms.append(Term(added * rows if reduction == "mean" else added, rows))
        return terms, matched

    @property
    def _term_weights(self) -> list[float]:
        return [o.weight for o in self.losses.outputs] + [1.0] * len(self._added)

    @property
    def _reductions(self) -> list[str | None]:
        return [o.loss.reduction for o in self.losses.outputs] + self._added

    @autograph.do_not_convert
    def _objective(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        terms, matched = self.terms(batch, training=True)
        for mean, t, reduction in zip(self._loss_means.values(), terms, self._reductions, strict=False):
            # The shares of a step's micro-batches in a sum add up to one.
            count = _rows(batch) / self._denominators[-1] if reduction == "sum" else t.weight_sum
            mean.update_state(tf.math.divide_no_nan(t.loss_sum, count), count)
        self.metrics.update(matched, batch.mask)
        if self._denominators is None:
            (only,), (weight,) = terms, self._term_weights
            return weight * only.loss_sum, only.weight_sum
        *denominators, all_rows = self._denominators
        parts = [
            weight * tf.math.divide_no_nan(t.loss_sum, denominator)
            for weight, t, denominator in zip(self._term_weights, terms, denominators, strict=True)
        ]
        return all_rows * tf.add_n(parts), _rows(batch)

    # One stack.

    def accumulate(self, *stacks: Batch):
        # Around the backward pass too: a layer that recomputes its activations there is called again.
        with self._layers_as_compiled():
            # Several losses, each with a divisor of its own, share one accumulator only if the divisors are
            # known before the first gradient. XLA drops from this pass whatever they do not depend on.
            self._denominators = self._divisors(self._counts(*stacks)) if self._has_several_terms else None
            self._observe_labels(*stacks)
            return super().accumulate(*stacks)

    @property
    def _has_several_terms(self) -> bool:
        return len(self._term_weights) > 1

    def _counts(self, *stacks: Batch) -> list[tf.Tensor]:
        """What `count` returns, over the stacks of all devices."""
        return self.count(*stacks)

    @contextlib.contextmanager
    def _layers_as_compiled(self):
        with contextlib.ExitStack() as scopes:
            if self._fp32_weight_gradients:
                scopes.enter_context(self.model.fp32_weight_gradients())
            if self._jit_compile:
                scopes.enter_context(self.model.compiled_layers(fast_gradients=not has_gpu()))
            yield

    def _observe_labels(self, *stacks: Batch) -> None:
        for stack in stacks:
            for i, labels in enumerate(self.losses.class_indices(self.outputs.match(stack.y, "y"))):
                self.index_checks.observe(i, labels)

    def count(self, *stacks: Batch) -> list[tf.Tensor]:
        """Each term's weight sum over the stacks, and the number of valid rows."""

        def count(batch):
            with self.index_checks.paused():
                terms, _ = self.terms(batch, training=False)
            return [*(t.weight_sum for t in terms), _rows(batch)]

        return _sum_over(stacks, count, len(self._term_weights) + 1)

    def _divisors(self, counts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Each term's divisor, and the number of valid rows."""
        *weight_sums, rows = counts
        return [
            tf.constant(1.0) if reduction == "sum" else weight_sum
            for reduction, weight_sum in zip(self._reductions, weight_sums, strict=True)
        ] + [rows]

    def _divisor(self, weight_sum: tf.Tensor) -> tf.Tensor:
        return self.losses.divisor(weight_sum) if self._denominators is None else weight_sum

    def _penalty(self) -> tf.Tensor | None:
        return self.model.penalty()

    def _accept(self) -> tf.Tensor:
        return self._fine()

    def _fine(self) -> tf.Tensor:
        return self.index_checks.in_range() & self.stuck_steps.running()

    def _typical_weight(self, *stacks: Batch) -> float:
        rows = sum(math.prod(tf.nest.flatten(stack.x)[0].shape[:2]) for stack in stacks)
        if self._denominators is not None:
            return float(rows)
        targets = tf.nest.flatten(stacks[0].y)
        inner = targets[0].shape[2:-1] if self.losses.outputs[0].classes is None else targets[0].shape[2:]
        return float(rows * math.prod(inner))

    # One dispatch.

    def dispatch(self, dispatch: Dispatch) -> Executed:
        """Runs the train steps of a dispatch."""
        program = self.compiled_execute_many if dispatch.is_multi_step else self.compiled_execute
        return program(*dispatch.stacks)

    place = ""  # how the error of a step that is not finite begins, where it may lie elsewhere

    def on_one_device(self) -> contextlib.AbstractContextManager:
        """Within it the model runs as if there were no other devices: as it does anyway on one."""
        return contextlib.nullcontext()

    def together(
        self, source: Any, dispatches: Iterator[Dispatch], steps: int | None, training: bool = True
    ) -> Iterator[Dispatch]:
        """The dispatches of a pass, which all workers have as many of: on one, any pass."""
        return dispatches

    def execute(self, *stacks: Batch) -> Executed:
        """One train step on the stacks, one after the other, and the logs so far."""
        return self._report(self._tracked(self.loss_scale.scale(), self.run(*stacks)))

    def execute_many(self, stack: Batch) -> Executed:
        """Train steps over the leading axis of [steps, micro-batches, rows, ...], in one program."""
        steps = trip_count(stack)

        def body(i, _):
            step = tf.nest.map_structure(lambda t: tf.gather(t, i), stack)
            return i + 1, self._tracked(self.loss_scale.scale(), self.run(step))

        nothing = StepResult(*(tf.zeros([], d) for d in (tf.float32, tf.float32, tf.float32, tf.bool, tf.float32)))
        _, result = tf.while_loop(
            lambda i, _: i < steps,
            body,
            (tf.constant(0), nothing),
            parallel_iterations=1,
        )
        return self._report(result)

    def _tracked(self, scale: tf.Tensor, result: StepResult) -> StepResult:
        """`result`, counted in the logs; `scale` is the loss scale that the step began with."""
        valid = tf.not_equal(result.weight, 0.0)
        skipped = ~result.grads_finite & valid
        self.stuck_steps.count(skipped & (result.loss_scale >= scale), valid)
        self._loss_mean.update_state(result.loss, result.weight)
        self._skipped.assign_add(tf.cast(skipped, tf.int64))
        return result

    def _report(self, result: StepResult) -> Executed:
        logs = {
            "loss": self._loss_mean.result(),
            **{name: mean.result() for name, mean in self._loss_means.items()},
            **self.metrics.result(),
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_steps": self._skipped.read_value(),
        }
        return Executed(result, logs, self.index_checks.seen(), self.stuck_steps.seen(), self._fine())

    def require(self, executed: Executed, dispatch: Dispatch) -> None:
        """Raises what a dispatch has to say; waits for it.

        Raises:
            ValueError: labels or ids out of range.
            NonFiniteError: training that can only skip its steps.
        """
        if executed.fine:
            return
        self.index_checks.require(executed.indices)
        since = self.stuck_steps.since_end(executed.stuck)
        if since is None:
            return
        stacks = dispatch.stacks
        if dispatch.is_multi_step:
            (stack,) = stacks
            stacks = (tf.nest.map_structure(lambda t: t[self._steps_run(dispatch) - 1 - since], stack),)
        try:
            raise diagnosis.error(self, stacks)
        finally:
            self.stuck_steps.reset()

    def _steps_run(self, dispatch: Dispatch) -> int:
        """How many steps a dispatch of many runs: here those that only pad it too."""
        return trip_count(dispatch.stacks)

    @property
    def running(self) -> list[tf.Variable]:
        """What a step changes beside model, optimizer and loss scale: means of logs, skipped steps, indices seen.

        Not the stuck steps: who resumes training that was stuck may have mended the cause.
        """
        means = [v.value for mean in (self._loss_mean, *self._loss_means.values()) for v in mean.variables]
        return [*means, *self.metrics.variables, self._skipped, *self.index_checks.variables]

    def reset(self) -> None:
        """Starts the running means of a new epoch."""
        for mean in (self._loss_mean, *self._loss_means.values()):
            mean.reset_state()
        self.metrics.reset()
        self._skipped.assign(0)
        self.stuck_steps.start_epoch()
        # What a fit that broke off had seen is not this one's.
        self.index_checks.reset()

    def evaluate(self, *stacks: Batch) -> list[tf.Tensor]:
        """Sums over the stacks: every term's loss sum, then every term's weight sum. Updates the metrics."""

        def sums(batch):
            terms, matched = self.terms(batch, training=False)
            self.metrics.update(matched, batch.mask)
            return [*(t.loss_sum for t in terms), *(t.weight_sum for t in terms)]

        self._observe_labels(*stacks)
        with self._layers_as_compiled():
            return [*_sum_over(stacks, sums, 2 * len(self._term_weights)), self.index_checks.seen()]

    def evaluated(self, sums: list[float]) -> dict[str, float]:
        """The logs of an evaluation, from the sums of all its dispatches."""
        half = len(sums) // 2
        loss, logs = 0.0, {}
        names = [*self._loss_means] + [None] * (half - len(self._loss_means))
        reductions = self._reductions
        for name, weight, reduction, loss_sum, weight_sum in zip(
            names, self._term_weights, reductions, sums[:half], sums[half:], strict=True
        ):
            value = loss_sum if reduction == "sum" else loss_sum / weight_sum if weight_sum else 0.0
            loss += weight * value
            if name is not None:
                logs[name] = value
        penalty = self.model.penalty()
        loss += 0.0 if penalty is None else float(penalty)
        return {"loss": loss, **logs, **{k: log_value(v) for k, v in self.metrics.result().items()}}


def _sum_over(stacks, fn, size: int) -> list[tf.Tensor]:
    """The sums of `fn(micro_batch)`, a list of `size` float32 scalars, over every micro-batch."""
    totals = [tf.constant(0.0)] * size
    for stack in stacks:
        steps = trip_count(stack)

        def body(i, *totals, stack=stack):
            values = fn(tf.nest.map_structure(lambda t: tf.gather(t, i), stack))
            return [i + 1, *(a + b for a, b in zip(totals, values, strict=True))]

        _, *totals = tf.while_loop(
            lambda i, *_, steps=steps: i < steps,
            body,
            [tf.constant(0), *totals],
            parallel_iterations=1,
        )
    return totals


def _rows(batch: Batch) -> tf.Tensor:
    if batch.mask is None:
        return tf.constant(float(tf.nest.flatten(batch.x)[0].shape[0]))
    return tf.reduce_sum(tf.cast(batch.mask, tf.float32))
