"""Models with Dropout: ours and Keras's own accumulation in `fit`, and what the Dropout costs a
step of ours.

Without XLA TensorFlow draws other numbers, so of Keras's two ways only that one can agree which
"auto" takes for ours.
"""

import pytest

from benchmarks.peers import keras_accumulation
from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio


@pytest.mark.parametrize("workload", models.WITH_DROPOUT, ids=lambda w: w.name)
def test_dropout(workload, benchmark, report):
    dropping = models.WITH_DROPOUT[workload]
    ours, without = contestants.make_fit(dropping), contestants.make_fit(workload)
    compiled, plain = (keras_accumulation.make(dropping, jit_compile=jit) for jit in (True, False))
    peers = {"without": without, "Keras GA, jit": compiled, "Keras GA, no jit": plain}
    outcomes = {name: agreement.outcome_of_fit(peer, workload) for name, peer in peers.items()}
    alike = "Keras GA, no jit" if workload is models.CONVNET else "Keras GA, jit"
    agreement.assert_agree(agreement.outcome_of_fit(ours, workload), outcomes[alike], alike)

    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    epochs = {name: lambda peer=peer: peer.epoch(x, y) for name, peer in peers.items()}
    times = race(benchmark, lambda: ours.epoch(x, y), epochs, workload.rounds)
    if times:
        notes = {name: milliseconds(each, updates) for name, each in times.items()}
        for jit in ("jit", "no jit"):
            name = f"Keras GA, {jit}"
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
