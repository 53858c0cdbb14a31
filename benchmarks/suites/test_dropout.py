"""Models with Dropout in `fit`: ours, Keras's own accumulation, and ours without Dropout.

Without XLA TensorFlow draws other random numbers. So Keras agrees with ours only in the way that
"auto" takes for ours, with XLA or without.
"""

import pytest

from benchmarks.peers import keras_accumulation
from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio


@pytest.mark.parametrize("workload", models.WITH_DROPOUT, ids=lambda w: w.name)
def test_dropout(workload, benchmark, report):
    dropping = models.WITH_DROPOUT[workload]
    ours = contestants.make_fit(dropping)
    peers = {
        "without": contestants.make_fit(workload),
        "Keras GA, jit": keras_accumulation.make(dropping, jit_compile=True),
        "Keras GA, no jit": keras_accumulation.make(dropping, jit_compile=False),
    }
    outcomes = {name: agreement.outcome_of_fit(peer, workload) for name, peer in peers.items()}
    same_numbers = "Keras GA, no jit" if workload is models.CONVNET else "Keras GA, jit"
    our_outcome = agreement.outcome_of_fit(ours, workload)
    agreement.assert_agree(our_outcome, outcomes[same_numbers], same_numbers)

    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    epochs = {name: lambda peer=peer: peer.epoch(x, y) for name, peer in peers.items()}
    times = race(benchmark, lambda: ours.epoch(x, y), epochs, workload.rounds)
    if times:
        notes = {name: milliseconds(seconds, updates) for name, seconds in times.items()}
        for name in ("Keras GA, jit", "Keras GA, no jit"):
            note = f"ours {notes['ours']}, theirs {notes[name]}"
            report(
                f"fit with Dropout: {name} / ours",
                workload,
                ratio(times[name], times["ours"]),
                note,
            )
        note = f"{notes['ours']}, without {notes['without']}"
        report(
            "fit: with Dropout / without", workload, ratio(times["ours"], times["without"]), note
        )
