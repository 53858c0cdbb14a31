"""Attributes of objects that are not ours: a Keras variable's value, and any replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


def raw(variable: Any) -> tf.Variable:
    """The tf.Variable in a keras.Variable; one of TensorFlow's as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@contextmanager
def restored(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Variables may be assigned within the scope; after it they are as before."""
    before = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within the scope, these (object, name, value) stand in for the objects' own attributes; scopes may be nested."""
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
