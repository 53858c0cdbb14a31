"""Draws a run: the time by peer, and every chart whose lines the suites recorded with `series`."""

import collections
import math
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.support import scores
from benchmarks.support.scores import number

DPI = 100
SLOWER, FASTER = "tab:blue", "tab:orange"
# Beyond this, small values would lie on the axis of a linear scale.
LOG_FROM = 8
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


def draw(run, folder):
    """Writes the charts of `run` to `folder` as PNG files; returns `{title: path}`."""
    drawn = {}
    for kind in ("train step", "fit"):
        ratios = time_by_peer(run, kind)
        if ratios:
            title = f"{kind}: time by peer"
            drawn[title] = save(_draw_bars(title, ratios), folder, title)
    for title, panels in _by_axis(line_charts(run)).items():
        drawn[title] = save(draw_lines(title, panels), folder, title)
    return drawn


def time_by_peer(run, kind):
    """`{workload: {peer: its time / ours}}` of the measures `KIND: PEER / ours`, both in the order
    of the run.
    """
    ratios = collections.defaultdict(dict)
    for score in scores.of_run(run):
        found = re.fullmatch(rf"{re.escape(kind)}: (?P<peer>.+) / ours", score.measure)
        if found:
            ratios[score.workload][found["peer"]] = score.value
    return dict(ratios)


def line_charts(run):
    """`{chart: {"x_label", "y_label", "lines": {line: [(x, y), ...]}}}`, the points in order of x.

    Series of the same chart and line are one line: a suite may add a point at a time.
    """
    charts = {}
    for benchmark in run["benchmarks"]:
        for series in benchmark["extra_info"].get("series", []):
            chart = charts.setdefault(
                series["chart"],
                {"x_label": series["x_label"], "y_label": series["y_label"], "lines": {}},
            )
            line = chart["lines"].setdefault(series["line"], [])
            line.extend(zip(series["x"], series["y"], strict=True))
            line.sort()
    return charts


def _by_axis(drawn):
    """The charts that share a picture: "memory against depth" and "first step against depth" are
    panels of one.

    >>> _by_axis({"memory against depth": 1, "first step against depth": 2, "dispatch": 3})
    {'against depth': {'memory': 1, 'first step': 2}, 'dispatch': {'dispatch': 3}}
    """
    pictures = {}
    for title, chart in drawn.items():
        what, against, axis = title.partition(" against ")
        picture = f"against {axis}" if against else title
        pictures.setdefault(picture, {})[what] = chart
    return pictures


def _draw_bars(title, ratios):
    """A panel for each workload, a bar for each peer: to the right if slower than ours, to the left
    if faster.
    """
    peers = list(dict.fromkeys(peer for of_workload in ratios.values() for peer in of_workload))
    figure, axes = _panels(
        len(ratios), width=3.6, height=0.8 + 0.32 * len(peers), sharex=True, sharey=True
    )
    values = [value for of_workload in ratios.values() for value in of_workload.values()]
    for axis, (workload, of_workload) in zip(axes.flat, ratios.items(), strict=False):
        for row, peer in enumerate(peers):
            if peer not in of_workload:
                axis.text(1.05, row, "not measured", va="center", fontsize=8, color="gray")
                continue
            value = of_workload[peer]
            axis.barh(row, value - 1, left=1, height=0.7, color=SLOWER if value >= 1 else FASTER)
            axis.text(max(value, 1) * 1.06, row, number(value), va="center", fontsize=9)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(
            title=workload, xscale="log", xlim=(min(0.8, *values) * 0.85, max(2, *values) * 2.2)
        )
        axis.set_yticks(range(len(peers)), peers)
        _label_decades(axis.xaxis, *axis.get_xlim())
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.tick_params(labelbottom=True)
    axes[0, 0].invert_yaxis()
    figure.suptitle(title)
    figure.supxlabel(
        "times as long as ours: right of 1 ours is faster, left of 1 the peer", fontsize="medium"
    )
    return figure


def draw_lines(title, panels):
    """A panel for each chart; a line has the same colour in all of them."""
    figure, axes = _panels(len(panels), width=3.8, height=3.2)
    colours = {}
    for axis, (what, chart) in zip(axes.flat, panels.items(), strict=False):
        for line, points in chart["lines"].items():
            colour = colours.setdefault(line, f"C{len(colours)}")
            axis.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=colour, label=line
            )
        xs = _apart(sorted({x for points in chart["lines"].values() for x, _ in points}))
        ys = [y for points in chart["lines"].values() for _, y in points]
        axis.set(title=what, xlabel=chart["x_label"], ylabel=chart["y_label"], xscale="log")
        axis.set_xticks(xs, [f"{x:,g}" for x in xs])
        axis.xaxis.set_minor_locator(NullLocator())
        if min(ys) > 0 and max(ys) > LOG_FROM * min(ys):
            axis.set_yscale("log")
            _label_decades(axis.yaxis, *axis.get_ylim())
        else:
            axis.set_ylim(min(0, *ys), 1.05 * max(ys))
            axis.yaxis.set_major_formatter(PLAIN)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=4) for colour in colours.values()
    ]
    figure.legend(handles, colours, loc="outside lower center", ncols=6)
    return figure


def _panels(count, width, height, **shared):
    """A figure with room for `count` panels of that size in inches, at most three in a row."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    size = (max(width * columns, 6), height * rows + 0.8)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **shared
    )
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, axes


def _label_decades(axis, low, high):
    """Plain numbers on a log axis: 1, 10, 100; between them 2 and 5 too where that leaves room."""
    wide = high / low > 50
    axis.set_major_locator(LogLocator(10, subs=[1] if wide else [1, 2, 5]))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_locator(NullLocator())


def _apart(values):
    """Those of the sorted positive `values` whose labels do not touch on a log axis.

    >>> _apart([1, 2, 4, 8, 8.5, 64])
    [1, 2, 4, 8, 64]
    """
    kept = values[:1]
    for value in values[1:]:
        if math.log(value / kept[-1]) > 0.08 * math.log(values[-1] / values[0]):
            kept.append(value)
    return kept


def save(figure, folder, title):
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
