"""Describes layers, losses, metrics and optimizers for comparison, alike in each process."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import math
import os
import platform
import sys
import types
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import kinds, package
from fastaccum.kernels import private

# Packages whose code is not described, as the number of their version tells it apart.
_VERSIONED = ("keras", "tf_keras", "tensorflow", "fastaccum", "numpy", "builtins", "functools")

# Parts of the paths of code that was installed, or came with Python.
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))

# Methods that run in each step: what they set follows from the rest of an object.
_RUN = ("call", "__call__", "update_state", "update_step")

# Settings that are not compared: names are numbered anew in each process, dtypes are described as
# the policy, and the shapes that a layer was built for as its variables.
_LEFT_OUT = ("name", "dtype", "build_config")

# The text in place of a shape's first size.
_BATCH = "batch"

# Characters of a text, or entries of a collection, that are described whole: of more, a checksum
# is, as every checkpoint holds the description.
_MAX_SIZE = 1000

# Elements of an array that are described whole: of more, a checksum is, for the same reason.
_MAX_ELEMENTS = 64


class _Scope(NamedTuple):
    """The place of a value: what was met on the way to it."""

    names: frozenset[str]  # attributes that the user's code reads
    met: dict[int, object]  # objects that were described, by id
    shapes: Sequence[list] = ()  # of the inputs that the layer around it was built for
    concealed: bool = False  # texts may be secrets


class _Code(NamedTuple):
    """The content of a function's code, and of the functions within it."""

    instructions: str
    names: frozenset[str]  # attributes and texts that it reads
    loaded: frozenset[str]  # globals that it only reads
    # Globals and attributes that it sets; as "object.attribute" where a variable other than the
    # first argument holds the object.
    stored: frozenset[str]


def describe(thing: object, known: Iterable[object] = ()) -> Any:
    """Describes an object, a function or a nest of them as JSON holds it.

    Of an object that is `known`, only the class is described; of every other, the class and
    `get_config()`. Where these are the user's or fail, and for every function, a checksum of the
    code is added, and what that code reads. Texts that it reads are described by their checksums,
    and shapes without their batch axis.
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
    if isinstance(value, types.ModuleType) and _is_installed(value.__name__):
        return value.__name__

    name = _get(value, "__qualname__") or type(value).__qualname__
    description = {"class": name}
    # The state of a seed generator is a variable, and its seed may be a random number.
    if id(value) in scope.met or isinstance(value, keras.random.SeedGenerator):
        return description
    scope.met[id(value)] = value

    if isinstance(value, (types.MethodType, types.FunctionType, types.BuiltinFunctionType)):
        function = _function(value)
        if function is None:
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

    methods = _methods(value)
    users = [m for m in methods if m.__name__ != "__init__" and not _is_installed(_module(m))]
    return description | _describe_class(value, methods, users, scope)


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


def _describe_class(
    kind: type,
    methods: list[types.FunctionType],
    users: list[types.FunctionType],
    scope: _Scope,
) -> dict[str, Any]:
    """Describes a class by what it holds of what the `users` of its methods read, and by code."""
    codes = [_read(method.__code__) for method in users]
    read = scope.names.union(*(code.names for code in codes))
    names = read.difference(*(code.stored for code in codes))
    attributes = _class_attributes(kind.__mro__)
    attributes_read = {name: attributes[name] for name in sorted(names & attributes.keys())}
    description = _describe(attributes_read, scope._replace(names=names))
    return description | _coded(methods, scope.met)


def _describe_nest(value: Any, scope: _Scope) -> Any:
    """Describes a collection by its entries; by their checksum where they are many."""
    if id(value) in scope.met:  # it contains itself
        return type(value).__name__
    scope.met[id(value)] = value

    clear = scope._replace(concealed=False)
    # A checksum of many entries conceals their texts.
    inner = scope._replace(concealed=scope.concealed and len(value) <= _MAX_SIZE)
    description: Any
    if isinstance(value, dict):
        description = {
            _describe(str(name), clear): _describe(entry, inner) for name, entry in value.items()
        }
    elif isinstance(value, (set, frozenset)):
        # The order of a set differs between processes, that of its entries' descriptions does not.
        apart = clear._replace(met=dict(scope.met))
        entries = sorted(value, key=lambda entry: repr(_describe(entry, apart)))
        description = [_describe(entry, inner) for entry in entries]
    else:
        description = [_describe(entry, inner) for entry in value]
        if description in scope.shapes:
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
    """Describes an object by its configuration, attributes and code."""
    methods = _methods(type(value))
    config = _config(value)
    # A configuration is empty where its `get_config` raises, as where an argument has none.
    failed = not config and _get(value, "get_config") is not None

    names_read: set[str] = set()
    names_set: set[str] = set()
    for method in methods:
        is_compared = failed or not _is_installed(_module(method))
        if method.__name__ == "__init__" or not is_compared:
            continue
        code = _read(method.__code__)
        names_read |= code.names
        if method.__name__ in _RUN:
            names_set |= code.stored
    names = (scope.names | names_read) - names_set

    classes = value.__class__.__mro__
    if failed:
        for kind in classes:
            for argument in inspect.signature(kind.__init__).parameters:
                names |= {argument, f"_{argument}"}
    if config or failed:
        # Objects are numbered by their names, anew in each process.
        names = frozenset(name for name in names if name.strip("_") != "name")
        dtype_policy = _get(value, "dtype_policy")
        dtype = _get(value, "dtype")
        policy = getattr(dtype_policy, "name", dtype)
        if isinstance(policy, str):
            config["policy"] = policy

    attribute_names: list[str] = []
    attributes = _class_attributes(classes) | getattr(value, "__dict__", {})
    is_users = any(not _is_installed(_module(kind)) for kind in classes)
    if is_users or failed or not config:  # else the configuration says it all
        attribute_names = sorted((names & attributes.keys()) - config.keys())

    scope = scope._replace(names=names, concealed=False)
    shapes_of_input = _shapes([config.get("batch_shape"), config.get("batch_input_shape")])
    description = _describe(config, scope._replace(shapes=shapes_of_input))
    with contextlib.suppress(Exception):  # of whatever kind, also where there is none
        scope = scope._replace(shapes=_shapes(value.get_build_config()))
    attributes_read = {name: _get(value, name) for name in attribute_names}
    of_attributes = _describe(attributes_read, scope._replace(concealed=True))
    return description | of_attributes | _coded(methods, scope.met)


def _class_attributes(classes: Sequence[type]) -> dict[str, object]:
    """Returns what a user's classes hold besides functions; the first class of several wins."""
    users = [kind for kind in reversed(classes) if not _is_installed(_module(kind))]
    attributes = {}
    for kind in users:
        for name, member in vars(kind).items():
            if _function(member) is None:
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
    """Returns the result of `get_config`, with objects in place of what stands for them.

    It is empty if there is no `get_config`, or if that raises.
    """
    if {"keras.Model", "tf_keras.Model"} & kinds(value).keys():
        return {"layers": value.layers}

    config: dict[str, Any] = {}
    # A `get_config` of the user's may leave out what that of its base tells.
    for kind in reversed(value.__class__.__mro__):
        if "get_config" in vars(kind):
            try:
                config.update(kind.get_config(value))
            except Exception:  # of whatever kind
                config = {}

    attributes = getattr(value, "__dict__", {})
    if any(isinstance(held, keras.random.SeedGenerator) for held in attributes.values()):
        config.pop("seed", None)
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
    """Tells if a configuration may hold something else in place of a value, such as its name."""
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


def _methods(kind: type) -> list[types.FunctionType]:
    """Lists the functions of a class and its bases whose packages no version tells apart."""
    functions = []
    for base in kind.__mro__:
        for name in sorted(vars(base)):
            function = _function(vars(base)[name])
            if function is not None:
                functions.append(function)
    return functions


def _function(member: object) -> types.FunctionType | None:
    """Finds the function of a method, a property or a static method.

    The result is None for what is no function, and where a version tells its package apart.
    """
    for name in ("fget", "__func__", "func"):
        member = getattr(member, name, member)
    if isinstance(member, types.FunctionType) and package(member) not in _VERSIONED:
        return member
    return None


def _coded(functions: list[types.FunctionType], met: dict[int, object]) -> dict[str, object]:
    """Describes functions by a checksum of their code, and by what the user's read.

    The checksum is of this version of Python. What a function reads is described beside its
    arguments, which each call brings.
    """
    if not functions:
        return {}

    instructions = [_read(function.__code__).instructions for function in functions]
    digest = hashlib.sha256(repr(instructions).encode()).hexdigest()
    python = platform.python_version().rpartition(".")[0]
    description: dict[str, object] = {"code": f"{digest[:12]} of Python {python}"}

    for function in functions:
        if function.__name__ == "__init__" or _is_installed(_module(function)):
            continue
        code = _read(function.__code__)
        names = code.names - code.stored
        for variable, value in _variables(function, names).items():
            prefix = f"{variable}."
            set_on_it = {
                name.removeprefix(prefix) for name in code.stored if name.startswith(prefix)
            }
            scope = _Scope(names - set_on_it, met, concealed=True)
            key = f"{function.__name__} reads {variable}"
            description[key] = _describe(value, scope)
    return description


def _variables(function: types.FunctionType, names: frozenset[str]) -> dict[str, object]:
    """Returns a function's globals, closure and defaults by name.

    Of a table of settings, only those are returned whose keys are among the `names` that the code
    reads, if there are any.
    """
    variables = {}
    held = function.__globals__
    for name in sorted(_read(function.__code__).loaded & held.keys()):
        variables[name] = held[name]

    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name != "__class__" and cell != types.CellType():  # an empty cell
            variables[name] = cell.cell_contents

    positional = function.__defaults__ or ()
    by_keyword = function.__kwdefaults__ or {}
    defaults = (*positional, *by_keyword.values())
    if defaults:
        variables["defaults"] = defaults

    for name, value in variables.items():
        if isinstance(value, dict):
            settings = names & value.keys()
            if settings:
                variables[name] = {key: value[key] for key in sorted(settings)}
    return variables


@functools.cache
def _read(code: types.CodeType) -> _Code:
    """Reads the instructions of code, and which names they read and set."""
    text = []
    names: set[str] = set()
    loaded: set[str] = set()
    stored: set[str] = set()
    holder = ""  # the variable that the instruction before put on the stack
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        value = instruction.argval
        if isinstance(value, types.CodeType):
            inner = _read(value)
            value = inner.instructions
            names |= inner.names
            loaded |= inner.loaded
            stored |= inner.stored

        if operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            names.add(value)
        if operation == "LOAD_CONST" and isinstance(value, str):
            names.add(value)
        if "GLOBAL" in operation:
            loaded.add(value)
        if operation == "STORE_GLOBAL":
            stored.add(value)
        if operation == "STORE_ATTR":
            attribute = f"{holder}.{value}" if holder else value
            stored.add(attribute)

        holder = ""
        if operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
            variable = value[-1] if isinstance(value, tuple) else value  # some load two
            if variable not in (*code.co_varnames[:1], "self"):
                holder = variable

        if isinstance(value, frozenset):  # its order is another in each process
            text.append((operation, sorted(map(repr, value))))
        else:
            text.append((operation, value))
    return _Code(
        instructions=repr(text),
        names=frozenset(names),
        loaded=frozenset(loaded - stored),
        stored=frozenset(stored),
    )


def _module(thing: Any) -> str | None:
    """Names the module that defines a class or function.

    The result is None where it only says so, as `functools.wraps` copies the name.
    """
    if not package(thing):
        return None
    return thing.__module__


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Tells if a module is of an installed package or of Python, so not of the user's program."""
    name = module or ""
    root = name.partition(".")[0]
    if root in _VERSIONED or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return any(folder in file for folder in _INSTALLED)
