"""The train step on four logical CPU devices: the optimizer's slots shared out over them, and all
slots on each.
"""

import pytest

from benchmarks.support import agreement, models, processes
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

DEVICES, REPLICATED = 4, "replicated"


@pytest.mark.parametrize("workload", [models.MLP_2048, models.GPT], ids=lambda w: w.name)
def test_shards(workload, benchmark, report):
    with processes.replicas(workload.name, DEVICES) as replicas:
        agreement.assert_agree(replicas.outcome(True), replicas.outcome(False), REPLICATED)
        updates = 1 if benchmark.disabled else workload.step_updates
        replicas.prepare(updates)
        rounds = 3 * workload.rounds
        times = race(
            benchmark, lambda: replicas.run(True), {REPLICATED: lambda: replicas.run(False)}, rounds
        )
    if times:
        note = (
            f"shared out {milliseconds(times['ours'], updates)}, all on each "
            f"{milliseconds(times[REPLICATED], updates)}"
        )
        report(
            "train step, 4 logical devices: slots shared out / all on each",
            workload,
            ratio(times["ours"], times[REPLICATED]),
            note,
        )
