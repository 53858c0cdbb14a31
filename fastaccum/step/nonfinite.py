"""Train steps that are skipped although no lower loss scale can help: counted in the program, and read late."""

from __future__ import annotations

import warnings

import tensorflow as tf

# A corrupt row now and then must not end a long run, nor must a model that makes nothing but NaN go on for hours. Were
# one step in ten bad, by chance, ten in a row would come once in 10**10 steps; a spoilt model gives ten at once.
PATIENCE = 10


class NonFiniteError(FloatingPointError):
    """Training can only skip its steps: their gradient, loss or statistics are not finite, and no lower loss scale is
    left to try. Weights, slots and statistics are those of the last good step.
    """


class StuckSteps(tf.Module):
    """Counts the train steps that were not finite and left the loss scale where it was.

    That is each such step without loss scaling, under a static scale, and under a dynamic one at its floor. A dynamic
    scale that backs off is at work, and not stuck. Once `patience` steps in a row were stuck, no step is applied until
    the count is reset: so reading late loses nothing, and the step that ended it can be run again as it was.

    Args:
        patience: how many stuck steps in a row are the end.

    >>> steps = StuckSteps(patience=2)
    >>> for stuck in (True, False, True, True, False):  # the last one comes after the end
    ...     steps.count(tf.constant(stuck), tf.constant(True))
    ...     print(steps.since_end(steps.seen()), bool(steps.running()))
    None True
    None True
    None True
    0 False
    1 False
    """

    def __init__(self, patience: int):
        super().__init__()
        self.patience = patience
        self._in_a_row = tf.Variable(0, trainable=False, dtype=tf.int64, name="stuck_in_a_row")
        self._in_epoch = tf.Variable(0, trainable=False, dtype=tf.int64, name="stuck_in_epoch")

    def running(self) -> tf.Tensor:
        """Whether steps are still to be applied: bool scalar."""
        return self._in_a_row < self.patience

    def count(self, stuck: tf.Tensor, valid: tf.Tensor) -> None:
        """Counts one train step, in the program.

        Args:
            stuck: bool scalar.
            valid: bool scalar; a step without anything valid in it tells nothing.
        """
        running, in_a_row = self.running(), self._in_a_row.read_value()
        self._in_epoch.assign_add(tf.cast(stuck & running, tf.int64))
        # After the end every step counts: it says how far back the end lies.
        going_on = tf.where(valid, tf.zeros_like(in_a_row), in_a_row)
        self._in_a_row.assign(tf.where(stuck | ~running, in_a_row + 1, going_on))

    def seen(self) -> tf.Tensor:
        """Stuck steps in a row, and in the epoch: int64 [2]."""
        return tf.stack([self._in_a_row.read_value(), self._in_epoch.read_value()])

    def since_end(self, seen: tf.Tensor) -> int | None:
        """How many steps before the last one the end lies, by a value that `self.seen()` had; None if it has not come.

        Waits for the step that made `seen`.
        """
        since = int(seen.numpy()[0]) - self.patience
        return since if since >= 0 else None

    def warn(self, seen: tf.Tensor) -> None:
        """Warns of the epoch's stuck steps, by a value that `self.seen()` had."""
        if count := int(seen.numpy()[1]):
            warnings.warn(
                f"{count:,} train steps of this epoch were skipped: their gradient, loss or statistics were not "
                "finite, and the loss scale could not go lower. on_nonfinite='raise' ends training at the first of "
                "them, and says where the bad numbers come from.",
                stacklevel=5,  # who called fit
            )

    def start_epoch(self) -> None:
        """Counts the epoch's steps anew; those in a row go on."""
        self._in_epoch.assign(0)

    def reset(self) -> None:
        """Counts all anew."""
        self._in_a_row.assign(0)
        self._in_epoch.assign(0)
