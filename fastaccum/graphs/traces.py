"""Traces functions of a batch, and reads in their graphs which variables they assign and where they
call Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Nest, Variable, raw
from fastaccum.kernels import private
from fastaccum.kernels.recomputed_function import DRAWS

# Of a batch that is only traced: no other axis of a model is as long.
TELLING_ROWS = 1031
# Of a drawn batch, in place of lengths that are not known, such as those of padded sequences.
DRAWN_LENGTH = 6
# What `compute_loss` hands to its compiled loss as sample weights, and what it gets from it, by
# name.
WEIGHTS, COMPILED = "weight_of_compute_loss", "compiled_loss_of_compute_loss"

# whose state is in a variable; that of the others is nowhere to be read
UNSEEDED = DRAWS - {"RngReadAndSkip"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
CALLS_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def trace(
    function: Callable, nest: Nest, rows: int | None = TELLING_ROWS
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function of one batch with so many rows; `nest` has the specs, and with None also
    the number of rows.

    The operations of a tf.function that it calls are in its own graph, except where one needs
    AutoGraph.
    """
    # whatever a user's function raises without AutoGraph
    with contextlib.suppress(Exception), _inlined_functions():
        return trace_with_calls(function, nest, rows)
    return trace_with_calls(function, nest, rows)


def trace_with_calls(
    function: Callable, nest: Nest, rows: int | None
) -> tf.types.experimental.ConcreteFunction:
    """Traces as `trace` does, with a tf.function that the function calls left a call, and compiled
    as it says.
    """
    specs = tf.nest.map_structure(
        lambda s: tf.TensorSpec([rows or s.shape[0] or 1, *s.shape[1:]], s.dtype), nest
    )
    return tf.function(function, autograph=False).get_concrete_function(specs)


def drawn_batch(specs: Nest, rows: int, seed: int) -> Nest:
    """Draws so many rows of inputs of these specs: floats from 0.1 to 0.9, integers 0 and 1, False
    and True.
    """
    uniform = np.random.default_rng(seed).uniform

    def draw(spec: tf.TensorSpec) -> tf.Tensor:
        lengths = [DRAWN_LENGTH if length is None else length for length in spec.shape[1:]]
        drawn = uniform(0.1, 0.9, [rows, *lengths])
        dtype = tf.as_dtype(spec.dtype)
        return tf.cast(drawn if dtype.is_floating else np.round(drawn), dtype)

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


def list_python_calls(graph: tf.Graph) -> list[str]:
    """Names the operations that call Python (tf.numpy_function, tf.py_function), which XLA cannot
    compile.
    """
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return [node.name for node in nodes if node.op in CALLS_OF_PYTHON]


def list_assigned(graph: tf.Graph, of_keras: Sequence[Variable]) -> list[Variable]:
    """Lists the variables that a graph assigns, as Keras variables where they are in `of_keras`."""
    # A variable has a component on every replica, or is its own.
    owners = {id(part.handle): v for v in of_keras for part in getattr(raw(v), "values", [raw(v)])}
    owners = {id(v.handle): v for v in graph.variables} | owners
    outside = {id(inside): id(handle) for handle, inside in graph.captures}
    written = [
        outside.get(id(t))
        for op in graph.get_operations()
        for t in private.get_read_write_resource_inputs(op)[1]
    ]
    return list(
        {id(owners[handle]): owners[handle] for handle in written if handle in owners}.values()
    )
