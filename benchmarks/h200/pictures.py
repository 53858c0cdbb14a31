"""Draws the report's pictures: where the time of a step goes, and MFU and memory against sizes."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.h200.bars import Figures, Results
from benchmarks.h200.cases import AXES, CHECKPOINT, DRAWN
from benchmarks.h200.parts import PARTS
from benchmarks.tools import charts

# The programs whose time is shown in parts, as bars and in a table. `cases.DRAWN` has those whose
# figures are drawn as lines against sizes.
SHOWN_IN_PARTS = (
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
        before: the figures of an earlier commit by that commit's names of programs; two of them
            have a bar.
        folder: the folder to write them to.
    """
    bars = {name: results.of(name) for name in SHOWN_IN_PARTS}
    bars["before: as shipped"] = before["as shipped, 4 layers"]
    bars["before: unrolled"] = before["unrolled, cuDNN, 4 layers"]
    pictures = {
        "where the time goes, 4 layers": _draw_bars(bars),
        "MFU against sizes": _draw_against_sizes(results, "MFU", 100, "MFU, %"),
        "temp memory against sizes": _draw_against_sizes(results, "temp GB", 1, "temp memory, GB"),
    }
    return {title: charts.save(picture, folder, title) for title, picture in pictures.items()}


def _draw_against_sizes(results: Results, key: str, factor: float, label: str) -> plt.Figure:
    """Draws a panel for each axis of sizes, in which each program of `DRAWN` is a line.

    Args:
        results: all figures.
        key: of the value that is drawn, among a program's figures.
        factor: multiplies the value.
        label: of the value.
    """
    panels = {}
    for axis, points in AXES.items():
        lines = {}
        for name in DRAWN:
            lines[name] = []
            for x, sizes in points:
                figures = results.of(name, **sizes)
                lines[name].append((x, factor * figures[key]))
        panels[axis] = {"x_label": axis, "y_label": label, "lines": lines}
    title = (
        f"{label}: one size at a time; else 4 layers, 16,384 tokens, T 2,048, width 2,048, "
        "vocabulary 50,304"
    )
    return charts.draw_lines(title, panels)


def _draw_bars(bars: dict[str, Figures]) -> plt.Figure:
    """Draws a bar for each program, whose length is the time of a step, cut into its parts."""
    picture, axes = plt.subplots(figsize=(10, 1.4 + 0.42 * len(bars)), layout="constrained")
    longest = max(figures["predicted ms"] for figures in bars.values())
    colours = plt.get_cmap("tab20").colors
    # tab20 has pairs of a dark and a light colour: the ten dark ones come first.
    colours = [*colours[::2], *colours[1::2]]
    starts = np.zeros(len(bars))
    for part, colour in zip(PARTS, colours, strict=False):
        widths = np.array([figures["parts"][part] for figures in bars.values()])
        axes.barh(list(bars), widths, left=starts, height=0.72, color=colour, label=part)
        starts = starts + widths
    for row, figures in enumerate(bars.values()):
        text = f"{figures['predicted ms']:,.0f} ms, {figures['MFU']:.0%}"
        axes.text(figures["predicted ms"] + 0.008 * longest, row, text, va="center", fontsize=9)
    axes.set(xlabel="predicted milliseconds of a step, and MFU", xlim=(0, 1.2 * longest))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    picture.legend(loc="outside lower center", ncols=5, fontsize=9)
    picture.suptitle("where the time goes: 4 layers, 8 x 8 x 2,048 tokens, bfloat16")
    return picture
