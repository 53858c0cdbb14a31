"""Deeper models: layers in one loop against the same layers unrolled.

With a `LayerStack` the first step and the activations' memory hardly grow with depth; it costs a
second forward pass. With `scan_layers` a model of Keras's own layers is compiled once for all of
them.
"""

import numpy as np
import pytest

from benchmarks.support import agreement, axes, models, processes

STACKED = "LayerStack"
SCANNED = "scan_layers"
UNROLLED = "unrolled"


@pytest.mark.parametrize("workload", [models.GPT], ids=lambda w: w.name)
def test_depth(workload, benchmark, series):
    depths = {STACKED: (2,), UNROLLED: (2,)}
    if not benchmark.disabled:
        depths = {STACKED: (2, 4, 8, 16, 32, 48), UNROLLED: (2, 4, 8)}
    race(models.gpt_of_depth, depths, "depth", workload.rounds, benchmark, series)


@pytest.mark.parametrize("workload", [models.KERAS_GPT], ids=lambda w: w.name)
def test_depth_of_layers_that_repeat(workload, benchmark, series):
    depths = {SCANNED: (2,), UNROLLED: (2,)}
    if not benchmark.disabled:
        depths = {SCANNED: (2, 12, 24), UNROLLED: (2, 12, 24)}
    axis = "depth, Keras's layers"
    race(models.keras_gpt_of_depth, depths, axis, workload.rounds, benchmark, series)


def race(make, depths, axis, rounds, benchmark, series):
    """Times both forms of a model at their depths, and records the charts.

    Args:
        make: `(depth, in_loop) -> Workload`, one of `benchmarks.support.models`.
        depths: of the form that is a loop, then of the unrolled one, by the form.
        axis: the charts' name for what grows.
        rounds: how many times each contestant is timed.
        benchmark, series: the fixtures.
    """
    in_loop = next(iter(depths))
    points = {}
    for form in depths:
        for depth in depths[form]:
            points[form, depth] = (make, depth, form == in_loop)
    with processes.contestants_of(points) as contestants:
        footprints = {point: contestant.footprint() for point, contestant in contestants.items()}
        losses = {point: contestant.outcome().losses for point, contestant in contestants.items()}
        # The weights of the two forms may have different shapes. The second loss comes from updated
        # weights, so it compares them.
        for depth in depths[UNROLLED]:
            np.testing.assert_allclose(
                losses[in_loop, depth],
                losses[UNROLLED, depth],
                rtol=agreement.LOSS_TOLERANCE,
                err_msg=f"depth {depth}",
            )
        times, rate = processes.take_turns(benchmark, contestants, rounds)

    examples = make(2, True).update_size
    for form in depths:
        by_depth = {depth: footprints[form, depth] for depth in depths[form]}
        times_by_depth = {depth: times[form, depth] for depth in depths[form]}
        axes.record(series, axis, form, by_depth, times_by_depth, rate, examples, "example")
