"""Checks that run in the program and are read late: of indices, and of steps not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from fastaccum.adapters.outputs import NOT_WHOLE, to_whole
from fastaccum.basics.warnings import warn

# Steps in a row that are not finite, after which training ends. A corrupt row now and then must not
# end a long run, nor must a model that makes nothing but NaN go on for hours. Were one step in ten
# bad by chance, ten in a row would come once in 10**10 steps.
PATIENCE = 10


class NonFiniteError(FloatingPointError):
    """Raised for gradients, losses or statistics that are not finite at the lowest loss scale.

    Weights, optimizer slots and statistics are those of the last good step.
    """


class StuckSteps(tf.Module):
    """Counts the train steps that were not finite and left the loss scale where it was.

    After `patience` of them in a row no step is applied until the count is reset, so that the last
    can be run again.
    """

    def __init__(self, patience: int):
        super().__init__()
        self.patience = patience
        # Stuck steps in a row. Once there are `patience`, all steps since then are added.
        self._in_a_row = tf.Variable(0, trainable=False, dtype=tf.int64, name="stuck_in_a_row")
        self._in_epoch = tf.Variable(0, trainable=False, dtype=tf.int64, name="stuck_in_epoch")

    def running(self) -> tf.Tensor:
        """Returns whether steps are still to be applied: bool scalar."""
        return self._in_a_row < self.patience

    def count(self, stuck: tf.Tensor, valid: tf.Tensor) -> None:
        """Counts one train step, in the program; both arguments are bool scalars.

        A step without a `valid` element counts neither way.
        """
        running = self.running()
        in_a_row = self._in_a_row.read_value()
        self._in_epoch.assign_add(tf.cast(stuck & running, tf.int64))
        # A step that is not stuck ends the row, unless it has no valid element.
        in_a_row_if_not_stuck = tf.where(valid, tf.zeros_like(in_a_row), in_a_row)
        # After the end of training every step counts, which tells how far back the end lies.
        self._in_a_row.assign(tf.where(stuck | ~running, in_a_row + 1, in_a_row_if_not_stuck))

    def seen(self) -> tf.Tensor:
        """Returns the stuck steps in a row, and in the epoch: int64 [2]."""
        return tf.stack([self._in_a_row.read_value(), self._in_epoch.read_value()])

    def since_end(self, seen: tf.Tensor) -> int | None:
        """Returns how many steps ago training ended; None if it has not.

        `seen` is a value that `self.seen()` returned, for which this waits.
        """
        in_a_row, _ = seen.numpy().tolist()
        if in_a_row < self.patience:
            return None
        return in_a_row - self.patience

    def warn(self, seen: tf.Tensor) -> None:
        """Warns of the epoch's stuck steps, by a value that `self.seen()` had."""
        _, in_epoch = seen.numpy().tolist()
        if in_epoch == 0:
            return
        steps = "train steps of this epoch were"
        if in_epoch == 1:
            steps = "train step of this epoch was"
        warn(
            f"{in_epoch:,} {steps} skipped: gradient, loss or statistics were not finite, and "
            "the loss scale could not go lower. on_nonfinite='raise' ends training at the "
            "first such step, and says where it came from.",
            UserWarning,
        )

    def start_epoch(self) -> None:
        """Counts the epoch's steps anew; those in a row go on."""
        self._in_epoch.assign(0)

    def reset(self) -> None:
        self._in_a_row.assign(0)
        self.start_epoch()


# The smallest and the largest index before any is seen: any row or class widens both ends, and a
# lookup of no index is in range.
_NO_INDICES = (tf.int64.max, -1)


class IndexChecks(tf.Module):
    """Tracks the smallest and the largest index of several lookups, (description, size) pairs.

    A step that meets an index outside [0, size) is not applied, nor is any later one until
    `require` has raised.
    """

    def __init__(self, lookups: Sequence[tuple[str, int]]):
        super().__init__()
        self.lookups = list(lookups)
        self._sizes = np.array([size for _, size in self.lookups], np.int64)
        self._ranges = []
        for _ in self.lookups:
            self._ranges.append(
                tf.Variable(_NO_INDICES, trainable=False, dtype=tf.int64, name="indices_seen")
            )

    def observe(self, lookup: int, indices: tf.Tensor) -> None:
        """Widens the range seen by a lookup; called where the indices are known, in the program."""
        indices = to_whole(indices)
        low, high = tf.unstack(self._ranges[lookup].read_value())
        low = tf.minimum(low, tf.reduce_min(indices))
        high = tf.maximum(high, tf.reduce_max(indices))
        self._ranges[lookup].assign(tf.stack([low, high]))

    def seen(self) -> tf.Tensor:
        """Returns the smallest and the largest index of each lookup: int64 [lookups, 2]."""
        if not self._ranges:
            return tf.zeros([0, 2], tf.int64)
        return tf.stack([seen.read_value() for seen in self._ranges])

    def assign(self, seen: tf.Tensor) -> None:
        """Takes over what was seen elsewhere: int64 [lookups, 2], as `seen` returns it."""
        seen_ranges = tf.unstack(seen, num=len(self._ranges))
        for variable, seen_range in zip(self._ranges, seen_ranges, strict=True):
            variable.assign(seen_range)

    def in_range(self) -> tf.Tensor:
        """Returns whether every index seen so far exists: bool scalar."""
        seen = self.seen()
        return tf.reduce_all((seen[:, 0] >= 0) & (seen[:, 1] < self._sizes))

    def require(self, seen: tf.Tensor) -> None:
        """Raises ValueError if `seen`, which `self.seen()` returned, has an index out of range."""
        if not self.lookups:  # and nothing to wait for
            return
        seen_ranges = seen.numpy().tolist()
        for (what, size), (low, high) in zip(self.lookups, seen_ranges, strict=True):
            if low >= 0 and high < size:
                continue
            self.reset()
            if low == NOT_WHOLE:
                raise ValueError(
                    f"{what}: a value that is no whole number was seen. Nothing was updated with "
                    "it. Correct the data."
                )
            room = ""
            if size <= high < 10 * size:  # a larger index is no class or row of the user's
                room = f", or make room for {high + 1} classes or rows"
            raise ValueError(
                f"{what}: values from {low} to {high} were seen, but only 0 to {size - 1} exist. "
                f"Nothing was updated with them. Correct the data{room}."
            )

    def reset(self) -> None:
        for variable in self._ranges:
            variable.assign(_NO_INDICES)
