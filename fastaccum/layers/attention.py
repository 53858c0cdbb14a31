"""Fused attention for layers of Keras and KerasHub, and for `keras.ops.dot_product_attention`.

Keras's TensorFlow backend has the unfused formula alone. Once this module is imported, that
function asks the context of the trace first: within a train step or an evaluation, a
`FusedAttention` answers.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics import patches
from fastaccum.basics.attributes import of_keras, package
from fastaccum.basics.warnings import warn
from fastaccum.kernels import private, trace_context
from fastaccum.kernels.attention import attention, attention_implementation
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import HALF, in_xla
from fastaccum.layers.attention_layers import (
    AttentionForm,
    attends,
    find_hub_form,
    find_keras_form,
)
from fastaccum.layers.attention_masks import Mask, read_mask
from fastaccum.layers.attention_segments import as_segments
from fastaccum.layers.interceptors import Interceptor, Role

FlashAttention = Literal["auto"] | bool
Call = Callable[..., Any]

# Bytes of one call's scores in float32. With fewer, the mode "auto" takes the layer's own formula,
# because that keeps little for the way back.
_SMALL_ON_CPU = 2**28
_SMALL_ON_GPU = 2**26
# Tokens of a call that blocks alone compute. Up to these, the mode "auto" takes the layer's own
# formula. On a CPU such a call has dropout, a window or a soft cap; on a GPU one of the last two.
_SHORT_ON_CPU = 512
_SHORT_ON_GPU = 2048

# Tokens of a call with documents from which on the mode "auto" fuses it on a CPU, whatever its
# scores take: blocks of other documents are left out.
_LONG_FOR_DOCUMENTS = 512

# Reasons why a call is left to the layer.
_OWN_FORMULA = "a formula of the layer's own"
_UNREADABLE = "a mask that cannot be read as causal, a window, padding or documents"


class _NotFused(Exception):
    """The reason why the kernels do not compute a call."""


class FusedAttention:
    """Computes attention by `kernels.attention` where that equals the layer's own formula.

    The mode "auto" leaves small scores, and what the kernels lack, to the layer; True fuses all, or
    refuses.
    """

    def __init__(self, mode: Literal["auto", True]):
        self._mode = mode
        self._layer: keras.layers.Layer | None = None
        self._noted = False
        # What computes each call, and why: by the layer's path, or by the name scope of a call
        # without a layer.
        self.choices: dict[str, str] = {}

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Answers calls of `keras.ops.dot_product_attention` that are traced inside the block."""
        return trace_context.current().extended(attention=self._dot_product_attention)

    def make_forms(self, layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
        """Returns interceptors of the layers that have an attention formula of their own.

        It warns if this release of Keras keeps its attention where none can be fused.
        """
        if _UNFUSED is None:
            _warn_of_keras()

        forms = []
        for layer in layers:
            has_formula = private.compute_attention.exists(layer)
            method = private.compute_attention.name if has_formula else "call"
            if hasattr(layer, "path") and (has_formula or attends(layer)):
                compute = functools.partial(self._form, layer)
                forms.append(Interceptor(layer, method, compute, Role.FORM))

            mask_method = private.compute_causal_mask.name
            make_mask = getattr(type(layer), mask_method, None)
            if make_mask is not None and of_keras(make_mask):
                forms.append(Interceptor(layer, mask_method, _make_causal_mask, Role.FORM))
        return forms

    def _form(self, layer: keras.layers.Layer, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Computes a layer's `_compute_attention`, or its `call` if it has no such method.

        The argument `call` is what the layer itself does.
        """
        outer = self._layer
        self._layer = layer
        self._noted = False
        try:
            keras_form = find_keras_form(layer)
            form = find_hub_form(layer) or keras_form
            if form is not None:
                try:
                    output = self._compute(layer, form, *args, **kwargs)
                except _NotFused as reason:
                    self._leave(str(reason))
                else:
                    if keras_form is None:
                        return output
                    return output, None  # Keras's layers return the scores too

            result = call(*args, **kwargs)
            if not self._noted:  # it called no `dot_product_attention`
                self._leave(_OWN_FORMULA)
            return result
        finally:
            self._layer = outer

    @property
    def _of_hub(self) -> bool:
        return self._layer is not None and package(type(self._layer)) == "keras_hub"

    def _compute(
        self,
        layer: Any,
        kind: AttentionForm,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        attention_mask: tf.Tensor | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
        **_unused: Any,
    ) -> tf.Tensor:
        if return_attention_scores or private.return_attention_scores(layer, False):
            raise _NotFused(_OWN_FORMULA)
        _require_kernel_arguments(query, key, value, None)
        for name in kind.unsupported:
            setting = getattr(layer, name)
            if setting:
                raise _NotFused(f"{name}={setting}")

        dropout = None
        if kind.dropout and training:
            dropout = getattr(layer, kind.dropout)
        if attention_mask is not None and attention_mask.shape.rank != 4:
            attention_mask = tf.expand_dims(attention_mask, -3)  # of the heads
        window = None
        if attention_mask is not None and kind.window and getattr(layer, kind.window, None):
            window = layer.sliding_window_size

        output, _ = self._fuse(
            query,
            key,
            value,
            mask=attention_mask,
            scale=kind.scale(layer),
            is_causal=use_causal_mask,
            dropout=dropout,
            soft_cap=getattr(layer, "logit_soft_cap", None),
            window=window,
        )
        return output

    def _dot_product_attention(self, query: Any, key: Any, value: Any, **options: Any) -> tf.Tensor:
        """Computes `keras.ops.dot_product_attention`.

        There a query that sees no key gets the mean of all values.
        """
        try:
            output, sees_any = self._fuse(query, key, value, **options)
        except _NotFused as reason:
            self._leave(str(reason))
            return _UNFUSED(query, key, value, **options)
        if sees_any is None:
            return output

        mean = tf.reduce_mean(tf.cast(value, output.dtype), 1, keepdims=True)
        sees_any = sees_any[..., None, None]
        heads_per_value = output.shape[2] // mean.shape[2]
        return tf.where(sees_any, output, tf.repeat(mean, heads_per_value, 2))

    def _leave(self, reason: str) -> None:
        if self._mode != "auto":
            raise ValueError(
                "flash_attention=True: the kernels do not compute the attention of "
                f"{self._place} ({reason}). Pass "
                'flash_attention="auto", which leaves such a layer its own formula.'
            )
        self._note(f"unfused: {reason}")

    @property
    def _place(self) -> str:
        return tf.get_current_name_scope() if self._layer is None else self._layer.path

    def _note(self, choice: str) -> None:
        """Adds to the choices of the layer, which may be called more than once."""
        self._noted = True
        if trace_context.current().documents_are_masked:
            choice += ", documents apart"
        place = self._place
        before = self.choices.get(place, choice)
        if choice in before:
            self.choices[place] = before
        else:
            self.choices[place] = f"{before}; {choice}"

    def _fuse(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: Any = None,
        is_causal: bool = False,
        flash_attention: bool | None = None,
        attn_logits_soft_cap: float | None = None,
        dropout: keras.layers.Dropout | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Computes attention by the kernels.

        Returns the output, 0 for a query that sees nothing; and bool [B, T], whether a query sees
        a key, or None if each does. Raises _NotFused if the kernels cannot compute the call
        exactly, or if they do not pay.
        """
        query = tf.convert_to_tensor(query)
        key = tf.convert_to_tensor(key)
        value = tf.convert_to_tensor(value)
        if flash_attention:
            raise _NotFused("flash_attention=True of the layer itself")
        if bias is not None:
            raise _NotFused("a bias")
        if attn_logits_soft_cap is not None:
            raise _NotFused("a soft cap")
        _require_kernel_arguments(query, key, value, scale)

        # In the mode "auto" small scores are left to the layer, unless cuDNN computes them.
        too_small = None
        if self._mode == "auto":
            too_small = _why_too_small(query, key)
        may_be_cudnn = has_gpu() and query.dtype in HALF
        tokens = min(query.shape[1], key.shape[1])
        may_skip_blocks = not has_gpu() and mask is not None and tokens >= _LONG_FOR_DOCUMENTS
        if too_small is not None and not (may_be_cudnn or may_skip_blocks):
            raise _NotFused(too_small)

        parts = self._read_parts(query.shape[1], key.shape[1], mask, is_causal, window)
        if may_skip_blocks and parts.documents is not None:
            too_small = None
        if too_small is not None and not may_be_cudnn:
            raise _NotFused(too_small)
        causal = parts.after == 0
        window = None
        if parts.before is not None:
            window = parts.before + 1  # a query sees itself too
        dropout_rate = 0.0 if dropout is None else dropout.rate
        if self._mode == "auto" and (dropout_rate or window is not None or soft_cap is not None):
            _require_many_tokens(query, key, dropout_rate)

        has_segments = (
            parts.queries is not None or parts.keys is not None or parts.documents is not None
        )
        implementation = attention_implementation(
            query.shape,
            key.shape,
            dtype=query.dtype,
            causal=causal,
            packed=has_segments,
            dropout=bool(dropout_rate),
            jit_compile=in_xla() and window is None and soft_cap is None,
        )
        if implementation != "cudnn":
            if too_small is not None:
                raise _NotFused(too_small)
            implementation = "blockwise"

        segments = None
        sees_any = None
        if has_segments:
            _require_free_ids(parts)
            rows = tf.shape(query)[0]
            segments, sees_any = as_segments(parts, rows, query.shape[1], key.shape[1])
        scale = None if scale is None else float(scale)
        options: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "soft_cap": soft_cap,
            "segment_ids": segments,
        }
        if dropout_rate and dropout is not None:
            options["dropout"] = dropout_rate
            options["seed"] = dropout.seed_generator.next()
        output = attention(query, key, value, implementation=implementation, **options)
        self._note(f"fused: {implementation}")
        return output, sees_any

    def _read_parts(
        self, queries: int, keys: int, mask: Any, is_causal: bool, window: int | None
    ) -> Mask:
        """Joins all that hides keys from queries; raises _NotFused if the kernels cannot do so."""
        parts = Mask(after=0) if is_causal else Mask()
        if mask is not None:
            mask = tf.convert_to_tensor(mask)
            parts_of_mask = read_mask(mask, queries, keys, zero_or_one=self._of_hub)
            if parts_of_mask is None:
                raise _NotFused(_UNREADABLE)
            parts = parts.both(parts_of_mask)
        if window is not None and window < max(queries, keys):
            parts = parts.both(Mask(before=window - 1, after=window - 1))

        is_causal_or_symmetric = parts.after in (0, parts.before)
        if not is_causal_or_symmetric:
            raise _NotFused(_UNREADABLE)
        if parts.after is not None and queries != keys:
            raise _NotFused(f"a causal mask of {queries} queries and {keys} keys")
        return parts


def _make_causal_mask(call: Call, query: tf.Tensor, value: tf.Tensor | None = None) -> tf.Tensor:
    """Makes the causal mask of Keras's layers by comparing two ranges.

    Keras itself sums a whole matrix of ones, twice.
    """
    queries = query.shape[1]
    keys = queries if value is None else value.shape[1]
    if queries is None or keys is None:
        return call(query, value)
    query_places = tf.range(queries)[None, :, None]
    key_places = tf.range(keys)[None, None]
    return query_places >= key_places


def _require_kernel_arguments(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scale: Any
) -> None:
    for t in (query, key, value):
        if t.shape.rank != 4 or None in t.shape[1:]:
            raise _NotFused("sizes that are not known when the step is traced")
    if query.dtype not in (*HALF, tf.float32) or not query.dtype == key.dtype == value.dtype:
        raise _NotFused("dtypes other than float32, float16 or bfloat16 alike")
    if (
        key.shape[1:] != value.shape[1:]
        or query.shape[3] != key.shape[3]
        or query.shape[2] % key.shape[2]
    ):
        raise _NotFused(f"shapes of query {query.shape}, key {key.shape} and value {value.shape}")
    if scale is not None and not isinstance(scale, (numbers.Real, np.floating)):
        raise _NotFused("a scale that is a tensor")


def _why_too_small(query: tf.Tensor, key: tf.Tensor) -> str | None:
    """Returns why the scores of a call are too small for blocks to pay; None if they are not."""
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    scores = 4 * (batch or 1) * heads * queries * keys  # bytes in float32
    limit = _SMALL_ON_GPU if has_gpu() else _SMALL_ON_CPU
    if scores >= limit:
        return None
    return f"its scores take {scores / 2**20:,.3g} MiB, less than {limit / 2**20:,.3g}"


def _require_many_tokens(query: tf.Tensor, key: tf.Tensor, dropout_rate: float) -> None:
    """Raises _NotFused for a call with dropout, a window or a soft cap that is too short to pay."""
    if not has_gpu():
        most_tokens = _SHORT_ON_CPU
    elif dropout_rate:
        most_tokens = 0  # any length pays
    else:
        most_tokens = _SHORT_ON_GPU
    if max(query.shape[1], key.shape[1]) <= most_tokens:
        raise _NotFused(f"dropout, a window or a soft cap, of {most_tokens} tokens at most")


def _require_free_ids(mask: Mask) -> None:
    """Raises _NotFused if padding finds no segment id beside those of documents."""
    is_padded = mask.queries is not None or mask.keys is not None
    if not is_padded or mask.documents is None:
        return
    query_ids, _ = mask.documents
    if query_ids.dtype.size > 4:
        raise _NotFused(
            "64-bit segment ids beside padding, which takes a segment id of its own: cast the ids "
            "to int32"
        )


@functools.cache
def _warn_of_keras() -> None:
    warn(
        f"Keras {keras.__version__} keeps its attention in a place that fastaccum does not know, "
        "so layers that call keras.ops.dot_product_attention take their own formula, which holds "
        "the scores of all tokens. Install a version that pyproject.toml allows."
    )


def unfused(query: Any, key: Any, value: Any, **options: Any) -> tf.Tensor:
    """Computes `keras.ops.dot_product_attention` by Keras's own formula."""
    return _UNFUSED(query, key, value, **options)


# Keras's own formula; None with a release that keeps it where `private` does not look.
_UNFUSED: Any = None
if private.has("nn"):
    _UNFUSED = patches.replace_attention(private.nn, lambda: trace_context.current().attention)
