"""Embedding layers: their tables, and the ids that they look up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from fastaccum.adapters.attributes import Nest
from fastaccum.adapters.interceptors import Interceptor, Role
from fastaccum.adapters.packages import kinds


def find_lookups(layers: Iterable[keras.layers.Layer]) -> list[tuple[keras.layers.Layer, int]]:
    """Lists the embedding layers with the rows of their tables: XLA clamps ids outside of these silently."""
    found = [layer for layer in layers if _lookup_class(layer)]
    # A subclass may have made a larger table than it was asked for.
    return [(layer, max([layer.input_dim, *(v.shape[0] for v in layer.weights[:1])])) for layer in found]


def make_id_observers(
    layers: Sequence[keras.layers.Layer], observe: Callable[[int, tf.Tensor], None]
) -> list[Interceptor]:
    """Returns interceptors that first pass the ids which embedding i of `layers` looks up to `observe(i, ids)`.

    The ids are those that reach Keras's own lookup: the `call` of a subclass may map its argument to other ids.
    """
    found = []
    for i, layer in enumerate(layers):
        owner = _lookup_class(layer)
        replacement = functools.partial(_look_up, functools.partial(observe, i))
        names = [name for name in ("call", "_int8_call", "_int4_call") if hasattr(owner or layer, name)]
        found += [Interceptor(layer, name, replacement, Role.OBSERVE, owner) for name in names]
    return found


def _lookup_class(layer: keras.layers.Layer) -> type | None:
    """Returns the Embedding of Keras or tf_keras that a layer's class is or extends, or None."""
    own = kinds(layer)
    return own.get("keras.Embedding") or own.get("tf_keras.Embedding")


def _look_up(observe: Callable[[tf.Tensor], None], call: Callable[..., Nest], *args: Nest, **kwargs: Nest) -> Nest:
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if ids is not None:
        # Of sparse and ragged ids those that are there.
        observe(getattr(ids, "flat_values", getattr(ids, "values", ids)))
    return call(*args, **kwargs)
