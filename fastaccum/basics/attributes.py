"""Reads and replaces attributes of others' objects, and tells whose they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels.origins import known_name as known_name
from fastaccum.kernels.origins import package as package
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
    """Sets attributes, given as (object, name, value), and restores them on exit.

    Blocks may be nested.
    """
    # `vars`, since the `__setattr__` of Keras objects tracks what it is given. It also tells an
    # attribute of the object from one of its class, which is restored by removing the object's.
    with ExitStack() as on_exit:
        for owner, name, value in attributes:
            attributes_of_owner = vars(owner)
            if name in attributes_of_owner:
                on_exit.callback(attributes_of_owner.update, {name: attributes_of_owner[name]})
            else:
                on_exit.callback(attributes_of_owner.pop, name, None)
            attributes_of_owner[name] = value
        yield


def of_keras(thing: object) -> bool:
    """Tells if a class or function, or an object's class, is Keras's or tf_keras's."""
    return package(thing) in ("keras", "tf_keras")


def kinds(value: object) -> Mapping[str, type]:
    """Returns a value's class and its bases, by names such as "keras.Optimizer".

    A class whose name is not true of it, such as a user's that says it is Keras's, is left out.
    """
    kind: Any = type(value)
    return _kinds_of_class(kind)


@functools.lru_cache(maxsize=1024)
def _kinds_of_class(kind: type) -> Mapping[str, type]:
    classes = {}
    # From `object` to the class itself, so that a subclass wins a name that its base has too.
    for cls in reversed(kind.__mro__):
        classes[known_name(cls)] = cls
    classes.pop("", None)
    return types.MappingProxyType(classes)


def require_model(model: object) -> None:
    """Raises TypeError for what is neither a Keras 3 nor a tf_keras model."""
    if kinds(model).keys().isdisjoint(("keras.Model", "tf_keras.Model")):
        raise TypeError(
            f"model={model!r} is not a Keras model: pass a keras.Model (Keras 3) or a "
            "tf_keras.Model."
        )


def runs_keras(value: object, method: str) -> bool:
    """Tells if an object's method is Keras's or tf_keras's: nothing overrides it."""
    function = getattr(type(value), method, None)
    if function is None or not of_keras(function):
        return False
    return method not in getattr(value, "__dict__", {})


def function_of(loss: Any) -> Callable | None:
    """Returns the `fn` whose values a Keras loss returns; None for a loss with its own `call`."""
    if not runs_keras(loss, "call"):
        return None
    return getattr(loss, "fn", None)
