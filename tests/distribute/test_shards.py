"""Slots shared out over replicas train as slots on each: the checks of `on_shards.py`."""

import on_shards
import pytest
import tensorflow as tf
from on_replicas import cases, outcomes

import fastaccum as fa
from fastaccum.distribute import deal

pytestmark = pytest.mark.long

CHECKS = [name.removeprefix("check_") for name in vars(on_shards) if name.startswith("check_")]
FIRST = ["same_adamw", "slots_are_on_their_owners_device_alone", "refused"]
RESUMED = "resumed_on_other_devices_and_shares"  # for four devices
ON_FOUR = [
    "same_adamw",
    "same_lamb",
    "same_muon",
    "same_sgd",
    "same_adafactor",
    "slots_are_on_their_owners_device_alone",
    "same_when_gathered",
    "wrong_exchange_is_another_training",
    "collectives_of_a_step",
    "same_in_rounds",
    "planned_memory",
    RESUMED,
]


@pytest.mark.parametrize(("count", "names", "name"), cases(CHECKS, FIRST, ON_FOUR, alone=[RESUMED]))
def test_shards(count, names, name):
    assert (failure := outcomes(count, names, on_shards.__file__)[name]) is None, failure


def test_lines_hold_every_number_once(monkeypatch):
    monkeypatch.setattr(deal, "ROUND", 48)
    tensors = [
        tf.range(13.0),
        None,
        tf.reshape(tf.range(6.0), [2, 3]) + 20.0,
        tf.constant(31.0),
        tf.range(4.0) + 40.0,
    ]
    owned = deal.deal([13, 5, 6, 1, 4], 3)
    assert owned == [[0], [1, 4], [2, 3]]
    length, rounds = deal.segments(owned, tensors)
    assert (length, rounds) == (4, 4)
    for places in owned:
        owned_tensors = [tensors[place] for place in places]
        line = [
            deal.pack(places, owned_tensors, tensors, number, length) for number in range(rounds)
        ]
        assert all(segment.shape == [length] for segment in line)
        unpacked = dict(deal.unpack(places, line, tensors))
        assert set(unpacked) == set(places) - {1}
        for place, tensor in unpacked.items():
            tf.debugging.assert_equal(tensor, tensors[place])


def test_rounds_hold_every_number_once_in_order(monkeypatch):
    monkeypatch.setattr(deal, "ROUND", 28)
    tensors = [tf.range(13.0), None, tf.zeros([2, 3]), tf.zeros([]), tf.zeros([0])]
    rounds = deal.cut(tensors)
    assert rounds == [[(0, 0, 7)], [(0, 7, 13), (2, 0, 1)], [(2, 1, 6), (3, 0, 1)]]


def test_a_model_made_outside_a_strategy_has_nobody_to_share_with():
    with pytest.raises(
        ValueError, match="shard_optimizer=True, and the model was made outside the scope"
    ):
        fa.Trainer(on_shards.deep(), "adam", "mse", shard_optimizer=True)
