"""Which variables a forward pass assigns."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs


def assigned(graph: Any, of_keras: list[Any]) -> list[Any]:
    """The variables that a function's graph assigns, as Keras variables where they are some."""
    owners = {id(part.handle): v for v in of_keras for part in _components(v)}
    owners = {id(v.handle): v for v in graph.variables} | owners
    outside = {id(inside): id(handle) for handle, inside in graph.captures}
    written = [outside.get(id(t)) for op in graph.get_operations() for t in get_read_write_resource_inputs(op)[1]]
    found = {id(owners[handle]): owners[handle] for handle in written if handle in owners}
    return list(found.values())


def _components(variable: Any) -> list[tf.Variable]:
    """A Keras variable's, one on every replica; a tf_keras variable is its own."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return list(getattr(value, "values", [value]))


def plain(variables: list[Any]) -> list[tf.Variable]:
    """As TensorFlow has them."""
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]
