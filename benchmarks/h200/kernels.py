"""XLA's optimized HLO for a GPU as the kernels that it launches: what each computes, and the bytes
that it moves.

What a kernel moves is what it must read and write in memory once: each operand that it reads, of
one that it slices or gathers from the slices alone; each result that it writes, of one that it
updates in place the update alone. What caches hold from one kernel to the next, and what a matmul
reads twice, is not known here.

FLOPs are those of matmuls and convolutions, two for a multiplication and its addition: elementwise
arithmetic hides behind memory. Convolutions count no products with their padding. Attention by
cuDNN is two matmuls forward and five backward (the scores again, and the gradients of values,
weights, queries and keys), causal attention half of that: what is masked is skipped in blocks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from benchmarks.support.stablehlo import hlo

BYTES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
BYTES |= {
    "s8": 1,
    "u8": 1,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "c128": 16,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
}
FREE = (
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
)
FREE += ("replica-id", "tuple")  # nothing is launched for these
HOST = ("conditional", "infeed", "outfeed", "recv", "send")  # these wait for it
SLICES = ("dynamic-slice", "gather", "slice")  # read no more of their operand than they yield
# A fusion is called after the first of these that it holds; elementwise otherwise.
NAMED = ("scatter", "sort", "reduce-window", "reduce", "transpose", "gather")
MOVES = ("bitcast", "broadcast", "constant", "convert", "copy", "parameter", "reshape", "tuple")
BOTH = ("true", "false")

Computations = dict[str, list[hlo.Instruction]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: of its instruction.
        kind: "gemm", "convolution", "attention"; of a fusion "scatter", "reduce", "transpose",
            "gather", "convert", "slice" (which copies one, or writes one), "fill", "elementwise";
            or its opcode, such as "copy", or a custom call's target.
        scope: where it comes from, as the framework names it; where XLA does not say, the loop
            around it, and "/".
        types: of a matmul "bf16 x bf16 -> f32"; the results' types of all others.
        flops: of its matmuls, each time.
        bytes: read and written, each time.
        loops: trip counts of the loops around it, the outermost first.
        results: dtype and shape of what it writes.
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
        """How often it is launched each time the program runs."""
        return math.prod(self.loops)


def read(text: str) -> list[Kernel]:
    """The kernels that a program launches, in the order of its schedule.

    Of a conditional's branches the one that moves most is taken; a loop of unknown length counts
    once (`facts` tells).

    Args:
        text: an HLO module, optimized for a GPU and scheduled.
    """
    computations, entry = hlo.parse(text)
    return list(_Reader(computations).launches(entry, (), ""))


@dataclasses.dataclass(frozen=True)
class _Reader:
    computations: Computations

    def launches(self, computation: str, loops: tuple[int, ...], around: str) -> Iterator[Kernel]:
        """Those of a computation, and of what it calls, inside loops and the scope of the
        innermost.
        """
        lines = {line.name: line for line in self.computations[computation]}
        for line in lines.values():
            opcode = line.opcode
            nothing = opcode in FREE or 'custom_call_target="AllocateBuffer"' in line.attributes
            if nothing or opcode.endswith(("-done", "-update")):
                continue
            if opcode == "while":
                yield from self.launches(
                    line.called("body"), (*loops, line.trip_count or 1), _scope([line])
                )
            elif opcode == "call":
                yield from self.launches(line.called("to_apply"), loops, around)
            elif opcode == "async-start":
                yield from self.launches(line.called("calls"), loops, around)
            elif opcode == "conditional":
                branches = [list(self.launches(name, loops, around)) for name in _branches(line)]
                yield from max(
                    branches,
                    key=lambda kernels: sum(kernel.bytes * kernel.times for kernel in kernels),
                )
            else:
                kernel = self.kernel(line, lines)
                yield dataclasses.replace(kernel, loops=loops, scope=kernel.scope or f"{around}/")

    def kernel(self, line: hlo.Instruction, lines: dict[str, hlo.Instruction]) -> Kernel:
        operands = [lines[name] for name in line.operands]
        fused = self.computations[line.called("calls")] if line.opcode == "fusion" else None
        if fused:
            kind, types, flops = self.fusion(line, fused)
            moved = _moved(fused, [operand.types for operand in operands])
        else:
            kind, types, flops = _alone(line, operands)
            moved = _moved_alone(line, operands)
        return Kernel(
            line.name, kind, _scope([line, *(fused or ())]), types, flops, moved, results=line.types
        )

    def fusion(self, line: hlo.Instruction, fused: list[hlo.Instruction]) -> tuple[str, str, float]:
        inner = list(self.nested(fused))
        products = [(each, lines) for each, lines in inner if each.opcode in ("dot", "convolution")]
        if products:
            counted = [
                _alone(each, [lines[name] for name in each.operands]) for each, lines in products
            ]
            return counted[0][0], counted[0][1], sum(flops for _, _, flops in counted)
        opcodes = {each.opcode for each, _ in inner}
        kind = next((name for name in NAMED if name in opcodes), "elementwise")
        if kind == "elementwise":
            arrays = {each.opcode for each, _ in inner if math.prod(each.shape) > 1}
            if not line.operands:
                kind = "fill"
            elif arrays <= {*MOVES, *SLICES, "dynamic-update-slice"}:
                kind = "convert" if "convert" in arrays else "slice"
        return kind, _types(line), 0.0

    def nested(
        self, lines: list[hlo.Instruction]
    ) -> Iterator[tuple[hlo.Instruction, dict[str, hlo.Instruction]]]:
        by_name = {line.name: line for line in lines}
        for line in lines:
            yield line, by_name
            if line.opcode == "fusion":
                yield from self.nested(self.computations[line.called("calls")])


def facts(text: str) -> dict[str, int]:
    """What no step may hold: loops of unknown length, and instructions that wait for the host."""
    computations, _ = hlo.parse(text)
    lines = [line for each in computations.values() for line in each]
    unknown = sum(line.opcode == "while" and line.trip_count is None for line in lines)
    counts = {opcode: sum(line.opcode == opcode for line in lines) for opcode in HOST}
    transfers = sum(count for opcode, count in counts.items() if opcode != "conditional")
    return {
        "unknown trip counts": unknown,
        "conditionals": counts["conditional"],
        "host transfers": transfers + sum("S(5)" in line.attributes for line in lines),
    }


def size(types: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Bytes of arrays."""
    return sum(BYTES.get(dtype, 0) * math.prod(shape) for dtype, shape in types)


def _moved(fused: list[hlo.Instruction], operands: list[tuple]) -> float:
    """Bytes that a fusion reads and writes: from its results backwards, how much is needed of each
    value within.
    """
    lines = {line.name: line for line in fused}
    root = next(line for line in fused if line.is_root)
    results = [
        _behind(name, lines) for name in (root.operands if root.opcode == "tuple" else [root.name])
    ]
    in_place = {result.name for result in results if _updates_in_place(result, lines)}
    needed = dict.fromkeys(lines, 0.0)  # elements
    for result in results:
        needed[result.name] = math.prod(result.shape)
    for line in reversed(fused):
        if needed[line.name] and line.opcode not in ("tuple", "parameter", "constant"):
            part = min(1.0, needed[line.name] / math.prod(line.shape))
            for position, name in enumerate(line.operands):
                taken = _taken(line, position, lines)
                needed[name] += 0 if position == 0 and line.name in in_place else part * taken
    read = 0.0
    for line in fused:
        if needed[line.name] and line.opcode == "parameter":
            elements = sum(math.prod(shape) for _, shape in line.types)
            read += size(operands[int(line.arguments)]) * min(1.0, needed[line.name] / elements)
    return read + sum(_written(result, lines, result.name in in_place) for result in results)


def _taken(line: hlo.Instruction, position: int, lines: dict[str, hlo.Instruction]) -> float:
    """Elements of an operand that all of a value takes."""
    if position == 0 and line.opcode in SLICES:
        return math.prod(line.shape)
    if position == 0 and line.opcode == "scatter":
        return math.prod(lines[line.operands[-1]].shape)  # each is added to what stands there
    return math.prod(lines[line.operands[position]].shape)


def _written(result: hlo.Instruction, lines: dict[str, hlo.Instruction], in_place: bool) -> float:
    if in_place:
        return size(lines[result.operands[1]].types)
    return size(lines[result.operands[-1]].types if result.opcode == "scatter" else result.types)


def _updates_in_place(result: hlo.Instruction, lines: dict[str, hlo.Instruction]) -> bool:
    """Whether it updates what is as it was before the kernel: then that buffer is the result's."""
    return (
        result.opcode == "dynamic-update-slice"
        and _behind(result.operands[0], lines).opcode == "parameter"
    )


def _behind(name: str, lines: dict[str, hlo.Instruction]) -> hlo.Instruction:
    """What a value is, in whatever shape."""
    while lines[name].opcode in ("bitcast", "copy", "reshape"):
        name = lines[name].operands[0]
    return lines[name]


def _moved_alone(line: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    if line.opcode in SLICES:
        return 2 * size(line.types) + sum(size(each.types) for each in operands[1:])
    if line.opcode == "dynamic-update-slice":
        return 2 * size(operands[1].types)
    if line.opcode == "scatter":
        return 3 * size(operands[-1].types) + size(operands[1].types)
    if line.opcode == "copy-start":
        return 2 * size(operands[0].types)
    written = line.types if "custom-call" not in line.opcode else line.types[: _results(line)]
    return sum(size(each.types) for each in operands) + size(written)


def _results(line: hlo.Instruction) -> int:
    """How many parts of a library call's result are no workspace."""
    return len(line.types) - (len(line.types) > 1 and line.types[-1][0] in ("s8", "u8"))


def _alone(line: hlo.Instruction, operands: list[hlo.Instruction]) -> tuple[str, str, float]:
    """Kind, types and FLOPs of an instruction that is a kernel by itself, or a product within
    one.
    """
    target = re.search(r'custom_call_target="([^"]*)"', line.attributes)
    kind = target[1] if target else line.opcode.removesuffix("-start")
    if kind == "dot" or kind.startswith("__cublas$"):
        return "gemm", _product(line, operands), _gemm_flops(line, operands)
    if kind == "convolution" or kind.startswith("__cudnn$conv"):
        return "convolution", _product(line, operands), _convolution_flops(line, operands, kind)
    if kind.startswith("__cudnn$fmha"):
        return "attention", _product(line, operands), _attention_flops(line, operands, kind)
    return kind, _types(line), 0.0


def _gemm_flops(line: hlo.Instruction, operands: list[hlo.Instruction]) -> float:
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', line.attributes)
    sizes = [operands[0].shape[int(axis)] for axis in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(line.shape) * math.prod(sizes)


def _attention_flops(line: hlo.Instruction, operands: list[hlo.Instruction], kind: str) -> float:
    scores = re.search(
        r'"intermediate_tensor_shape":\s*\{[^{}]*"dimensions":\s*\[([^\]]*)\]', line.attributes
    )
    causal = "CAUSAL" in line.attributes
    products = 5 if "Backward" in kind else 2
    elements = math.prod(int(number) for number in re.findall(r"\d+", scores[1]))
    return products * 2.0 * elements * operands[0].shape[-1] / (2 if causal else 1)


def _convolution_flops(line: hlo.Instruction, operands: list[hlo.Instruction], kind: str) -> float:
    """Two for each pair of an output and a weight that meet at an input, not at the padding."""
    image, filters, result = operands[0].shape, operands[1].shape, line.shape
    if kind.endswith("BackwardInput"):
        image, result = result, image
    elif kind.endswith("BackwardFilter"):
        filters, result = result, filters
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    window = dict(re.findall(r"(size|stride|pad|lhs_dilate|rhs_dilate)=([\w\-]+)", line.attributes))
    axes = [label for label in labels[1] if label.isdigit()]
    steps = [
        _meeting(i, axis, window, labels, image, filters, result) for i, axis in enumerate(axes)
    ]
    batch, depth = (
        result[labels[3].index("b")],
        math.prod(filters[labels[2].index(each)] for each in "io"),
    )
    return 2.0 * batch * depth * math.prod(steps)


def _meeting(i, axis, window, labels, image, filters, result) -> int:
    """Along one axis, the pairs of an output and a weight that meet at an input."""

    def entry(name, default):
        return window[name].split("x")[i] if name in window else default

    before = int(entry("pad", "0_0").split("_")[0])
    stride, dilated, spread = (
        int(entry(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    length = (image[labels[1].index(axis)] - 1) * dilated + 1
    places = [
        output * stride + weight * spread - before
        for output in range(result[labels[3].index(axis)])
        for weight in range(filters[labels[2].index(axis)])
    ]
    return sum(0 <= place < length and place % dilated == 0 for place in places)


def _product(line: hlo.Instruction, operands: list[hlo.Instruction]) -> str:
    return f"{operands[0].dtype} x {operands[1].dtype} -> {line.dtype}"


def _types(line: hlo.Instruction) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in line.types)


def _branches(line: hlo.Instruction) -> list[str]:
    named = re.search(r"branch_computations=\{([^}]*)\}", line.attributes)
    return (
        re.findall(r"%([\w.\-]+)", named[1])
        if named
        else [line.called(f"{it}_computation") for it in BOTH]
    )


def _scope(lines: list[hlo.Instruction]) -> str:
    """The first name that the framework gave: the kernel's own, or the last within it."""
    names = (
        re.search(r'op_name="([^"]*)"', line.attributes)
        for line in (lines[0], *reversed(lines[1:]))
    )
    return next((name[1] for name in names if name), "")
