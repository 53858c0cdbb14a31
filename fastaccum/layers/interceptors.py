"""Replaces methods of single layers; the role of each replacement says what wraps what.

To make a layer compute in another way, register an `Interceptor`. Its layer's class and other
instances stay as they are. The role alone says what wraps what, in whichever order interceptors are
registered.

All interceptors of a method share one `_Intercepted`, which stands where Python finds it before the
method itself:

- Usually it is an attribute of the layer: `layer.call` finds that before the class's `call`.
- An `owner`'s method that the layer's class overrides is looked up by `super()`, which passes by
  the layer's attributes. The layer then gets a class of its own, in whose order of base classes
  a class before the owner has the attribute. For an owner `Dense` and a layer `Doubled(Dense)`:

      Doubled, Dense, Layer, ...                           before
      own class, Doubled, class between, Dense, Layer, ... while intercepted
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

from fastaccum.kernels.recomputed_function import Policy


class Role(enum.IntEnum):
    """The use of an interceptor, which decides what wraps what.

    A later role wraps an earlier one; of one role the last registered is outermost. Where the user
    has assigned the method on the layer itself (`layer.call = ...`), interceptors of the roles FORM
    and PRECISION, and those of an `owner`'s method, are skipped.
    """

    FORM = enum.auto()  # another form of the same computation, for XLA or for speed
    PRECISION = enum.auto()  # weight gradients in float32, products in float8
    RECOMPUTE = enum.auto()  # runs what it wraps again in the backward pass
    LOOP = enum.auto()  # runs layers that repeat in a loop
    OBSERVE = enum.auto()  # looks at arguments or results
    DOCUMENTS = enum.auto()  # keeps the documents of packed rows apart
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
    # What is kept for the backward pass by one that recomputes, as in `LayerStack`.
    policy: Policy | None = None

    @property
    def wraps_users_method(self) -> bool:
        """Tells if it also wraps a method that the user has assigned on the layer itself."""
        return self.owner is None and self.role not in (Role.FORM, Role.PRECISION)


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
    holder = _holder_of(interceptor)
    method = interceptor.method
    if not isinstance(vars(holder).get(method), _Intercepted):
        _set(holder, method, _Intercepted(holder, interceptor))
    registered_here = vars(holder)[method].interceptors
    bisect.insort(registered_here, interceptor, key=lambda registered: registered.role)


def remove(interceptor: Interceptor) -> None:
    """Removes a registered interceptor; does nothing if the user has set the method again since."""
    for holder in (interceptor.layer, *type(interceptor.layer).__mro__):
        method = vars(holder).get(interceptor.method)
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


def without_interceptors(value: object) -> object:
    """Returns a layer's attribute as its user has set it; None for an intercepted method."""
    if isinstance(value, _Intercepted):
        return value.of_user
    return value


def is_users(layer: keras.layers.Layer, method: str) -> bool:
    """Tells if the user has set a method on the layer itself."""
    value = vars(layer).get(method)
    if isinstance(value, _Intercepted):
        return value.of_user is not None
    return value is not None


class _Between:
    """Marks a class that stands between a layer's class and an owner, to hold interceptors."""

    __slots__ = ()


def _holder_of(interceptor: Interceptor) -> Any:
    """Returns the object whose attribute the `_Intercepted` is: the layer, or a class between.

    A class between is made for the first interceptor of an owner's method that the layer's class
    overrides.
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
    own_class = types.new_class(cls.__name__, (cls, between))
    _set(layer, "__class__", own_class)
    return between


class _Intercepted:
    """A method of one layer, wrapped by its interceptors.

    Attributes:
        of_user: the method that the user has assigned on the layer itself, if any.
        interceptors: by role, the innermost first.
    """

    def __init__(self, holder: Any, interceptor: Interceptor):
        self._holder = holder
        self._layer = interceptor.layer
        self._method = interceptor.method
        functools.update_wrapper(self, getattr(self._layer, self._method), updated=())
        self.of_user: Callable[..., Any] | None = None
        # The class whose method is wrapped; None for the class that the layer has when called.
        self._owner: type | None = None
        if self._is_on_layer:
            self.of_user = vars(holder).get(self._method)
        else:
            self._owner = interceptor.owner
        self.interceptors: list[Interceptor] = []

    @property
    def _is_on_layer(self) -> bool:
        return self._holder is self._layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.of_user
        if call is None:
            # Looked up now: the layer's class may have changed.
            function = getattr(self._owner or type(self._layer), self._method)
            call = functools.partial(function, self._layer)
        for interceptor in self.interceptors:
            if self.of_user is None or interceptor.wraps_users_method:
                call = functools.partial(interceptor.replacement, call)
        return call(*args, **kwargs)

    def restore(self) -> None:
        """Leaves the method as it was before its first interceptor."""
        if not self._is_on_layer:
            self._remove_from_class_between()
        elif self.of_user is None:
            object.__delattr__(self._layer, self._method)
        else:
            _set(self._layer, self._method, self.of_user)

    def _remove_from_class_between(self) -> None:
        """Removes the method there, and the layer's own class after the last of its methods."""
        type.__delattr__(self._holder, self._method)
        if not any(isinstance(value, _Intercepted) for value in vars(self._holder).values()):
            own_class = type(self._layer)
            class_before = own_class.__bases__[0]  # the other base is the class between
            _set(self._layer, "__class__", class_before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns what a copy of the layer has: a method without interceptors."""
        if self.of_user is not None:
            return copy.deepcopy(self.of_user, memo)
        function = getattr(type(self._layer), self._method)
        return types.MethodType(function, copy.deepcopy(self._layer, memo))


def _set(target: Any, name: str, value: Any) -> None:
    # Past Keras's own __setattr__, which tracks what is assigned.
    if isinstance(target, type):
        type.__setattr__(target, name, value)
    else:
        object.__setattr__(target, name, value)
