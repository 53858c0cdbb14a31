"""Traces functions of a batch, and lists what their graphs hold.

That is their operations, the variables that they assign, and their calls of Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest, Variable, raw
from fastaccum.kernels import private
from fastaccum.kernels.recomputed_function import DRAWS

# The rows of a batch that is only traced: a prime number, which no other axis of a model has.
TELLING_ROWS = 1031
# The length of axes of a drawn batch whose lengths are not known, as of padded sequences.
DRAWN_LENGTH = 6
# Names of the sample weights that `compute_loss` hands to its compiled loss.
WEIGHTS = "weight_of_compute_loss"
# The name of what `compute_loss` gets from its compiled loss.
COMPILED = "compiled_loss_of_compute_loss"

# Operations that draw numbers, and whose state cannot be read: that of RngReadAndSkip is in a
# variable.
UNSEEDED = DRAWS - {"RngReadAndSkip"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
CALLS_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def trace(
    function: Callable, nest: Nest, rows: int | None = TELLING_ROWS
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function of one batch of these specs and so many rows; None for those of the specs.

    The operations of a tf.function that it calls are in its own graph, except where one needs
    AutoGraph.
    """
    # A user's function may raise anything without AutoGraph.
    with contextlib.suppress(Exception), _inlined_functions():
        return trace_with_calls(function, nest, rows)
    return trace_with_calls(function, nest, rows)


def trace_with_calls(
    function: Callable, nest: Nest, rows: int | None
) -> tf.types.experimental.ConcreteFunction:
    """Traces as `trace` does, but a tf.function that the function calls stays a call."""

    def spec_of_rows(spec):
        count = spec.shape[0] if rows is None else rows
        return tf.TensorSpec([count or 1, *spec.shape[1:]], spec.dtype)

    specs = tf.nest.map_structure(spec_of_rows, nest)
    return tf.function(function, autograph=False).get_concrete_function(specs)


def drawn_batch(specs: Nest, rows: int, seed: int) -> Nest:
    """Draws so many rows of inputs: floats from 0.1 to 0.9, integers 0 and 1, False and True."""
    uniform = np.random.default_rng(seed).uniform

    def draw(spec: tf.TensorSpec) -> tf.Tensor:
        lengths = [DRAWN_LENGTH if length is None else length for length in spec.shape[1:]]
        drawn = uniform(0.1, 0.9, [rows, *lengths])
        dtype = tf.as_dtype(spec.dtype)
        if not dtype.is_floating:
            drawn = np.round(drawn)
        return tf.cast(drawn, dtype)

    return tf.nest.map_structure(draw, specs)


@contextlib.contextmanager
def _inlined_functions() -> Iterator[None]:
    """Traces each tf.function that is called inside the block as a part of its caller."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def list_operations(graph: tf.Graph, needed_only: bool = False) -> Iterator[tf.Operation]:
    """Yields the operations of a function, and those of the functions it calls.

    The bodies of its loops and its branches are such functions. With `needed_only`, operations that
    no result needs are left out, as those that tf.vectorized_map has traced and then replaced.
    """
    operations = graph.get_operations()
    if needed_only:
        needed = {t.op.name for t in graph.outputs}
        for operation in reversed(operations):  # each before its inputs
            if operation.name in needed:
                needed |= {t.op.name for t in operation.inputs}
        operations = [operation for operation in operations if operation.name in needed]
    for operation in operations:
        yield operation
        for called in called_graphs(operation):
            yield from list_operations(called, needed_only)


def called_graphs(operation: tf.Operation) -> list[tf.Graph]:
    """Lists the graphs of the functions that an operation calls."""
    graphs = []
    for attribute in operation.node_def.attr.values():
        for called in [attribute.func, *attribute.list.func]:
            if not called.name:
                continue
            function = private.get_function(operation.graph, called.name)
            graph = getattr(function, "graph", None)  # functions of TensorFlow 1 have none
            if graph is not None:
                graphs.append(graph)
    return graphs


def list_python_calls(graph: tf.Graph) -> list[str]:
    """Names the operations that call Python (tf.py_function and its like): XLA compiles none."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return [node.name for node in nodes if node.op in CALLS_OF_PYTHON]


def list_assigned(graph: tf.Graph, of_keras: Sequence[Variable]) -> list[Variable]:
    """Lists the variables that a graph assigns, as Keras variables where they are in `of_keras`."""
    variables_of_handles: dict[int, Variable] = {id(v.handle): v for v in graph.variables}
    for variable in of_keras:
        # A variable has a component on every replica, or is its own.
        for component in getattr(raw(variable), "values", [raw(variable)]):
            variables_of_handles[id(component.handle)] = variable

    captured_handles = {id(inside): id(handle) for handle, inside in graph.captures}
    assigned = {}  # by identity, in the order of the assignments
    for operation in graph.get_operations():
        _, written = private.get_read_write_resource_inputs(operation)
        for tensor in written:
            handle = captured_handles.get(id(tensor))
            if handle in variables_of_handles:
                variable = variables_of_handles[handle]
                assigned[id(variable)] = variable
    return list(assigned.values())
