"""Summarizes a compiled program, as plain numbers and as text."""

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
    """Sums of kernels that belong together, such as those of one kind."""

    ms: float = 0.0
    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, timed: roofline.Timed) -> None:
        """Adds a kernel, with all its launches."""
        kernel = timed.kernel
        self.ms += timed.ms
        self.launches += kernel.times
        self.bytes += kernel.bytes * kernel.times
        self.flops += kernel.flops * kernel.times


def grouped(prediction: roofline.Prediction, key: Any) -> dict[Hashable, Group]:
    """Groups the kernels, the costliest group first.

    Args:
        prediction: of a program.
        key: a function of a kernel that returns the key of its group.
    """
    groups: dict[Hashable, Group] = collections.defaultdict(Group)
    for timed in prediction.kernels:
        groups[key(timed.kernel)].add(timed)
    return dict(sorted(groups.items(), key=lambda item: -item[1].ms))


def place(kernel: kernels.Kernel) -> str:
    """Returns a kernel's scope without its operation and without the numbers of layers."""
    scope = re.sub(r"(?:StatefulPartitionedCall|call\.\d+)/", "", kernel.scope)
    *names, _operation = scope.split("/")
    return "/".join(name if "while" in name else re.sub(r"(_\d+)+$", "", name) for name in names)


def added(program: Compiled) -> dict[str, int]:
    """Counts the weight gradients of `program.matrices` a micro-batch by the way they are added."""
    counts = collections.Counter()
    for gradient in program.values.weight_gradients(program.matrices):
        counts[str(gradient.added)] += gradient.times // program.micro_batches
    return dict(sorted(counts.items()))


def accumulation(program: Compiled) -> float | None:
    """Counts the bytes that accumulating moves a micro-batch, over the bytes of the accumulators.

    A gradient that its matmul writes, and that a kernel reads and adds to the accumulator, moves 4;
    one that is added in its matmul's epilogue 2. Counted are kernels that write float32 of a
    gradient's or a stack's shape in the loop over the micro-batches: no activation may have such a
    shape.
    """
    accumulators = 4.0 * sum(math.prod(shape) for shape in program.matrices)
    if not accumulators:
        return None
    shapes = set()
    for shape, depth in collections.Counter(program.matrices).items():
        shapes.add(_size_ordered(shape))
        shapes.add(_size_ordered((depth, *shape)))
    moved = 0.0
    for gradient in program.values.weight_gradients(program.matrices):
        if gradient.added == "epilogue":  # which reads the accumulator too
            times = gradient.times / program.micro_batches
            moved += 4.0 * math.prod(gradient.shape) * times
    for kernel in program.kernels:
        written = [
            (dtype, shape)
            for dtype, shape in kernel.results
            if dtype == "f32" and _size_ordered(shape) in shapes
        ]
        if written and kernel.loops[:1] == (program.micro_batches,):
            times = kernel.times / program.micro_batches
            moved += times * (kernels.size(written) if kernel.flops else kernel.bytes)
    return moved / accumulators


def _size_ordered(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def of(program: Compiled, rates: roofline.Rates | None = None) -> dict[str, Any]:
    """Computes the totals of a program, ready for JSON."""
    prediction = roofline.predict(program.kernels, rates)
    by_kind = grouped(prediction, lambda kernel: kernel.kind)
    gemms: dict[str, int] = collections.Counter()
    for timed in prediction.kernels:
        if timed.kernel.flops:
            gemms[timed.kernel.types] += timed.kernel.times
    return {
        "launches a micro-batch": prediction.launches(program.micro_batches),
        "GB moved": prediction.bytes / 1e9,
        "temp GB": program.memory.temp_bytes / 1e9,
        "peak GB": program.memory.peak_bytes / 1e9,
        "predicted ms": prediction.ms,
        "serial ms": prediction.serial_ms,
        "TFLOP": prediction.flops / 1e12,
        "MFU": None if program.flops is None else prediction.mfu(program.flops),
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
    """Writes the totals, the kernels by kind, and the costliest kernels.

    Args:
        program: the program.
        rows: of the table of kernels.
        rates: of the device.
        by: "scope" for kernels of one place and kind in one row; "kernel" for each in its own.
    """
    prediction = roofline.predict(program.kernels, rates)
    totals = of(program, rates)
    lines = [
        f"{name:30}{_number(value)}"
        for name, value in totals.items()
        if not isinstance(value, dict)
    ]
    if totals["MFU"] is not None:
        rate = f"{prediction.rates.half / 1e12:,.0f} TFLOP/s"
        lines.append(f"MFU is of {rate}, which matmuls sustain, not of the peak.")
    gradients = [f"{count} {place}" for place, count in totals[_ADDED].items()]
    matmuls = [f"{count:,} {types}" for types, count in totals["matmuls"].items()]
    lines += ["", f"weight gradients a micro-batch: {', '.join(gradients)}"]
    lines.append(f"matmuls a step: {', '.join(matmuls)}")
    lines += ["", _HEAD + "kind"]
    for kind, group in grouped(prediction, lambda kernel: kernel.kind).items():
        lines.append(f"{_row(group, prediction)}{kind}")
    lines += ["", _HEAD + "kind: types, where"]
    groups = grouped(prediction, _by_scope if by == "scope" else _by_kernel)
    for name, group in list(groups.items())[:rows]:
        lines.append(f"{_row(group, prediction)}{name}")
    return "\n".join(lines)


_HEAD = f"{'ms':>9}{'%':>6}{'launches':>10}{'GB':>9}{'TFLOP':>8}  "


def _row(group: Group, whole: roofline.Prediction) -> str:
    part = 100 * group.ms / whole.ms
    time = f"{group.ms:9.2f}{part:6.1f}{group.launches:10,}"
    return f"{time}{group.bytes / 1e9:9.2f}{group.flops / 1e12:8.2f}  "


def _by_scope(kernel: kernels.Kernel) -> str:
    types = kernel.types if kernel.flops else ""
    return f"{kernel.kind}: {types} {place(kernel)}"


def _by_kernel(kernel: kernels.Kernel) -> str:
    return f"{kernel.kind}: {kernel.types} {kernel.name} {kernel.scope}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
