"""Reads XLA's optimized HLO for a GPU as the kernels that it launches, with FLOPs and bytes.

A kernel's bytes are those that it must read and write in memory once: each operand, or only the
slices if it slices or gathers; each result, or only the update if it updates in place. What caches
hold from one kernel to the next, and what a matmul reads twice, is not known here.

FLOPs are those of matmuls and convolutions, two for a multiplication and its addition: elementwise
arithmetic hides behind memory. Convolutions count no products with their padding. Attention by
cuDNN is two matmuls forward and five backward (the scores again, and the gradients of values,
weights, queries and keys), causal attention half of that: masked blocks are skipped.
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
# Opcodes that wait for the host.
HOST = ("conditional", "infeed", "outfeed", "recv", "send")
# Opcodes that read no more of their operand than they yield.
SLICES = ("dynamic-slice", "gather", "slice")
# A fusion is called after the first of these opcodes that it holds, and elementwise without any.
NAMED = ("scatter", "sort", "reduce-window", "reduce", "transpose", "gather")
# Opcodes that compute nothing.
MOVES = ("bitcast", "broadcast", "constant", "convert", "copy", "parameter", "reshape", "tuple")

Computations = dict[str, list[hlo.Instruction]]


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


def read(text: str) -> list[Kernel]:
    """Reads the kernels that a program launches, in the order of its schedule.

    Of a conditional's branches the one that moves most bytes counts; a loop of unknown length
    counts once (`facts` counts such loops).

    Args:
        text: an HLO module, optimized for a GPU and scheduled.
    """
    computations, entry = hlo.parse(text)
    return list(_Reader(computations).launches(entry, (), ""))


Lines = dict[str, hlo.Instruction]  # the instructions of a computation, by name


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
        lines = {line.name: line for line in self.computations[computation]}
        for line in lines.values():
            opcode = line.opcode
            if opcode in FREE or opcode.endswith(("-done", "-update")):
                continue
            if 'custom_call_target="AllocateBuffer"' in line.attributes:
                continue
            if opcode == "while":
                inner_loops = (*loops, line.trip_count or 1)
                yield from self.launches(line.called("body"), inner_loops, _scope([line]))
            elif opcode == "call":
                yield from self.launches(line.called("to_apply"), loops, around)
            elif opcode == "async-start":
                yield from self.launches(line.called("calls"), loops, around)
            elif opcode == "conditional":
                branches = [list(self.launches(name, loops, around)) for name in _branches(line)]
                yield from max(branches, key=_total_bytes)
            else:
                kernel = self.kernel(line, lines)
                yield dataclasses.replace(kernel, loops=loops, scope=kernel.scope or f"{around}/")

    def kernel(self, line: hlo.Instruction, lines: Lines) -> Kernel:
        """Reads the kernel of an instruction."""
        operands = [lines[name] for name in line.operands]
        fused = []
        if line.opcode == "fusion":
            fused = self.computations[line.called("calls")]
        if fused:
            work = self.fusion(line, fused)
            moved = _moved(fused, [operand.types for operand in operands])
        else:
            work = _read_work(line, operands)
            moved = _moved_alone(line, operands)
        scope = _scope([line, *fused])
        return Kernel(
            line.name, work.kind, scope, work.types, work.flops, moved, results=line.types
        )

    def fusion(self, line: hlo.Instruction, fused: list[hlo.Instruction]) -> _Work:
        """Reads the work of a fusion: of its products, or else of the opcodes that it holds."""
        instructions = list(self.nested(fused))
        products = []
        for instruction, lines in instructions:
            if instruction.opcode in ("dot", "convolution"):
                operands = [lines[name] for name in instruction.operands]
                products.append(_read_work(instruction, operands))
        if products:
            return products[0]._replace(flops=sum(product.flops for product in products))
        opcodes = {instruction.opcode for instruction, _ in instructions}
        kind = next((name for name in NAMED if name in opcodes), "elementwise")
        if kind == "elementwise":
            of_arrays = {
                instruction.opcode
                for instruction, _ in instructions
                if math.prod(instruction.shape) > 1
            }
            if not line.operands:
                kind = "fill"
            elif of_arrays <= {*MOVES, *SLICES, "dynamic-update-slice"}:
                kind = "convert" if "convert" in of_arrays else "slice"
        return _Work(kind, _types(line), 0.0)

    def nested(self, fused: list[hlo.Instruction]) -> Iterator[tuple[hlo.Instruction, Lines]]:
        """Yields the instructions of a fusion and of fusions in it, each with its computation."""
        lines = {line.name: line for line in fused}
        for line in fused:
            yield line, lines
            if line.opcode == "fusion":
                yield from self.nested(self.computations[line.called("calls")])


def _total_bytes(kernels: list[Kernel]) -> float:
    return sum(kernel.bytes * kernel.times for kernel in kernels)


def facts(text: str) -> dict[str, int]:
    """Counts what no step may hold: loops of unknown length, and waits for the host."""
    computations, _ = hlo.parse(text)
    unknown = 0
    conditionals = 0
    transfers = 0
    for lines in computations.values():
        for line in lines:
            if line.opcode == "while" and line.trip_count is None:
                unknown += 1
            if line.opcode == "conditional":
                conditionals += 1
            elif line.opcode in HOST:
                transfers += 1
            if "S(5)" in line.attributes:  # the memory space of the host
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

    From the results backwards, it counts how many elements of each value are needed.
    """
    lines = {line.name: line for line in fused}
    root = next(line for line in fused if line.is_root)
    names = root.operands if root.opcode == "tuple" else [root.name]
    results = [_source(name, lines) for name in names]
    in_place = {result.name for result in results if _updates_in_place(result, lines)}
    needed = dict.fromkeys(lines, 0.0)  # elements
    for result in results:
        needed[result.name] = math.prod(result.shape)
    for line in reversed(fused):
        if not needed[line.name] or line.opcode in ("tuple", "parameter", "constant"):
            continue
        part = min(1.0, needed[line.name] / math.prod(line.shape))
        for position, name in enumerate(line.operands):
            is_updated = position == 0 and line.name in in_place
            if not is_updated:
                needed[name] += part * _elements_read(line, position, lines)
    moved = 0.0
    for line in fused:
        if needed[line.name] and line.opcode == "parameter":
            elements = sum(math.prod(shape) for _, shape in line.types)
            part = min(1.0, needed[line.name] / elements)
            moved += part * size(operands[int(line.arguments)])
    for result in results:
        moved += _written(result, lines, result.name in in_place)
    return moved


def _elements_read(line: hlo.Instruction, position: int, lines: Lines) -> float:
    """Counts the elements of an operand that an instruction reads."""
    if position == 0 and line.opcode in SLICES:
        return math.prod(line.shape)
    if position == 0 and line.opcode == "scatter":
        updates = lines[line.operands[-1]]  # each is added to an element
        return math.prod(updates.shape)
    return math.prod(lines[line.operands[position]].shape)


def _written(result: hlo.Instruction, lines: Lines, in_place: bool) -> float:
    """Counts the bytes that a kernel writes of a result."""
    if in_place:
        return size(lines[result.operands[1]].types)
    if result.opcode == "scatter":
        return size(lines[result.operands[-1]].types)
    return size(result.types)


def _updates_in_place(result: hlo.Instruction, lines: Lines) -> bool:
    """Says if a result is an update of an operand, whose buffer it then takes."""
    if result.opcode != "dynamic-update-slice":
        return False
    return _source(result.operands[0], lines).opcode == "parameter"


def _source(name: str, lines: Lines) -> hlo.Instruction:
    """Returns the instruction of a value before changes of its shape alone."""
    while lines[name].opcode in ("bitcast", "copy", "reshape"):
        name = lines[name].operands[0]
    return lines[name]


def _moved_alone(line: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    """Counts the bytes that an instruction outside of fusions reads and writes."""
    sizes = [size(operand.types) for operand in operands]
    if line.opcode in SLICES:
        return 2 * size(line.types) + sum(sizes[1:])
    if line.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if line.opcode == "scatter":
        return 3 * sizes[-1] + sizes[1]
    if line.opcode == "copy-start":
        return 2 * sizes[0]
    results = line.types
    if "custom-call" in line.opcode:
        results = _without_workspace(results)
    return sum(sizes) + size(results)


def _without_workspace(results: tuple) -> tuple:
    """Returns the parts of a library call's result that are no workspace."""
    if len(results) > 1 and results[-1][0] in ("s8", "u8"):
        return results[:-1]
    return results


def _read_work(line: hlo.Instruction, operands: list[hlo.Instruction]) -> _Work:
    """Reads the work of an instruction that is a kernel by itself, or of a product within one."""
    target = re.search(r'custom_call_target="([^"]*)"', line.attributes)
    kind = target[1] if target else line.opcode.removesuffix("-start")
    if kind == "dot" or kind.startswith("__cublas$"):
        return _Work("gemm", _product(line, operands), _gemm_flops(line, operands))
    if kind == "convolution" or kind.startswith("__cudnn$conv"):
        flops = _convolution_flops(line, operands, kind)
        return _Work("convolution", _product(line, operands), flops)
    if kind.startswith("__cudnn$fmha"):
        flops = _attention_flops(line, operands, kind)
        return _Work("attention", _product(line, operands), flops)
    return _Work(kind, _types(line), 0.0)


def _gemm_flops(line: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', line.attributes)
    sizes = [operands[0].shape[int(axis)] for axis in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(line.shape) * math.prod(sizes)


def _attention_flops(line: hlo.Instruction, operands: list[hlo.Instruction], kind: str) -> float:
    scores = re.search(
        r'"intermediate_tensor_shape":\s*\{[^{}]*"dimensions":\s*\[([^\]]*)\]', line.attributes
    )
    products = 5 if "Backward" in kind else 2
    elements = math.prod(int(number) for number in re.findall(r"\d+", scores[1]))
    flops = products * 2.0 * elements * operands[0].shape[-1]
    if "CAUSAL" in line.attributes:
        return flops / 2
    return flops


def _convolution_flops(line: hlo.Instruction, operands: list[hlo.Instruction], kind: str) -> float:
    """Counts two for each pair of an output and a weight that meet at an input."""
    image = operands[0].shape
    filters = operands[1].shape
    result = line.shape
    if kind.endswith("BackwardInput"):
        image, result = result, image
    elif kind.endswith("BackwardFilter"):
        filters, result = result, filters
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    image_size = dict(zip(labels[1], image, strict=True))
    filters_size = dict(zip(labels[2], filters, strict=True))
    result_size = dict(zip(labels[3], result, strict=True))
    window = dict(re.findall(r"(size|stride|pad|lhs_dilate|rhs_dilate)=([\w\-]+)", line.attributes))
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


def _product(line: hlo.Instruction, operands: list[hlo.Instruction]) -> str:
    return f"{operands[0].dtype} x {operands[1].dtype} -> {line.dtype}"


def _types(line: hlo.Instruction) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in line.types)


def _branches(line: hlo.Instruction) -> list[str]:
    branches = re.search(r"branch_computations=\{([^}]*)\}", line.attributes)
    if branches:
        return re.findall(r"%([\w.\-]+)", branches[1])
    return [line.called("true_computation"), line.called("false_computation")]


def _scope(lines: list[hlo.Instruction]) -> str:
    """Returns the framework's name of a kernel, or else the last one within it."""
    line, *fused = lines
    for candidate in (line, *reversed(fused)):
        name = re.search(r'op_name="([^"]*)"', candidate.attributes)
        if name:
            return name[1]
    return ""
