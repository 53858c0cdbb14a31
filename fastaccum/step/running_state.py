"""Running logs and guards: what train steps change beside model, optimizer and loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from fastaccum.adapters.metrics import Metrics
from fastaccum.step.guards import IndexChecks, StuckSteps
from fastaccum.step.token_counts import TokenCounts
from fastaccum.step.train_step import StepResult


class Executed(NamedTuple):
    """The results of a dispatch, on the device. Reading one waits for the dispatch."""

    result: StepResult  # the last train step's
    logs: dict[str, tf.Tensor]  # running means since the last reset
    indices: tf.Tensor  # for `IndexChecks.require`, to find labels or ids out of range
    stuck: tf.Tensor  # for `StuckSteps.since_end`, to find training that can only skip
    fine: tf.Tensor  # bool: there is nothing of either to find


class RunningState:
    """The running means of losses, the metrics, the count of skipped steps, and the guards.

    The means are weighted by rows, as in Keras.

    Attributes:
        tokens: the counts of packed rows' tokens; None where rows are not packed.
    """

    def __init__(
        self,
        loss_names: Sequence[str],
        metrics: Metrics,
        index_checks: IndexChecks,
        stuck_steps: StuckSteps,
    ):
        self.metrics = metrics
        self.index_checks = index_checks
        self.stuck_steps = stuck_steps
        self.loss = keras.metrics.Mean()
        self.losses = {name: keras.metrics.Mean() for name in loss_names}
        for name, mean in self.means.items():
            # The name in `model.metrics`. The variables keep the names that checkpoints know.
            mean.name = name
        self.tokens: TokenCounts | None = None
        self.skipped = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")

    @property
    def means(self) -> dict[str, keras.metrics.Mean]:
        """The running means of the loss and of each output's loss, by their names in the logs."""
        return {"loss": self.loss, **self.losses}

    @property
    def log_variables(self) -> list[tf.Variable]:
        """The variables that the logs of losses and metrics are computed from."""
        return [*_variables_of(self.means), *self.metrics.variables, *self._token_variables]

    @property
    def micro_batch_variables(self) -> list[tf.Variable]:
        """The variables that every micro-batch adds to.

        They start at zero and are added to, except those of metrics that users wrote.
        """
        return [*self.metrics.variables, *_variables_of(self.losses), *self._token_variables]

    @property
    def _token_variables(self) -> list[tf.Variable]:
        return [] if self.tokens is None else self.tokens.variables

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that a checkpoint saves.

        The count of stuck steps is not saved: their cause may have been mended before a resume.
        """
        return [*self.log_variables, self.skipped, *self.index_checks.variables]

    def require_free(self, names: Sequence[str]) -> None:
        """Raises ValueError if a metric has one of these names in the logs."""
        for metric in (*self.metrics.compiled.metrics, *self.metrics.own):
            if metric.name in names:
                raise ValueError(
                    f"A metric is called {metric.name!r}, as a share of tokens in the logs of "
                    "packed rows is: give it another name."
                )

    def reset_logs(self) -> None:
        """Starts the running means and metrics, as of an epoch or an evaluation."""
        for mean in self.means.values():
            mean.reset_state()
        self.metrics.reset()
        if self.tokens is not None:
            self.tokens.reset()

    def show(self, losses: Mapping[str, float]) -> None:
        """Sets the means, which `model.metrics` shows, to the losses of an evaluation."""
        for name, mean in self.means.items():
            mean.reset_state()
            mean.update_state(losses[name])

    def reset(self) -> None:
        """Starts an epoch: the logs, the count of skipped steps and the guards."""
        self.reset_logs()
        self.skipped.assign(0)
        self.stuck_steps.start_epoch()
        self.index_checks.reset()  # what a fit that broke off had seen is not this one's

    def fine(self) -> tf.Tensor:
        """Returns whether the guards have found nothing, so steps may be applied: bool scalar."""
        return self.index_checks.in_range() & self.stuck_steps.running()

    def add_parts(self, parts: Sequence[tf.Tensor], rows: tf.Tensor, all_rows: tf.Tensor) -> None:
        """Adds to the means a micro-batch's part of each loss.

        The micro-batch has `rows` of the step's `all_rows`. A step's loss is the sum of its parts,
        and counts in the mean once for each of all rows.
        """
        # The mean adds value x rows to its total. With this value that is part x all_rows, which
        # sums over the step to loss x all_rows. A single loss has no mean beside `self.loss`.
        for mean, part in zip(self.losses.values(), parts, strict=False):
            mean.update_state(tf.math.divide_no_nan(part * all_rows, rows), rows)

    def add_step(self, scale: tf.Tensor, result: StepResult, rows: tf.Tensor) -> StepResult:
        """Counts a train step of `rows` rows that began with the loss scale `scale`.

        Returns the step's result.
        """
        valid = tf.not_equal(result.weight, 0.0)
        skipped = ~result.grads_finite & valid
        # A skipped step that lowers the scale may help the next; one that does not is stuck.
        is_stuck = skipped & (result.loss_scale >= scale)
        self.stuck_steps.count(is_stuck, valid)
        self.loss.update_state(result.loss, rows)
        self.skipped.assign_add(tf.cast(skipped, tf.int64))
        return result

    def report(self, result: StepResult, fine: tf.Tensor | bool = True) -> Executed:
        """Reports the logs so far and what the guards saw.

        `fine` is False where another device has an error.
        """
        losses = {name: mean.result() for name, mean in self.means.items()}
        logs = {
            **self.metrics.logs(losses, training=True),
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_steps": self.skipped.read_value(),
        }
        if self.tokens is not None:
            logs.update(self.tokens.logs())
        return Executed(
            result=result,
            logs=logs,
            indices=self.index_checks.seen(),
            stuck=self.stuck_steps.seen(),
            fine=self.fine() & fine,
        )

    def savable(self) -> bool:
        """Returns False while all steps are skipped; raises ValueError for indices out of range."""
        if self.stuck_steps.since_end(self.stuck_steps.seen()) is not None:
            return False
        self.index_checks.require(self.index_checks.seen())
        return True


def _variables_of(means: Mapping[str, keras.metrics.Mean]) -> list[tf.Variable]:
    variables = []
    for mean in means.values():
        variables += [variable.value for variable in mean.variables]
    return variables
