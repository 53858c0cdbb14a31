"""`fit` over one epoch, from NumPy arrays to the epoch's loss: ours and Keras 3's own accumulation.

Keras runs with the defaults of `compile`, and tuned: the best of 1, 10 and 100 steps per execution,
with and without XLA. Ours runs with its defaults, and where epochs are long with 10 steps per
execution. All train on the same examples in the same order, after a first `fit` that compiles.

Keras on its JAX backend, with its defaults, trains in a process of its own and takes turns with
ours: a process has one backend of Keras.
"""

import importlib.util
import statistics

import pytest

from benchmarks.peers import keras_accumulation
from benchmarks.support import agreement, contestants, models, processes
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

DEFAULT = "Keras GA default"
OURS_TUNED = "ours, 10 steps/execution"
ON_JAX = "Keras on JAX"


@pytest.mark.parametrize("workload", models.ALL + models.CONVOLUTIONAL, ids=lambda w: w.name)
def test_fit(workload, benchmark, report):
    ours = contestants.make_fit(workload)
    tuned = keras_accumulation.make_tuned(workload)
    peers = {DEFAULT: keras_accumulation.make(workload), **tuned}
    if workload.fit_updates % 10 == 0:
        peers[OURS_TUNED] = contestants.make_fit(workload, steps_per_execution=10)

    our_outcome = agreement.outcome_of_fit(ours, workload)
    for name, peer in peers.items():
        agreement.assert_agree(
            our_outcome, agreement.outcome_of_fit(peer, workload), name, workload.movement
        )

    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    epochs = {name: lambda peer=peer: peer.epoch(x, y) for name, peer in peers.items()}
    times = race(benchmark, lambda: ours.epoch(x, y), epochs, workload.rounds)
    if times:
        best = min(tuned, key=lambda name: statistics.median(times[name]))
        note = (
            f"ours {milliseconds(times['ours'], updates)}, theirs "
            f"{milliseconds(times[DEFAULT], updates)}"
        )
        report("fit: Keras GA default / ours", workload, ratio(times[DEFAULT], times["ours"]), note)
        note = f"{best.removeprefix('Keras GA, ')}: {milliseconds(times[best], updates)}"
        report("fit: Keras GA best tuned / ours", workload, ratio(times[best], times["ours"]), note)
        if OURS_TUNED in times:
            note = f"ours with 10 steps/execution: {milliseconds(times[OURS_TUNED], updates)}"
            report(
                "fit: Keras GA best tuned / ours tuned",
                workload,
                ratio(times[best], times[OURS_TUNED]),
                note,
            )


@pytest.mark.parametrize(
    "workload",
    [models.MLP_128, models.CONVNET, models.KERAS_GPT, models.HUB_GPT2],
    ids=lambda w: w.name,
)
def test_fit_beside_keras_on_jax(workload, benchmark, report, monkeypatch):
    if not importlib.util.find_spec("jax"):
        pytest.skip("needs jax")
    if workload is models.HUB_GPT2 and not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    ours = contestants.make_fit(workload)
    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    weights = ours.model.get_weights()
    with processes.fit_peer("jax_keras_fit", "make", workload.name, weights) as peer:
        our_outcome = agreement.outcome_of_fit(ours, workload)
        agreement.assert_agree(our_outcome, peer.outcome(), ON_JAX, workload.movement)
        peer.prepare(updates)
        times = race(benchmark, lambda: ours.epoch(x, y), {ON_JAX: peer.run}, workload.rounds)
    if times:
        note = (
            f"ours {milliseconds(times['ours'], updates)}, theirs "
            f"{milliseconds(times[ON_JAX], updates)}"
        )
        report(f"fit: {ON_JAX} / ours", workload, ratio(times[ON_JAX], times["ours"]), note)
