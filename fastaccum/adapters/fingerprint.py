"""Describes layers, losses, metrics and optimizers alike in each process of a program, for
comparison.
"""

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

from fastaccum.adapters.attributes import kinds, package
from fastaccum.kernels import private

# Of one version, which is told by its number.
_VERSIONED = ("keras", "tf_keras", "tensorflow", "fastaccum", "numpy", "builtins", "functools")
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
# in training: what they set follows from it
_RUN = ("call", "__call__", "update_state", "update_step")
# numbered anew in each process, told as the policy, or as variables
_LEFT_OUT = ("name", "dtype", "build_config")
_BATCH = "batch"  # in place of a shape's first size


class _Scope(NamedTuple):
    """The place of a value: what was met on the way to it."""

    names: frozenset[str]  # attributes that the user's code reads
    met: dict[int, object]  # objects that were described, by id
    shapes: Sequence[list] = ()  # of the inputs that the layer around it was built for
    concealed: bool = False  # texts may be secrets


def describe(thing: object, known: Iterable[object] = ()) -> Any:
    """Describes an object, a function or a nest of them as JSON holds it; of what is `known`, the
    class alone.

    An object is told by its class and `get_config()`, and where these are the user's or fail, a
    function always, by a
    checksum of its code and what that reads: texts by their checksums, and shapes without their
        batch axis.
    """
    return _describe(
        thing, _Scope(frozenset(), {id(each): each for each in known if each is not thing})
    )


def _describe(value: Any, scope: _Scope) -> Any:
    if isinstance(value, str):  # a path's may be no UTF-8
        text = _shorten(value.encode(errors="backslashreplace").decode(), len(value))
        return (
            f"text of checksum {hashlib.sha256(text.encode()).hexdigest()[:12]}"
            if scope.concealed
            else text
        )
    if (
        value is None
        or isinstance(value, (bool, int))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    if isinstance(value, (dict, set, frozenset, list, tuple)):
        return _describe_nest(value, scope)
    value = _get(value, "python_function", value)  # of a tf.function
    if isinstance(value, (keras.Variable, tf.Variable)) or tf.is_symbolic_tensor(value):
        return "a variable"  # whose value training may change
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor)):
        array = np.asarray(value)
        large = array.size > 64 and array.dtype != object  # told by its checksum
        told = f"{array.dtype}{array.shape} of checksum {zlib.crc32(array.tobytes())}"
        return told if large else _describe(array.tolist(), scope)
    if isinstance(value, bytes):
        return _describe(repr(value), scope)
    if isinstance(value, (float, complex, range, slice)):
        return repr(value)
    if isinstance(value, types.ModuleType) and _is_installed(value.__name__):
        return value.__name__
    found = {"class": _get(value, "__qualname__") or type(value).__qualname__}
    # The state of a seed generator is a variable, and its seed may be a random number.
    if id(value) in scope.met or isinstance(value, keras.random.SeedGenerator):
        return found
    scope.met[id(value)] = value
    if isinstance(value, (types.MethodType, types.FunctionType, types.BuiltinFunctionType)):
        function, owner = _function(value), getattr(value, "__self__", None)
        of = {} if owner is None or not function else {"of": _describe(owner, scope)}
        return found | of | _coded([function], scope.met) if function else found["class"]
    if isinstance(value, functools.partial):
        return found | {
            "of": _describe(
                [value.func, value.args, value.keywords], scope._replace(concealed=True)
            )
        }
    if not isinstance(value, type):
        return found | _parts(value, scope)
    methods, attributes = _methods(value), _class_attributes(value.__mro__)
    users = [
        each for each in methods if each.__name__ != "__init__" and not _is_installed(_module(each))
    ]
    own = [_read(each.__code__) for each in users]
    names = scope.names.union(*(each[1] for each in own)).difference(*(each[3] for each in own))
    read = {name: attributes[name] for name in sorted(names & attributes.keys())}
    return found | _describe(read, scope._replace(names=names)) | _coded(methods, scope.met)


def _describe_nest(value: Any, scope: _Scope) -> Any:
    """Describes a collection by its parts; by their checksum where they are many, as every
    checkpoint holds them.
    """
    if id(value) in scope.met:  # it contains itself
        return type(value).__name__
    scope.met[id(value)] = value
    clear, inner = (
        scope._replace(concealed=False),
        scope._replace(concealed=scope.concealed and len(value) <= 1000),
    )
    if isinstance(value, dict):
        found: Any = {
            _describe(str(name), clear): _describe(each, inner) for name, each in value.items()
        }
    elif isinstance(value, (set, frozenset)):  # whose order is another in each process
        apart = clear._replace(met=dict(scope.met))
        found = [
            _describe(each, inner)
            for each in sorted(value, key=lambda each: repr(_describe(each, apart)))
        ]
    else:
        found = [_describe(each, inner) for each in value]
        if found in scope.shapes:
            found[0] = _BATCH
    del scope.met[id(value)]
    return _shorten(found, len(found))


def _shorten(found: Any, size: int) -> Any:
    return found if size <= 1000 else f"{size} of checksum {zlib.crc32(repr(found).encode())}"


def _get(value: Any, name: str, default: Any = None) -> Any:
    """Returns an attribute; the default also where a `__getattr__` or a property of the user's
    raises any error.
    """
    try:
        return getattr(value, name, default)
    except Exception:  # of whatever kind
        return default


def _parts(value: Any, scope: _Scope) -> dict[str, Any]:
    """Describes an object by its configuration, attributes and code."""
    names, methods, config, classes = (
        scope.names,
        _methods(type(value)),
        _config(value),
        value.__class__.__mro__,
    )
    failed = not config and _get(value, "get_config") is not None  # as where an argument has none
    own = [
        each
        for each in methods
        if each.__name__ != "__init__" and (failed or not _is_installed(_module(each)))
    ]
    names = names.union(*(_read(each.__code__)[1] for each in own))
    names = names.difference(*(_read(each.__code__)[3] for each in own if each.__name__ in _RUN))
    if failed:
        arguments = {
            name for kind in classes for name in inspect.signature(kind.__init__).parameters
        }
        names |= arguments | {f"_{name}" for name in arguments}
    if config or failed:
        names = frozenset(name for name in names if name.strip("_") != "name")
        policy = getattr(_get(value, "dtype_policy"), "name", _get(value, "dtype"))
        config |= {"policy": policy} if isinstance(policy, str) else {}
    users = any(not _is_installed(_module(kind)) for kind in classes)
    told = _class_attributes(classes) | getattr(value, "__dict__", {})
    read = sorted((names & told.keys()) - config.keys()) if users or failed or not config else []
    scope = scope._replace(names=names, concealed=False)
    of_input = _shapes([config.get("batch_shape"), config.get("batch_input_shape")])
    found = _describe(config, scope._replace(shapes=of_input))
    with contextlib.suppress(Exception):  # of whatever kind, also where there is none
        scope = scope._replace(shapes=_shapes(value.get_build_config()))
    attributes = _describe(
        {name: _get(value, name) for name in read}, scope._replace(concealed=True)
    )
    return found | attributes | _coded(methods, scope.met)


def _class_attributes(classes: Sequence[type]) -> dict[str, object]:
    """Returns what a user's classes hold besides functions; the first class of several wins."""
    users = [kind for kind in reversed(classes) if not _is_installed(_module(kind))]
    return {
        name: each for kind in users for name, each in vars(kind).items() if _function(each) is None
    }


def _shapes(nest: object) -> list[list]:
    parts = (
        [*nest.values()]
        if isinstance(nest, dict)
        else nest
        if isinstance(nest, (list, tuple))
        else []
    )
    if parts and all(size is None or isinstance(size, int) for size in parts):
        return [[*parts]]
    return [shape for part in parts for shape in _shapes(part)]


def _config(value: Any) -> dict[str, Any]:
    """The result of `get_config`, with objects in place of what stands for them; {} if there is
    none, or it fails.
    """
    if {"keras.Model", "tf_keras.Model"} & kinds(value).keys():
        return {"layers": value.layers}
    config, told = dict[str, Any](), getattr(value, "__dict__", {})
    # one of the user's may leave out what its base would tell
    for kind in reversed(value.__class__.__mro__):
        if "get_config" in vars(kind):
            try:
                config |= kind.get_config(value)
            except Exception:  # of whatever kind
                config = {}
    if any(isinstance(each, keras.random.SeedGenerator) for each in told.values()):
        config.pop("seed", None)
    for name in config:
        own = told.get(f"_{name}", told.get(name))
        each = [*own] if isinstance(own, (list, tuple)) else [own]
        if any(
            callable(part) or hasattr(part, "get_config") or isinstance(part, np.ndarray)
            for part in each
        ):
            config[name] = own
    # Keras's do not all tell the arguments of a function that they wrap.
    return _without_names(
        config | {name: own for name, own in told.items() if name == private.fn_kwargs.name}
    )


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            name: _without_names(each) for name, each in config.items() if name not in _LEFT_OUT
        }
    return (
        [_without_names(each) for each in config] if isinstance(config, (list, tuple)) else config
    )


def _methods(kind: type) -> list[types.FunctionType]:
    """Lists the functions of a class and its bases, but for those of packages that a version tells
    apart.
    """
    found = (_function(vars(each)[name]) for each in kind.__mro__ for name in sorted(vars(each)))
    return [each for each in found if each is not None]


def _function(member: object) -> types.FunctionType | None:
    """Finds the function of a method, a property or a static method; None where a version tells its
    package apart.
    """
    for name in ("fget", "__func__", "func"):
        member = getattr(member, name, member)
    return (
        member
        if isinstance(member, types.FunctionType) and package(member) not in _VERSIONED
        else None
    )


def _coded(functions: list[types.FunctionType], met: dict[int, object]) -> dict[str, object]:
    """A checksum of functions' code, for this version of Python; and what the user's read beside
    their arguments.
    """
    if not functions:
        return {}
    digest = hashlib.sha256(
        repr([_read(each.__code__)[0] for each in functions]).encode()
    ).hexdigest()[:12]
    found: dict[str, object] = {
        "code": f"{digest} of Python {platform.python_version().rpartition('.')[0]}"
    }
    for function in (
        each
        for each in functions
        if each.__name__ != "__init__" and not _is_installed(_module(each))
    ):
        (_, names, loaded, stored), cells = _read(function.__code__), function.__closure__ or ()
        scope = _Scope(names - stored, met, concealed=True)
        read = {
            name: function.__globals__[name]
            for name in sorted(loaded & function.__globals__.keys())
        }
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            read |= (
                {name: cell.cell_contents}
                if name != "__class__" and cell != types.CellType()
                else {}
            )
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        read |= {"defaults": defaults} if defaults else {}
        for name, each in read.items():  # of a table of settings, those that the code names
            if isinstance(each, dict) and (named := scope.names & each.keys()):
                read[name] = {key: each[key] for key in sorted(named)}
        for name, each in read.items():
            set_on_it = {
                attribute.partition(".")[2]
                for attribute in stored
                if attribute.startswith(f"{name}.")
            }
            found[f"{function.__name__} reads {name}"] = _describe(
                each, scope._replace(names=scope.names - set_on_it)
            )
    return found


@functools.cache
def _read(code: types.CodeType) -> tuple[str, frozenset[str], frozenset[str], frozenset[str]]:
    """Reads code: its instructions; attributes and texts that it reads; globals that it only reads;
    what it sets.
    """
    text, names, loaded, stored = [], set[str](), set[str](), set[str]()
    holder = ""
    for each in dis.get_instructions(code):
        value = each.argval
        if isinstance(value, types.CodeType):
            value, inner, read, written = _read(value)
            names, loaded, stored = names | inner, loaded | read, stored | written
        names |= (
            {value} if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") else set()
        )
        loaded |= {value} if "GLOBAL" in each.opname else set()
        names |= {value} if each.opname == "LOAD_CONST" and isinstance(value, str) else set()
        stored |= {value} if each.opname == "STORE_GLOBAL" else set()
        # As `object.attribute` if a variable other than the first argument holds it.
        stored |= (
            {f"{holder}.{value}" if holder else value} if each.opname == "STORE_ATTR" else set()
        )
        holder = ""
        if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
            variable = value[-1] if isinstance(value, tuple) else value  # some load two
            holder = variable if variable not in (*code.co_varnames[:1], "self") else ""
        text.append(
            (each.opname, sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        )
    return repr(text), frozenset(names), frozenset(loaded - stored), frozenset(stored)


def _module(thing: Any) -> str | None:
    """Names the module that defines a class or function; None where it only says so, as
    `functools.wraps` copies it.
    """
    return thing.__module__ if package(thing) else None


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Tells if a module belongs to an installed package or to Python, and so is no part of the
    user's program.
    """
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    known = (module or "").partition(".")[0] in _VERSIONED or module in sys.builtin_module_names
    return known or any(each in file for each in _INSTALLED)
