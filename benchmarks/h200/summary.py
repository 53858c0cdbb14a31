"""What a compiled program comes to, as plain numbers, and as text."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Hashable
from typing import Any

from benchmarks.h200 import kernels, roofline
from benchmarks.h200.programs import Compiled

_ADDED = "weight gradients added"


@dataclasses.dataclass
class Group:
    """Kernels that belong together: of one kind and types, from one place."""

    ms: float = 0.0
    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, timed: roofline.Timed) -> None:
        kernel = timed.kernel
        self.ms += timed.ms
        self.launches += kernel.times
        self.bytes += kernel.bytes * kernel.times
        self.flops += kernel.flops * kernel.times


def grouped(prediction: roofline.Prediction, key: Any) -> dict[Hashable, Group]:
    """The kernels in groups, the costliest first.

    Args:
        prediction: of a program.
        key: function of a kernel, what it has in common with those of its group.
    """
    groups: dict[Hashable, Group] = collections.defaultdict(Group)
    for timed in prediction.kernels:
        groups[key(timed.kernel)].add(timed)
    return dict(sorted(groups.items(), key=lambda item: -item[1].ms))


def place(kernel: kernels.Kernel) -> str:
    """Its scope without the operation itself and without what tells layers of one kind apart."""
    names = re.sub(r"(?:StatefulPartitionedCall|call\.\d+)/", "", kernel.scope).split("/")[:-1]
    return "/".join(name if "while" in name else re.sub(r"(_\d+)+$", "", name) for name in names)


def added(program: Compiled) -> dict[str, int]:
    """Where the weight gradients of `program.matrices` are added, and how often a micro-batch."""
    found = collections.Counter()
    for each in program.values.weight_gradients(program.matrices):
        found[str(each.added)] += each.times // program.micro_batches
    return dict(sorted(found.items()))


def accumulation(program: Compiled) -> float | None:
    """What accumulating the gradients of `program.matrices` moves a micro-batch, in sizes of their
    accumulators.

    A gradient that its matmul writes, and that a kernel reads and adds to the accumulator, moves 4;
    one that is added in its matmul's epilogue 2. Counted is what writes float32 of a gradient's or
    a stack's shape in the loop over the micro-batches: no activation may have such a shape.
    """
    depths = collections.Counter(program.matrices)
    shapes = {
        _size_ordered((each, *shape)) for shape, depth in depths.items() for each in (1, depth)
    }
    whole = 4.0 * sum(math.prod(shape) for shape in program.matrices)
    moved = 4.0 * sum(
        # the accumulator is read there too
        math.prod(each.shape) * each.times / program.micro_batches
        for each in program.values.weight_gradients(program.matrices)
        if each.added == "epilogue"
    )
    for kernel in program.kernels:
        written = [
            result
            for result in kernel.results
            if result[0] == "f32" and _size_ordered(result[1]) in shapes
        ]
        if written and kernel.loops[:1] == (program.micro_batches,):
            times = kernel.times / program.micro_batches
            moved += times * (kernels.size(written) if kernel.flops else kernel.bytes)
    return moved / whole if whole else None


def _size_ordered(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def of(program: Compiled, rates: roofline.Rates | None = None) -> dict[str, Any]:
    """The totals of a program, ready for JSON."""
    found = roofline.predict(program.kernels, rates)
    by_kind = grouped(found, lambda kernel: kernel.kind)
    gemms: dict[str, int] = collections.Counter()
    for timed in found.kernels:
        if timed.kernel.flops:
            gemms[timed.kernel.types] += timed.kernel.times
    return {
        "launches a micro-batch": found.launches(program.micro_batches),
        "GB moved": found.bytes / 1e9,
        "temp GB": program.memory.temp_bytes / 1e9,
        "peak GB": program.memory.peak_bytes / 1e9,
        "predicted ms": found.ms,
        "serial ms": found.serial_ms,
        "TFLOP": found.flops / 1e12,
        "MFU": None if program.flops is None else found.mfu(program.flops),
        "kernels": {kind: group.launches for kind, group in by_kind.items()},
        "ms": {kind: group.ms for kind, group in by_kind.items()},
        "matmuls": dict(gemms.most_common()),
        _ADDED: added(program),
        "accumulation / accumulators": accumulation(program),
        **kernels.facts(program.text),
    }


def text(
    program: Compiled, rows: int, rates: roofline.Rates | None = None, by: str = "scope"
) -> str:
    """Totals, kernels by kind, and the costliest.

    Args:
        program: what to show.
        rows: of the table of kernels.
        rates: of the device.
        by: "scope", kernels of one place and kind in one row; "kernel", each in its own.
    """
    found, totals = roofline.predict(program.kernels, rates), of(program, rates)
    lines = [
        f"{name:30}{_number(value)}"
        for name, value in totals.items()
        if not isinstance(value, dict)
    ]
    if totals["MFU"] is not None:
        lines += [
            f"MFU is of {found.rates.half / 1e12:,.0f} TFLOP/s, which matmuls sustain, not of "
            "the peak."
        ]
    lines += [
        "",
        "weight gradients a micro-batch: "
        + ", ".join(f"{n} {it}" for it, n in totals[_ADDED].items()),
    ]
    lines += [
        "matmuls a step: " + ", ".join(f"{n:,} {types}" for types, n in totals["matmuls"].items())
    ]
    lines += ["", _HEAD + "kind"]
    lines += [
        _row(group, found) + str(kind)
        for kind, group in grouped(found, lambda kernel: kernel.kind).items()
    ]
    lines += ["", _HEAD + "kind: types, where"]
    groups = grouped(found, _by_scope if by == "scope" else _by_kernel)
    lines += [_row(group, found) + str(name) for name, group in list(groups.items())[:rows]]
    return "\n".join(lines)


_HEAD = f"{'ms':>9}{'%':>6}{'launches':>10}{'GB':>9}{'TFLOP':>8}  "


def _row(group: Group, whole: roofline.Prediction) -> str:
    part = 100 * group.ms / whole.ms
    time = f"{group.ms:9.2f}{part:6.1f}{group.launches:10,}"
    return f"{time}{group.bytes / 1e9:9.2f}{group.flops / 1e12:8.2f}  "


def _by_scope(kernel: kernels.Kernel) -> str:
    return f"{kernel.kind}: {kernel.types if kernel.flops else ''} {place(kernel)}"


def _by_kernel(kernel: kernels.Kernel) -> str:
    return f"{kernel.kind}: {kernel.types} {kernel.name} {kernel.scope}"


def _number(value: float | None) -> str:
    return (
        "-"
        if value is None
        else f"{value:,.0f}"
        if value >= 100 or value == round(value)
        else f"{value:.3g}"
    )
