"""Reads XLA's buffer assignment: the buffers alive at a program's peak, by kind, layer and
operation.
"""

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
        return {kind: sum(b.bytes for b in self.buffers if b.kind == kind) for kind in KINDS}

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
    """Lists the buffers at a program's peak besides its arguments: temporary ones, and outputs that
    alias no input.

    `layers` are names; `trained` has the shapes of the variables whose gradients the program
    accumulates.
    """
    module = _Module(proto, layers, {tuple(shape) for shape in trained if len(shape)})
    assignment, found = proto.buffer_assignment, []
    alive = _alive_at_peak(assignment)
    for allocation in assignment.buffer_allocations:
        if (
            allocation.is_entry_computation_parameter
            or allocation.is_constant
            or allocation.is_thread_local
        ):
            continue
        ids = [
            each.logical_buffer_id
            for each in sorted(allocation.assigned, key=lambda each: -each.size)
        ]
        groups = [alive[i] for i in ids if i in alive] if not allocation.maybe_live_out else []
        buffers = [module.buffer(group) for group in groups or [ids]]
        if not groups:
            buffers = [buffer._replace(bytes=allocation.size) for buffer in buffers]
        found += buffers
        if rest := allocation.size - sum(buffer.bytes for buffer in buffers):
            found.append(Buffer(rest, "other", "", "between buffers"))
    return found


def _alive_at_peak(assignment: HloProto) -> dict[int, list[int]]:
    """Maps the first value of each buffer that is alive at its heap's peak to all values that share
    the buffer.
    """
    sizes = {b.id: b.size for b in assignment.logical_buffers}
    alive: dict[int, list[int]] = {}
    for trace in assignment.heap_simulator_traces:
        first: dict[int, int] = {}
        sharing: dict[int, list[int]] = {}
        left: dict[int, int] = {}
        now = peak = 0
        at_peak: list[int] = []
        for event in trace.events:
            own = event.buffer_id
            if event.kind == event.FREE:
                left[first[own]] -= 1
                if not left[first[own]]:
                    now -= sizes[first[own]]
                    del left[first[own]]
                continue
            shared = event.kind == event.SHARE_WITH and event.share_with_canonical_id in left
            first[own] = event.share_with_canonical_id if shared else own
            left[first[own]] = left.get(first[own], 0) + 1
            sharing.setdefault(first[own], []).append(own)
            now += 0 if shared else sizes[own]
            if now > peak:
                peak, at_peak = now, list(left)
        alive |= {each: sharing[each] for each in at_peak}
    return alive


class _Module:
    """A compiled module, which says of its values what they hold and which operation computed
    them.
    """

    def __init__(
        self, proto: HloProto, layers: Collection[str], trained: Collection[tuple[int, ...]]
    ):
        computations = proto.hlo_module.computations
        self._computations = {c.id: c for c in computations}
        self._instructions = {i.id: i for c in computations for i in c.instructions}
        self._values = {b.id: b for b in proto.buffer_assignment.logical_buffers}
        self._layers, self._trained = layers, trained
        self._scopes = {
            part for i in self._instructions.values() for part in i.metadata.op_name.split("/")
        }
        loops = [i for i in self._instructions.values() if i.opcode == "while"]
        called = [c for loop in loops for c in loop.called_computation_ids]
        parameters = [
            i for c in called for i in self._computations[c].instructions if i.opcode == "parameter"
        ]
        self._carried = {i.id for i in (*loops, *parameters)}

    def buffer(self, values: Sequence[int]) -> Buffer:
        """Describes the buffer that these values share."""
        size = max(self._values[i].size for i in values)
        whole = [i for i in values if self._values[i].size == size]
        names = [name for i in whole if (name := self._name(self._instruction(i)))]
        shapes = [self._shape(i) for i in whole]
        (dtype, shape) = next((s for s in shapes if s[1]), shapes[0])
        # XLA joins the names of what it makes one
        parts = [name.partition(";")[0].split("/") for name in names]
        said = next((p for p in parts if not all(_CALL.fullmatch(each) for each in p)), [])
        layer, operation = self._place(said)
        return Buffer(size, self._kind(whole, parts, dtype, shape), layer, operation, shape)

    def _kind(
        self, values: Sequence[int], parts: list[list[str]], dtype: int, shape: tuple[int, ...]
    ) -> Kind:
        if any("accumulate" in each for each in parts):
            return "accumulators"
        gradient_like = dtype in _WIDE and shape in self._trained
        if gradient_like and any(self._instruction(i).id in self._carried for i in values):
            return "accumulators"
        if not gradient_like and any(_FORWARD & set(each) for each in parts):
            return "activations"
        # of a micro-batch
        return "data" if any(each[-1].startswith("GatherV2") for each in parts) else "other"

    def _instruction(self, value: int) -> HloProto:
        return self._instructions[self._values[value].defined_at.instruction_id]

    def _shape(self, value: int) -> tuple[int, tuple[int, ...]]:
        shape = self._instruction(value).shape
        for index in self._values[value].defined_at.shape_index:
            shape = shape.tuple_shapes[index]
        return shape.element_type, tuple(shape.dimensions)

    def _name(self, instruction: HloProto, depth: int = 4) -> str:
        """Returns TensorFlow's name of an instruction, or for a copy or an unnamed fusion that of
        its source.
        """
        if instruction.metadata.op_name or not depth:
            return instruction.metadata.op_name
        if instruction.opcode == "fusion":
            inside = self._computations[instruction.called_computation_ids[0]]
            return next(
                (i.metadata.op_name for i in reversed(inside.instructions) if i.metadata.op_name),
                "",
            )
        if (
            instruction.opcode in ("copy", "bitcast", "transpose", "convert", "reshape")
            and instruction.operand_ids
        ):
            return self._name(self._instructions[instruction.operand_ids[0]], depth - 1)
        return ""

    def _place(self, parts: list[str]) -> tuple[str, str]:
        """Splits the parts of a name into the layer and the operation."""
        gradient = "gradient_tape" in parts or "backward" in parts
        own = [part for part in parts if part not in _SCOPES and not _CALL.fullmatch(part)]
        layers = [self._layer(part) for part in own]
        last = max((i for i, layer in enumerate(layers) if layer), default=-1)
        operation = "/".join(own[last + 1 :][-2:])
        # A gradient's name can hold that of the forward pass after its own.
        path = dict.fromkeys(layer for layer in layers[: last + 1] if layer)
        return "/".join(path), "gradient of " * gradient + operation

    def _layer(self, part: str) -> str:
        """Returns the layer of a scope, to whose name TensorFlow adds a number where the name was
        taken; or "".
        """
        before, _, number = part.rpartition("_")
        numbered = number.isdigit() and before in self._layers
        # Of layers "a" and "a_1", whose scopes are "a_1" and "a_1_2", the first one's has the name
        # of the second.
        others = (
            numbered
            and before not in self._scopes
            and any(p.startswith(f"{part}_") for p in self._scopes)
        )
        if part in self._layers and not others:
            return part
        return before if numbered else ""
