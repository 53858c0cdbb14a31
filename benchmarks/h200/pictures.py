"""Draws the pictures of the report."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.h200.bars import Figures, Results
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


def draw(results: Results, before: dict[str, Figures], folder: Path) -> dict[str, Path]:
    """Writes the pictures as PNG files; returns `{title: path}`.

    Args:
        results: all figures.
        before: the figures of an earlier commit, drawn beside them.
        folder: of the files.
    """
    shown = {name: results.of(name) for name in SHOWN}
    shown["before: as shipped"] = before["as shipped, 4 layers"]
    shown["before: unrolled"] = before["unrolled, cuDNN, 4 layers"]
    pictures = {
        "where the time goes, 4 layers": _bars(shown),
        "MFU against sizes": _against_sizes(results, "MFU", 100, "MFU, %"),
        "temp memory against sizes": _against_sizes(results, "temp GB", 1, "temp memory, GB"),
    }
    return {title: charts.save(figure, folder, title) for title, figure in pictures.items()}


def _against_sizes(results: Results, key: str, factor: float, label: str) -> plt.Figure:
    """Draws a figure of the programs, times a factor, along each axis of sizes."""
    panels = {}
    for axis, points in AXES.items():
        lines = {}
        for name, case in DRAWN.items():
            lines[name] = [
                (x, factor * results.figures[sized(case, **sizes)][key]) for x, sizes in points
            ]
        panels[axis] = {"x_label": axis, "y_label": label, "lines": lines}
    title = (
        f"{label}: one size at a time; else 4 layers, 16,384 tokens, T 2,048, width 2,048, "
        "vocabulary 50,304"
    )
    return charts.draw_lines(title, panels)


def _bars(shown: dict[str, Figures]) -> plt.Figure:
    """Draws a bar for each program, as long as its step, in its parts."""
    figure, axis = plt.subplots(figsize=(10, 1.4 + 0.42 * len(shown)), layout="constrained")
    longest = max(figures["predicted ms"] for figures in shown.values())
    colours = plt.get_cmap("tab20").colors
    # tab20 has pairs of a dark and a light colour: the ten dark ones come first.
    colours = [*colours[::2], *colours[1::2]]
    starts = np.zeros(len(shown))
    for part, colour in zip(PARTS, colours, strict=False):
        widths = np.array([figures["parts"][part] for figures in shown.values()])
        axis.barh(list(shown), widths, left=starts, height=0.72, color=colour, label=part)
        starts = starts + widths
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
