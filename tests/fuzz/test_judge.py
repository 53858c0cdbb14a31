"""The judge of random calls sees each kind of fault that is planted: the negative control."""

import re

import numpy as np
import pytest
import random_calls
import tensorflow as tf
from hypothesis import find
from random_calls import Call, Values, calls, fuzz, judge

import fastaccum as fa
from fastaccum import checks

VALID = Call("fit", {"batch_size": "0"})
ODD = VALID._replace(odd=("batch_size",))
BAD = VALID._replace(bad=("batch_size",))
POSITIVE = {
    "name": Values(["'a'"]),
    "value": Values([random_calls.numbers(1e-3, 1e3)], bad=random_calls.ANYTHING),
}


def is_one(result):
    np.testing.assert_allclose(result, 1.0)


def refuse():
    checks.whole_number("batch_size", 0)


def wrap_error():
    raise RuntimeError("wrapped") from random_calls.PassedIn("raised by what was passed")


@pytest.mark.parametrize(
    "call, run, outcome",
    [
        (ODD, lambda: 1.0, "result"),
        (BAD, refuse, "refused"),
        (BAD, lambda: fa.Trainer(None, modle=1), "refused"),
        (BAD, random_calls.raises, "raised by what was passed"),
        (BAD, wrap_error, "raised by what was passed"),
        (BAD, lambda: 1.0, "batch_size: taken in silence"),
        (VALID, refuse, "A valid call is refused"),
        (ODD, lambda: 1.1, "The result is wrong"),
        (ODD, lambda: np.nan, "The result is wrong"),
        (ODD, lambda: checks.whole_number("another", 0), "An error that names no argument"),
        (ODD, lambda: {}["batch_size"], "A raw error. KeyError"),
        (ODD, lambda: None.batch_size, "A raw error. AttributeError"),
        (ODD, lambda: tf.constant("batch_size") + 1, "A raw error. InvalidArgumentError"),
        (ODD, lambda: tf.convert_to_tensor(object(), name="batch_size"), "An error of others"),
        (ODD, lambda: int("batch_size"), "An error of others. ValueError"),
        (ODD, lambda: tf.reshape([1.0], "batch_size"), "A raw error|An error of others"),
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
    def is_taken(call):
        return call.bad and judge(call._replace(bad=()), lambda: 1.0) == "result"

    call = find(calls("f", POSITIVE, required=["name", "value"]), is_taken, settings=fuzz(200))
    assert call.arguments == {"name": "'a'", "value": "None"}


def test_every_value_can_be_made():
    for code in random_calls.ANYTHING:
        eval(code, dict(random_calls.NAMES))
