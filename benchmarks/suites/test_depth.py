"""Deeper models: one `LayerStack` against the same layers unrolled, as far as unrolled ones compile
in seconds.

Depth is what a stack keeps out of the first step and of the activations' memory, for a second
forward pass.
"""

import numpy as np
import pytest

from benchmarks.support import agreement, axes, models, processes

STACKED, UNROLLED = "LayerStack", "unrolled"


@pytest.mark.parametrize("workload", [models.GPT], ids=lambda w: w.name)
def test_depth(workload, benchmark, series):
    depths = {STACKED: (2,), UNROLLED: (2,)}
    if not benchmark.disabled:
        depths = {STACKED: (2, 4, 8, 16, 32, 48), UNROLLED: (2, 4, 8)}
    points = {
        (form, depth): (models.gpt_of_depth, depth, form == STACKED)
        for form in depths
        for depth in depths[form]
    }
    with processes.contestants_of(points) as contestants:
        footprints = {point: contestant.footprint() for point, contestant in contestants.items()}
        losses = {point: contestant.outcome().losses for point, contestant in contestants.items()}
        # Their weights have different shapes; the second loss is that of the first one's updated
        # weights.
        for depth in depths[UNROLLED]:
            np.testing.assert_allclose(
                losses[STACKED, depth],
                losses[UNROLLED, depth],
                rtol=agreement.LOSS_TOLERANCE,
                err_msg=f"depth {depth}",
            )
        times, rate = processes.take_turns(benchmark, contestants, workload.rounds)

    examples = models.gpt_of_depth(2, stacked=True).update_size
    for form in depths:
        its_footprints = {depth: footprints[form, depth] for depth in depths[form]}
        its_times = {depth: times[form, depth] for depth in depths[form]}
        axes.record(series, "depth", form, its_footprints, its_times, rate, examples, "example")
