"""Tests that the check before any timing fails for a contestant that trains differently."""

import dataclasses

import keras
import pytest

from benchmarks.peers import eager_loop
from benchmarks.support import agreement, contestants, models

TINY = dataclasses.replace(
    models.MLP_128,
    micro_batches=3,
    batch_size=4,
    build=lambda: keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(10)]
    ),
)


def outcome(make=eager_loop.make, workload=TINY):
    return agreement.outcome_of_train_step(make(workload), workload)


@pytest.fixture(scope="module")
def ours():
    return outcome(contestants.make_train_step)


def test_the_same_training_agrees(ours):
    agreement.assert_agree(ours, outcome(), "eager loop")


def test_a_forgotten_micro_batch(ours):
    def make(workload):
        peer = eager_loop.make(workload)
        return dataclasses.replace(peer, feed=lambda stack: peer.feed(stack)[1:])

    with pytest.raises(AssertionError, match="losses of forgetful"):
        agreement.assert_agree(ours, outcome(make), "forgetful")


def test_another_learning_rate(ours):
    # The first loss does not know it yet, and the second hardly.
    other = dataclasses.replace(TINY, optimizer=lambda: keras.optimizers.Adam(1.1e-3))
    theirs = dataclasses.replace(outcome(workload=other), losses=ours.losses)
    with pytest.raises(AssertionError, match=r"fast: weight 0 \(784, 8\) moved"):
        agreement.assert_agree(ours, theirs, "fast")


def test_other_initial_weights(ours):
    def make(workload):
        peer = eager_loop.make(workload)
        kernel = peer.model.trainable_variables[0]
        kernel.assign(kernel + 1e-6)
        return peer

    with pytest.raises(AssertionError, match="initial weight 0 of shifted"):
        agreement.assert_agree(ours, outcome(make), "shifted")


def test_nothing_trained(ours):
    still = dataclasses.replace(ours, after=ours.before)
    with pytest.raises(AssertionError, match="nothing moved"):
        agreement.assert_agree(still, still, "still")


def test_a_weight_too_few(ours):
    theirs = dataclasses.replace(ours, after=ours.after[:-1])
    with pytest.raises(ValueError, match="shorter"):
        agreement.assert_agree(ours, theirs, "short")
