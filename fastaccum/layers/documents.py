"""Keeps the documents of a packed row apart: in attention, and in learned positions.

While a model is called with packed rows, the trace's context has their documents. Interceptors of
attention layers, and the context's answer to `keras.ops.dot_product_attention`, then hide the
tokens of other documents. Layers that look positions up get those within documents.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import kinds
from fastaccum.basics.packed_rows import PackedRows
from fastaccum.kernels import private, trace_context
from fastaccum.layers import attention
from fastaccum.layers.attention_layers import attends
from fastaccum.layers.interceptors import Interceptor, Role


@contextlib.contextmanager
def kept_apart(x: PackedRows) -> Iterator[None]:
    """Keeps the documents of these rows apart in the layers that are called inside the block."""
    context = trace_context.current()
    # Padding comes last in a row, so its id is the largest: ids ascend, which spares attention the
    # blocks of other documents.
    is_padding = x.documents == 0
    ids = tf.where(is_padding, x.documents.shape[1] + 1, x.documents)
    documents = trace_context.Documents(ids, x.positions)
    attend = functools.partial(_dot_product_attention, context.attention)
    with context.extended(documents=documents, attention=attend):
        yield


def make_interceptors(layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
    """Returns interceptors by which layers keep documents apart, where there are any.

    They are of layers with a `_compute_attention`, as Keras's and KerasHub's have, and of layers
    that look up positions.
    """
    interceptors = []
    for layer in layers:
        method = _method_with_mask(layer)
        if method is not None:
            compute = functools.partial(_compute_attention, layer, method)
            interceptors.append(Interceptor(layer, method, compute, Role.DOCUMENTS))
        layer_kinds = kinds(layer)
        if "keras_hub.PositionEmbedding" in layer_kinds:
            add_positions = functools.partial(_add_positions, layer)
            interceptors.append(Interceptor(layer, "call", add_positions, Role.DOCUMENTS))
        elif "keras.Embedding" in layer_kinds:
            interceptors.append(Interceptor(layer, "call", _look_up, Role.DOCUMENTS))
    return interceptors


def _method_with_mask(layer: keras.layers.Layer) -> str | None:
    """Names the method of a layer that computes attention with a mask; None if it has none."""
    name = None
    if private.compute_attention.exists(layer):
        name = private.compute_attention.name
    elif attends(layer):
        name = "call"
    if name is None or "attention_mask" not in _parameters(layer, name):
        return None
    return name


def _parameters(layer: keras.layers.Layer, method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(type(layer), method)).parameters


def _compute_attention(
    layer: keras.layers.Layer, method: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls an attention layer's method with a mask of its documents."""
    context = trace_context.current()
    signature = inspect.signature(getattr(type(layer), method))
    bound = signature.bind(layer, *args, **kwargs)
    _, query, *_ = bound.arguments.values()
    key = bound.arguments.get("key", query)
    if context.documents is None or not _have_tokens(query, key, context.documents):
        return call(*args, **kwargs)

    mask = bound.arguments.get("attention_mask")
    bound.arguments["attention_mask"] = _with_documents(mask, context.documents)
    _, *positional = bound.args
    with context.extended(documents=None, documents_are_masked=True):
        return call(*positional, **bound.kwargs)


def _dot_product_attention(
    attend: Callable[..., tf.Tensor] | None,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    mask: tf.Tensor | None = None,
    **options: Any,
) -> tf.Tensor:
    """Computes `keras.ops.dot_product_attention` with a mask of documents.

    By `attend` then, or by Keras's own formula.
    """
    attend = attend or attention.unfused
    context = trace_context.current()
    if context.documents is None or not _have_tokens(query, key, context.documents):
        return attend(query, key, value, mask=mask, **options)
    if mask is not None:
        mask = tf.convert_to_tensor(mask)
    mask = _with_documents(mask, context.documents, heads=True)
    with context.extended(documents_are_masked=True):
        return attend(query, key, value, mask=mask, **options)


def _have_tokens(query: Any, key: Any, documents: trace_context.Documents) -> bool:
    """Tells if the second axis of queries and keys is that of the documents' tokens.

    Keys of another length, as of learned latents, belong to no document.
    """
    for tensor in (query, key):
        shape = tf.convert_to_tensor(tensor).shape
        if shape.rank not in (3, 4) or shape[1] != documents.ids.shape[1]:
            return False
    return True


def _with_documents(
    mask: tf.Tensor | None, documents: trace_context.Documents, heads: bool = False
) -> tf.Tensor:
    """Joins a mask [B, T, T] or [B, H, T, T] with one of the tokens of a query's own document."""
    is_same = documents.ids[:, :, None] == documents.ids[:, None, :]
    if heads or (mask is not None and mask.shape.rank == 4):
        is_same = is_same[:, None]
    if mask is None:
        return is_same
    if mask.dtype.is_bool:
        return mask & is_same
    return tf.minimum(mask, tf.cast(is_same, mask.dtype))


def _add_positions(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Looks up the positions within documents in a `PositionEmbedding` of KerasHub."""
    documents = trace_context.current().documents
    if documents is None or len(args) > 1 or kwargs.get("positions") is not None:
        return call(*args, **kwargs)
    length = documents.ids.shape[1]
    if length > layer.sequence_length:
        raise ValueError(
            f"x holds packed rows of {length} tokens, and layer {layer.path!r} has "
            f"{layer.sequence_length} positions, fewer than a document may need: pack rows of at "
            f"most {layer.sequence_length} tokens."
        )
    return call(*args, **{**kwargs, "positions": documents.positions})


def _look_up(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Looks up the positions within documents where an Embedding is called with 0, 1, ..., T - 1.

    So code of a user's own makes learned positions: `Embedding(T, width)(keras.ops.arange(T))`.
    """
    documents = trace_context.current().documents
    if documents is None or not args or not _are_places(args[0], documents.ids.shape[1]):
        return call(*args, **kwargs)
    return call(documents.positions, *args[1:], **kwargs)


def _are_places(ids: Any, length: int) -> bool:
    """Tells if ids are 0, 1, ..., length - 1, whatever the data, or several such rows."""
    if not tf.is_tensor(ids) or ids.shape.rank not in (1, 2) or ids.shape[-1] != length:
        return False
    value = tf.get_static_value(ids)
    if value is None and private.has("try_evaluate_constant"):
        value = private.try_evaluate_constant(ids)
    return value is not None and bool(np.all(value == np.arange(length)))
