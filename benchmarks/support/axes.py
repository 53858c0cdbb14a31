"""Records the charts of every suite along an axis: micro-batches, depth, sequence length."""

import statistics


def fraction_of_matmul_rate(footprint, times, rate):
    """Returns the FLOP/s of an update, without recomputation, as a fraction of a matmul's.

    Args:
        footprint: the `Footprint` of the update.
        times: seconds an update, one for each round.
        rate: FLOP/s of a matmul in the same run.
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

    def add(chart, unit, values):
        label = f"{chart}, {unit}" if unit else chart
        series(f"{chart} against {axis}", line, places, values, axis, label)

    milliseconds = [1e3 * statistics.median(times[place]) / items for place in places]
    add(f"time per {item}", "ms", milliseconds)
    fractions = [fraction_of_matmul_rate(footprints[p], times[p], rate) for p in places]
    add("fraction of the matmul rate", "", fractions)
    add("first step", "s", [footprints[place].first_step for place in places])
    add("XLA temp memory", "MB", [footprints[place].temp_bytes / 1e6 for place in places])
    add("process peak memory", "MB", [footprints[place].process_bytes / 1e6 for place in places])
