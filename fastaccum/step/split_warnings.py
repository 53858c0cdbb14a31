"""Warnings of losses, metrics and layers whose values depend on how an update is split."""

from __future__ import annotations

from fastaccum.adapters.losses import BoundLosses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.scalar_losses import ScalarLoss
from fastaccum.basics.warnings import warn


class SplitWarnings:
    """The warnings that a step gives where it splits the rows of an update.

    Attributes:
        mixing: what mixes rows, as a warning names it, with the operation by which it does.
    """

    def __init__(self, model: Model, losses: BoundLosses, metrics: Metrics):
        self._model = model
        self._metrics = metrics
        self.mixing = {
            f"The metric {name!r}": operation for name, operation in metrics.mixing.items()
        }
        self._unproven_losses = dict(losses.unproven)

    def give(self) -> None:
        """Warns of what is known so far, of each once."""
        while self.mixing:
            _warn_of_mixing(*self.mixing.popitem())
        while self._unproven_losses:
            _warn_of_scalar(*self._unproven_losses.popitem())
        row_counter = self._model.effects.row_counter
        if row_counter:
            self._model.effects.row_counter = None
            warn(
                f"A layer of {self._model.model.name!r} computes with the number of rows in its "
                f"batch (see {row_counter}). Here that is the number of rows of a micro-batch on "
                "one replica, and not of the update. Give the layer a number of its own, such as "
                "batch_size * gradient_accumulation_steps.",
                UserWarning,
            )
        names = self._metrics.of_last_micro_batch
        if names:
            self._metrics.of_last_micro_batch = []
            warn(
                f"compute_metrics of {self._model.model.name!r} returned {names} as plain numbers, "
                "so their logs show the last micro-batch alone. To log the whole epoch, update a "
                "keras.metrics.Mean that the model holds, in place of each.",
                UserWarning,
            )


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
    """Warns of a loss that is one number for a batch, and may not follow from its parts'."""
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
