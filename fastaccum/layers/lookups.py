"""The layers that look up rows of a table, and the ids that they look up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest, kinds
from fastaccum.layers.interceptors import Interceptor, Role


def find_lookups(layers: Iterable[keras.layers.Layer]) -> list[tuple[keras.layers.Layer, int]]:
    """Lists the embedding layers with the rows of their tables: XLA clamps ids outside of these
    silently.
    """
    found = [layer for layer in layers if _lookup_class(layer)]
    # A subclass may have made a larger table than it was asked for.
    return [
        (layer, max([layer.input_dim, *(v.shape[0] for v in layer.weights[:1])])) for layer in found
    ]


def make_id_observers(
    lookups: Sequence[tuple[keras.layers.Layer, int]],
    observe: Callable[[int, tf.Tensor], None],
    uses_xla: bool,
) -> list[Interceptor]:
    """Returns interceptors that pass ids which reach Keras's lookup of embedding i to `observe(i,
    ids)`.
    """
    found = []
    for i, (layer, size) in enumerate(lookups):
        owner = _lookup_class(layer)
        replacement = functools.partial(
            _look_up, functools.partial(observe, i), None if uses_xla else size
        )
        names = [name for name in ("call", "quantized_call") if hasattr(owner or layer, name)]
        found += [Interceptor(layer, name, replacement, Role.OBSERVE, owner) for name in names]
    return found


def _lookup_class(layer: keras.layers.Layer) -> type | None:
    """Returns the Embedding of Keras or tf_keras that a layer's class is or extends, or None."""
    own = kinds(layer)
    return own.get("keras.Embedding") or own.get("tf_keras.Embedding")


def _look_up(
    observe: Callable[[tf.Tensor], None],
    size: int | None,
    call: Callable[..., Nest],
    *args: Nest,
    **kwargs: Nest,
) -> Nest:
    # ReversibleEmbedding's quantised form takes hidden states too, to compute logits.
    if kwargs.get("reverse", args[1:2] == (True,)):
        return call(*args, **kwargs)
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if ids is not None:
        # Of sparse and ragged ids those that are there.
        observe(getattr(ids, "flat_values", getattr(ids, "values", ids)))
    # Without XLA: TensorFlow's error would come after earlier micro-batches moved statistics.
    if size is not None and args and isinstance(ids, tf.Tensor):
        whole = tf.cast(ids, tf.int64)
        args = tf.where((whole >= 0) & (whole < size), ids, tf.zeros_like(ids)), *args[1:]
    return call(*args, **kwargs)
