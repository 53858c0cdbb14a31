"""Reads and replaces attributes of others' objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels.recomputed_function import Nest as Nest

Variable: TypeAlias = keras.Variable | tf.Variable


def raw(variable: Variable) -> tf.Variable:
    """Returns the tf.Variable in a keras.Variable, and anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@contextmanager
def restored(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Restores the values of variables on exit."""
    before = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def replaced(attributes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Sets attributes, given as (object, name, value), and restores them on exit; blocks may be nested."""
    attributes = list(attributes)
    before = [(vars(owner), name, name in vars(owner), vars(owner).get(name)) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            vars(owner)[name] = value
        yield
    finally:
        for own, name, had, value in before:
            if had:
                own[name] = value
            else:
                own.pop(name, None)
