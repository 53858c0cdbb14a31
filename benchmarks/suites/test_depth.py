"""Deeper models: one `LayerStack` against the same layers unrolled, up to 8 layers.

With a stack the first step and the activations' memory hardly grow with depth; it costs a second
forward pass.
"""

import numpy as np
import pytest

from benchmarks.support import agreement, axes, models, processes

STACKED = "LayerStack"
UNROLLED = "unrolled"


@pytest.mark.parametrize("workload", [models.GPT], ids=lambda w: w.name)
def test_depth(workload, benchmark, series):
    depths = {STACKED: (2,), UNROLLED: (2,)}
    if not benchmark.disabled:
        depths = {STACKED: (2, 4, 8, 16, 32, 48), UNROLLED: (2, 4, 8)}
    points = {}
    for form in (STACKED, UNROLLED):
        for depth in depths[form]:
            points[form, depth] = (models.gpt_of_depth, depth, form == STACKED)
    with processes.contestants_of(points) as contestants:
        footprints = {point: contestant.footprint() for point, contestant in contestants.items()}
        losses = {point: contestant.outcome().losses for point, contestant in contestants.items()}
        # The weights of the two forms have different shapes. The second loss comes from updated
        # weights, so it compares them.
        for depth in depths[UNROLLED]:
            np.testing.assert_allclose(
                losses[STACKED, depth],
                losses[UNROLLED, depth],
                rtol=agreement.LOSS_TOLERANCE,
                err_msg=f"depth {depth}",
            )
        times, rate = processes.take_turns(benchmark, contestants, workload.rounds)

    examples = models.gpt_of_depth(2, stacked=True).update_size
    for form in (STACKED, UNROLLED):
        by_depth = {depth: footprints[form, depth] for depth in depths[form]}
        times_by_depth = {depth: times[form, depth] for depth in depths[form]}
        axes.record(series, "depth", form, by_depth, times_by_depth, rate, examples, "example")
