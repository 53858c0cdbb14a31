"""Overhead of `fit` over the bare train step: the loop, the input pipeline, the callbacks.

Both train one trainer on the same examples: `fit` from NumPy arrays, the bare loop from stacks that
are tensors already. Each ends when its last loss is read.
"""

import dataclasses
import statistics

import pytest

from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio


@pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
def test_overhead(workload, benchmark, report):
    trainer = contestants.trainer(workload)
    fit = contestants.as_fit(trainer, workload)
    step = contestants.as_train_step(trainer)

    # Both use one trainer, so that it compiles once.
    restore = agreement.snapshot(trainer)
    by_fit = agreement.outcome_of_fit(fit, workload)
    restore()
    by_step = agreement.outcome_of_train_step(step, workload)
    mean = dataclasses.replace(by_step, losses=[statistics.mean(by_step.losses)])
    agreement.assert_agree(by_fit, mean, "the bare train step")

    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    stacks = [step.feed(stack) for stack in workload.stacks(updates)]

    def bare():
        for stack in stacks:
            loss = step.update(stack)
        return float(loss)

    times = race(benchmark, lambda: fit.epoch(x, y), {"bare": bare}, 2 * workload.rounds)
    if times:
        note = (
            f"fit {milliseconds(times['ours'], updates)}, bare "
            f"{milliseconds(times['bare'], updates)}"
        )
        report("fit / bare train step", workload, ratio(times["ours"], times["bare"]), note)
