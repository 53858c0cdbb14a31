"""Rows of documents by which a model, its losses and its metrics are tried out on packed rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.models import Model
from fastaccum.basics.attributes import raw, restored
from fastaccum.basics.packed_rows import PackedRows
from fastaccum.data.stacks import Batch

# Added to the weights, times numbers drawn from a normal distribution: a gate that is 0 before the
# training would hide what it lets in.
_SHIFT_OF_WEIGHTS = 0.05


class ProbeRow(NamedTuple):
    """A packed row with its targets: arrays [1, T, ...], or tensors in a trace."""

    x: PackedRows
    y: Any
    sample_weight: Any


def make_row(stack: Batch) -> ProbeRow:
    """Makes a row of the tokens of a stack's first row, in documents of 1, 2, 3, 5, 8, ... tokens.

    The documents fill the row. Its leaves are arrays [1, T, ...].
    """
    x: Any = stack.x
    length = int(x.documents.shape[-1])
    is_real = x.documents.numpy().reshape(-1, length)[0] > 0
    tokens = np.resize(np.flatnonzero(is_real), length)
    rank_of_stack = x.documents.shape.rank

    def first_row(tensor: tf.Tensor | None) -> np.ndarray | None:
        if tensor is None:
            return None
        array = tensor.numpy().reshape(-1, length, *tensor.shape[rank_of_stack:])
        return array[:1, tokens]

    document_lengths = [1, 2]
    while sum(document_lengths) < length:
        document_lengths.append(document_lengths[-1] + document_lengths[-2])
    documents = np.repeat(np.arange(len(document_lengths)) + 1, document_lengths)[:length]
    starts = np.searchsorted(documents, documents)
    inputs, y, sample_weight = tf.nest.map_structure(
        first_row, (x.inputs, stack.y, stack.sample_weight)
    )
    packed = PackedRows(
        inputs,
        documents[None].astype(np.int32),
        (np.arange(length) - starts)[None].astype(np.int32),
        np.ones([1, length], bool),
    )
    return ProbeRow(packed, y, sample_weight)


def is_watched(row: ProbeRow) -> np.ndarray:
    """Tells which tokens are of documents of even numbers: bool [T]."""
    return row.x.documents[0] % 2 == 0


def with_other_tokens(row: ProbeRow) -> ProbeRow:
    """Returns a row with other tokens in the documents that are not watched.

    The last of these is padding, if it ends the row.
    """
    places = np.flatnonzero(~is_watched(row))
    parts = row.x.inputs, row.y, row.sample_weight

    def replaced(array: np.ndarray, values: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed[:, places] = values[:, places]
        return changed

    def rolled(shift: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda array: replaced(array, np.roll(array, shift, 1))

    # A row with one token alone, again and again, gets 0 or 1 in its place.
    changes: Sequence[Callable[[np.ndarray], np.ndarray]] = (
        rolled(1),
        rolled(row.x.documents.shape[1] // 2),
        lambda array: replaced(array, np.zeros_like(array)),
        lambda array: replaced(array, np.ones_like(array)),
    )
    for change in changes:
        other_inputs, *other_targets = _map_arrays(change, parts)
        if _differ(other_inputs, row.x.inputs):
            break

    documents = row.x.documents.copy()
    last = documents[0, -1]
    if last % 2 == 1 and last > 1:
        is_padding = documents[0] == last

        def padded(array: np.ndarray) -> np.ndarray:
            array = array.copy()
            array[:, is_padding] = np.zeros_like(array[:, is_padding])
            return array

        other_inputs, *other_targets = _map_arrays(padded, (other_inputs, *other_targets))
        documents = padded(documents)
    y, sample_weight = other_targets
    x = row.x._replace(inputs=other_inputs, documents=documents)
    return ProbeRow(x, y, sample_weight)


def order_moved(row: ProbeRow) -> np.ndarray:
    """Returns the places from which tokens come when the last document comes first: int [T]."""
    return np.argsort(-row.x.documents[0], kind="stable")


def moved(row: ProbeRow) -> ProbeRow:
    """Returns a row with its documents in the opposite order."""
    order = order_moved(row)
    return _map_arrays(lambda array: array[:, order], row)


def predicting(row: ProbeRow, tokens: np.ndarray) -> ProbeRow:
    """Returns a row of whose targets those of some tokens count, bool [T]."""
    return row._replace(x=row.x._replace(predicts=tokens[None] & (row.x.documents > 0)))


def as_tensors(nest: Any) -> Any:
    """Returns a nest of arrays and None as one of tensors."""
    return _map_arrays(tf.constant, nest)


def split_variables(
    traced: ConcreteFunction, model: Model, state_ids: Collection[int]
) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """Splits the variables of a traced function: its weights, and those that it may assign.

    The weights come in the model's order, since that of a graph differs from process to process.
    """
    places = {id(raw(variable)): place for place, variable in enumerate(model.variables)}

    def place_of(variable: tf.Variable) -> tuple[int, str]:
        return places.get(id(variable), len(places)), variable.name

    weights = []
    state = []
    for variable in sorted(traced.graph.variables, key=place_of):
        if variable.dtype.is_floating and id(variable) not in state_ids:
            weights.append(variable)
        else:
            state.append(variable)
    return weights, state


@contextlib.contextmanager
def shifted_weights(weights: Sequence[tf.Variable]) -> Iterator[None]:
    """Moves weights a little away from 0 inside the block.

    No weight changes its sign, since a model may take its root or its logarithm.
    """
    with restored(weights):
        for number, weight in enumerate(weights):
            noise = _SHIFT_OF_WEIGHTS * tf.random.stateless_normal(weight.shape, [0, number])
            noise = tf.cast(noise, weight.dtype)
            value = weight.read_value()
            weight.assign_add(tf.where(value == 0, noise, tf.abs(noise) * tf.sign(value)))
        yield


def _map_arrays(function: Callable[[np.ndarray], Any], nest: Any) -> Any:
    return tf.nest.map_structure(lambda array: None if array is None else function(array), nest)


def _differ(nest: Any, other: Any) -> bool:
    pairs = zip(tf.nest.flatten(nest), tf.nest.flatten(other), strict=True)
    return any((array != other_array).any() for array, other_array in pairs)
