"""Which variables a forward pass assigns."""

from __future__ import annotations

from typing import Any

from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from fastaccum.adapters.attributes import raw


def assigned(graph: Any, of_keras: list[Any]) -> list[Any]:
    """The variables that a function's graph assigns, as Keras variables where they are some."""
    # A variable has a component on every replica, or is its own.
    owners = {id(part.handle): v for v in of_keras for part in getattr(raw(v), "values", [raw(v)])}
    owners = {id(v.handle): v for v in graph.variables} | owners
    outside = {id(inside): id(handle) for handle, inside in graph.captures}
    written = [outside.get(id(t)) for op in graph.get_operations() for t in get_read_write_resource_inputs(op)[1]]
    found = {id(owners[handle]): owners[handle] for handle in written if handle in owners}
    return list(found.values())
