"""The pictures of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.h200.bars import Found
from benchmarks.h200.cases import AXES, CHECKPOINT, DRAWN, sized
from benchmarks.h200.parts import PARTS
from benchmarks.tools import charts

SHOWN = (
    "fastaccum, as shipped",
    "fastaccum, everything recomputed",
    "fastaccum, unrolled",
    "fastaccum without cuDNN, everything recomputed",
    f"{CHECKPOINT}, cuDNN",
    "JAX, unrolled, cuDNN",
    f"{CHECKPOINT}, XLA attention",
)


def draw(found: Found, before: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Writes the pictures as PNG files; returns `{title: path}`.

    Args:
        found: all figures.
        before: those of the commit before, drawn beside them.
        folder: where they go.
    """
    old = {
        "before: as shipped": before["as shipped, 4 layers"],
        "before: unrolled": before["unrolled, cuDNN, 4 layers"],
    }
    shown = {**{name: found.of(name) for name in SHOWN}, **old}
    titled = {"where the time goes, 4 layers": _bars(shown)}
    for key, factor, label in (("MFU", 100, "MFU, %"), ("temp GB", 1, "temp memory, GB")):
        titled[f"{label.partition(',')[0]} against sizes"] = charts.draw_lines(
            f"{label}: one size at a time; else 4 layers, 16,384 tokens, T 2,048, width 2,048, "
            "vocabulary 50,304",
            {axis: _lines(found, axis, key, factor, label) for axis in AXES},
        )
    return {title: charts.save(figure, folder, title) for title, figure in titled.items()}


def _lines(found, axis, key, factor, label):
    lines = {
        name: [(x, factor * found.figures[sized(case, **sizes)][key]) for x, sizes in AXES[axis]]
        for name, case in DRAWN.items()
    }
    return {"x_label": axis, "y_label": label, "lines": lines}


def _bars(shown):
    """A bar for each program, as long as its step, in its parts."""
    figure, axis = plt.subplots(figsize=(10, 1.4 + 0.42 * len(shown)), layout="constrained")
    longest = max(figures["predicted ms"] for figures in shown.values())
    colours = plt.get_cmap("tab20").colors
    start = dict.fromkeys(shown, 0.0)
    for number, part in enumerate(PARTS):
        widths = [figures["parts"][part] for figures in shown.values()]
        colour = colours[2 * number % 20 + (number >= 10)]
        axis.barh(
            list(shown), widths, left=list(start.values()), height=0.72, color=colour, label=part
        )
        start = {
            name: left + width for (name, left), width in zip(start.items(), widths, strict=True)
        }
    for row, figures in enumerate(shown.values()):
        text = f"{figures['predicted ms']:,.0f} ms, {figures['MFU']:.0%}"
        axis.text(figures["predicted ms"] + 0.008 * longest, row, text, va="center", fontsize=9)
    axis.set(xlabel="predicted milliseconds of a step, and MFU", xlim=(0, 1.2 * longest))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle("where the time goes: 4 layers, 8 x 8 x 2,048 tokens, bfloat16")
    return figure
