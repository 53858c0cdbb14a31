"""Train step on four logical CPU devices, with sharded and with replicated slots."""

import pytest

from benchmarks.support import agreement, models, processes
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

DEVICES = 4
REPLICATED = "replicated"


@pytest.mark.parametrize("workload", [models.MLP_2048, models.GPT], ids=lambda w: w.name)
def test_shards(workload, benchmark, report):
    with processes.replicas(workload.name, DEVICES) as replicas:
        sharded = replicas.outcome(True)
        agreement.assert_agree(sharded, replicas.outcome(False), REPLICATED)
        updates = 1 if benchmark.disabled else workload.step_updates
        replicas.prepare(updates)
        times = race(
            benchmark,
            lambda: replicas.run(True),
            {REPLICATED: lambda: replicas.run(False)},
            3 * workload.rounds,
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
