"""Reads XLA's optimized HLO for a GPU as the kernels that it launches, with FLOPs and bytes.

A kernel's bytes are those that it must read and write in memory once: each operand, or only the
slices if it slices or gathers; each result, or only the update if it updates in place. What caches
hold from one kernel to the next, and what a matmul reads twice, is not known here.

FLOPs are those of matmuls and convolutions, two for a multiplication and its addition. Elementwise
arithmetic is left out, since it takes less time than its kernel's reads and writes. Convolutions
count no products with their padding. Attention by cuDNN is two matmuls forward and five backward
(the scores again, and the gradients of values, weights, queries and keys), causal attention half of
that: masked blocks are skipped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.support.stablehlo import hlo

# Bytes of a number.
BYTES = {
    "s4": 0.5,
    "u4": 0.5,
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "c128": 16,
}
# Opcodes for which nothing is launched.
FREE = (
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
)
# Opcodes that move data between the host and the device.
TRANSFERS = ("infeed", "outfeed", "recv", "send")
# Opcodes that read no more of their operand than they yield.
SLICES = ("dynamic-slice", "gather", "slice")
# A fusion is called after the first of these opcodes that it holds, and elementwise without any.
NAMED = ("scatter", "sort", "reduce-window", "reduce", "transpose", "gather")
# Opcodes that compute nothing.
MOVES = ("bitcast", "broadcast", "constant", "convert", "copy", "parameter", "reshape", "tuple")

Computations = dict[str, list[hlo.Instruction]]  # by name, each in the order of its schedule
ByName = dict[str, hlo.Instruction]  # the instructions of one computation


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Kernel that a program launches.

    Attributes:
        name: of its instruction.
        kind: "gemm", "convolution", "attention"; of a fusion "scatter", "reduce", "transpose",
            "gather", "convert", "slice" (which copies or writes a slice), "fill", "elementwise"; or
            its opcode, such as "copy", or a custom call's target.
        scope: the framework's name of the operation; without one, the loop around it, and "/".
        types: "bf16 x bf16 -> f32" of a matmul; the results' types of all others.
        flops: of its matmuls, in one launch.
        bytes: read and written in one launch.
        loops: trip counts of the loops around it, the outermost first.
        results: dtype and shape of each result.
    """

    name: str
    kind: str
    scope: str
    types: str
    flops: float
    bytes: float
    loops: tuple[int, ...] = ()
    results: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def times(self) -> int:
        """The launches in one run of the program."""
        return math.prod(self.loops)

    @property
    def is_float8(self) -> bool:
        """True if it multiplies float8 numbers."""
        return re.match(r"f8e\w+ x f8e", self.types) is not None


def read(text: str) -> list[Kernel]:
    """Reads the kernels that a program launches, in the order of its schedule.

    Of a conditional's branches the one that moves most bytes counts; a loop of unknown length
    counts once (`facts` counts such loops).

    Args:
        text: an HLO module, optimized for a GPU and scheduled.
    """
    computations, entry = hlo.parse(text)
    return list(_Reader(computations).launches(entry, (), ""))


class _Work(NamedTuple):
    """Kind, types and FLOPs of a kernel, as in `Kernel`."""

    kind: str
    types: str
    flops: float


@dataclasses.dataclass(frozen=True)
class _Reader:
    computations: Computations

    def launches(self, computation: str, loops: tuple[int, ...], around: str) -> Iterator[Kernel]:
        """Yields the kernels of a computation and of those that it calls.

        Args:
            computation: its name.
            loops: trip counts of the loops around it.
            around: the scope of the innermost loop.
        """
        by_name = {instruction.name: instruction for instruction in self.computations[computation]}
        for instruction in by_name.values():
            opcode = instruction.opcode
            if opcode in FREE or opcode.endswith(("-done", "-update")):
                continue
            if 'custom_call_target="AllocateBuffer"' in instruction.attributes:
                continue
            if opcode == "while":
                inner_loops = (*loops, instruction.trip_count or 1)
                yield from self.launches(
                    instruction.called("body"), inner_loops, _scope(instruction)
                )
            elif opcode == "call":
                yield from self.launches(instruction.called("to_apply"), loops, around)
            elif opcode == "async-start":
                yield from self.launches(instruction.called("calls"), loops, around)
            elif opcode == "conditional":
                branches = [
                    list(self.launches(name, loops, around)) for name in _branches(instruction)
                ]
                yield from max(branches, key=_total_bytes)
            else:
                kernel = self.kernel(instruction, by_name)
                yield dataclasses.replace(kernel, loops=loops, scope=kernel.scope or f"{around}/")

    def kernel(self, instruction: hlo.Instruction, by_name: ByName) -> Kernel:
        """Reads the kernel of an instruction."""
        operands = [by_name[name] for name in instruction.operands]
        fused = []
        if instruction.opcode == "fusion":
            fused = self.computations[instruction.called("calls")]
        if fused:
            work = self.fusion(instruction, fused)
            moved = _moved(fused, [operand.types for operand in operands])
        else:
            work = _read_work(instruction, operands)
            moved = _moved_alone(instruction, operands)
        scope = _scope(instruction, fused)
        return Kernel(
            instruction.name,
            work.kind,
            scope,
            work.types,
            work.flops,
            moved,
            results=instruction.types,
        )

    def fusion(self, fusion: hlo.Instruction, fused: list[hlo.Instruction]) -> _Work:
        """Reads the work of a fusion: of its products, or else of the opcodes that it holds."""
        instructions = list(self.nested(fused))
        products = []
        for instruction, by_name in instructions:
            if instruction.opcode in ("dot", "convolution"):
                operands = [by_name[name] for name in instruction.operands]
                products.append(_read_work(instruction, operands))
        if products:
            return products[0]._replace(flops=sum(product.flops for product in products))
        kind = _kind_of_fusion(fusion, [instruction for instruction, _ in instructions])
        return _Work(kind, _types(fusion), 0.0)

    def nested(self, fused: list[hlo.Instruction]) -> Iterator[tuple[hlo.Instruction, ByName]]:
        """Yields the instructions of a fusion and of fusions in it, each with its computation."""
        by_name = {instruction.name: instruction for instruction in fused}
        for instruction in fused:
            yield instruction, by_name
            if instruction.opcode == "fusion":
                yield from self.nested(self.computations[instruction.called("calls")])


def _kind_of_fusion(fusion: hlo.Instruction, fused: list[hlo.Instruction]) -> str:
    """Names a fusion without products after the opcode that tells most of how it moves memory."""
    opcodes = {instruction.opcode for instruction in fused}
    for name in NAMED:
        if name in opcodes:
            return name
    if not fusion.operands:
        return "fill"
    # Indices are scalars: what is computed of them says nothing of the arrays.
    array_opcodes = {
        instruction.opcode for instruction in fused if math.prod(instruction.shape) > 1
    }
    if not array_opcodes <= {*MOVES, *SLICES, "dynamic-update-slice"}:
        return "elementwise"
    if "convert" in array_opcodes:
        return "convert"
    return "slice"


def _total_bytes(kernels: list[Kernel]) -> float:
    return sum(kernel.bytes * kernel.times for kernel in kernels)


def facts(text: str) -> dict[str, int]:
    """Counts what no step may hold: loops of unknown length, and waits for the host."""
    computations, _ = hlo.parse(text)
    unknown = 0
    conditionals = 0
    transfers = 0
    for instructions in computations.values():
        for instruction in instructions:
            if instruction.opcode == "while" and instruction.trip_count is None:
                unknown += 1
            if instruction.opcode == "conditional":
                conditionals += 1
            if instruction.opcode in TRANSFERS:
                transfers += 1
            if "S(5)" in instruction.attributes:  # the memory space of the host
                transfers += 1
    return {
        "unknown trip counts": unknown,
        "conditionals": conditionals,
        "host transfers": transfers,
    }


def size(types: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Counts the bytes of arrays."""
    return sum(BYTES.get(dtype, 0) * math.prod(shape) for dtype, shape in types)


def _moved(fused: list[hlo.Instruction], operands: list[tuple]) -> float:
    """Counts the bytes that a fusion reads and writes.

    A fusion computes no element that its results do not need. So from the results backwards, this
    counts how many elements of each value are needed; at the parameters, these are read.

    Args:
        fused: the instructions of the fusion, each after its operands.
        operands: the types of each operand of the fusion.
    """
    by_name = {instruction.name: instruction for instruction in fused}
    root = next(instruction for instruction in fused if instruction.is_root)
    names = root.operands if root.opcode == "tuple" else [root.name]
    results = [_source(name, by_name) for name in names]
    in_place = {result.name for result in results if _updates_in_place(result, by_name)}

    elements_needed = dict.fromkeys(by_name, 0.0)
    for result in results:
        elements_needed[result.name] = math.prod(result.shape)
    for instruction in reversed(fused):
        needed = elements_needed[instruction.name]
        if not needed or instruction.opcode in ("tuple", "parameter", "constant"):
            continue
        # Two users may need the same elements, which are then counted twice.
        share = min(1.0, needed / math.prod(instruction.shape))
        for position, name in enumerate(instruction.operands):
            # What an update in place does not replace stays where it is, unread.
            is_updated = position == 0 and instruction.name in in_place
            if not is_updated:
                elements_needed[name] += share * _elements_read(instruction, position, by_name)

    moved = 0.0
    for instruction in fused:
        needed = elements_needed[instruction.name]
        if needed and instruction.opcode == "parameter":
            elements = sum(math.prod(shape) for _, shape in instruction.types)
            share = min(1.0, needed / elements)
            number = int(instruction.arguments)  # which operand of the fusion the parameter is
            moved += share * size(operands[number])
    for result in results:
        moved += _written(result, by_name, result.name in in_place)
    return moved


def _elements_read(instruction: hlo.Instruction, position: int, by_name: ByName) -> float:
    """Counts the elements of an operand that an instruction reads."""
    if position == 0 and instruction.opcode in SLICES:
        return math.prod(instruction.shape)
    if position == 0 and instruction.opcode == "scatter":
        updates = by_name[instruction.operands[-1]]  # each is added to an element
        return math.prod(updates.shape)
    return math.prod(by_name[instruction.operands[position]].shape)


def _written(result: hlo.Instruction, by_name: ByName, in_place: bool) -> float:
    """Counts the bytes that a kernel writes of a result."""
    if in_place:
        return size(by_name[result.operands[1]].types)
    if result.opcode == "scatter":
        return size(by_name[result.operands[-1]].types)
    return size(result.types)


def _updates_in_place(result: hlo.Instruction, by_name: ByName) -> bool:
    """Says if a result is an update of an operand, whose buffer it then takes."""
    if result.opcode != "dynamic-update-slice":
        return False
    return _source(result.operands[0], by_name).opcode == "parameter"


def _source(name: str, by_name: ByName) -> hlo.Instruction:
    """Returns the instruction of a value before changes of its shape alone."""
    while by_name[name].opcode in ("bitcast", "copy", "reshape"):
        name = by_name[name].operands[0]
    return by_name[name]


def _moved_alone(instruction: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    """Counts the bytes that an instruction outside of fusions reads and writes."""
    sizes = [size(operand.types) for operand in operands]
    if instruction.opcode in SLICES:
        # Reads as much of the operand as it writes, and the indices.
        return 2 * size(instruction.types) + sum(sizes[1:])
    if instruction.opcode == "dynamic-update-slice":
        update = sizes[1]
        return 2 * update  # reads it, and writes it into the buffer
    if instruction.opcode == "scatter":
        indices = sizes[1]
        updates = sizes[-1]
        # Reads the updates, and reads and writes the elements that they are added to.
        return indices + 3 * updates
    if instruction.opcode == "copy-start":
        return 2 * sizes[0]  # its result also holds the operand, which is not written
    results = instruction.types
    if "custom-call" in instruction.opcode:
        results = _without_workspace(results)
    return sum(sizes) + size(results)


def _without_workspace(results: tuple) -> tuple:
    """Returns the parts of a library call's result that are no workspace."""
    if len(results) > 1 and results[-1][0] in ("s8", "u8"):
        return results[:-1]
    return results


def _read_work(instruction: hlo.Instruction, operands: list[hlo.Instruction]) -> _Work:
    """Reads the work of an instruction that is a kernel by itself, or of a product within one."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    kind = target[1] if target else instruction.opcode.removesuffix("-start")
    if kind == "dot" or kind.startswith("__cublas$"):
        return _Work("gemm", _product(instruction, operands), _gemm_flops(instruction, operands))
    if kind == "convolution" or kind.startswith("__cudnn$conv"):
        flops = _convolution_flops(instruction, operands, kind)
        return _Work("convolution", _product(instruction, operands), flops)
    if kind.startswith("__cudnn$fmha"):
        flops = _attention_flops(instruction, operands, kind)
        return _Work("attention", _product(instruction, operands), flops)
    return _Work(kind, _types(instruction), 0.0)


def _gemm_flops(instruction: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    contracted = re.search(
        r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', instruction.attributes
    )
    sizes = [operands[0].shape[int(axis)] for axis in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(instruction.shape) * math.prod(sizes)


def _attention_flops(
    instruction: hlo.Instruction, operands: list[hlo.Instruction], kind: str
) -> float:
    scores = re.search(
        r'"intermediate_tensor_shape":\s*\{[^{}]*"dimensions":\s*\[([^\]]*)\]',
        instruction.attributes,
    )
    products = 5 if "Backward" in kind else 2
    elements = math.prod(int(number) for number in re.findall(r"\d+", scores[1]))
    flops = products * 2.0 * elements * operands[0].shape[-1]
    if "CAUSAL" in instruction.attributes:
        return flops / 2
    return flops


def _convolution_flops(
    instruction: hlo.Instruction, operands: list[hlo.Instruction], kind: str
) -> float:
    """Counts two for each pair of an output and a weight that meet at an input."""
    image = operands[0].shape
    filters = operands[1].shape
    result = instruction.shape
    if kind.endswith("BackwardInput"):
        image, result = result, image
    elif kind.endswith("BackwardFilter"):
        filters, result = result, filters
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    image_size = dict(zip(labels[1], image, strict=True))
    filters_size = dict(zip(labels[2], filters, strict=True))
    result_size = dict(zip(labels[3], result, strict=True))
    window = dict(
        re.findall(r"(size|stride|pad|lhs_dilate|rhs_dilate)=([\w\-]+)", instruction.attributes)
    )
    flops = 2.0 * result_size["b"] * filters_size["i"] * filters_size["o"]
    axes = [label for label in labels[1] if label.isdigit()]
    for number, axis in enumerate(axes):
        of_axis = {name: text.split("x")[number] for name, text in window.items()}
        flops *= _pairs_at_inputs(image_size[axis], filters_size[axis], result_size[axis], of_axis)
    return flops


def _pairs_at_inputs(image: int, filters: int, result: int, window: dict[str, str]) -> int:
    """Counts the pairs of an output and a weight that meet at an input along one axis.

    Args:
        image, filters, result: their sizes along the axis.
        window: XLA's description of the window along the axis.
    """
    padding = int(window.get("pad", "0_0").split("_")[0])
    stride = int(window.get("stride", "1"))
    image_dilation = int(window.get("lhs_dilate", "1"))
    filters_dilation = int(window.get("rhs_dilate", "1"))
    length = (image - 1) * image_dilation + 1
    pairs = 0
    for output in range(result):
        for weight in range(filters):
            place = output * stride + weight * filters_dilation - padding
            if 0 <= place < length and place % image_dilation == 0:
                pairs += 1
    return pairs


def _product(instruction: hlo.Instruction, operands: list[hlo.Instruction]) -> str:
    return f"{operands[0].dtype} x {operands[1].dtype} -> {instruction.dtype}"


def _types(instruction: hlo.Instruction) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in instruction.types)


def _branches(instruction: hlo.Instruction) -> list[str]:
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if branches:
        return re.findall(r"%([\w.\-]+)", branches[1])
    return [instruction.called("true_computation"), instruction.called("false_computation")]


def _scope(instruction: hlo.Instruction, fused: Iterable[hlo.Instruction] = ()) -> str:
    """Returns the framework's name of an instruction, or else of the last named one fused in it."""
    for candidate in (instruction, *reversed([*fused])):
        name = re.search(r'op_name="([^"]*)"', candidate.attributes)
        if name:
            return name[1]
    return ""
