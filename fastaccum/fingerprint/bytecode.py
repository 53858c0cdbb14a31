"""Reads the code of functions: a checksum of it, and which attributes and globals it uses.

A fingerprint compares what a user's code reads, and neither docstrings, lines nor what is only
noted (docs/reliability.md, "On the disk"). Only bytecode tells reads from
writes for every function: a lambda of an interpreter, or of `exec`, has no source, and the source
of a lambda in an argument is no statement that Python parses.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastaccum.basics.attributes import package

# Packages whose code is not described, as the number of their version tells it apart.
_VERSIONED = ("keras", "tf_keras", "tensorflow", "fastaccum", "numpy", "builtins", "functools")

# Parts of the paths of code that was installed, or came with Python.
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


class Attribute(NamedTuple):
    """An attribute of the object that a variable holds."""

    variable: str
    name: str


class Code(NamedTuple):
    """The content of a function's code, and of the functions within it."""

    instructions: str
    names: frozenset[str]  # attributes and texts that it reads
    loaded: frozenset[str]  # globals that it only reads
    stored: frozenset[str]  # globals and attributes of the first argument that it sets
    stored_on: frozenset[Attribute]  # attributes of other objects that it sets


@functools.cache
def read(code: types.CodeType) -> Code:
    """Reads the instructions of code, and which names they read and set."""
    text = []
    names: set[str] = set()
    loaded: set[str] = set()
    stored: set[str] = set()
    stored_on: set[Attribute] = set()
    holder = ""  # the variable that the instruction before put on the stack
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        value = instruction.argval
        if isinstance(value, types.CodeType):
            inner = read(value)
            value = inner.instructions
            names |= inner.names
            loaded |= inner.loaded
            stored |= inner.stored
            stored_on |= inner.stored_on

        if operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            names.add(value)
        if operation == "LOAD_CONST" and isinstance(value, str):
            names.add(value)
        if "GLOBAL" in operation:
            loaded.add(value)
        if operation == "STORE_GLOBAL":
            stored.add(value)
        if operation == "STORE_ATTR":
            if holder:
                stored_on.add(Attribute(holder, value))
            else:
                stored.add(value)

        holder = ""
        if operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
            variable = value[-1] if isinstance(value, tuple) else value  # some load two
            if variable not in (*code.co_varnames[:1], "self"):
                holder = variable

        if isinstance(value, frozenset):  # its order is another in each process
            text.append((operation, sorted(map(repr, value))))
        else:
            text.append((operation, value))
    return Code(
        instructions=repr(text),
        names=frozenset(names),
        loaded=frozenset(loaded - stored),
        stored=frozenset(stored),
        stored_on=frozenset(stored_on),
    )


def checksum(functions: Sequence[types.FunctionType]) -> str:
    """Returns a checksum of functions' code, which is comparable within this version of Python."""
    instructions = [read(function.__code__).instructions for function in functions]
    digest = hashlib.sha256(repr(instructions).encode()).hexdigest()
    python = platform.python_version().rpartition(".")[0]
    return f"{digest[:12]} of Python {python}"


def variables(function: types.FunctionType, names: frozenset[str]) -> dict[str, object]:
    """Returns a function's globals, closure and defaults by name.

    Of a table of settings, only those are returned whose keys are among the `names` that the code
    reads, if there are any.
    """
    variables = {}
    held = function.__globals__
    for name in sorted(read(function.__code__).loaded & held.keys()):
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


def methods(kind: type) -> list[types.FunctionType]:
    """Lists the functions of a class and its bases whose packages no version tells apart."""
    functions = []
    for base in kind.__mro__:
        for name in sorted(vars(base)):
            function = find_function(vars(base)[name])
            if function is not None:
                functions.append(function)
    return functions


def find_function(member: object) -> types.FunctionType | None:
    """Finds the function of a method, a property or a static method.

    The result is None for what is no function, and where a version tells its package apart.
    """
    for name in ("fget", "__func__", "func"):
        member = getattr(member, name, member)
    if isinstance(member, types.FunctionType) and package(member) not in _VERSIONED:
        return member
    return None


def is_users(function: types.FunctionType) -> bool:
    """Tells if a function is of the user's program and runs in training."""
    return function.__name__ != "__init__" and is_of_user(function)


def is_of_user(thing: Any) -> bool:
    """Tells if a class or function is of the user's program.

    One that only says that it is of a package, as `functools.wraps` copies the name, is the user's.
    """
    return not (package(thing) and is_installed(thing.__module__))


@functools.cache
def is_installed(module: str) -> bool:
    """Tells if a module is of an installed package or of Python, so not of the user's program."""
    root = module.partition(".")[0]
    if root in _VERSIONED or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(folder in file for folder in _INSTALLED)
