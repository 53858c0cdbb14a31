"""Reads and replaces attributes of others' objects, and names the package of a class, which need not be imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as undone:
        for owner, name, value in attributes:
            own = vars(owner)
            if name in own:
                undone.callback(own.update, {name: own[name]})
            else:
                undone.callback(own.pop, name, None)
            own[name] = value
        yield


def package(thing: object) -> str:
    """Names the package that defines a class or function; empty for anything else."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def of_keras(thing: object) -> bool:
    """Tells if a class or function is Keras's or tf_keras's."""
    return package(thing) in ("keras", "tf_keras")


def kinds(value: object) -> dict[str, type]:
    """Returns a value's class and its bases by package and name, such as "keras.Optimizer"."""
    return {f"{package(c)}.{c.__name__}": c for c in reversed(type(value).__mro__)}
