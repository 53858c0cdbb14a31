"""Replaces methods of single layers; the role of each replacement says what wraps what.

To make a layer compute in another way, register an `Interceptor`. Its layer's class and other
instances stay as they are. The role alone says what wraps what, in whichever order interceptors are
registered.
"""

from __future__ import annotations

import bisect
import copy
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras


class Role(enum.IntEnum):
    """The use of an interceptor: a later role wraps an earlier one, and of one role the last
    registered is outermost.

    Where the user has assigned the method on the layer itself (`layer.call = ...`), interceptors of
    the roles FORM and PRECISION, and those of an `owner`'s method, are skipped.
    """

    FORM = enum.auto()  # another form of the same computation, for XLA or for speed
    PRECISION = enum.auto()  # weight gradients in float32
    RECOMPUTE = enum.auto()  # runs what it wraps again in the backward pass
    OBSERVE = enum.auto()  # looks at arguments or results
    BYPASS = enum.auto()  # returns the input unchanged, since the loss computes the layer


class Interceptor(NamedTuple):
    """A layer's method and its replacement, which is called with what it wraps, then with the
    method's arguments.

    The method is the layer's own, or that of a base class, its `owner`, so that `super()` in the
    layer's class reaches the replacement.
    """

    layer: keras.layers.Layer
    method: str
    replacement: Callable[..., Any]
    role: Role
    owner: type | None = None


@contextmanager
def intercepting(interceptors: Iterable[Interceptor]) -> Iterator[None]:
    """Registers interceptors inside the block, and removes them on exit."""
    with ExitStack() as installed_ones:
        for each in interceptors:
            install(each)
            installed_ones.callback(remove, each)
        yield


def install(interceptor: Interceptor) -> None:
    """Registers an interceptor until it is removed."""
    place, method = _place(interceptor), interceptor.method
    if not isinstance(vars(place).get(method), _Intercepted):
        _set(place, method, _Intercepted(place, interceptor))
    bisect.insort(vars(place)[method].interceptors, interceptor, key=lambda each: each.role)


def remove(interceptor: Interceptor) -> None:
    """Removes a registered interceptor; does nothing if the user has set the method again since."""
    for place in (interceptor.layer, *type(interceptor.layer).__mro__):
        found = vars(place).get(interceptor.method)
        if isinstance(found, _Intercepted) and interceptor in found.interceptors:
            found.interceptors.remove(interceptor)
            if not found.interceptors:
                found.restore()
            return


def installed(layer: keras.layers.Layer, role: Role) -> list[Interceptor]:
    """Lists the interceptors of a layer that have a role."""
    found = (each for each in vars(layer).values() if isinstance(each, _Intercepted))
    return [each for intercepted in found for each in intercepted.interceptors if each.role is role]


def is_users(layer: keras.layers.Layer, method: str) -> bool:
    """Returns whether the user has set a method on the layer itself."""
    found = vars(layer).get(method)
    return (found._own if isinstance(found, _Intercepted) else found) is not None


class _Intercepted:
    """A method of one layer, wrapped by its interceptors."""

    def __init__(self, place: Any, interceptor: Interceptor):
        self._layer, self._method, self._place = interceptor.layer, interceptor.method, place
        functools.update_wrapper(self, getattr(self._layer, self._method), updated=())
        is_layer = place is self._layer
        self._kind = None if is_layer else interceptor.owner
        self._own = vars(place).get(self._method) if is_layer else None  # set by the user
        self.interceptors: list[Interceptor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up now: the layer's class may have changed.
        call = self._own or functools.partial(
            getattr(self._kind or type(self._layer), self._method), self._layer
        )
        for each in self.interceptors:
            if self._own is None or (each.role > Role.PRECISION and each.owner is None):
                call = functools.partial(each.replacement, call)
        return call(*args, **kwargs)

    def restore(self) -> None:
        """Leaves the method as it was before its first interceptor."""
        if self._place is not self._layer:
            type.__delattr__(self._place, self._method)
            if not any(isinstance(each, _Intercepted) for each in vars(self._place).values()):
                _set(self._layer, "__class__", type(self._layer).__bases__[0])
        elif self._own is None:
            object.__delattr__(self._layer, self._method)
        else:
            _set(self._layer, self._method, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns what a copy of the layer has: a method without interceptors."""
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return types.MethodType(
            getattr(type(self._layer), self._method), copy.deepcopy(self._layer, memo)
        )


class _Between:
    """Marks a class between a layer's class and its `owner`, where `super()` finds the layer's
    interceptors.
    """

    __slots__ = ()


def _place(interceptor: Interceptor) -> Any:
    """Returns the object that the replaced method is set on: the layer, or a class of its own that
    it gets.
    """
    layer, method, owner = interceptor.layer, interceptor.method, interceptor.owner
    own = type(layer)
    if owner is None or getattr(own, method) is getattr(owner, method):
        return layer
    between = next((kind for kind in own.__mro__ if kind.__bases__ == (owner, _Between)), None)
    if between is None:
        between = types.new_class(owner.__name__, (owner, _Between))
        _set(layer, "__class__", types.new_class(own.__name__, (own, between)))
    return between


def _set(place: Any, name: str, value: Any) -> None:
    # Past Keras's own __setattr__, which tracks what is assigned.
    (type if isinstance(place, type) else object).__setattr__(place, name, value)
