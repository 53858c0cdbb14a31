"""Draws a run of the benchmarks: bars of the time by peer, and lines that the suites recorded.

A run is pytest-benchmark's JSON. A chart is one panel of lines, which suites record with `series`;
a picture is a PNG file with one panel or several.
"""

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
PEER_IS_SLOWER = "tab:blue"
PEER_IS_FASTER = "tab:orange"
# The y axis is logarithmic if its largest value is more than this many times the smallest: on a
# linear one the small values would lie on the axis.
MAX_LINEAR_RATIO = 8
# The least distance of two labels on an axis, as a share of its length: closer ones would touch.
MIN_LABEL_DISTANCE = 0.08
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
    """Reads `{workload: {peer: its time / ours}}` from the measures `KIND: PEER / ours`.

    Workloads and peers are in the order of the run.
    """
    ratios = collections.defaultdict(dict)
    for score in scores.of_run(run):
        measure = re.fullmatch(rf"{re.escape(kind)}: (?P<peer>.+) / ours", score.measure)
        if measure:
            ratios[score.workload][measure["peer"]] = score.value
    return dict(ratios)


def line_charts(run):
    """Reads `{chart: {"x_label", "y_label", "lines": {line: [(x, y), ...]}}}`, sorted by x.

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


def _by_axis(charts):
    """Groups the charts that share a picture, such as all those "against depth".

    >>> _by_axis({"memory against depth": 1, "first step against depth": 2, "dispatch": 3})
    {'against depth': {'memory': 1, 'first step': 2}, 'dispatch': {'dispatch': 3}}
    """
    pictures = {}
    for title, chart in charts.items():
        measure, separator, x_axis = title.partition(" against ")
        picture = title
        if separator:
            picture = f"against {x_axis}"
        pictures.setdefault(picture, {})[measure] = chart
    return pictures


def _draw_bars(title, ratios):
    """Draws a panel for each workload with a bar for each peer.

    A bar starts at 1, our time, and goes to the right for a slower peer, to the left for a faster.
    """
    peers = []
    values = []
    for ratios_of_peers in ratios.values():
        peers += [peer for peer in ratios_of_peers if peer not in peers]
        values += ratios_of_peers.values()
    lowest = min(0.8, *values)
    highest = max(2, *values)
    figure, panel_grid = _panels(
        len(ratios), width=3.6, height=0.8 + 0.32 * len(peers), sharex=True, sharey=True
    )
    for axes, workload in zip(panel_grid.flat, ratios, strict=False):
        for row, peer in enumerate(peers):
            value = ratios[workload].get(peer)
            if value is None:
                axes.text(1.05, row, "not measured", va="center", fontsize=8, color="gray")
                continue
            colour = PEER_IS_SLOWER if value >= 1 else PEER_IS_FASTER
            axes.barh(row, value - 1, left=1, height=0.7, color=colour)
            axes.text(max(value, 1) * 1.06, row, number(value), va="center", fontsize=9)
        axes.axvline(1, color="black", linewidth=1)
        axes.set(title=workload, xscale="log", xlim=(lowest * 0.85, highest * 2.2))
        axes.set_yticks(range(len(peers)), peers)
        _label_decades(axes.xaxis, *axes.get_xlim())
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)
    panel_grid[0, 0].invert_yaxis()  # of all panels, which share it
    figure.suptitle(title)
    figure.supxlabel(
        "times as long as ours: right of 1 ours is faster, left of 1 the peer", fontsize="medium"
    )
    return figure


def draw_lines(title, panels):
    """Draws a panel for each chart; a line has the same colour in all of them."""
    figure, panel_grid = _panels(len(panels), width=3.8, height=3.2)
    colours = {}
    for axes, (measure, chart) in zip(panel_grid.flat, panels.items(), strict=False):
        all_x = set()
        ys = []
        for line, points in chart["lines"].items():
            colour = colours.setdefault(line, f"C{len(colours)}")
            line_x, line_y = zip(*points, strict=True)
            axes.plot(line_x, line_y, marker="o", markersize=4, color=colour, label=line)
            all_x.update(line_x)
            ys.extend(line_y)
        axes.set(title=measure, xlabel=chart["x_label"], ylabel=chart["y_label"], xscale="log")
        ticks = _apart(sorted(all_x))
        axes.set_xticks(ticks, [f"{x:,g}" for x in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        if min(ys) > 0 and max(ys) > MAX_LINEAR_RATIO * min(ys):
            axes.set_yscale("log")
            _label_decades(axes.yaxis, *axes.get_ylim())
        else:
            axes.set_ylim(min(0, *ys), 1.05 * max(ys))
            axes.yaxis.set_major_formatter(PLAIN)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=4) for colour in colours.values()
    ]
    figure.legend(handles, colours, loc="outside lower center", ncols=6)
    return figure


def _panels(count, width, height, **shared):
    """Makes a figure for `count` panels of that size in inches, at most three in a row."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    size = (max(width * columns, 6), height * rows + 0.8)
    figure, panel_grid = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **shared
    )
    for axes in panel_grid.flat[count:]:
        axes.set_visible(False)
    return figure, panel_grid


def _label_decades(axis, low, high):
    """Labels a log axis with plain numbers: 1, 10, 100, on a narrow axis 2 and 5 too."""
    is_wide = high / low > 50
    digits = [1] if is_wide else [1, 2, 5]
    axis.set_major_locator(LogLocator(10, subs=digits))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_locator(NullLocator())


def _apart(values):
    """Keeps those of the sorted positive `values` whose labels do not touch on a log axis.

    >>> _apart([1, 2, 4, 8, 8.5, 64])
    [1, 2, 4, 8, 64]
    """
    kept = values[:1]
    for value in values[1:]:
        distance = math.log(value / kept[-1])
        length = math.log(values[-1] / values[0])
        if distance > MIN_LABEL_DISTANCE * length:
            kept.append(value)
    return kept


def save(figure, folder, title):
    """Writes the figure to a PNG file named after its title and returns the path."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
