"""Tells whose a class, a function or an object is: by the object that a module holds, not by what
it says of itself.

`functools.wraps` copies `__module__`, `__name__` and `__qualname__` to a user's function, and any
class may set them.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorflow as tf


def known_name(thing: object) -> str:
    """Returns a class's or function's package and name, such as "keras.dice"; "" for what only says
    that it is that.

    A class or function is the package's if the module that it names holds this very object.

    >>> import functools, keras
    >>> @functools.wraps(keras.losses.dice)
    ... def loss(y_true, y_pred):
    ...     return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
    >>> known_name(loss), known_name(keras.losses.dice)
    ('', 'keras.dice')
    """
    own_package = package(thing)
    if not own_package:
        return ""
    thing = _unwrapped(thing)
    return f"{own_package}.{getattr(thing, '__name__', type(thing).__name__)}"


def package(thing: object) -> str:
    """Returns the package that defines a class or function, or an object's class; "" where it only
    says so.

    A bound method is its object's class's: what it does follows from the methods that it calls.
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
    # which names itself as the function that it runs
    if isinstance(thing, tf.types.experimental.GenericFunction):
        return getattr(thing, "python_function", thing)
    return thing


def _holds(module: types.ModuleType, thing: Any) -> bool:
    """Tells if a module holds a class or function at the place that this names, or is where it was
    defined.
    """
    if _is_defined_in(module, thing):
        return True
    found: Any = module
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _is_defined_in(module: types.ModuleType, thing: Any) -> bool:
    """Tells by the globals of a function, which nothing copies; of a class made in a function by
    those of its methods.

    A decorated function has the globals of its decorator, as Keras's and TensorFlow's own often
    have.
    """
    if isinstance(thing, types.FunctionType):
        return thing.__globals__ is vars(module)
    if "<locals>" not in thing.__qualname__:
        return False
    methods = [each for each in vars(thing).values() if isinstance(each, types.FunctionType)]
    return any(each.__globals__ is vars(module) for each in methods)
