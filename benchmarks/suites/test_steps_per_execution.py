"""Gain of several train steps in a dispatch, where a step takes about as long as its dispatch."""

import statistics

import pytest

from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

UPDATES = 64


@pytest.mark.parametrize("workload", [models.MLP_128], ids=lambda w: w.name)
def test_steps_per_execution(workload, benchmark, report, series):
    counts = (1, 32) if benchmark.disabled else (1, 2, 4, 8, 16, 32)
    fits = {count: contestants.make_fit(workload, steps_per_execution=count) for count in counts}
    outcomes = {count: agreement.outcome_of_fit(fit, workload) for count, fit in fits.items()}
    for count in counts[1:]:
        agreement.assert_agree(outcomes[1], outcomes[count], f"steps_per_execution={count}")

    x, y = workload.arrays(32 if benchmark.disabled else UPDATES)
    epochs = {count: lambda fit=fit: fit.epoch(x, y) for count, fit in fits.items()}
    for epoch in epochs.values():
        epoch()  # full dispatches are another program than a short last one
    alone = epochs.pop(1)
    times = race(benchmark, alone, epochs, workload.rounds)
    if times:
        times[1] = times.pop("ours")
        note = f"1: {milliseconds(times[1], UPDATES)}, 32: {milliseconds(times[32], UPDATES)}"
        report("steps per execution: 1 / 32", workload, ratio(times[1], times[32]), note)
        series(
            "time per update in fit against steps per execution",
            workload.name,
            counts,
            [1e3 * statistics.median(times[count]) / UPDATES for count in counts],
            "steps per execution",
            "time per update, ms",
        )
