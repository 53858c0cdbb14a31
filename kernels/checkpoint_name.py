"""Names of values that a LayerStack may keep for the way back, instead of computing them again."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

from fastaccum.kernels.checks import as_tensor, shown

Names = dict[int, tuple[tf.Tensor, str]]  # by the tensor's id
_names: contextvars.ContextVar[Names | None] = contextvars.ContextVar("names", default=None)


def checkpoint_name(x: tf.Tensor, name: str) -> tf.Tensor:
    """x itself. In a layer of a `LayerStack` it has this name, by which the stack's `policy` may keep it.

    As `jax.ad_checkpoint.checkpoint_name`. Inside a custom gradient, name what its backward function reads.

    >>> float(checkpoint_name(tf.constant(2.0), "scores"))
    2.0
    """
    x = as_tensor("x", x)
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={shown(name)} must be a string that is not empty.")
    names = _names.get()
    if names is not None:
        names[id(x)] = x, name
    return x


@contextlib.contextmanager
def collected_names() -> Iterator[Names]:
    """The names given within the scope; those of an inner scope are its own."""
    names: Names = {}
    token = _names.set(names)
    try:
        yield names
    finally:
        _names.reset(token)
