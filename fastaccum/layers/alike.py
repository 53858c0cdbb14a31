"""Tells whether two layers compute the same, with other weights."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import package
from fastaccum.kernels import private, stackable
from fastaccum.layers import interceptors
from fastaccum.layers.blocks import ordered

# Objects that make or restrain weights, of which the configurations tell all.
_OF_WEIGHTS = (
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)
# Objects that two layers have for themselves, or share.
_OWNED = (
    keras.layers.Layer,
    keras.Variable,
    tf.Variable,
    keras.random.SeedGenerator,
    keras.KerasTensor,
)
_VARIABLES = (keras.Variable, tf.Variable)
_VALUES = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type,
    types.ModuleType,
    tf.DType,
    tf.TensorShape,
    tf.TensorSpec,
)
# Packages whose layers compute by their attributes alone, and nothing by their names.
_NAMELESS = ("keras", "keras_hub", "fastaccum", "tensorflow", "builtins")
# The most characters of a value in a reason.
_SHOWN = 40


class Comparison:
    """Compares two layers, or other values, with all that they hold.

    Layers are alike if they are objects of one class whose attributes are alike, whatever their
    names, seeds and the values of their weights: then one function computes both. Attributes are
    compared, not configurations, as a layer may compute by what no configuration tells.
    """

    def __init__(self) -> None:
        self._counterparts: dict[int, Any] = {}  # of what was compared, by id
        self._originals: dict[int, Any] = {}  # the same the other way round
        self._kept: list[object] = []  # lest a later object gets the id of an earlier one
        # Whether code was met that is neither Keras's nor KerasHub's: it may compute by what no
        # attribute tells.
        self.meets_users_code = False

    def inputs(self, nodes: Sequence[Any]) -> list[tuple[keras.KerasTensor, keras.KerasTensor]]:
        """Lists what compared nodes take from outside, each with its counterpart."""
        made = {id(t) for node in nodes for t in node.outputs}
        taken = {}
        for node in nodes:
            for t in node.input_tensors:
                if id(t) not in made:
                    taken[id(t)] = (t, self._counterparts[id(t)])
        return list(taken.values())

    def compare_nodes(self, nodes: Sequence[Any], others: Sequence[Any], path: str) -> str | None:
        """Compares nodes of functional graphs: what they call, and what they call it with."""
        if len(nodes) != len(others):
            return f"{path or 'the graph'} has {len(nodes)} and {len(others)} nodes"
        for k, (node, other) in enumerate(zip(nodes, others, strict=True)):
            inner = path
            if len(nodes) > 1:
                inner = f"{path}.node {k}".lstrip(".")
            pairs = [
                (node.operation, other.operation),
                (node.arguments.args, other.arguments.args),
                (node.arguments.kwargs, other.arguments.kwargs),
                (node.outputs, other.outputs),
            ]
            for value, of_other in pairs:
                found = self.compare(value, of_other, inner)
                if found is not None:
                    return found
        return None

    def compare(self, a: Any, b: Any, path: str) -> str | None:
        """Says where two values differ; None if they do not. `path` leads to them."""
        if is_users_code(a):
            self.meets_users_code = True
        if a is None or isinstance(a, _VALUES):
            if type(a) is type(b) and (a == b or (a != a and b != b)):
                return None
            return f"{path} is {_show(a)} and {_show(b)}"
        if id(a) in self._counterparts:
            if self._counterparts[id(a)] is b:
                return None
            return f"{path} is shared within one of them in another way"
        if a is b:  # both hold the same object
            self._note(a, b)
            return None
        if type(a) is not type(b):
            return f"{path or 'the class'} is {_show(a)} and {_show(b)}"

        if isinstance(a, _OF_WEIGHTS):
            return self._compare_all(_config(a), _config(b), path)
        if self._originals.get(id(b), a) is not a and isinstance(a, _OWNED):
            return f"{path} is shared within one of them in another way"
        self._note(a, b)
        if isinstance(a, keras.layers.Layer):
            return self._compare_layers(a, b, path)
        if isinstance(a, _VARIABLES):
            return self._compare_all(_traits_of_variable(a), _traits_of_variable(b), path)
        if isinstance(a, keras.KerasTensor):
            specs = {"shape": tuple(a.shape), "dtype": a.dtype}
            return self._compare_all(specs, {"shape": tuple(b.shape), "dtype": b.dtype}, path)
        if isinstance(a, keras.random.SeedGenerator):
            return None
        if isinstance(a, keras.DTypePolicy):
            return self._compare_all(a.get_config(), b.get_config(), path)
        if isinstance(a, (set, frozenset)):
            if _are_equal(frozenset(a), frozenset(b)):
                return None
            return f"{path} is {_show(a)} and {_show(b)}"
        if isinstance(a, Mapping):
            if list(a) != list(b):
                return f"{path} has the keys {_show(list(a))} and {_show(list(b))}"
            return self._compare_all(a, b, path)
        if isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return f"{path} has {len(a)} and {len(b)} items"
            return self._compare_all(dict(enumerate(a)), dict(enumerate(b)), path)
        if isinstance(a, (np.ndarray, np.generic, tf.Tensor)):
            return _compare_arrays(a, b, path)
        if isinstance(a, types.FunctionType):
            found = self._compare_all(_traits_of_function(a), _traits_of_function(b), path)
            if found is not None and _show(a) != _show(b):
                return f"{path} is {_show(a)} and {_show(b)}"
            return found
        if isinstance(a, _Code):
            return None if a == b else f"{path.removesuffix('.code')} is written in another way"
        if isinstance(a, types.MethodType):
            return self.compare(a.__func__, b.__func__, path) or self.compare(
                a.__self__, b.__self__, f"{path} of"
            )
        if isinstance(a, functools.partial):
            parts = {"func": a.func, "args": a.args, "keywords": a.keywords}
            others = {"func": b.func, "args": b.args, "keywords": b.keywords}
            return self._compare_all(parts, others, path)
        if isinstance(a, keras.Operation):
            return self._compare_all(_attributes(a), _attributes(b), path)
        if getattr(a, "__dict__", None) and not _has_slots(type(a)):
            return self._compare_all(vars(a), vars(b), path)
        if _are_equal(a, b):
            return None
        return f"{path} is {_show(a)} and {_show(b)}"

    def _note(self, a: Any, b: Any) -> None:
        self._counterparts[id(a)] = b
        self._originals[id(b)] = a
        self._kept += [a, b]

    def _compare_all(self, a: Mapping[Any, Any], b: Mapping[Any, Any], path: str) -> str | None:
        for name in [*a, *(name for name in b if name not in a)]:
            inner = f"{path}.{name}".lstrip(".")
            if name not in a or name not in b:
                return f"only one of them has {inner}"
            found = self.compare(a[name], b[name], inner)
            if found is not None:
                return found
        return None

    def _compare_layers(
        self, a: keras.layers.Layer, b: keras.layers.Layer, path: str
    ) -> str | None:
        if private.nodes_by_depth.exists(a):
            if package(type(a)) != "keras":
                return f"{path or 'each'} is a {_show(a)}, a graph with code of its own"
            return self._compare_graphs(a, b, path)
        return self._compare_all(_traits_of_layer(a), _traits_of_layer(b), path)

    def _compare_graphs(self, a: keras.Function, b: keras.Function, path: str) -> str | None:
        """Compares functional models by the nodes that a call runs."""
        return (
            self.compare(_policies(a), _policies(b), f"{path}.policies of remat")
            or self.compare(list(a.inputs), list(b.inputs), f"{path}.inputs")
            or self.compare_nodes(ordered(a)[0], ordered(b)[0], path)
            or self.compare(list(a.outputs), list(b.outputs), f"{path}.outputs")
        )


def _traits_of_layer(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns what a layer computes by: its settings, its variables and the layers in it."""
    name = None
    kind: Any = type(layer)
    if _reads_name(kind):
        name = layer.name
    return {
        "name": name,
        **_attributes(layer),
        "dtype_policy": layer.dtype_policy,
        "autocast": layer.autocast,
        "trainable": layer.trainable,
        "supports_masking": layer.supports_masking,
        "policies of remat": _policies(layer),
        "variables": stackable.variables(layer),
        "layers": list(private.flatten_layers(layer, include_self=False, recursive=False)),
    }


def _attributes(operation: keras.Operation) -> dict[str, Any]:
    """Returns the attributes of an object that are not those which Keras gives to every layer."""
    attributes = {
        name: interceptors.without_interceptors(value)
        for name, value in vars(operation).items()
        if name not in _keras_attributes()
    }
    if any(isinstance(value, keras.random.SeedGenerator) for value in attributes.values()):
        attributes.pop("seed", None)  # the generator's, which is in its state
    return attributes


@functools.lru_cache(maxsize=1024)
def _reads_name(kind: type) -> bool:
    """Tells if a user's class reads a name anywhere but where it is made: it may compute by it."""
    for base in kind.__mro__:
        if package(base) in _NAMELESS:
            continue
        for attribute, method in vars(base).items():
            code = getattr(method, "__code__", None)
            if code is None or attribute == "__init__":
                continue
            if {"name", "path"} & {*code.co_names}:
                return True
    return False


@functools.cache
def _keras_attributes() -> frozenset[str]:
    """Returns the names of the attributes that Keras gives to every layer."""

    class Plain(keras.layers.Layer):
        def __init__(self):
            # With names and numbers of its own, it takes none of the user's.
            super().__init__(name="plain")
            self.inner = keras.layers.Identity(name="inner")

        def build(self, shape):
            self.add_weight(shape=(), initializer="zeros")

        def call(self, x):
            return self.inner(x)

    plain = Plain()
    plain(keras.KerasTensor([1]))
    return frozenset(vars(plain)) - {"inner"}


def _traits_of_variable(variable: Any) -> dict[str, Any]:
    return {
        "shape": tuple(variable.shape),
        "dtype": tf.as_dtype(private.variable_dtype(variable, variable.dtype)).name,
        "trainable": variable.trainable,
        "autocast": private.autocast(variable, None),
    }


def _traits_of_function(function: types.FunctionType) -> dict[str, Any]:
    cells: Iterable[types.CellType] = function.__closure__ or ()
    contents = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # of one that is empty
            contents.append(cell.cell_contents)
    return {
        "code": _Code(function.__code__),
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "variables": contents,
        "globals": id(function.__globals__),
        "attributes": dict(vars(function)),
    }


class _Code(str):
    """The text of a function's code, which is equal where the function is written the same."""

    def __new__(cls, code: types.CodeType) -> _Code:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        return super().__new__(cls, f"{code.co_code!r} {names} {counts} {code.co_consts}")


def _compare_arrays(a: Any, b: Any, path: str) -> str | None:
    if isinstance(a, np.ndarray) and type(a) is not np.ndarray:
        return f"{path} are arrays of a class of their own"
    if tf.is_symbolic_tensor(a) or tf.is_symbolic_tensor(b):
        return None  # left from a call that was traced
    a = np.asarray(a)
    b = np.asarray(b)
    is_same_kind = a.shape == b.shape and a.dtype == b.dtype and a.dtype != object
    if is_same_kind and a.tobytes() == b.tobytes():
        return None
    return f"{path} holds other numbers"


def is_users_code(value: Any) -> bool:
    """Tells if a value is a function or an object of a class that no known package defines."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return package(value) not in _NAMELESS
    if isinstance(value, keras.Operation):
        return package(type(value)) not in _NAMELESS
    if callable(value) and not isinstance(value, type):
        return package(type(value)) not in _NAMELESS
    return False


def _policies(layer: keras.layers.Layer) -> list[object]:
    recomputing = interceptors.installed(layer, interceptors.Role.RECOMPUTE)
    return [interceptor.policy for interceptor in recomputing]


def _config(value: Any) -> dict[str, Any]:
    """Returns the configuration of an initializer, a regularizer or a constraint, without seed."""
    try:
        config = dict(value.get_config())
    except Exception:  # of whatever kind, of a class of the user's own
        return dict(vars(value))
    config.pop("seed", None)
    return config


def _has_slots(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # of whatever kind: objects of the user's may compare as they like
        return False


def _show(value: Any) -> str:
    if isinstance(value, keras.Operation):
        return f"a {type(value).__name__}"
    if isinstance(value, types.FunctionType):
        return value.__qualname__
    try:
        text = repr(value)
    except Exception:  # of whatever kind
        text = f"a {type(value).__name__}"
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."
