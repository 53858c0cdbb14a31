"""The judge of random calls sees each kind of fault that is planted: the negative control."""

import re

import numpy as np
import pytest
import random_calls
import tensorflow as tf
from hypothesis import find
from random_calls import Call, calls, fuzz, judge, positive

import fastaccum as fa
from fastaccum import checks

VALID = Call({"batch_size": 0})
SPOILED = VALID._replace(spoiled=("batch_size",))
BAD = SPOILED._replace(refused=("batch_size",))


def is_one(result):
    np.testing.assert_allclose(result, 1.0)


def refuse():
    checks.whole_number("batch_size", 0)


def wrap_error():
    raise RuntimeError("wrapped") from random_calls.PassedIn("raised by what was passed")


@pytest.mark.parametrize(
    "call, run, outcome",
    [
        (SPOILED, lambda: 1.0, "result"),
        (BAD, refuse, "refused"),
        (BAD, lambda: fa.Trainer(None, modle=1), "refused"),
        (BAD, random_calls.raises, "raised by what was passed"),
        (BAD, wrap_error, "raised by what was passed"),
        (BAD, lambda: 1.0, "batch_size: taken in silence"),
        (VALID, refuse, "A valid call is refused"),
        (SPOILED, lambda: 1.1, "The result is wrong"),
        (SPOILED, lambda: np.nan, "The result is wrong"),
        (SPOILED, lambda: checks.whole_number("another", 0), "An error that names none of"),
        (SPOILED, lambda: {}["batch_size"], "A raw error. KeyError"),
        (SPOILED, lambda: tf.constant("batch_size") + 1, "A raw error. InvalidArgumentError"),
        (SPOILED, lambda: int("batch_size"), "An error of others. ValueError"),
        (SPOILED, lambda: tf.reshape([1.0], "batch_size"), "A raw error|An error of others"),
    ],
)
def test_the_judge(call, run, outcome):
    try:
        verdict = judge(call, run, is_one)
    except random_calls.Wrong as wrong:
        verdict = str(wrong)
    assert re.match(outcome, verdict), verdict


def test_what_moved_before_a_refusal_is_seen():
    moved = []

    def move_and_refuse():
        moved.append(1)
        refuse()

    with pytest.raises(random_calls.Wrong, match="It moved something, and then was refused"):
        judge(BAD, move_and_refuse, is_one, lambda: list(moved))


def test_a_bad_value_that_is_taken_is_found_and_shrunk():
    drawn = calls({"value": positive(1e-3, 1e3), "other": positive(1e-3, 1e3)}, ["value"])
    call = find(drawn, lambda call: call.refused == ("value",), settings=fuzz(200))
    assert list(call.arguments) == ["value"]
