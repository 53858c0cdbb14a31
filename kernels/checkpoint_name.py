"""Names of values that a LayerStack may keep for the way back, instead of computing them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from fastaccum.kernels import trace_context
from fastaccum.kernels.checks import as_tensor, shown


def checkpoint_name(x: tf.Tensor, name: str) -> tf.Tensor:
    """Returns x itself. In a layer of a `LayerStack`, the stack's `policy` may keep x by this name.

    As `jax.ad_checkpoint.checkpoint_name`. Inside a custom gradient, name what its backward
    function reads.

    >>> float(checkpoint_name(tf.constant(2.0), "scores"))
    2.0
    """
    x = as_tensor("x", x)
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={shown(name)} must be a string that is not empty.")
    names = trace_context.current().names
    if names is not None:
        names[id(x)] = x, name
    return x


@contextlib.contextmanager
def collected_names() -> Iterator[trace_context.Names]:
    """Collects the names given inside the block, but for those of an inner block."""
    names: trace_context.Names = {}
    with trace_context.current().extended(names=names):
        yield names
