"""Train step with tensorflow-addons' LAMB: ours, and the custom loop that its users wrote."""

import dataclasses
import importlib.util

import pytest

import fastaccum as fa
from benchmarks.peers import addons_lamb_loop
from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

NAME = "addons LAMB loop"


@pytest.mark.parametrize(
    "workload", [models.MLP_128, models.MLP_2048, models.GPT], ids=lambda w: w.name
)
def test_addons(workload, benchmark, report):
    for package in ("tensorflow_addons", "tf_keras"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{NAME}: {package} is not installed; "
                'pip install -c constraints.txt -e ".[addons]" adds it'
            )
    workload = dataclasses.replace(workload, optimizer=lambda: fa.addons.optimizers.LAMB(1e-3))
    ours = contestants.make_train_step(workload)
    theirs = addons_lamb_loop.make(workload)
    our_outcome = agreement.outcome_of_train_step(ours, workload)
    agreement.assert_agree(our_outcome, agreement.outcome_of_train_step(theirs, workload), NAME)

    updates = 1 if benchmark.disabled else workload.step_updates
    times = race(
        benchmark,
        ours.block(workload, updates),
        {NAME: theirs.block(workload, updates)},
        workload.rounds,
    )
    if times:
        note = (
            f"ours {milliseconds(times['ours'], updates)}, theirs "
            f"{milliseconds(times[NAME], updates)}"
        )
        report(f"train step: {NAME} / ours", workload, ratio(times[NAME], times["ours"]), note)
