"""Compiled programs: called with little overhead, and asked for their IR and the memory that XLA planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError


class MemoryAnalysis(NamedTuple):
    """Bytes of a compiled program, from XLA's buffer assignment; the names are those of JAX.

    Attributes:
        argument_bytes: inputs: the stack, the variables and the optimizer's slots.
        output_bytes: outputs, updated variables included.
        alias_bytes: the part of the outputs that lives in the inputs' own buffers.
        temp_bytes: everything in between: activations, accumulators, workspaces.
        peak_bytes: argument + output - alias + temp.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class Program:
    """A function of nests of tensors, traced and compiled once per structure, shapes and dtypes.

    The same as `tf.function`, but found by these alone, called with the variables' handles that were looked up once,
    and, outside of graphs, without a look at gradient tapes: a tape cannot look into it.

    Args:
        function: takes nests of tensors and None only.
        jit_compile: compile with XLA.

    >>> double = Program(lambda x: 2.0 * x)
    >>> float(double(tf.constant(1.0))), float(double(tf.constant(2.0))), double.traces
    (2.0, 4.0, 1)
    """

    def __init__(self, function: Callable[..., Any], jit_compile: bool = True):
        self.function = tf.function(function, jit_compile=jit_compile, autograph=False)
        self._calls: dict[tuple, Callable[[list[tf.Tensor]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, key = flat(args)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _call_of(self.function.get_concrete_function(*args), args)
        return call(leaves)

    @property
    def traces(self) -> int:
        """How often the function was traced."""
        return self.function.experimental_get_tracing_count()


def flat(nest: Any) -> tuple[list[Any], tuple]:
    """The arrays or tensors of a nest, and what nests that one program takes have in common."""
    leaves, structure = optree.tree_flatten(nest)
    return leaves, (structure, *[(type(t), getattr(t, "shape", None), getattr(t, "dtype", None)) for t in leaves])


def _call_of(concrete: Any, args: Any) -> Callable[[list[tf.Tensor]], Any]:
    """Calls a concrete function, traced with `args`, with the tensors of a nest like these."""
    captured, function = concrete.captured_inputs, concrete._inference_function
    size = len(function.function_type.flat_outputs)
    structure = optree.tree_structure(concrete.structured_outputs)
    # The order of TensorFlow's nests is another one, where keys are in an OrderedDict.
    given = optree.tree_structure(args)
    numbers = optree.tree_unflatten(given, range(given.num_leaves))
    order = [number for number in tf.nest.flatten(numbers) if number is not None]

    def call(leaves: list[tf.Tensor]) -> Any:
        tensors, now = [leaves[number] for number in order], context.context()
        if not now.executing_eagerly():
            return concrete._call_flat(tensors, captured)
        # What `_call_flat` ends in: its own work takes as long as the arithmetic of a small model.
        with InterpolateRuntimeError(function):
            outputs = now.call_function(function.name, tensors + captured, size)
        return optree.tree_unflatten(structure, outputs or ())

    return call


def compiler_ir(function: Any, *args: Any, stage: str = "optimized_hlo") -> str | bytes:
    """What `function(*args)` compiles to, at a stage of XLA; nothing is run.

    Args:
        function: a `tf.function` with jit_compile=True, or a `Program`.
        *args: nests of tensors.
        stage: what `experimental_get_compiler_ir` takes ("hlo", "optimized_hlo", "stablehlo_serialized",
            "optimized_hlo_proto_serialized", ...).

    Raises:
        ValueError: a function that is not compiled with XLA.
    """
    function = getattr(function, "function", function)
    if not function._jit_compile:
        raise ValueError("jit_compile=False: this is no XLA program, so it has no compiler IR. Pass jit_compile=True.")
    return function.experimental_get_compiler_ir(*args)(stage=stage)


def memory_analysis(function: Any, *args: Any) -> MemoryAnalysis:
    """XLA's memory plan for `function(*args)`; compiles, runs nothing.

    >>> memory_analysis(Program(lambda x: 2.0 * x), tf.zeros([256])).argument_bytes
    1024
    """
    proto = hlo_pb2.HloProto.FromString(compiler_ir(function, *args, stage="optimized_hlo_proto_serialized"))
    argument = output = alias = temp = 0
    for allocation in proto.buffer_assignment.buffer_allocations:
        size = allocation.size
        if allocation.is_entry_computation_parameter:
            argument += size
            if allocation.maybe_live_out:
                output, alias = output + size, alias + size
        elif allocation.maybe_live_out:
            output += size
        elif not (allocation.is_constant or allocation.is_thread_local):
            temp += size
    return MemoryAnalysis(argument, output, alias, temp)
