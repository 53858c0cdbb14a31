"""Describes layers, losses, metrics and optimizers for comparison, alike in each process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import types
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import kinds
from fastaccum.fingerprint import bytecode
from fastaccum.kernels import private

# Methods that run in each step. The attributes that they set are not compared, as they are results
# of the others.
_RUN = ("call", "__call__", "update_state", "update_step")

# Settings that are not compared: Keras numbers names anew in each process, the policy describes
# dtypes, and the variables show the shapes that a layer was built for.
_LEFT_OUT = ("name", "dtype", "build_config")

# The text in place of a shape's first size.
_BATCH = "batch"

# The most characters of a text, or entries of a collection, that are described whole. A checksum
# describes a longer one, since every checkpoint holds the description.
_MAX_SIZE = 1000

# The most elements of an array that are described whole, for the same reason.
_MAX_ELEMENTS = 64


class _Names(NamedTuple):
    """The attributes that an object's methods use."""

    read: frozenset[str]
    set_in_steps: frozenset[str]  # by the methods that run in each step


class _Scope(NamedTuple):
    """The context of a value, by which its description differs."""

    names: frozenset[str]  # attributes that the user's code reads
    # By id, what is not described again: objects that are known or were described, and the
    # collections that hold the value. Each is kept, so that no later object gets its id.
    met: dict[int, object]
    shapes: Sequence[list] = ()  # of the inputs that the layer around it was built for
    concealed: bool = False  # texts may be secrets


def describe(thing: object, known: Iterable[object] = ()) -> Any:
    """Describes an object, a function or a nest of them as JSON holds it.

    A `known` object is described by its class, any other by its class and `get_config()`. If the
    class is the user's, or `get_config()` fails, the description also has a checksum of the code
    and the values that the code reads. A function is described by these two alone. Texts that code
    reads are described by checksums, as they may be secrets, and shapes without their batch axis.
    """
    met = {id(member): member for member in known if member is not thing}
    return _describe(thing, _Scope(frozenset(), met))


def _describe(value: Any, scope: _Scope) -> Any:
    if isinstance(value, str):
        return _describe_text(value, scope)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (dict, set, frozenset, list, tuple)):
        return _describe_nest(value, scope)

    value = _get(value, "python_function", value)  # of a tf.function
    if isinstance(value, (keras.Variable, tf.Variable)) or tf.is_symbolic_tensor(value):
        return "a variable"  # whose value training may change
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor)):
        return _describe_array(np.asarray(value), scope)
    if isinstance(value, bytes):
        return _describe(repr(value), scope)
    if isinstance(value, (float, complex, range, slice)):
        return repr(value)
    if isinstance(value, types.ModuleType) and bytecode.is_installed(value.__name__):
        return value.__name__

    name = _get(value, "__qualname__") or type(value).__qualname__
    description = {"class": name}
    # The state of a seed generator is a variable, and its seed may be a random number.
    if id(value) in scope.met or isinstance(value, keras.random.SeedGenerator):
        return description
    scope.met[id(value)] = value

    if isinstance(value, (types.MethodType, types.FunctionType, types.BuiltinFunctionType)):
        function = bytecode.find_function(value)
        if function is None:  # it has no bytecode, or its package has a version to tell it apart
            return name
        owner = getattr(value, "__self__", None)
        if owner is not None:
            description["of"] = _describe(owner, scope)
        return description | _coded([function], scope.met)

    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        description["of"] = _describe(parts, scope._replace(concealed=True))
        return description

    if not isinstance(value, type):
        return description | _parts(value, scope)

    return description | _describe_class(value, scope)


def _describe_text(value: str, scope: _Scope) -> str:
    """Describes a text, by its checksum where it may be a secret."""
    utf8 = value.encode(errors="backslashreplace")  # a path may hold other bytes
    text = _shorten(utf8.decode(), len(value))
    if not scope.concealed:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"text of checksum {digest[:12]}"


def _describe_array(array: np.ndarray, scope: _Scope) -> Any:
    """Describes an array by its elements; by their checksum where they are many numbers."""
    if array.size <= _MAX_ELEMENTS or array.dtype == object:
        return _describe(array.tolist(), scope)
    checksum = zlib.crc32(array.tobytes())
    return f"{array.dtype}{array.shape} of checksum {checksum}"


def _describe_class(kind: type, scope: _Scope) -> dict[str, Any]:
    """Describes a class by its code, and by what it holds of what the user's methods read."""
    methods = bytecode.methods(kind)
    names = set(scope.names)
    names_set: set[str] = set()
    for method in methods:
        if bytecode.is_users(method):
            content = bytecode.read(method.__code__)
            names |= content.names
            names_set |= content.stored
    names -= names_set
    attributes = _class_attributes(kind.__mro__)
    attributes_read = {name: attributes[name] for name in sorted(names & attributes.keys())}
    description = _describe(attributes_read, scope._replace(names=frozenset(names)))
    return description | _coded(methods, scope.met)


def _describe_nest(value: Any, scope: _Scope) -> Any:
    """Describes a collection by its entries; by their checksum where they are many."""
    if id(value) in scope.met:  # it contains itself
        return type(value).__name__
    scope.met[id(value)] = value

    unconcealed = scope._replace(concealed=False)
    # The entries of a large collection need no checksums of their own: it gets a single one.
    is_concealed = scope.concealed and len(value) <= _MAX_SIZE
    of_entries = scope._replace(concealed=is_concealed)
    description: Any
    if isinstance(value, dict):
        description = {
            _describe(str(name), unconcealed): _describe(entry, of_entries)
            for name, entry in value.items()
        }
    elif isinstance(value, (set, frozenset)):
        # The order of a set differs between processes, that of its entries' descriptions does not.
        # Objects that are described for the order alone do not count as described.
        for_order = unconcealed._replace(met=dict(scope.met))
        entries = sorted(value, key=lambda entry: repr(_describe(entry, for_order)))
        description = [_describe(entry, of_entries) for entry in entries]
    else:
        description = [_describe(entry, of_entries) for entry in value]
        if description in scope.shapes:  # two runs may differ in the batch size of an input
            description[0] = _BATCH

    del scope.met[id(value)]
    return _shorten(description, len(description))


def _shorten(description: Any, size: int) -> Any:
    """Returns a description, or a checksum of it where it has many entries or characters."""
    if size <= _MAX_SIZE:
        return description
    checksum = zlib.crc32(repr(description).encode())
    return f"{size} of checksum {checksum}"


def _get(value: Any, name: str, default: Any = None) -> Any:
    """Returns an attribute; the default where there is none, or the user's code for it raises."""
    try:
        return getattr(value, name, default)
    except Exception:  # of whatever kind
        return default


def _parts(value: Any, scope: _Scope) -> dict[str, Any]:
    """Describes an object by its configuration, its code, and the attributes that it reads."""
    methods = bytecode.methods(type(value))
    classes = value.__class__.__mro__
    config = _config(value)
    # Keras's `get_config` raises, for one, if an argument of `__init__` has no configuration.
    config_failed = not config and _get(value, "get_config") is not None

    used = _names_used(methods, config_failed)
    names = (scope.names | used.read) - used.set_in_steps
    if config_failed:
        names |= _argument_names(classes)
    if config or config_failed:
        # Keras numbers the names of its objects anew in each process.
        names = frozenset(name for name in names if name.strip("_") != "name")
        dtype_policy = _get(value, "dtype_policy")
        dtype = _get(value, "dtype")
        policy = getattr(dtype_policy, "name", dtype)
        if isinstance(policy, str):
            config["policy"] = policy

    attribute_names: list[str] = []
    attributes = _class_attributes(classes) | getattr(value, "__dict__", {})
    is_users = any(bytecode.is_of_user(kind) for kind in classes)
    # The configuration of Keras's own objects tells all of them.
    if is_users or config_failed or not config:
        attribute_names = sorted((names & attributes.keys()) - config.keys())

    scope = scope._replace(names=names, concealed=False)
    shapes_of_input = _shapes([config.get("batch_shape"), config.get("batch_input_shape")])
    description = _describe(config, scope._replace(shapes=shapes_of_input))
    with contextlib.suppress(Exception):  # of whatever kind, also where there is none
        scope = scope._replace(shapes=_shapes(value.get_build_config()))
    attributes_read = {name: _get(value, name) for name in attribute_names}
    of_attributes = _describe(attributes_read, scope._replace(concealed=True))
    return description | of_attributes | _coded(methods, scope.met)


def _names_used(methods: Sequence[types.FunctionType], config_failed: bool) -> _Names:
    """Returns the attributes that the user's methods use.

    Where `get_config` failed, those of all methods but `__init__` stand in for the configuration.
    """
    names_read: set[str] = set()
    names_set: set[str] = set()
    for method in methods:
        is_compared = bytecode.is_users(method)
        if config_failed:
            is_compared = method.__name__ != "__init__"
        if not is_compared:
            continue
        content = bytecode.read(method.__code__)
        names_read |= content.names
        if method.__name__ in _RUN:
            names_set |= content.stored
    return _Names(frozenset(names_read), frozenset(names_set))


def _argument_names(classes: Sequence[type]) -> set[str]:
    """Returns the attributes in which classes usually keep the arguments of `__init__`."""
    names: set[str] = set()
    for kind in classes:
        for argument in inspect.signature(kind.__init__).parameters:  # type: ignore[misc]
            names |= {argument, f"_{argument}"}
    return names


def _class_attributes(classes: Sequence[type]) -> dict[str, object]:
    """Returns what a user's classes hold besides functions; the first class of several wins."""
    users = [kind for kind in reversed(classes) if bytecode.is_of_user(kind)]
    attributes = {}
    for kind in users:
        for name, member in vars(kind).items():
            if bytecode.find_function(member) is None:
                attributes[name] = member
    return attributes


def _shapes(nest: object) -> list[list]:
    """Lists the shapes in a nest: its lists of sizes."""
    entries: list | tuple
    if isinstance(nest, dict):
        entries = list(nest.values())
    elif isinstance(nest, (list, tuple)):
        entries = nest
    else:
        return []

    if entries and all(size is None or isinstance(size, int) for size in entries):
        return [list(entries)]
    shapes = []
    for entry in entries:
        shapes += _shapes(entry)
    return shapes


def _config(value: Any) -> dict[str, Any]:
    """Returns the result of `get_config`, with objects in place of their names and configurations.

    It is empty if there is no `get_config`, or if that raises.
    """
    if {"keras.Model", "tf_keras.Model"} & kinds(value).keys():
        return {"layers": value.layers}

    config: dict[str, Any] = {}
    # Base classes come first: a user's `get_config` may leave out what that of its base tells.
    for kind in reversed(value.__class__.__mro__):
        if "get_config" in vars(kind):
            try:
                config.update(kind.get_config(value))
            except Exception:  # of whatever kind
                config = {}

    # A seed of which a generator was made may be a random number.
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(held, keras.random.SeedGenerator) for held in attributes.values()):
        config.pop("seed", None)
    # Where a configuration names or serialises an object, the object itself is in an attribute.
    for name in config:
        held = attributes.get(f"_{name}", attributes.get(name))
        parts = held if isinstance(held, (list, tuple)) else [held]
        if any(_is_object(part) for part in parts):
            config[name] = held

    # Keras's losses and metrics do not all tell the arguments of a function that they wrap.
    fn_kwargs = private.fn_kwargs.name
    if fn_kwargs in attributes:
        config[fn_kwargs] = attributes[fn_kwargs]
    return _without_names(config)


def _is_object(value: Any) -> bool:
    """Tells if a configuration may hold the value's name or configuration in its place."""
    return callable(value) or hasattr(value, "get_config") or isinstance(value, np.ndarray)


def _without_names(config: Any) -> Any:
    """Returns a nest without the settings in its dicts that are not compared."""
    if isinstance(config, dict):
        return {
            name: _without_names(entry) for name, entry in config.items() if name not in _LEFT_OUT
        }
    if isinstance(config, (list, tuple)):
        return [_without_names(entry) for entry in config]
    return config


def _coded(functions: list[types.FunctionType], met: dict[int, object]) -> dict[str, object]:
    """Describes functions by a checksum of their code, and by the variables that the user's read.

    The checksum tells the version of Python, since bytecode differs between versions. Arguments are
    not described, as each call brings its own.
    """
    if not functions:
        return {}

    description: dict[str, object] = {"code": bytecode.checksum(functions)}
    for function in functions:
        if not bytecode.is_users(function):
            continue
        content = bytecode.read(function.__code__)
        names = content.names - content.stored
        for variable, value in bytecode.variables(function, names).items():
            set_on_it = {
                attribute.name for attribute in content.stored_on if attribute.variable == variable
            }
            scope = _Scope(names - set_on_it, met, concealed=True)
            key = f"{function.__name__} reads {variable}"
            description[key] = _describe(value, scope)
    return description
