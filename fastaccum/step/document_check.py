"""Refuses models, losses and metrics for which packed rows are not the documents alone.

A model may mix the tokens of a row in any way: by recurrence, convolution, pooling, or an attention
of its own. What it computes decides, not what it is called. It is called, with weights that are
moved a little, for a row of documents: then with other tokens in every second document, and with
the documents in another order. The first layer whose result for a document changes is named.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest, raw, restored
from fastaccum.basics.packed_rows import PackedRows
from fastaccum.layers import documents
from fastaccum.layers.interceptors import Interceptor, Role, intercepting
from fastaccum.layers.scan import probe_layers
from fastaccum.step.model_objective import ModelObjective

# Added to the weights, times numbers drawn from a normal distribution: a gate that is 0 before the
# training would hide what it lets in.
_SHIFT_OF_WEIGHTS = 0.05
# Changes of a layer's result that tell, as fractions of its largest element. Masked tokens change
# none but by rounding. Relative positions round otherwise at other places.
_CHANGE_BY_TOKENS = 1e-4
_CHANGE_BY_PLACE = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.1}
_REMEDY = (
    "Attention is kept apart in keras.layers.MultiHeadAttention, GroupQueryAttention, KerasHub's "
    "decoders and encoders, and keras.ops.dot_product_attention; positions in KerasHub's "
    "PositionEmbedding, and in an Embedding that is called with keras.ops.arange(length). For "
    "other models pad the documents, and mask what is padding."
)


def require_packable(objective: ModelObjective) -> None:
    """Raises ValueError for losses or metrics that do not count single tokens."""
    model = objective.model
    kind = type(model.model).__name__
    reason = None
    if model.keras_module is not keras:
        reason = f"{kind} is a model of tf_keras"
    elif objective.own_loss is not None:
        reason = f"{kind} overrides compute_loss"
    elif objective.has_own_metrics:
        reason = f"{kind} overrides compute_metrics"
    elif objective.model.effects.added_reductions:
        reason = f"layers of {kind} add losses, which are means over rows (add_loss, regularizers)"
    elif objective.metrics.need_exact_rows:
        reason = "a metric may count padding, as one of a class of your own may"
    else:
        for output in objective.losses.outputs:
            mixes_rows = output.mixing is not None
            if mixes_rows or output.scalar is not None or output.power is not None:
                reason = f"the loss of output {output.name!r} is no sum over tokens"
    if reason is not None:
        raise ValueError(
            f"x holds packed rows, and {reason}: what that makes of several documents in a row is "
            "not known. Pad the documents instead, and mask what is padding."
        )


class _Row(NamedTuple):
    """One row of documents that fill it, as arrays."""

    inputs: Nest  # [1, T, ...]
    documents: np.ndarray  # [1, T]
    positions: np.ndarray  # [1, T]


def require_documents_apart(objective: ModelObjective, x: PackedRows) -> None:
    """Raises ValueError if what a model computes for a document depends on the rest of its row.

    Args:
        objective: the model's.
        x: a stack of packed rows, tensors [..., rows, T, ...].
    """
    length = int(x.documents.shape[-1])
    if length == 1:
        return
    row = _make_row(x, length)
    other = row._replace(inputs=_with_other_tokens(row))
    is_unchanged = row.documents[0] % 2 == 0
    call = _trace(objective, row, training=True)
    for name, before, after in zip(call.names, *call.run(row, other), strict=True):
        if _differ(before[:, is_unchanged], after[:, is_unchanged], before, _CHANGE_BY_TOKENS):
            raise ValueError(
                f"x holds packed rows, and {name} lets tokens of a row's documents see one "
                f"another. {_REMEDY}"
            )

    call = _trace(objective, row, training=False)
    order = np.argsort(-row.documents[0], kind="stable")  # the last document comes first
    moved = tf.nest.map_structure(lambda array: array[:, order], row)
    tolerance = _CHANGE_BY_PLACE.get(objective.model.compute_dtype, 0.1)
    changed = []
    for name, before, after in zip(call.names, *call.run(row, moved), strict=True):
        if _differ(before[:, order], after, before, tolerance):
            changed.append(name)
    # Rotary positions change what is between, but no result of the model.
    if changed and changed[-1] == call.names[-1]:
        raise ValueError(
            f"x holds packed rows, and {changed[0]} computes by the place of a token in its row, "
            f"which is not its place in its document. {_REMEDY}"
        )


def _make_row(x: PackedRows, length: int) -> _Row:
    """Makes a row of the first row's tokens, as documents of 1, 2, 3, 5, 8, ... tokens."""
    is_real = x.documents.numpy().reshape(-1, length)[0] > 0
    tokens = np.resize(np.flatnonzero(is_real), length)

    def first_row(tensor: tf.Tensor) -> np.ndarray:
        rank_of_stack = x.documents.shape.rank
        array = tensor.numpy().reshape(-1, length, *tensor.shape[rank_of_stack:])
        return array[:1, tokens]

    document_lengths = [1, 2]
    while sum(document_lengths) < length:
        document_lengths.append(document_lengths[-1] + document_lengths[-2])
    documents = np.repeat(np.arange(len(document_lengths)) + 1, document_lengths)[:length]
    starts = np.searchsorted(documents, documents)
    positions = np.arange(length) - starts
    return _Row(
        tf.nest.map_structure(first_row, x.inputs),
        documents[None].astype(np.int32),
        positions[None].astype(np.int32),
    )


def _with_other_tokens(row: _Row) -> Nest:
    """Returns a row's inputs with other tokens in its documents of odd numbers."""
    places = np.flatnonzero(row.documents[0] % 2 == 1)

    def replaced(array: np.ndarray, values: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed[:, places] = values[:, places]
        return changed

    for shift in (1, row.documents.shape[1] // 2):
        shifted = tf.nest.map_structure(
            lambda array, shift=shift: replaced(array, np.roll(array, shift, 1)), row.inputs
        )
        if _any_differ(shifted, row.inputs):
            return shifted
    # The row has one token alone, again and again: 0 or 1 take its place.
    zeros = tf.nest.map_structure(lambda array: replaced(array, np.zeros_like(array)), row.inputs)
    if _any_differ(zeros, row.inputs):
        return zeros
    return tf.nest.map_structure(lambda array: replaced(array, np.ones_like(array)), row.inputs)


def _any_differ(nest: Nest, other: Nest) -> bool:
    pairs = zip(tf.nest.flatten(nest), tf.nest.flatten(other), strict=True)
    return any((array != other_array).any() for array, other_array in pairs)


def _has_tokens(tensor: tf.Tensor, length: int) -> bool:
    """Tells if a tensor's second axis is that of a row's tokens."""
    return bool(tensor.shape.rank) and tuple(tensor.shape[:2]) == (1, length)


class _Recorder:
    """Records tensors with an axis of tokens, and the layers that computed them.

    Attributes:
        names: of the layer that computed each result.
        results: in the order in which they were computed.
    """

    def __init__(self, model: keras.Model, length: int):
        self.names: list[str] = []
        self.results: list[tf.Tensor] = []
        self._length = length
        self._graph = tf.compat.v1.get_default_graph()
        self._recorded_ids: set[int] = set()
        self._running = [f"model {model.name!r}"]  # the layers that are being called
        self._first_without_tokens: str | None = None  # a layer that has dropped the axis

    def record(self, tensors: Nest, name: str | None = None) -> None:
        """Records results of a layer; those of the innermost one that is called without a name."""
        name = name or self._running[-1]
        for tensor in tf.nest.flatten(tensors):
            if not tf.is_tensor(tensor) or tensor.graph is not self._graph:
                continue
            if id(tensor) in self._recorded_ids or not tensor.dtype.is_floating:
                continue
            self._recorded_ids.add(id(tensor))
            if _has_tokens(tensor, self._length):
                self.names.append(self._first_without_tokens or name)
                self.results.append(tensor)
            elif self._length not in tensor.shape and self._first_without_tokens is None:
                self._first_without_tokens = name

    def call_layer(
        self, layer: keras.layers.Layer, call: Callable, *args: Any, **kwargs: Any
    ) -> Nest:
        """Calls a layer, and records what the code around it has computed, and its results."""
        for argument in tf.nest.flatten((args, kwargs)):
            if tf.is_tensor(argument) and _has_tokens(argument, self._length):
                self.record(argument)
        name = f"layer {layer.path or layer.name!r} ({type(layer).__name__})"
        self._running.append(name)
        outputs = call(*args, **kwargs)
        self._running.pop()
        self.record(outputs, name)
        return outputs


class _TracedCall(NamedTuple):
    """A call of a model, and the layers whose results it returns, in the order of their ends."""

    names: list[str]
    run: Callable[..., list[list[np.ndarray]]]  # the results for each of some rows


def _trace(objective: ModelObjective, row: _Row, training: bool) -> _TracedCall:
    """Traces a call of the model for a row."""
    model = objective.model
    length = row.documents.shape[1]
    called = model.called_layers
    names: list[str] = []

    def compute(row: _Row) -> list[tf.Tensor]:
        recorder = _Recorder(model.model, length)
        interceptors = documents.make_interceptors(called)
        attending: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if objective.attention is not None:
            interceptors += objective.attention.make_forms(called)
            attending = objective.attention.entered()
        for layer in called:
            if layer is not model.model and hasattr(layer, "path"):
                call_layer = functools.partial(recorder.call_layer, layer)
                interceptors.append(Interceptor(layer, "call", call_layer, Role.OBSERVE))
        # Of blocks that repeat the first one is called alone.
        interceptors += probe_layers(model.model).interceptors
        x = PackedRows(row.inputs, row.documents, row.positions, row.documents > 0)
        with attending, intercepting(interceptors):
            outputs = model(x, training)
        for output in tf.nest.flatten(outputs):
            if tuple(output.shape[:2]) != (1, length):
                raise ValueError(
                    f"x holds packed rows of {length} tokens, and an output of the model has shape "
                    f"{(None, *output.shape[1:])}: it must have a result for each token."
                )
        recorder.record(outputs)
        names.extend(recorder.names)
        return recorder.results

    traced = tf.function(compute, autograph=False).get_concrete_function(
        tf.nest.map_structure(tf.constant, row)
    )

    def run(*rows: _Row) -> list[list[np.ndarray]]:
        variables = list(traced.graph.variables)
        assigned = {id(raw(variable)) for variable in objective.state}
        weights = []
        state = []  # seeds too: each call draws the same
        for variable in variables:
            is_weight = variable.dtype.is_floating and id(variable) not in assigned
            if is_weight:
                weights.append(variable)
            else:
                state.append(variable)
        results = []
        with restored(weights):
            for number, weight in enumerate(weights):
                noise = tf.random.stateless_normal(weight.shape, [0, number])
                weight.assign_add(tf.cast(_SHIFT_OF_WEIGHTS * noise, weight.dtype))
            for row in rows:
                with restored(state):
                    of_row = traced(tf.nest.map_structure(tf.constant, row))
                    results.append([tf.cast(result, tf.float32).numpy() for result in of_row])
        return results

    return _TracedCall(names, run)


def _differ(before: np.ndarray, after: np.ndarray, whole: np.ndarray, tolerance: float) -> bool:
    """Tells if results differ by more than this fraction of the largest finite element."""
    largest = np.max(np.abs(whole), initial=0.0, where=np.isfinite(whole))
    close = np.isclose(before, after, rtol=0.0, atol=tolerance * largest, equal_nan=True)
    return not bool(close.all())
