"""Cost of a checkpoint every 50 steps of `fit`.

Each round trains one trainer for 50 steps with a checkpoint, and for 50 without. The checkpoint
falls on the last step, so `fit` waits for the whole write: in a longer training most of it happens
beside the next steps.
"""

import shutil

import pytest

from benchmarks.support import contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

EVERY = 50


@pytest.mark.parametrize("workload", [models.MLP_128, models.GPT], ids=lambda w: w.name)
def test_saving(workload, benchmark, report, tmp_path):
    trainer = contestants.trainer(workload)
    updates = 1 if benchmark.disabled else EVERY
    x, y = workload.arrays(updates)
    options = {"batch_size": workload.batch_size, "shuffle": False, "verbose": 0}

    def saving():
        trainer.fit(x, y, checkpoint_dir=tmp_path / "run", checkpoint_every=EVERY, **options)
        shutil.rmtree(tmp_path / "run")

    def plain():
        trainer.fit(x, y, **options)

    plain()
    rounds = workload.rounds
    if workload is models.GPT:
        rounds = 3  # each takes minutes, and its ratio is steadier than an MLP's
    times = race(benchmark, saving, {"plain": plain}, rounds)
    if times:
        note = (
            f"saving {milliseconds(times['ours'], updates)}, plain "
            f"{milliseconds(times['plain'], updates)}"
        )
        report(
            f"fit, saving every {EVERY} steps / not",
            workload,
            ratio(times["ours"], times["plain"]),
            note,
        )
