"""The report's table of measures: what the compiled programs must reach, and the losses of before
that are won back.
"""

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

Figures = dict[str, Any]
CUDNN, XLA = f"{CHECKPOINT}, cuDNN", f"{CHECKPOINT}, XLA attention"
UNROLLED = "JAX, unrolled, cuDNN"
TRAFFIC, ADDED, MS = "accumulation / accumulators", "weight gradients added", "predicted ms"


class Measure(NamedTuple):
    """A row of the table.

    Attributes:
        what: is measured.
        ours, theirs: as printed.
        value: what the bar is for: ours, or the ratio of both.
        bar: the most that it may be, or the least.
        at_least: which of them.
        is_ratio: whether it is that of both.
    """

    what: str
    ours: str
    theirs: str
    value: float
    bar: float
    at_least: bool = False
    is_ratio: bool = False

    @property
    def is_met(self) -> bool:
        """To a part in a thousand: small kernels come and go."""
        return self.value >= 0.999 * self.bar if self.at_least else self.value <= 1.001 * self.bar


class Loss(NamedTuple):
    """What a step lost, before and now."""

    what: str
    before: str
    now: str


class Found:
    """The programs' figures by name and size.

    Args:
        figures: by case.
    """

    def __init__(self, figures: dict[Case, Figures]):
        self.figures = figures

    def of(self, name: str, **sizes: int) -> Figures:
        return self.figures[sized({**OURS, **JAX}[name], **sizes)]

    def deep(self, name: str) -> Figures:
        return self.of(name, layers=DEEP)


def measures(found: Found, head_memory: dict[str, float]) -> Iterator[Measure]:
    """The rows of the table.

    Args:
        found: all figures.
        head_memory: "temp", bytes of logits and their gradients at once, and "logits", what float32
            logits would take.
    """
    of, deep = found.of, found.deep
    shipped, unrolled = of(SHIPPED), of("fastaccum, unrolled")
    best = max((deep(name) for name in (CUDNN, UNROLLED)), key=lambda figures: figures["MFU"])
    mfu = deep(SHIPPED)["MFU"]
    yield Measure(
        "as shipped, 24 layers: MFU", f"{mfu:.1%}", f"{best['MFU']:.1%}", mfu, 0.75, at_least=True
    )
    yield _ratio("everything recomputed, cuDNN, 24 layers: ms", deep(RECOMPUTED), deep(CUDNN), 0.95)
    yield _ratio("nothing recomputed, unrolled, cuDNN, 4 layers: ms", unrolled, of(UNROLLED), 1.0)
    portable = deep(PORTABLE_RECOMPUTED)
    yield _ratio("recomputed, without cuDNN, 24 layers: ms", portable, deep(XLA), 0.9)
    yield _ratio(
        "the same against float32 logits: ms", portable, deep(f"{XLA}, float32 logits"), 0.9
    )
    long = of(RECOMPUTED, **LONG), of(CUDNN, **LONG)
    yield _ratio("T 8,192, B 2, recomputed: attention's ms", *long, 1.05, "attention ms")
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
    fused, products = added.get("epilogue", 0) + added.get("reduction", 0), sum(added.values())
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
    yield from _none(found)
    half = found.figures[dataclasses.replace(OURS[SHIPPED], dtype="float16")]
    yield _ratio("mixed_float16 (left) against mixed_bfloat16, 4 layers: ms", half, shipped, 1.02)


def losses(found: Found, before: dict[str, Figures]) -> Iterator[Loss]:
    """What the step of the commit before lost, and what it loses now, each in milliseconds of a
    step.

    Args:
        found: all figures.
        before: those of that commit, by program.
    """
    old, old_deep = before["as shipped, 4 layers"], before["as shipped, 24 layers"]
    new, new_deep = found.of(SHIPPED), found.deep(SHIPPED)
    portable = found.of(PORTABLE_RECOMPUTED)

    def both(name: str, shallow: Figures, deep: Figures) -> str:
        if name in shallow:
            return f"{shallow[name]:,.1f} ({deep[name]:,.0f})"
        return f"{shallow['parts'][name]:,.1f} ({deep['parts'][name]:,.0f})"

    def row(what: str, name: str) -> Loss:
        return Loss(what, both(name, old, old_deep), both(name, new, new_deep))

    yield row("1. attention, all passes of it", "attention ms")
    yield Loss(
        "1. the portable form alone, all passes, launches of it a micro-batch",
        f"{old['attention ms']:,.1f}, {old['attention launches']:,.0f}",
        f"{portable['attention ms']:,.1f}, {portable['attention launches']:,.0f}",
    )
    yield Loss(
        "2. what the backward pass computes once more (before: with cuDNN)",
        both(
            "recomputed", *(before[f"everything recomputed, cuDNN, {n} layers"] for n in (4, DEEP))
        ),
        both("recomputed", new, new_deep),
    )
    yield row("3. head and loss", LOSS)
    yield Loss(
        "3. launches of it a micro-batch",
        f"{old['loss launches']:,.0f}",
        f"{new['loss launches']:,.0f}",
    )
    yield row("4. sums of gradients", "sums of gradients")
    yield Loss(
        "4. bytes moved / accumulators' size, a micro-batch",
        f"{old[TRAFFIC]:.2f}",
        f"{new[TRAFFIC]:.2f}",
    )
    for name in ("norms", "elementwise", "slices, copies, transposes", "embedding", "once a step"):
        yield row(f"5. {name}", name)
    yield row("whole step", MS)


def _ratio(what: str, ours: Figures, theirs: Figures, bar: float, key: str = MS) -> Measure:
    mine, other = ours[key], theirs[key]
    return Measure(what, f"{mine:,.4g}", f"{other:,.4g}", mine / other, bar, is_ratio=True)


def _plain(what: str, ours: Figures, theirs: Figures, bar: float, key: str, form: str) -> Measure:
    return Measure(what, f"{ours[key]:{form}}", f"{theirs[key]:{form}}", ours[key], bar)


def _none(found: Found) -> Iterator[Measure]:
    """What no program of ours may hold."""
    ours = [figures for case, figures in found.figures.items() if type(case) is type(OURS[SHIPPED])]
    for what, names in (
        ("matmuls of float32 operands, all programs", ("wide matmuls",)),
        (
            "conditionals, unknown trip counts, host transfers",
            ("conditionals", "unknown trip counts", "host transfers"),
        ),
    ):
        count = sum(figures[name] for figures in ours for name in names)
        yield Measure(what, f"{count:,}", "", count, 0)
