"""Counts of an epoch's tokens in packed rows: those that are real, and those of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from fastaccum.basics.packed_rows import PackedRows


class TokenCounts:
    """Counts the tokens that train steps read, in variables of the compiled step.

    Args:
        sources: the names of the sources that `fastaccum.mix` has mixed; none for one source.
    """

    def __init__(self, sources: Sequence[str]):
        self.sources = tuple(sources)
        self._all = _zero("tokens")  # with padding
        self._real = _zero("real_tokens")
        self._of_sources = [_zero(f"tokens_of_{name}") for name in self.sources]

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that every micro-batch adds to, from zero."""
        return [self._all, self._real, *self._of_sources]

    def reset(self) -> None:
        """Starts an epoch."""
        for variable in self.variables:
            variable.assign(0)

    def add(self, x: PackedRows, valid: tf.Tensor | None) -> None:
        """Counts the tokens of a micro-batch, in its valid rows: bool [rows]; None for all."""
        tokens_of_row = tf.math.count_nonzero(x.documents, 1)
        rows = tf.ones_like(tokens_of_row)
        if valid is not None:
            rows = tf.cast(valid, tf.int64)
        tokens_of_row *= rows
        self._all.assign_add(tf.reduce_sum(rows) * int(x.documents.shape[1]))
        self._real.assign_add(tf.reduce_sum(tokens_of_row))
        for name, variable in zip(self.sources, self._of_sources, strict=True):
            is_of_source = tf.cast(x.sources[name], tf.int64)
            variable.assign_add(tf.reduce_sum(tokens_of_row * is_of_source))

    @property
    def log_names(self) -> list[str]:
        return ["real_tokens", *(f"tokens_of_{name}" for name in self.sources)]

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the share of real tokens, and of those the share of each source."""
        shares = [_share(self._real, self._all)]
        for variable in self._of_sources:
            shares.append(_share(variable, self._real))
        return dict(zip(self.log_names, shares, strict=True))


def sources_of(x: object) -> tuple[str, ...] | None:
    """Returns the names of the sources of packed rows; None for other inputs."""
    if not isinstance(x, PackedRows):
        return None
    sources: Mapping[str, object] = x.sources
    return tuple(sorted(sources))


def _zero(name: str) -> tf.Variable:
    return tf.Variable(0, trainable=False, dtype=tf.int64, name=name)


def _share(part: tf.Variable, whole: tf.Variable) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.cast(part, tf.float32), tf.cast(whole, tf.float32))
