"""Time of a new process to its first update, and through three epochs with all that they compile.

Contestants are ours and Keras 3's accumulation, with the defaults of both, and ours once more where
an earlier process has compiled the same programs. Keras runs on TensorFlow, and on JAX where the
model is of Keras's layers. Imports, data and the making of the model are not timed. The first of
the 61 updates is a `fit` of its own.
"""

import functools
import importlib
import importlib.util
import operator
import statistics
import time
from typing import NamedTuple

import fastaccum  # noqa: F401  reads FASTACCUM_COMPILE_CACHE before TensorFlow is imported

# isort: split
import keras
import pytest

from benchmarks.support import models
from benchmarks.support.processes import in_new_process
from benchmarks.support.race import race
from benchmarks.support.scores import ratio

EPOCHS = 3
UPDATES = 20  # in an epoch
ROUNDS = 3


class Maker(NamedTuple):
    """The names of the function that makes a contestant's `Fit`, for other processes to import.

    The process has that backend of Keras.
    """

    module: str
    function: str
    backend: str


OURS = Maker("benchmarks.support.contestants", "make_fit", "tensorflow")
ON_TENSORFLOW = Maker("benchmarks.peers.keras_accumulation", "make", "tensorflow")
ON_JAX = Maker("benchmarks.peers.jax_keras_fit", "make", "jax")


class FirstEpochs(NamedTuple):
    """Seconds of the first update, up to the end of the first epoch and of all, and the losses."""

    first_update: float
    first_epoch: float
    total: float
    losses: list  # of each epoch


def first_epochs(maker, name, updates, weights):
    """Trains for one update and `EPOCHS` epochs, and returns the `FirstEpochs`.

    Args:
        maker: the `Maker` of the contestant.
        name: the workload's.
        updates: in an epoch.
        weights: the initial ones. From one seed, each backend of Keras draws other ones.
    """
    workload = models.named(name)
    x, y = workload.arrays(updates)
    make = getattr(importlib.import_module(maker.module), maker.function)
    fit = make(workload)
    fit.model.set_weights(weights)
    one_update = keras.tree.map_structure(lambda rows: rows[: workload.update_size], (x, y))
    started = time.perf_counter()
    fit.epoch(*one_update)
    first_update = time.perf_counter() - started
    losses = [fit.epoch(x, y)]
    first_epoch = time.perf_counter() - started
    losses += [fit.epoch(x, y) for _ in range(EPOCHS - 1)]
    return FirstEpochs(first_update, first_epoch, time.perf_counter() - started, losses)


@pytest.mark.parametrize("name", ["MLP 128", "ConvNet", "GPT nano", "Keras GPT", "KerasHub GPT-2"])
def test_first_minute(name, benchmark, report, tmp_path, monkeypatch):
    if name.startswith("KerasHub") and not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    peers = {"Keras GA default": ON_TENSORFLOW}
    # The layers of `fa.gpt` are TensorFlow's.
    if name != "GPT nano" and importlib.util.find_spec("jax"):
        peers["Keras on JAX"] = ON_JAX
    updates = 1 if benchmark.disabled else UPDATES
    weights = models.named(name).model().get_weights()
    cache = str(tmp_path / "cache")
    no_cache = ""
    runs = {"ours": [], "ours, second process": [], **{peer: [] for peer in peers}}

    def train(maker, cache):
        monkeypatch.setenv("FASTACCUM_COMPILE_CACHE", cache)
        monkeypatch.setenv("KERAS_BACKEND", maker.backend)
        return in_new_process(functools.partial(first_epochs, maker, name, updates, weights))

    def train_ours():
        runs["ours"].append(train(OURS, no_cache))

    def train_ours_again():
        runs["ours, second process"].append(train(OURS, cache))

    def train_peer(peer):
        runs[peer].append(train(peers[peer], no_cache))

    train(OURS, cache)  # fills the cache
    others = {"second": train_ours_again}
    for peer in peers:
        others[peer] = functools.partial(train_peer, peer)
    # The race gives the turns alone. Each process times itself, without its start.
    race(benchmark, train_ours, others, ROUNDS)
    losses = {contestant: its_runs[0].losses for contestant, its_runs in runs.items()}
    assert losses["ours"] == losses["ours, second process"]
    for peer in peers:
        # The first epoch alone is compared: after 61 updates rounding has moved the ConvNet's loss
        # by up to 3e-3 in any program.
        assert losses["ours"][0] == pytest.approx(losses[peer][0], rel=1e-3), peer
        for ours in ("ours", "ours, second process"):
            report_ratios(report, name, peer, runs[peer], ours, runs[ours])


def report_ratios(report, name, peer, their_runs, ours, our_runs):
    """Reports the median of the rounds' ratios for each span of time."""
    spans = {
        "first update": operator.attrgetter("first_update"),
        "first epoch": operator.attrgetter("first_epoch"),
        "first three epochs": operator.attrgetter("total"),
    }
    for span, seconds in spans.items():
        our_seconds = list(map(seconds, our_runs))
        their_seconds = list(map(seconds, their_runs))
        note = (
            f"ours {statistics.median(our_seconds):.2f} s, "
            f"theirs {statistics.median(their_seconds):.2f} s"
        )
        measure = f"{span}, cold: {peer} / {ours}"
        report(measure, models.named(name), ratio(their_seconds, our_seconds), note)
