"""What XLA made of a step: its IR, and the memory that it has planned."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorflow.compiler.xla.service import hlo_pb2


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


def compiler_ir(function: Any, *args: Any, stage: str = "optimized_hlo") -> str | bytes:
    """The program that `function(*args)` compiles to, at a stage of XLA.

    Args:
        function: a `tf.function` with jit_compile=True.
        *args: tensors, or specs of known shape.
        stage: what `experimental_get_compiler_ir` takes ("hlo", "optimized_hlo", "stablehlo_serialized",
            "optimized_hlo_proto_serialized", ...).

    Raises:
        ValueError: a function that is not compiled with XLA.
    """
    if not function._jit_compile:
        raise ValueError(
            "jit_compile=False: this step is no XLA program, so it has no compiler IR. Pass jit_compile=True."
        )
    return function.experimental_get_compiler_ir(*args)(stage=stage)


def memory_analysis(function: Any, *args: Any) -> MemoryAnalysis:
    """XLA's memory plan for `function(*args)`; compiles it, runs nothing.

    >>> double = tf.function(lambda x: 2.0 * x, jit_compile=True)
    >>> memory_analysis(double, tf.zeros([256])).argument_bytes
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
