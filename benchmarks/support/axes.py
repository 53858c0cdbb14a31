"""What every suite along an axis (micro-batches, depth, sequence length) measures at each of its
points.
"""

import statistics


def fraction(footprint, times, rate):
    """Of the matmul rate: the FLOP/s of an update, counting only what it must compute, over the
    rate.
    """
    return footprint.flops / statistics.median(times) / rate


def record(series, axis, line, footprints, times, rate, items, item):
    """Adds a line to each chart of an axis.

    Args:
        series: the fixture.
        axis: what grows from place to place, with its unit where it has one.
        line: the line's name.
        footprints, times: `{place: Footprint}` and `{place: [seconds an update]}`.
        rate: FLOP/s of a matmul in the same run.
        items: how many examples or tokens an update has.
        item: "example" or "token".
    """
    places = list(footprints)
    charts = {
        (f"time per {item}", "ms"): [1e3 * statistics.median(times[p]) / items for p in places],
        ("fraction of the matmul rate", ""): [
            fraction(footprints[p], times[p], rate) for p in places
        ],
        ("first step", "s"): [footprints[p].first_step for p in places],
        ("XLA temp memory", "MB"): [footprints[p].temp_bytes / 1e6 for p in places],
        ("process peak memory", "MB"): [footprints[p].process_bytes / 1e6 for p in places],
    }
    for (what, unit), values in charts.items():
        label = f"{what}, {unit}" if unit else what
        series(f"{what} against {axis}", line, places, values, axis, label)
