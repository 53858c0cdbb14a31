"""Time, memory and first step of one update of 64 examples in 1 to 64 micro-batches.

Every division has a process of its own, and they take turns. Equal losses and weights come first:
the number of micro-batches must not change an update.
"""

import pytest

from benchmarks.support import agreement, axes, models, processes
from benchmarks.support.scores import milliseconds, ratio

EXAMPLES = 64


@pytest.mark.parametrize(
    "workload", [models.MLP_128, models.MLP_2048, models.GPT], ids=lambda w: w.name
)
def test_micro_batches(workload, benchmark, report, series):
    if benchmark.disabled and workload.name != models.MLP_128.name:
        pytest.skip("timed runs only: each point compiles in a process of its own")
    counts = (1, EXAMPLES) if benchmark.disabled else (1, 2, 4, 8, 16, 32, 64)
    points = {count: (models.divided, workload.name, count, EXAMPLES) for count in counts}
    with processes.contestants_of(points) as contestants:
        footprints = {count: contestant.footprint() for count, contestant in contestants.items()}
        whole = contestants[1].outcome()
        for count in counts[1:]:
            agreement.assert_agree(whole, contestants[count].outcome(), f"{count} micro-batches")
        times, rate = processes.take_turns(
            benchmark, contestants, workload.rounds, workload.step_updates
        )

    if not benchmark.disabled:
        note = f"{milliseconds(times[64], 1)}, one micro-batch {milliseconds(times[1], 1)}"
        report("time per example: 64 micro-batches / 1", workload, ratio(times[64], times[1]), note)
    axes.record(
        series, "micro-batches", workload.name, footprints, times, rate, EXAMPLES, "example"
    )
