"""The layers that look up rows of a table, and the ids that they look up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest, kinds
from fastaccum.layers.interceptors import Interceptor, Role


def find_lookups(layers: Iterable[keras.layers.Layer]) -> list[tuple[keras.layers.Layer, int]]:
    """Lists the embedding layers with the rows of their tables.

    XLA clamps ids outside of a table silently.
    """
    lookups = []
    for layer in layers:
        if _lookup_class(layer) is None:
            continue
        rows = layer.input_dim
        if layer.weights:  # a subclass may have made a larger table than it was asked for
            rows = max(rows, layer.weights[0].shape[0])
        lookups.append((layer, rows))
    return lookups


def make_id_observers(
    lookups: Sequence[tuple[keras.layers.Layer, int]],
    observe: Callable[[int, tf.Tensor], None],
    uses_xla: bool,
) -> list[Interceptor]:
    """Returns interceptors that pass the ids which reach embedding i to `observe(i, ids)`."""
    interceptors = []
    for i, (layer, size) in enumerate(lookups):
        owner = _lookup_class(layer)
        # XLA clamps ids by itself.
        checked_size = None if uses_xla else size
        replacement = functools.partial(_look_up, functools.partial(observe, i), checked_size)
        for name in ("call", "quantized_call"):
            if hasattr(owner or layer, name):
                interceptors.append(Interceptor(layer, name, replacement, Role.OBSERVE, owner))
    return interceptors


def _lookup_class(layer: keras.layers.Layer) -> type | None:
    """Returns the Embedding of Keras or tf_keras that a layer's class is or extends, or None."""
    layer_kinds = kinds(layer)
    return layer_kinds.get("keras.Embedding") or layer_kinds.get("tf_keras.Embedding")


def _look_up(
    observe: Callable[[tf.Tensor], None],
    size: int | None,
    call: Callable[..., Nest],
    *args: Nest,
    **kwargs: Nest,
) -> Nest:
    """Observes the ids of a lookup, then calls it.

    Ids outside a table of `size` rows are looked up as 0: without XLA, TensorFlow's own error would
    come after earlier micro-batches moved statistics. The observer reports them.
    """
    # ReversibleEmbedding's quantised form takes hidden states too, to compute logits.
    if kwargs.get("reverse", args[1:2] == (True,)):
        return call(*args, **kwargs)
    if args:
        ids = args[0]
    else:
        ids = kwargs.get("inputs", kwargs.get("input_ids"))
    if ids is not None:
        # Of sparse and ragged ids those that are there.
        observe(getattr(ids, "flat_values", getattr(ids, "values", ids)))
    if size is not None and args and isinstance(ids, tf.Tensor):
        whole = tf.cast(ids, tf.int64)
        is_in_table = (whole >= 0) & (whole < size)
        ids = tf.where(is_in_table, ids, tf.zeros_like(ids))
        args = (ids, *args[1:])
    return call(*args, **kwargs)
