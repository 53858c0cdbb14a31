"""Refuses models, losses and metrics for which packed rows are not the documents alone.

A model may mix the tokens of a row in any way: by recurrence, convolution, pooling, or an attention
of its own. What it computes decides, not what it is called. It is called, with weights that are
moved a little, for a row of documents: then with other tokens in every second document, and with
the documents in another order. The first layer whose result for a document changes is named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.data.stacks import Batch
from fastaccum.layers.interceptors import Interceptor, Role
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.probe_rows import (
    ProbeRow,
    is_in_even_document,
    make_row,
    reversed_order,
    with_documents_reversed,
    with_other_tokens,
)
from fastaccum.step.token_check import require_counts_by_token
from fastaccum.step.trial import Trial

# Changes of a layer's result that tell, as fractions of the largest difference between tokens.
# Masked tokens change none but by rounding. Relative positions round otherwise at other places.
_CHANGE_BY_TOKENS = 1e-4
_CHANGE_BY_PLACE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.1}
_ROUNDING = 1e-5  # of a number, as a fraction of it
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


def require_documents_apart(objective: ModelObjective, stack: Batch, training: bool) -> None:
    """Raises ValueError if what a model computes for a document depends on the rest of its row.

    Args:
        objective: the model's.
        stack: of packed rows, tensors [..., rows, T, ...].
        training: False to try the model out for evaluations alone.
    """
    row = make_row(stack)
    if row.x.documents.shape[1] == 1:
        return
    call = _trace(objective, row, training=False)
    with call.trial.shifted_weights():
        _require_same_for_other_tokens(call, row)
        _require_same_for_other_places(call, row, objective.model.compute_dtype)
    if training:
        call = _trace(objective, row, training=True)
        with call.trial.shifted_weights():
            _require_same_for_other_tokens(call, row)
    require_counts_by_token(objective, row)


def _require_same_for_other_tokens(call: _TracedCall, row: ProbeRow) -> None:
    """Raises ValueError if a document's results change with the tokens of others."""
    is_compared = is_in_even_document(row)
    before = call.trial.compute(row)
    after = call.trial.compute(with_other_tokens(row))
    for number, name in enumerate(call.names):
        if not _differ(before[number], after[number], is_compared, _CHANGE_BY_TOKENS):
            continue
        again = call.trial.compute(row)
        if _differ(before[number], again[number], is_compared, _CHANGE_BY_TOKENS):
            raise ValueError(
                f"x holds packed rows, and {name} draws random numbers that differ from call to "
                "call, so it cannot be tried out on them. Draw them by keras.random with a "
                "keras.random.SeedGenerator of the layer."
            )
        raise ValueError(
            f"x holds packed rows, and {name} lets tokens of a row's documents see one another. "
            f"{_REMEDY}{_remedy_for_masks(row)}"
        )


def _remedy_for_masks(row: ProbeRow) -> str:
    """Returns a sentence about ids of 0, where there are any."""
    for array in tf.nest.flatten(row.x.inputs):
        if array.dtype.kind in "iu" and not array.all():
            return (
                " Where a layer masks tokens of id 0 (mask_zero=True), no document may hold that "
                "id: with all keys masked, attention is a mean over the whole row."
            )
    return ""


def _require_same_for_other_places(call: _TracedCall, row: ProbeRow, dtype: str) -> None:
    """Raises ValueError if a document's results change with its place in the row."""
    order = reversed_order(row)
    tolerance = _CHANGE_BY_PLACE.get(dtype, _CHANGE_BY_PLACE["float16"])
    before = call.trial.compute(row)
    after = call.trial.compute(with_documents_reversed(row))
    changed = []
    for number, (of_row, of_reversed) in enumerate(zip(before, after, strict=True)):
        if _differ(of_row[:, order], of_reversed, np.ones(len(order), bool), tolerance):
            changed.append(number)
    # Rotary positions change what is between, but no result of the model.
    if not call.outputs.isdisjoint(changed):
        raise ValueError(
            f"x holds packed rows, and {call.names[changed[0]]} computes by the place of a token "
            f"in its row, which is not its place in its document. {_REMEDY}"
        )


def _has_tokens(tensor: tf.Tensor, length: int) -> bool:
    """Tells if a tensor's second axis is that of a row's tokens."""
    return bool(tensor.shape.rank) and tuple(tensor.shape[:2]) == (1, length)


class _Recorder:
    """Records tensors with an axis of tokens, and the layers that computed them.

    Attributes:
        names: of the layer that computed each result.
        results: in the order in which they were computed.
        graph: the one of the trace, set as it begins; tensors of loops in it are not recorded.
    """

    graph: tf.Graph

    def __init__(self, model: keras.Model, length: int):
        self.names: list[str] = []
        self.results: list[tf.Tensor] = []
        self._length = length
        self._recorded_ids: set[int] = set()
        self._running = [f"model {model.name!r}"]  # the layers that are being called
        self._first_without_tokens: str | None = None  # a layer that has dropped the axis

    def record(self, tensors: Nest, name: str | None = None) -> None:
        """Records results of a layer; those of the innermost one that is called without a name."""
        name = name or self._running[-1]
        for tensor in tf.nest.flatten(tensors):
            if not tf.is_tensor(tensor) or tensor.graph is not self.graph:
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
    outputs: set[int]  # the places of the model's outputs among the results
    trial: Trial  # which returns the results


def _trace(objective: ModelObjective, row: ProbeRow, training: bool) -> _TracedCall:
    """Traces a call of the model for a row."""
    model = objective.model
    length = row.x.documents.shape[1]
    recorder = _Recorder(model.model, length)
    observers = []
    for layer in model.called_layers:
        if layer is not model.model and hasattr(layer, "path"):
            call_layer = functools.partial(recorder.call_layer, layer)
            observers.append(Interceptor(layer, "call", call_layer, Role.OBSERVE))
    output_ids: set[int] = set()

    def compute(row: ProbeRow) -> list[tf.Tensor]:
        recorder.graph = tf.compat.v1.get_default_graph()
        outputs = model(row.x, training)
        for output in tf.nest.flatten(outputs):
            if tuple(output.shape[:2]) != (1, length):
                raise ValueError(
                    f"x holds packed rows of {length} tokens, and an output of the model has shape "
                    f"{(None, *output.shape[1:])}: it must have a result for each token."
                )
            output_ids.add(id(output))
        recorder.record(outputs)
        return [tf.cast(result, tf.float32) for result in recorder.results]

    trial = Trial(objective, compute, row, observers=observers)
    places = range(len(recorder.results))
    output_places = {place for place in places if id(recorder.results[place]) in output_ids}
    return _TracedCall(recorder.names, output_places, trial)


def _differ(
    before: np.ndarray, after: np.ndarray, is_compared: np.ndarray, tolerance: float
) -> bool:
    """Tells if results [1, T, ...] of some tokens differ.

    They may by a fraction of the largest difference between tokens, and by rounding. What all
    tokens share, such as -1e9 for what a mask leaves out, says nothing of the size of the others.
    """
    finite = np.where(np.isfinite(before), before, 0.0)
    spread = np.max(np.ptp(finite, axis=1), initial=0.0)
    close = np.isclose(
        before[:, is_compared],
        after[:, is_compared],
        rtol=_ROUNDING,
        atol=tolerance * spread,
        equal_nan=True,
    )
    return not bool(close.all())
