"""What saving every 50 steps costs a `fit`.

Each round trains one trainer for 50 steps with a checkpoint, and for 50 without. The checkpoint
falls on the last step, so that `fit` waits for all of its write: in a longer training most of it
happens beside the next steps.
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
    # A GPT's round takes minutes, and says as much as many of an MLP's.
    times = race(
        benchmark, saving, {"plain": plain}, 3 if workload is models.GPT else workload.rounds
    )
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
