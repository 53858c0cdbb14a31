"""The first three epochs of 20 updates with all that they compile, each time in a new process: ours and Keras 3's own
accumulation, with the defaults of both. Imports, data and the making of the model are not timed.
"""

import importlib
import statistics
import time

import pytest

from benchmarks import models
from benchmarks.processes import in_new_process
from benchmarks.race import race

EPOCHS, UPDATES, ROUNDS = 3, 20, 3


def first_epochs(module, function, name, updates):
    """Trains the workload of this name for `EPOCHS` epochs, by the `Fit` that `module.function` makes.

    Returns the seconds, and the last epoch's loss.
    """
    workload = models.named(name)
    x, y = workload.arrays(updates)
    fit = getattr(importlib.import_module(module), function)(workload)
    started = time.perf_counter()
    losses = [fit.epoch(x, y) for _ in range(EPOCHS)]
    return time.perf_counter() - started, losses[-1]


@pytest.mark.parametrize("name", ["MLP 128", "ConvNet", "GPT"])
def test_first_minute(name, benchmark, report):
    updates = 1 if benchmark.disabled else UPDATES
    found = {"ours": [], "theirs": []}

    def run(who, module, function):
        found[who].append(in_new_process(first_epochs, module, function, name, updates))

    race(
        benchmark,
        lambda: run("ours", "benchmarks.contestants", "make_fit"),
        {"theirs": lambda: run("theirs", "benchmarks.peers.keras_accumulation", "make")},
        ROUNDS,
    )
    seconds = {who: statistics.median(time for time, _ in runs) for who, runs in found.items()}
    losses = {who: runs[0][1] for who, runs in found.items()}
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-3)
    note = f"ours {seconds['ours']:.1f} s, theirs {seconds['theirs']:.1f} s"
    workload = models.named(name)
    report("first three epochs, cold: Keras GA default / ours", workload, seconds["theirs"] / seconds["ours"], note)
