"""Rows of documents by which a model, its losses and its metrics are tried out on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.basics.packed_rows import PackedRows
from fastaccum.data.stacks import Batch


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


def is_in_even_document(row: ProbeRow) -> np.ndarray:
    """Tells which tokens are of documents of even numbers: bool [T]."""
    return row.x.documents[0] % 2 == 0


def with_other_tokens(row: ProbeRow) -> ProbeRow:
    """Returns a row with other tokens in the documents of odd numbers.

    The last document is padding, if its number is odd.
    """
    return _with_padding(_with_replaced_tokens(row))


def _with_replaced_tokens(row: ProbeRow) -> ProbeRow:
    """Replaces the tokens of odd documents by their neighbours', or by those of half a row on."""
    is_replaced = ~is_in_even_document(row)

    def with_values(values_of: Callable[[np.ndarray], np.ndarray]) -> ProbeRow:
        def replace(array: np.ndarray) -> np.ndarray:
            replaced = array.copy()
            replaced[:, is_replaced] = values_of(array)[:, is_replaced]
            return replaced

        return _map_tokens(replace, row)

    half = row.x.documents.shape[1] // 2
    # A row with one token alone, again and again, gets 0 or 1 in its place.
    sources: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda array: np.roll(array, 1, 1),
        lambda array: np.roll(array, half, 1),
        np.zeros_like,
    ]
    for values_of in sources:
        other = with_values(values_of)
        if _differ(other.x.inputs, row.x.inputs):
            return other
    return with_values(np.ones_like)


def _with_padding(row: ProbeRow) -> ProbeRow:
    """Makes padding of the last document, if its number is odd and it is not the only one."""
    numbers = row.x.documents
    last = numbers[0, -1]
    if last % 2 == 0 or last == 1:
        return row
    is_padding = numbers[0] == last

    def pad(array: np.ndarray) -> np.ndarray:
        padded = array.copy()
        padded[:, is_padding] = np.zeros_like(padded[:, is_padding])
        return padded

    row = _map_tokens(pad, row)
    return row._replace(x=row.x._replace(documents=pad(numbers)))


def reversed_order(row: ProbeRow) -> np.ndarray:
    """Returns the places from which tokens come when the last document comes first: int [T]."""
    return np.argsort(-row.x.documents[0], kind="stable")


def with_documents_reversed(row: ProbeRow) -> ProbeRow:
    """Returns a row whose last document comes first, and so on."""
    order = reversed_order(row)
    return _map_arrays(lambda array: array[:, order], row)


def with_targets_of(row: ProbeRow, tokens: np.ndarray) -> ProbeRow:
    """Returns a row in which the targets of some tokens alone count, bool [T]."""
    return row._replace(x=row.x._replace(predicts=tokens[None] & (row.x.documents > 0)))


def as_tensors(nest: Any) -> Any:
    """Returns a nest of arrays and None as one of tensors."""
    return _map_arrays(tf.constant, nest)


def _map_tokens(function: Callable[[np.ndarray], np.ndarray], row: ProbeRow) -> ProbeRow:
    """Maps the inputs, targets and weights of a row."""
    inputs, y, sample_weight = _map_arrays(function, (row.x.inputs, row.y, row.sample_weight))
    return ProbeRow(row.x._replace(inputs=inputs), y, sample_weight)


def _map_arrays(function: Callable[[np.ndarray], Any], nest: Any) -> Any:
    return tf.nest.map_structure(lambda array: None if array is None else function(array), nest)


def _differ(nest: Any, other: Any) -> bool:
    pairs = zip(tf.nest.flatten(nest), tf.nest.flatten(other), strict=True)
    return any((array != other_array).any() for array, other_array in pairs)
