"""Tells which package defines a class, a function or an object.

What counts is the object that a module holds, not what the object says of itself: `functools.wraps`
copies `__module__`, `__name__` and `__qualname__` to a user's function, and any class may set them.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorflow as tf


def known_name(thing: object) -> str:
    """Returns a class's or function's package and name, such as "keras.dice".

    A class or function is the package's if the module that it names holds this very object. The
    name is "" for one that only says so.

    >>> import functools, keras
    >>> @functools.wraps(keras.losses.dice)
    ... def loss(y_true, y_pred):
    ...     return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
    >>> known_name(loss), known_name(keras.losses.dice)
    ('', 'keras.dice')
    """
    defining_package = package(thing)
    if not defining_package:
        return ""
    thing = _unwrapped(thing)
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{defining_package}.{name}"


def package(thing: object) -> str:
    """Returns the package that defines a class or function, or an object's class.

    This is "" for one that only says that a package defines it. A bound method is its object's
    class's: what it does follows from the methods that it calls.
    """
    thing = _unwrapped(thing)
    owner = getattr(thing, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        thing = owner
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    module_name: object = getattr(thing, "__module__", None)
    if not isinstance(module_name, str):
        return ""
    module = sys.modules.get(module_name)
    if module is None or not _holds(module, thing):
        return ""
    return module_name.partition(".")[0]


def _unwrapped(thing: object) -> object:
    # A `tf.function` names itself as the function that it runs.
    if isinstance(thing, tf.types.experimental.GenericFunction):
        return getattr(thing, "python_function", thing)
    return thing


def _holds(module: types.ModuleType, thing: Any) -> bool:
    """Tells if a module holds or defines a class or function by the name that this gives itself."""
    if _is_defined_in(module, thing):
        return True
    held: Any = module
    for name in thing.__qualname__.split("."):
        held = getattr(held, name, None)
    return held is thing


def _is_defined_in(module: types.ModuleType, thing: Any) -> bool:
    """Tells by the globals of a function, which nothing copies, if a module defines it.

    For a class that is made in a function, the globals of its methods tell. A decorated function
    has the globals of its decorator, as Keras's and TensorFlow's own often have.
    """
    if isinstance(thing, types.FunctionType):
        return thing.__globals__ is vars(module)
    if "<locals>" not in thing.__qualname__:
        return False
    for attribute in vars(thing).values():
        if isinstance(attribute, types.FunctionType) and attribute.__globals__ is vars(module):
            return True
    return False
