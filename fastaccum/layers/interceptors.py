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
    """The use of an interceptor, which decides what wraps what.

    A later role wraps an earlier one; of one role the last registered is outermost. Where the user
    has assigned the method on the layer itself (`layer.call = ...`), interceptors of the roles FORM
    and PRECISION, and those of an `owner`'s method, are skipped.
    """

    FORM = enum.auto()  # another form of the same computation, for XLA or for speed
    PRECISION = enum.auto()  # weight gradients in float32
    RECOMPUTE = enum.auto()  # runs what it wraps again in the backward pass
    OBSERVE = enum.auto()  # looks at arguments or results
    BYPASS = enum.auto()  # returns the input unchanged, since the loss computes the layer


class Interceptor(NamedTuple):
    """A layer's method and its replacement, called as `replacement(wrapped, *arguments)`.

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
    with ExitStack() as on_exit:
        for interceptor in interceptors:
            install(interceptor)
            on_exit.callback(remove, interceptor)
        yield


def install(interceptor: Interceptor) -> None:
    """Registers an interceptor until it is removed."""
    place = _place(interceptor)
    method = interceptor.method
    if not isinstance(vars(place).get(method), _Intercepted):
        _set(place, method, _Intercepted(place, interceptor))
    installed_here = vars(place)[method].interceptors
    bisect.insort(installed_here, interceptor, key=lambda registered: registered.role)


def remove(interceptor: Interceptor) -> None:
    """Removes a registered interceptor; does nothing if the user has set the method again since."""
    for place in (interceptor.layer, *type(interceptor.layer).__mro__):
        method = vars(place).get(interceptor.method)
        if isinstance(method, _Intercepted) and interceptor in method.interceptors:
            method.interceptors.remove(interceptor)
            if not method.interceptors:
                method.restore()
            return


def installed(layer: keras.layers.Layer, role: Role) -> list[Interceptor]:
    """Lists the interceptors of a layer that have a role."""
    of_role = []
    for method in vars(layer).values():
        if isinstance(method, _Intercepted):
            of_role += [registered for registered in method.interceptors if registered.role is role]
    return of_role


def is_users(layer: keras.layers.Layer, method: str) -> bool:
    """Tells if the user has set a method on the layer itself."""
    value = vars(layer).get(method)
    if isinstance(value, _Intercepted):
        return value.of_user is not None
    return value is not None


class _Intercepted:
    """A method of one layer, wrapped by its interceptors."""

    def __init__(self, place: Any, interceptor: Interceptor):
        self._layer = interceptor.layer
        self._method = interceptor.method
        self._place = place
        functools.update_wrapper(self, getattr(self._layer, self._method), updated=())
        # The class whose method is wrapped; None for the class that the layer has when called.
        self._owner: type | None = None
        # What the user has set on the layer itself.
        self.of_user: Callable[..., Any] | None = None
        if place is self._layer:
            self.of_user = vars(place).get(self._method)
        else:
            self._owner = interceptor.owner
        self.interceptors: list[Interceptor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.of_user
        if call is None:
            # Looked up now: the layer's class may have changed.
            function = getattr(self._owner or type(self._layer), self._method)
            call = functools.partial(function, self._layer)
        for interceptor in self.interceptors:
            wraps_any = interceptor.role > Role.PRECISION and interceptor.owner is None
            if self.of_user is None or wraps_any:
                call = functools.partial(interceptor.replacement, call)
        return call(*args, **kwargs)

    def restore(self) -> None:
        """Leaves the method as it was before its first interceptor."""
        if self._place is not self._layer:
            type.__delattr__(self._place, self._method)
            if not any(isinstance(value, _Intercepted) for value in vars(self._place).values()):
                _set(self._layer, "__class__", type(self._layer).__bases__[0])
        elif self.of_user is None:
            object.__delattr__(self._layer, self._method)
        else:
            _set(self._layer, self._method, self.of_user)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns what a copy of the layer has: a method without interceptors."""
        if self.of_user is not None:
            return copy.deepcopy(self.of_user, memo)
        function = getattr(type(self._layer), self._method)
        return types.MethodType(function, copy.deepcopy(self._layer, memo))


class _Between:
    """Marks a class between a layer's class and the `owner` of an intercepted method.

    `super()` in the layer's class finds the layer's interceptors there.
    """

    __slots__ = ()


def _place(interceptor: Interceptor) -> Any:
    """Returns the object to set the replacement on: the layer, or a class of its own.

    A layer gets a class of its own where its class overrides the owner's method.
    """
    layer = interceptor.layer
    owner = interceptor.owner
    cls = type(layer)
    method = interceptor.method
    if owner is None or getattr(cls, method) is getattr(owner, method):
        return layer
    for base in cls.__mro__:
        if base.__bases__ == (owner, _Between):
            return base
    between = types.new_class(owner.__name__, (owner, _Between))
    _set(layer, "__class__", types.new_class(cls.__name__, (cls, between)))
    return between


def _set(place: Any, name: str, value: Any) -> None:
    # Past Keras's own __setattr__, which tracks what is assigned.
    if isinstance(place, type):
        type.__setattr__(place, name, value)
    else:
        object.__setattr__(place, name, value)
