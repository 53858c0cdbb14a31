"""Train step of ours, of two hand-written loops, and of one XLA step over the full batch.

A timed block is `step_updates` updates on data that lies in tensors already, and ends when its last
loss is read.
"""

import pytest

from benchmarks.peers import eager_loop, full_batch, function_loop
from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

PEERS = {"eager loop": eager_loop, "tf.function loop": function_loop, "full batch XLA": full_batch}


@pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
def test_train_step(workload, benchmark, report):
    ours = contestants.make_train_step(workload)
    peers = {name: peer.make(workload) for name, peer in PEERS.items()}

    our_outcome = agreement.outcome_of_train_step(ours, workload)
    for name, peer in peers.items():
        if peer is peers["full batch XLA"] and workload.has_batch_statistics:
            # Compiled all the same, so that the timing below finds it warm.
            agreement.outcome_of_train_step(peer, workload)
        else:
            agreement.assert_agree(
                our_outcome, agreement.outcome_of_train_step(peer, workload), name
            )

    updates = 1 if benchmark.disabled else workload.step_updates
    blocks = {name: peer.block(workload, updates) for name, peer in peers.items()}
    times = race(benchmark, ours.block(workload, updates), blocks, workload.rounds)
    if times:
        for name in peers:
            note = (
                f"ours {milliseconds(times['ours'], updates)}, theirs "
                f"{milliseconds(times[name], updates)}"
            )
            report(f"train step: {name} / ours", workload, ratio(times[name], times["ours"]), note)


@pytest.mark.parametrize("workload", [models.CONVNET], ids=lambda w: w.name)
def test_full_batch_agrees_with_frozen_statistics(workload):
    """Compares in inference mode: BatchNorm over 16 and over 128 images differ by nature."""
    workload = workload.with_frozen_statistics()
    ours = agreement.outcome_of_train_step(contestants.make_train_step(workload), workload)
    theirs = agreement.outcome_of_train_step(full_batch.make(workload), workload)
    agreement.assert_agree(ours, theirs, "full batch XLA, frozen statistics")
