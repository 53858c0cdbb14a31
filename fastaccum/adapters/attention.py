"""Fused attention for layers of Keras and KerasHub, and for calls of
`keras.ops.dot_product_attention`.

Keras's TensorFlow backend has the unfused formula alone. Once this module is imported, that
function asks the context
of the trace first: within a train step or an evaluation, a `FusedAttention` answers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.attention_masks import Mask, read_mask
from fastaccum.adapters.attributes import known_name, of_keras, package
from fastaccum.adapters.interceptors import Interceptor, Role
from fastaccum.kernels import private, trace_context
from fastaccum.kernels.attention import attention, attention_implementation
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import HALF, in_xla
from fastaccum.lines import warn

FlashAttention = Literal["auto"] | bool
Call = Callable[..., Any]

# In bytes of one call's scores in float32: below these the layer's own formula keeps little for the
# way back.
_SMALL_ON_CPU, _SMALL_ON_GPU = 2**28, 2**26
# tokens of what blocks alone compute: on a GPU of a window or a soft cap
_SHORT_ON_CPU, _SHORT_ON_GPU = 512, 2048
_OWN_FORMULA = "a formula of the layer's own"
_UNREADABLE = "a mask that cannot be read as causal, a window, padding or documents"


class _HubLayer(NamedTuple):
    """Names of attributes of a layer that computes `softmax(scale * query @ key) @ value` in
    `_compute_attention`.
    """

    # each adds to the formula what the kernels lack, if it is set
    unsupported: tuple[str, ...] = ()
    dropout: str | None = None  # the Dropout layer of the weights
    window: str = ""  # turns on a symmetric window of `sliding_window_size`
    # no name: computes the factor of the scores
    scale: Callable[[Any], float] = private.inv_norm_factor


def _gemma_scale(layer: Any) -> float:
    heads = layer.num_query_heads
    return 1 / math.sqrt(
        layer.head_dim if layer.query_head_dim_normalize else layer.hidden_dim // heads
    )


_FLAG = "use_sliding_window_attention"
_GEMMA = _HubLayer((), "dropout_layer", _FLAG, _gemma_scale)
# Keras's own with dropout; those without call `dot_product_attention`.
_KERAS_LAYERS = {
    keras.layers.MultiHeadAttention: _HubLayer(
        (), private.dropout_layer.name, "", private.inverse_sqrt_key_dim
    ),
    keras.layers.GroupQueryAttention: _HubLayer(
        (), private.dropout_layer.name, "", private.inverse_sqrt_head_dim
    ),
}
# By module and class. Llama's also serves Llama 3; windows of Mistral and Mixtral come in the mask.
_HUB_LAYERS = {
    "llama.llama_attention.LlamaAttention": _HubLayer(),
    "mistral.mistral_attention.CachedMistralAttention": _HubLayer(),
    "mixtral.mixtral_attention.CachedMixtralAttention": _HubLayer(),
    "phi3.phi3_attention.Phi3Attention": _HubLayer(),
    "smollm3.smollm3_layers.SmolLM3Attention": _HubLayer(),
    "gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": _HubLayer(
        dropout=private.attn_dropout_layer.name
    ),
    "qwen.qwen_attention.QwenAttention": _HubLayer(window=_FLAG),
    "qwen_moe.qwen_moe_attention.QwenMoeAttention": _HubLayer(window=_FLAG),
    "qwen3.qwen3_attention.Qwen3Attention": _HubLayer(window="sliding_window_size"),
    "qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention": _HubLayer(window="sliding_window_size"),
    "gemma.gemma_attention.CachedGemmaAttention": _GEMMA,
    "gemma3.gemma3_attention.CachedGemma3Attention": _GEMMA._replace(
        unsupported=("use_bidirectional_attention",)
    ),
}


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
        """Returns interceptors of the layers that have an attention formula of their own; warns if
        none is fused.
        """
        forms = []
        if _UNFUSED is None:
            _warn_of_keras()
        for layer in layers:
            method = (
                private.compute_attention.name
                if private.compute_attention.exists(layer)
                else "call"
            )
            if hasattr(layer, "path") and (method != "call" or _attends(layer)):
                forms.append(
                    Interceptor(layer, method, functools.partial(self._form, layer), Role.FORM)
                )
            make = getattr(type(layer), private.compute_causal_mask.name, None)
            if make is not None and of_keras(make):
                forms.append(
                    Interceptor(
                        layer, private.compute_causal_mask.name, _make_causal_mask, Role.FORM
                    )
                )
        return forms

    def _form(self, layer: keras.layers.Layer, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Computes a layer's `_compute_attention`; of another layer `call`, for what computes its
        attention.
        """
        outer, self._layer, self._noted = self._layer, layer, False
        try:
            keras_form = _keras_form(layer)
            form = _hub_form(layer) or keras_form
            if form is not None:
                try:
                    output = self._compute(layer, form, *args, **kwargs)
                    return output if keras_form is None else (output, None)
                except _NotFused as left:
                    self._leave(str(left))
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
        kind: _HubLayer,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        attention_mask: tf.Tensor | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
        **_: Any,
    ) -> tf.Tensor:
        if return_attention_scores or private.return_attention_scores(layer, False):
            raise _NotFused(_OWN_FORMULA)
        _require_kernel_arguments(query, key, value, None)
        for name in kind.unsupported:
            if set_ := getattr(layer, name):
                raise _NotFused(f"{name}={set_}")
        mask, dropout = (
            attention_mask,
            getattr(layer, kind.dropout) if kind.dropout and training else None,
        )
        mask = mask if mask is None or mask.shape.rank == 4 else tf.expand_dims(mask, -3)
        terms: dict[str, Any] = {"mask": mask, "is_causal": use_causal_mask, "dropout": dropout}
        terms["window"] = (
            layer.sliding_window_size
            if mask is not None and getattr(layer, kind.window, None)
            else None
        )
        terms["soft_cap"] = getattr(layer, "logit_soft_cap", None)
        return self._fuse(query, key, value, scale=kind.scale(layer), **terms)[0]

    def _dot_product_attention(self, query: Any, key: Any, value: Any, **options: Any) -> tf.Tensor:
        """Computes `keras.ops.dot_product_attention`: a query that sees no key gets the mean of all
        values.
        """
        try:
            output, sees = self._fuse(query, key, value, **options)
        except _NotFused as left:
            self._leave(str(left))
            return _UNFUSED(query, key, value, **options)
        if sees is None:
            return output
        mean = tf.reduce_mean(tf.cast(value, output.dtype), 1, keepdims=True)
        return tf.where(
            sees[..., None, None], output, tf.repeat(mean, output.shape[2] // mean.shape[2], 2)
        )

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
        self._noted, before = True, self.choices.get(self._place, choice)
        self.choices[self._place] = before if choice in before else f"{before}; {choice}"

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
        """Computes attention by the kernels; raises _NotFused if they cannot, exactly, or if it
        does not pay.

        Returns the output, 0 for a query that sees nothing; and bool [B, T], which see a key, None
        if each does.
        """
        query, key, value = (tf.convert_to_tensor(each) for each in (query, key, value))
        if bias is not None or attn_logits_soft_cap is not None or flash_attention:
            reasons = (
                "a bias" if bias is not None else "a soft cap",
                "flash_attention=True of the layer itself",
            )
            raise _NotFused(reasons[bool(flash_attention)])
        _require_kernel_arguments(query, key, value, scale)
        batch, queries, heads, _ = query.shape
        keys, limit = key.shape[1], _SMALL_ON_GPU if has_gpu() else _SMALL_ON_CPU
        scores = 4 * (batch or 1) * heads * queries * keys
        small = _NotFused(
            f"its scores take {scores / 2**20:,.3g} MiB, less than {limit / 2**20:,.3g}"
        )
        left = self._mode == "auto" and scores < limit  # unless cuDNN takes it
        if left and not (has_gpu() and query.dtype in HALF):
            raise small
        parts = Mask(after=0 if is_causal else None)
        if mask is not None:
            found = read_mask(tf.convert_to_tensor(mask), queries, keys, zero_or_one=self._of_hub)
            if found is None:
                raise _NotFused(_UNREADABLE)
            parts = parts.both(found)
        if window is not None and window < max(queries, keys):
            parts = parts.both(Mask(window - 1, window - 1))
        if parts.after not in (0, parts.before):  # to one side
            raise _NotFused(_UNREADABLE)
        if parts.after is not None and queries != keys:
            raise _NotFused(f"a causal mask of {queries} queries and {keys} keys")
        window, rate = (
            None if parts.before is None else parts.before + 1,
            0.0 if dropout is None else dropout.rate,
        )
        causal, plain = parts.after == 0, not rate and window is soft_cap is None
        short = (0 if rate else _SHORT_ON_GPU) if has_gpu() else _SHORT_ON_CPU
        if self._mode == "auto" and not plain and max(queries, keys) <= short:
            raise _NotFused(f"dropout, a window or a soft cap, of {short} tokens at most")
        padded = any(part is not None for part in parts[2:])
        chosen = attention_implementation(
            query.shape,
            key.shape,
            dtype=query.dtype,
            causal=causal,
            packed=padded,
            dropout=bool(rate),
            jit_compile=in_xla() and window is soft_cap is None,
        )
        if left and chosen != "cudnn":
            raise small
        chosen = "cudnn" if chosen == "cudnn" else "blockwise"
        segments, sees = (
            _as_segments(parts, tf.shape(query)[0], queries, keys) if padded else (None, None)
        )
        scale = None if scale is None else float(scale)
        options = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "soft_cap": soft_cap,
            "segment_ids": segments,
        }
        if rate and dropout is not None:
            options |= {"dropout": rate, "seed": dropout.seed_generator.next()}
        output = attention(query, key, value, implementation=chosen, **options)
        self._note(f"fused: {chosen}")
        return output, sees


# The methods of a layer that make up its formula.
_FORMULA = (private.compute_attention.name, private.masked_softmax.name)


def _attends(layer: keras.layers.Layer) -> bool:
    """Tells by the name of its class if a layer of Keras's or KerasHub's has attention of another
    kind.
    """
    owner, _, name = known_name(type(layer)).partition(".")
    return owner in ("keras", "keras_hub") and "Attention" in name and "Mask" not in name


def _hub_form(layer: Any) -> _HubLayer | None:
    """Returns the form of a layer of KerasHub's, unless a subclass computes a part of it
    otherwise.
    """
    for made in type(layer).__mro__:
        if private.compute_attention.name in vars(made):
            same = all(
                getattr(type(layer), name, None) is getattr(made, name, None) for name in _FORMULA
            )
            if not same or package(made) != "keras_hub":
                return None
            return _HUB_LAYERS.get(
                f"{made.__module__}.{made.__qualname__}".partition(".src.models.")[2]
            )
    return None


def _keras_form(layer: Any) -> _HubLayer | None:
    """Returns the form of a layer of Keras's with dropout, unless a subclass computes a part of it
    otherwise.
    """
    for made, form in _KERAS_LAYERS.items():
        same = all(getattr(type(layer), name, None) is getattr(made, name) for name in _FORMULA)
        if same and layer.dropout:
            kinds = type(private.softmax(layer)), type(private.dropout_layer(layer))
            return form if kinds == (keras.layers.Softmax, keras.layers.Dropout) else None
    return None


def _make_causal_mask(call: Call, query: tf.Tensor, value: tf.Tensor | None = None) -> tf.Tensor:
    """Makes the causal mask of Keras's layers of two ranges, not of two sums over a whole matrix of
    ones.
    """
    queries, keys = query.shape[1], (query if value is None else value).shape[1]
    if queries is None or keys is None:
        return call(query, value)
    return tf.range(queries)[None, :, None] >= tf.range(keys)[None, None]


def _require_kernel_arguments(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scale: Any
) -> None:
    if any(t.shape.rank != 4 or None in t.shape[1:] for t in (query, key, value)):
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


def _as_segments(
    mask: Mask, rows: tf.Tensor, queries: int, keys: int
) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns documents and padding as ids of queries and keys, and bool [B, T], whether a query
    sees any key.
    """
    own, others = mask.documents or (
        tf.zeros([1, queries], tf.int32),
        tf.zeros([1, keys], tf.int32),
    )
    padded = mask.queries is not None or mask.keys is not None
    if padded and own.dtype.size > 4:
        raise _NotFused(
            "documents of 64-bit ids beside padding, which takes an id of its own: cast them to "
            "int32"
        )
    if padded and mask.documents:  # multiples of 4, which padding is not
        own, others = (4 * tf.cast(ids, tf.int64) for ids in (own, others))
    own, others = tf.broadcast_to(own, [rows, queries]), tf.broadcast_to(others, [rows, keys])
    segments = own if mask.queries is None else tf.where(mask.queries, own, 1), others
    segments = segments[0], others if mask.keys is None else tf.where(mask.keys, others, 2)
    t_T1, s_S = tf.range(queries)[:, None], tf.range(keys)
    if mask.documents:
        in_band = s_S >= 0 if mask.after is None else s_S <= t_T1 + mask.after
        in_band &= True if mask.before is None else s_S >= t_T1 - mask.before
        return segments, tf.reduce_any(
            (segments[0][:, :, None] == segments[1][:, None]) & in_band, 2
        )
    may_see, seen = segments[0] == 0, segments[1] == 0
    places = np.arange(queries)
    end = np.minimum(places + (keys if mask.after is None else mask.after + 1), keys)
    start = 0 * places if mask.before is None else np.maximum(places - mask.before, 0)
    sums = tf.cumsum(tf.pad(tf.cast(seen, tf.int32), [[0, 0], [1, 0]]), 1)
    return segments, may_see & (tf.gather(sums, end, axis=1) > tf.gather(sums, start, axis=1))


@functools.cache
def _warn_of_keras() -> None:
    warn(
        f"Keras {keras.__version__} keeps its attention where fastaccum does not look: layers "
        "that call keras.ops.dot_product_attention take their own formula, which holds the "
        "scores of all tokens. Install a version that pyproject.toml allows."
    )


# Keras's own formula; None with a release that keeps it where `private` does not look.
_UNFUSED: Any = private.nn.dot_product_attention if private.has("nn") else None


def _replace_formula(unfused: Callable[..., tf.Tensor]) -> None:
    """Replaces Keras's formula for good: without a fused one in a trace's context it does what it
    did.
    """
    signature = inspect.signature(unfused)

    @functools.wraps(unfused)
    def dot_product_attention(*args: Any, **kwargs: Any) -> tf.Tensor:
        formula = trace_context.current().attention or unfused
        return formula(**signature.bind(*args, **kwargs).arguments)

    private.nn.dot_product_attention = dot_product_attention


if _UNFUSED is not None:
    _replace_formula(_UNFUSED)
