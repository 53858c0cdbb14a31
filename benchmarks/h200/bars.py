"""Rows of the report: bars (thresholds) for compiled programs, and time that a commit lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.h200.cases import (
    CHECKPOINT,
    DEEP,
    JAX,
    LONG,
    OURS,
    PORTABLE_RECOMPUTED,
    RECOMPUTED,
    SHIPPED,
    Case,
    sized,
)
from benchmarks.h200.parts import LOSS
from benchmarks.h200.programs import Gpt

Figures = dict[str, Any]
CUDNN = f"{CHECKPOINT}, cuDNN"
XLA = f"{CHECKPOINT}, XLA attention"
UNROLLED = "JAX, unrolled, cuDNN"
# Names of figures.
TRAFFIC = "accumulation / accumulators"
ADDED = "weight gradients added"
MS = "predicted ms"


class Measure(NamedTuple):
    """Row of the table.

    Attributes:
        name: of the measure.
        ours, theirs: as printed.
        value: the value that the bar is for: ours, or the ratio of both.
        bar: the most that the value may be, or the least.
        at_least: makes the bar the least.
        is_ratio: says that the value is the ratio of both.
    """

    name: str
    ours: str
    theirs: str
    value: float
    bar: float
    at_least: bool = False
    is_ratio: bool = False

    @property
    def is_met(self) -> bool:
        """Compares to a part in a thousand, since small kernels come and go."""
        if self.at_least:
            return self.value >= 0.999 * self.bar
        return self.value <= 1.001 * self.bar


class LostTime(NamedTuple):
    """Time that a step loses by one cause, before and now, as printed."""

    name: str
    before: str
    now: str


class Results:
    """Figures of the programs by name and size.

    Args:
        figures: by case.
    """

    def __init__(self, figures: dict[Case, Figures]):
        self.figures = figures

    def of(self, name: str, **sizes: int) -> Figures:
        """Returns the figures of a program, of other sizes than its own where they are named."""
        return self.figures[sized({**OURS, **JAX}[name], **sizes)]

    def deep(self, name: str) -> Figures:
        """Returns the figures of a program with 24 layers."""
        return self.of(name, layers=DEEP)


def measures(results: Results, head_memory: dict[str, float]) -> Iterator[Measure]:
    """Yields the rows of the table.

    Args:
        results: all figures.
        head_memory: "temp", bytes of logits and their gradients at once, and "logits", the bytes of
            float32 logits.
    """
    of = results.of
    deep = results.deep
    shipped = of(SHIPPED)
    unrolled = of("fastaccum, unrolled")
    mfu = deep(SHIPPED)["MFU"]
    best = max(deep(CUDNN)["MFU"], deep(UNROLLED)["MFU"])
    yield Measure(
        "as shipped, 24 layers: MFU", f"{mfu:.1%}", f"{best:.1%}", mfu, 0.75, at_least=True
    )
    yield _ratio("everything recomputed, cuDNN, 24 layers: ms", deep(RECOMPUTED), deep(CUDNN), 0.95)
    yield _ratio("nothing recomputed, unrolled, cuDNN, 4 layers: ms", unrolled, of(UNROLLED), 1.0)
    portable = deep(PORTABLE_RECOMPUTED)
    yield _ratio("recomputed, without cuDNN, 24 layers: ms", portable, deep(XLA), 0.9)
    yield _ratio(
        "the same against float32 logits: ms", portable, deep(f"{XLA}, float32 logits"), 0.9
    )
    long = of(RECOMPUTED, **LONG)
    yield _ratio(
        "T 8,192, B 2, recomputed: attention's ms", long, of(CUDNN, **LONG), 1.05, "attention ms"
    )
    yield _plain(
        "launches a micro-batch, 4 layers",
        shipped,
        of(CUDNN),
        400,
        "launches a micro-batch",
        ",.0f",
    )
    yield _plain(
        "bytes that accumulating moves / accumulators", shipped, of(CUDNN), 4.0, TRAFFIC, ".2f"
    )
    added = unrolled[ADDED]
    fused = added.get("epilogue", 0) + added.get("reduction", 0)
    products = sum(added.values())
    yield Measure(
        "unrolled: weight gradients added by their GEMM",
        f"{fused} of {products}",
        "",
        fused,
        products,
        True,
    )
    yield _ratio("head and loss, 4 layers: ms", shipped["parts"], of(CUDNN)["parts"], 1.05, LOSS)
    share = head_memory["temp"] / head_memory["logits"]
    yield Measure("its memory / float32 logits", f"{share:.2f}", "1 or more", share, 0.15)
    yield _ratio("temp memory, recomputed, 4 layers: GB", of(RECOMPUTED), of(CUDNN), 0.8, "temp GB")
    yield _ratio(
        "temp memory, recomputed, 24 layers: GB", deep(RECOMPUTED), deep(CUDNN), 0.8, "temp GB"
    )
    yield _ratio("temp memory, unrolled, 4 layers: GB", unrolled, of(UNROLLED), 0.8, "temp GB")
    yield from _absences(results)
    half = results.figures[dataclasses.replace(OURS[SHIPPED], dtype="float16")]
    yield _ratio("mixed_float16 (left) against mixed_bfloat16, 4 layers: ms", half, shipped, 1.02)


def lost_times(results: Results, before: dict[str, Figures]) -> Iterator[LostTime]:
    """Yields the milliseconds that a step lost in an earlier commit, and that it loses now.

    Args:
        results: all figures.
        before: the figures of that commit, by program.
    """
    old = before["as shipped, 4 layers"]
    old_deep = before["as shipped, 24 layers"]
    new = results.of(SHIPPED)
    new_deep = results.deep(SHIPPED)
    portable = results.of(PORTABLE_RECOMPUTED)

    def both(key: str, shallow: Figures, deep: Figures) -> str:
        if key not in shallow:
            shallow = shallow["parts"]
            deep = deep["parts"]
        return f"{shallow[key]:,.1f} ({deep[key]:,.0f})"

    def row(name: str, key: str) -> LostTime:
        return LostTime(name, both(key, old, old_deep), both(key, new, new_deep))

    yield row("1. attention, all passes of it", "attention ms")
    yield LostTime(
        "1. the portable form alone, all passes, launches of it a micro-batch",
        f"{old['attention ms']:,.1f}, {old['attention launches']:,.0f}",
        f"{portable['attention ms']:,.1f}, {portable['attention launches']:,.0f}",
    )
    yield LostTime(
        "2. what the backward pass computes once more (before: with cuDNN)",
        both(
            "recomputed",
            before["everything recomputed, cuDNN, 4 layers"],
            before["everything recomputed, cuDNN, 24 layers"],
        ),
        both("recomputed", new, new_deep),
    )
    yield row("3. head and loss", LOSS)
    yield LostTime(
        "3. launches of it a micro-batch",
        f"{old['loss launches']:,.0f}",
        f"{new['loss launches']:,.0f}",
    )
    yield row("4. sums of gradients", "sums of gradients")
    yield LostTime(
        "4. bytes moved / accumulators' size, a micro-batch",
        f"{old[TRAFFIC]:.2f}",
        f"{new[TRAFFIC]:.2f}",
    )
    for name in ("norms", "elementwise", "slices, copies, transposes", "embedding", "once a step"):
        yield row(f"5. {name}", name)
    yield row("whole step", MS)


def _ratio(name: str, ours: Figures, theirs: Figures, bar: float, key: str = MS) -> Measure:
    ratio = ours[key] / theirs[key]
    return Measure(name, f"{ours[key]:,.4g}", f"{theirs[key]:,.4g}", ratio, bar, is_ratio=True)


def _plain(name: str, ours: Figures, theirs: Figures, bar: float, key: str, form: str) -> Measure:
    return Measure(name, f"{ours[key]:{form}}", f"{theirs[key]:{form}}", ours[key], bar)


def _absences(results: Results) -> Iterator[Measure]:
    """Counts what no program of ours may hold."""
    matmuls = 0
    waits = 0
    for case, figures in results.figures.items():
        if isinstance(case, Gpt):
            matmuls += figures["wide matmuls"]
            waits += figures["conditionals"]
            waits += figures["unknown trip counts"]
            waits += figures["host transfers"]
    yield Measure("matmuls of float32 operands, all programs", f"{matmuls:,}", "", matmuls, 0)
    yield Measure("conditionals, unknown trip counts, host transfers", f"{waits:,}", "", waits, 0)
