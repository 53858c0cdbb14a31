"""The IR of compiled programs, and the memory that XLA planned for them; nothing is run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction, PolymorphicFunction

from fastaccum.checks import one_of
from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.step.tracing import TracedFunction

HloProto: TypeAlias = Any  # xla.HloProto, whose generated class has no public name
Compiled: TypeAlias = PolymorphicFunction | TracedFunction
Stage = Literal[
    "hlo",
    "hlo_no_metadata",
    "hlo_serialized",
    "optimized_hlo",
    "optimized_hlo_dot",
    "optimized_hlo_proto_serialized",
    "optimized_hlo_serialized",
    "stablehlo",
    "stablehlo_serialized",
]


class MemoryAnalysis(NamedTuple):
    """Bytes of a compiled program, from XLA's buffer assignment; the names are those of JAX."""

    argument_bytes: int  # inputs: the stack, the variables and the optimizer's slots
    output_bytes: int  # updated variables included
    alias_bytes: int  # the part of the outputs that lives in the inputs' own buffers
    temp_bytes: int  # everything in between: activations, accumulators, workspaces

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compiler_ir(function: Compiled, *args: object, stage: Stage = "optimized_hlo") -> str | bytes:
    """Returns what a `tf.function` or a `Program` compiles to at a stage of XLA.

    Raises ValueError for a function that XLA does not compile.
    """
    one_of("stage", stage, get_args(Stage))
    compiled: PolymorphicFunction = getattr(function, "function", function)
    if not private.is_jit_compiled(compiled):
        raise ValueError(
            "The step runs without XLA, and has no IR that could be read: pass jit_compile=True."
        )
    with graph_scoped_gradients():
        return compiled.experimental_get_compiler_ir(*args)(stage=stage)


def hlo_proto(concrete: ConcreteFunction) -> HloProto:
    """Returns what a concrete function compiles to, with XLA's plan of its memory.

    It takes no data, and runs nothing.
    """
    captured = concrete.captured_inputs
    arguments = concrete.inputs[: len(concrete.inputs) - len(captured)]
    compiled = private.context.context().get_compiler_ir(
        device_name=tf.zeros([]).device,
        platform_name=None,
        function_name=concrete.name,
        flat_args=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments],
        captured_inputs=captured,
        stage="optimized_hlo_proto_serialized",
    )
    return private.hlo_pb2.HloProto.FromString(compiled)


def memory_analysis(function: Compiled, *args: object) -> MemoryAnalysis:
    """Returns XLA's memory plan for `function(*args)`; compiles, runs nothing."""
    serialized = compiler_ir(function, *args, stage="optimized_hlo_proto_serialized")
    return memory_of(private.hlo_pb2.HloProto.FromString(serialized))


def memory_of(proto: HloProto) -> MemoryAnalysis:
    """Returns XLA's memory plan of a compiled program."""
    argument = 0
    output = 0
    alias = 0
    temp = 0
    for allocation in proto.buffer_assignment.buffer_allocations:
        size = allocation.size
        if allocation.is_entry_computation_parameter:
            argument += size
            # A parameter that is updated in place is an output too, and `peak_bytes` takes off the
            # alias so that its one buffer counts once.
            if allocation.maybe_live_out:
                output += size
                alias += size
        elif allocation.maybe_live_out:
            output += size
        elif not (allocation.is_constant or allocation.is_thread_local):
            temp += size
    return MemoryAnalysis(argument, output, alias, temp)
