"""Class labels and embedding ids, checked inside the program and read late: XLA clamps them silently."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from fastaccum.adapters.indices import NOT_WHOLE, whole

NOTHING_SEEN = (tf.int64.max, -1)


class IndexChecks(tf.Module):
    """The smallest and largest index that each of several lookups has seen.

    A step that meets an index out of range is not applied, nor is any after it, until `require` has raised:
    so reading late loses nothing.

    Args:
        lookups: (description, size) pairs; indices in [0, size) are in range.

    >>> checks = IndexChecks([("labels", 10)])
    >>> checks.observe(0, tf.constant([3, 12]))
    >>> bool(checks.in_range())
    False
    >>> checks.require(checks.seen())
    Traceback (most recent call last):
    ValueError: labels: values from 3 to 12 were seen, but only 0 to 9 exist. Nothing was updated with them. \
Correct the data, or make room for 13 classes or rows.
    """

    def __init__(self, lookups: Sequence[tuple[str, int]]):
        super().__init__()
        self.lookups = list(lookups)
        self._sizes = np.array([size for _, size in self.lookups], np.int64)
        self._ranges = [
            tf.Variable(NOTHING_SEEN, trainable=False, dtype=tf.int64, name="indices_seen") for _ in self.lookups
        ]
        self._paused = False

    def observe(self, lookup: int, indices: tf.Tensor) -> None:
        """Widens the range seen by a lookup; called where the indices are known, in the program."""
        if self._paused:
            return
        indices = whole(indices)
        low, high = tf.unstack(self._ranges[lookup].read_value())
        low, high = tf.minimum(low, tf.reduce_min(indices)), tf.maximum(high, tf.reduce_max(indices))
        self._ranges[lookup].assign(tf.stack([low, high]))

    def seen(self) -> tf.Tensor:
        """The smallest and the largest index of each lookup: int64 [lookups, 2]."""
        return tf.reshape(tf.stack([r.read_value() for r in self._ranges] or tf.zeros([0, 2], tf.int64)), [-1, 2])

    def assign(self, seen: tf.Tensor) -> None:
        """Takes over what was seen elsewhere: int64 [lookups, 2], as `seen` returns it."""
        for variable, range_ in zip(self._ranges, tf.unstack(seen, num=len(self._ranges)), strict=True):
            variable.assign(range_)

    @contextmanager
    def paused(self):
        """Within the scope nothing is observed: for a second pass over the same data."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def in_range(self) -> tf.Tensor:
        """Whether every index seen so far exists: bool scalar."""
        seen = self.seen()
        return tf.reduce_all((seen[:, 0] >= 0) & (seen[:, 1] < self._sizes))

    def require(self, seen: tf.Tensor) -> None:
        """Raises ValueError if `seen`, a value that `self.seen()` had, holds an index out of range."""
        if not self.lookups:
            return  # and no wait for the step
        seen = seen.numpy()
        if (seen[:, 0] >= 0).all() and (seen[:, 1] < self._sizes).all():
            return
        for (what, size), (low, high) in zip(self.lookups, seen.tolist(), strict=True):
            if low < 0 or high >= size:
                self.reset()
                if low == NOT_WHOLE:
                    raise ValueError(
                        f"{what}: a value that is no whole number (a fraction, or NaN) was seen. Nothing was updated "
                        "with it. Correct the data."
                    )
                room = f", or make room for {high + 1} classes or rows" if size <= high < 10 * size else ""
                raise ValueError(
                    f"{what}: values from {low} to {high} were seen, but only 0 to {size - 1} exist. Nothing was "
                    f"updated with them. Correct the data{room}."
                )

    def reset(self) -> None:
        """Forgets what was seen."""
        for each in self._ranges:
            each.assign(NOTHING_SEEN)
