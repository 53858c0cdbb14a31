"""Embedding layers: their tables, and the ids that they look up."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from fastaccum.adapters.packages import kinds


def lookups(layers: list[Any]) -> list[tuple[Any, int]]:
    """Embedding layers and the rows of their tables: ids outside must be caught, since XLA clamps them silently."""
    found = [layer for layer in layers if _lookup_class(layer)]
    # A subclass may have made a larger table than it was asked for.
    return [(layer, max([layer.input_dim, *(v.shape[0] for v in layer.weights[:1])])) for layer in found]


@contextmanager
def observed_ids(layers: list[Any], observe: Callable[[int, tf.Tensor], None]) -> Iterator[None]:
    """Within the scope, the ids that embedding i of `layers` looks up first pass to `observe(i, ids)`: those that reach
    Keras's own lookup, since the `call` of a subclass may map what it is given.
    """
    own = [type(layer) for layer in layers]
    try:
        for i, layer in enumerate(layers):
            object.__setattr__(layer, "__class__", _observing(layer, functools.partial(observe, i)))
        yield
    finally:
        for layer, cls in zip(layers, own, strict=True):
            object.__setattr__(layer, "__class__", cls)


def _lookup_class(layer: Any) -> Any:
    """Keras's or tf_keras's own Embedding, where a layer is one; None otherwise, whatever the layer is called."""
    own = kinds(layer)
    return own.get("keras.Embedding") or own.get("tf_keras.Embedding")


def _observing(layer: Any, observe: Callable[[tf.Tensor], None]) -> Any:
    """A class for an embedding: its own, with one between it and Keras's Embedding that observes the ids."""
    base = _lookup_class(layer) or type(layer)

    def observed(method):
        def lookup(self, *args, **kwargs):
            ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            if ids is not None:
                # Of sparse and ragged ids those that are there.
                observe(getattr(ids, "flat_values", getattr(ids, "values", ids)))
            return method(self, *args, **kwargs)

        return lookup

    names = [name for name in ("call", "_int8_call", "_int4_call") if hasattr(base, name)]
    methods = {name: observed(getattr(base, name)) for name in names}
    between = types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(methods))
    own = type(layer)
    return between if own is base else types.new_class(own.__name__, (own, between))
