"""The first update, and three epochs of 20 with all that they compile, each time in a new process:
ours and Keras 3's accumulation, with the defaults of both; and ours once more where an earlier
process has compiled the same programs.

Imports, data and the making of the model are not timed. The first of the 61 updates is a `fit` of
its own.
"""

import functools
import importlib
import importlib.util
import statistics
import time

import keras
import pytest

from benchmarks.support import models
from benchmarks.support.processes import in_new_process
from benchmarks.support.race import race

EPOCHS, UPDATES, ROUNDS = 3, 20, 3
OURS, THEIRS = "benchmarks.support.contestants", "benchmarks.peers.keras_accumulation"


def first_epochs(module, function, name, updates, **options):
    """Trains the workload of this name for one update and `EPOCHS` epochs, by the `Fit` that
    `module.function` makes.

    Returns the seconds of the first update, those of all, and each epoch's loss.
    """
    workload = models.named(name)
    x, y = workload.arrays(updates)
    fit = getattr(importlib.import_module(module), function)(workload, **options)
    started = time.perf_counter()
    fit.epoch(*keras.tree.map_structure(lambda rows: rows[: workload.update_size], (x, y)))
    first = time.perf_counter() - started
    losses = [fit.epoch(x, y) for _ in range(EPOCHS)]
    return first, time.perf_counter() - started, losses


@pytest.mark.parametrize("name", ["MLP 128", "ConvNet", "GPT nano", "KerasHub GPT-2"])
def test_first_minute(name, benchmark, report, tmp_path):
    if name.startswith("KerasHub") and not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    updates = 1 if benchmark.disabled else UPDATES
    found = {"ours": [], "theirs": [], "ours, second process": []}

    def run(who, module, function, **options):
        first = functools.partial(first_epochs, module, function, name, updates, **options)
        found[who].append(in_new_process(first))

    cache = {"compile_cache": str(tmp_path / "cache")}
    in_new_process(functools.partial(first_epochs, OURS, "make_fit", name, updates, **cache))
    race(
        benchmark,
        lambda: run("ours", OURS, "make_fit"),
        {
            "theirs": lambda: run("theirs", THEIRS, "make"),
            "second": lambda: run("ours, second process", OURS, "make_fit", **cache),
        },
        ROUNDS,
    )
    losses = {who: runs[0][2] for who, runs in found.items()}
    assert losses["ours"] == losses["ours, second process"]
    # Of the first epoch alone: after 61 updates rounding has moved the ConvNet's loss by up to 3e-3
    # in any program.
    assert losses["ours"][0] == pytest.approx(losses["theirs"][0], rel=1e-3)
    workload = models.named(name)
    for part, measure in enumerate(("first update", "first three epochs")):
        seconds = {who: statistics.median(run[part] for run in runs) for who, runs in found.items()}
        for who in ("ours", "ours, second process"):
            note = f"ours {seconds[who]:.2f} s, theirs {seconds['theirs']:.2f} s"
            report(
                f"{measure}, cold: Keras GA default / {who}",
                workload,
                seconds["theirs"] / seconds[who],
                note,
            )
