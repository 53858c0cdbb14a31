"""Reads from XLA's buffer assignment which buffers are alive at a program's peak."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from fastaccum.step.compiler_ir import MemoryAnalysis

Kind = Literal["weights", "optimizer slots", "accumulators", "activations", "data", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HloProto = Any  # xla.HloProto, and the messages in it, whose generated classes have no public name

# Scopes in the names of operations that no layer opened.
_SCOPES = {"while", "body", "cond", "forward", "backward", "accumulate", "gradient_tape"}
_FORWARD = {"forward", "backward", "gradient_tape"}
_WIDE = (11, 12)  # PrimitiveType F32 and F64

# The opcodes of instructions that only move or convert their operand.
_COPIES = ("copy", "bitcast", "transpose", "convert", "reshape")

# The scopes that TensorFlow opens for calls of functions, loops and branches.
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?|while(_\d+)?|.*__inference_.*|cond(_\d+)?")


class Buffer(NamedTuple):
    """A part of a device's memory."""

    bytes: int
    kind: Kind
    layer: str  # its path, "" where there is none
    operation: str  # TensorFlow's name of the operation that computes it, or the name of a variable
    shape: tuple[int, ...] = ()  # of a variable or tensor that has one


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of a train step at its peak, on one device."""

    analysis: MemoryAnalysis  # XLA's memory plan of the program, or of the largest of several
    buffers: tuple[Buffer, ...]  # alive at the peak

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes of each kind, in the order of `KINDS`; the sum is `peak_bytes`."""
        totals = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            totals[buffer.kind] += buffer.bytes
        return totals

    @property
    def peak_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def largest(self) -> list[Buffer]:
        """The buffers by size, the largest first."""
        return sorted(self.buffers, key=lambda buffer: -buffer.bytes)


def program_buffers(
    proto: HloProto, layers: Collection[str], trained: Iterable[tuple[int, ...]]
) -> list[Buffer]:
    """Lists the buffers at a program's peak: temporary ones, and outputs that alias no input.

    `layers` are names; `trained` has the shapes of the variables whose gradients the program
    accumulates.
    """
    assignment = proto.buffer_assignment
    module = _Module(proto, layers, {tuple(shape) for shape in trained if len(shape)})
    alive = _alive_at_peak(assignment)
    buffers = []
    for allocation in assignment.buffer_allocations:
        if (
            allocation.is_entry_computation_parameter
            or allocation.is_constant
            or allocation.is_thread_local
        ):
            continue

        # The values of an allocation, the largest first.
        assigned = sorted(allocation.assigned, key=lambda part: -part.size)
        values = [part.logical_buffer_id for part in assigned]
        groups = []
        if not allocation.maybe_live_out:
            groups = [alive[value] for value in values if value in alive]

        if groups:
            parts = [module.buffer(group) for group in groups]
        else:  # one buffer takes all of the allocation
            parts = [module.buffer(values)._replace(bytes=allocation.size)]
        buffers += parts

        left_over = allocation.size - sum(part.bytes for part in parts)
        if left_over:
            buffers.append(Buffer(left_over, "other", "", "between buffers"))
    return buffers


def _alive_at_peak(assignment: HloProto) -> dict[int, list[int]]:
    """Maps the first value of each buffer alive at its heap's peak to all values that share it."""
    sizes = {value.id: value.size for value in assignment.logical_buffers}
    alive: dict[int, list[int]] = {}
    for trace in assignment.heap_simulator_traces:
        first: dict[int, int] = {}  # of each value: the first value in its buffer
        sharing: dict[int, list[int]] = {}  # by the first value: all values in the buffer
        users: dict[int, int] = {}  # by the first value: how many values in the buffer are alive
        heap_size = 0
        peak = 0
        first_at_peak: list[int] = []

        for event in trace.events:
            value = event.buffer_id
            if event.kind == event.FREE:
                canonical = first[value]
                users[canonical] -= 1
                if users[canonical] == 0:
                    heap_size -= sizes[canonical]
                    del users[canonical]
                continue

            # A value that shares a live buffer needs no memory of its own.
            shares = event.kind == event.SHARE_WITH and event.share_with_canonical_id in users
            canonical = value
            if shares:
                canonical = event.share_with_canonical_id
            else:
                heap_size += sizes[value]
            first[value] = canonical
            users[canonical] = users.get(canonical, 0) + 1
            sharing.setdefault(canonical, []).append(value)

            if heap_size > peak:
                peak = heap_size
                first_at_peak = list(users)

        for canonical in first_at_peak:
            alive[canonical] = sharing[canonical]
    return alive


class _Array(NamedTuple):
    """The element type and the shape of a value."""

    dtype: int  # a PrimitiveType
    shape: tuple[int, ...]


class _Module:
    """A compiled module: what its values hold, and which operation computed them."""

    def __init__(
        self, proto: HloProto, layers: Collection[str], trained: Collection[tuple[int, ...]]
    ):
        self._layers = layers
        self._trained = trained
        self._values = {value.id: value for value in proto.buffer_assignment.logical_buffers}
        self._computations: dict[int, HloProto] = {}
        self._instructions: dict[int, HloProto] = {}
        for computation in proto.hlo_module.computations:
            self._computations[computation.id] = computation
            for instruction in computation.instructions:
                self._instructions[instruction.id] = instruction

        self._scopes: set[str] = set()
        for instruction in self._instructions.values():
            self._scopes.update(instruction.metadata.op_name.split("/"))
        self._carried = self._find_carried()

    def _find_carried(self) -> set[int]:
        """Finds the instructions that hold what loops carry: loops, and their parameters."""
        carried = set()
        for loop in self._instructions.values():
            if loop.opcode != "while":
                continue
            carried.add(loop.id)
            for called in loop.called_computation_ids:
                for instruction in self._computations[called].instructions:
                    if instruction.opcode == "parameter":
                        carried.add(instruction.id)
        return carried

    def buffer(self, values: Sequence[int]) -> Buffer:
        """Describes the buffer that these values share."""
        size = max(self._values[value].size for value in values)
        whole = [value for value in values if self._values[value].size == size]
        array = self._array(whole)

        paths = []
        for value in whole:
            name = self._name(self._instruction(value))
            if name:
                # XLA joins the names of what it makes one.
                first_name = name.partition(";")[0]
                paths.append(first_name.split("/"))

        layer, operation = self._place(_first_telling(paths))
        return Buffer(size, self._kind(whole, paths, array), layer, operation, array.shape)

    def _kind(self, values: Sequence[int], paths: list[list[str]], array: _Array) -> Kind:
        if any("accumulate" in path for path in paths):
            return "accumulators"
        is_like_gradient = array.dtype in _WIDE and array.shape in self._trained
        if is_like_gradient:
            if any(self._instruction(value).id in self._carried for value in values):
                return "accumulators"
        elif any(_FORWARD & set(path) for path in paths):
            return "activations"
        # A gather takes a micro-batch out of its stack.
        if any(path[-1].startswith("GatherV2") for path in paths):
            return "data"
        return "other"

    def _instruction(self, value: int) -> HloProto:
        return self._instructions[self._values[value].defined_at.instruction_id]

    def _array(self, values: Sequence[int]) -> _Array:
        """Returns the type and shape of the first value that is no scalar, or else of the first."""
        arrays = [self._array_of(value) for value in values]
        for array in arrays:
            if array.shape:
                return array
        return arrays[0]

    def _array_of(self, value: int) -> _Array:
        shape = self._instruction(value).shape
        for index in self._values[value].defined_at.shape_index:
            shape = shape.tuple_shapes[index]
        return _Array(shape.element_type, tuple(shape.dimensions))

    def _name(self, instruction: HloProto, depth: int = 4) -> str:
        """Returns TensorFlow's name of an instruction; for a copy or a fusion that of its source.

        An unnamed copy is followed through `depth` copies at most; "" stands for no name.
        """
        name = instruction.metadata.op_name
        if name or depth == 0:
            return name
        if instruction.opcode == "fusion":
            inside = self._computations[instruction.called_computation_ids[0]]
            for fused in reversed(inside.instructions):
                if fused.metadata.op_name:
                    return fused.metadata.op_name
            return ""
        if instruction.opcode in _COPIES and instruction.operand_ids:
            source = self._instructions[instruction.operand_ids[0]]
            return self._name(source, depth - 1)
        return ""

    def _place(self, path: list[str]) -> tuple[str, str]:
        """Splits the path of a name into the layer and the operation."""
        scopes = [part for part in path if part not in _SCOPES and not _CALL.fullmatch(part)]
        layers = []
        within_layer: list[str] = []  # the scopes after the last layer's
        for scope in scopes:
            layer = self._layer(scope)
            if layer:
                layers.append(layer)
                within_layer = []
            else:
                within_layer.append(scope)

        operation = "/".join(within_layer[-2:])
        if "gradient_tape" in path or "backward" in path:
            operation = f"gradient of {operation}"
        # A gradient's name can hold that of the forward pass after its own.
        once_each = dict.fromkeys(layers)
        return "/".join(once_each), operation

    def _layer(self, scope: str) -> str:
        """Returns the layer of a scope, or "" if there is none.

        TensorFlow adds a number to the name of a layer where the name was taken.
        """
        before, _, number = scope.rpartition("_")
        is_numbered = number.isdigit() and before in self._layers
        # Of layers "a" and "a_1", whose scopes are "a_1" and "a_1_2", the first one's has the name
        # of the second.
        is_of_numbered_layer = (
            is_numbered
            and before not in self._scopes
            and any(other.startswith(f"{scope}_") for other in self._scopes)
        )
        if scope in self._layers and not is_of_numbered_layer:
            return scope
        if is_numbered:
            return before
        return ""


def _first_telling(paths: list[list[str]]) -> list[str]:
    """Returns the first path that holds more than the scopes of calls; empty if there is none."""
    for path in paths:
        if not all(_CALL.fullmatch(part) for part in path):
            return path
    return []
