"""The judge of fuzzed calls sees what is planted."""

import re

import fuzzing
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import Call, Values, draw

import fastaccum as fa
from fastaccum import checks

CALL = Call("fit", {"batch_size": "0"}, odd=("batch_size",))
BAD = CALL._replace(bad=("batch_size",))


def right(result):
    np.testing.assert_allclose(result, 1.0)


def ours():
    checks.whole_number("batch_size", 0)


def nameless():
    checks.whole_number("another", 0)


def signature():
    fa.Trainer(None, modle=1)


def theirs():
    fuzzing.raises()


def from_theirs():
    raise RuntimeError("wrapped") from fuzzing.Theirs("raised by what was passed")


@pytest.mark.parametrize(
    "call, run, outcome",
    [
        (CALL, lambda: 1.0, "result"),
        (BAD, ours, "refused"),
        (BAD, signature, "refused"),
        (BAD, theirs, "raised by what was passed"),
        (BAD, from_theirs, "raised by what was passed"),
        (BAD, lambda: 1.0, "batch_size: taken in silence"),
        (CALL, lambda: 1.1, "The result is wrong"),
        (CALL, lambda: np.nan, "The result is wrong"),
        (CALL, nameless, "An error that names no argument"),
        (CALL, lambda: {}["batch_size"], "A raw error. KeyError"),
        (CALL, lambda: None.batch_size, "A raw error. AttributeError"),
        (CALL, lambda: tf.constant("batch_size") + 1, "A raw error. InvalidArgumentError"),
        (
            CALL,
            lambda: tf.convert_to_tensor(object(), name="batch_size"),
            "An error of others. ValueError",
        ),
        (CALL, lambda: int("batch_size"), "An error of others. ValueError"),
        (CALL, lambda: tf.reshape([1.0], "batch_size"), "A raw error|An error of others"),
    ],
)
def test_the_judge(call, run, outcome):
    try:
        said = fuzzing.judge(call, run, lambda: 0, right)
    except fuzzing.Wrong as wrong:
        said = str(wrong)
    assert re.match(outcome, said), said


def test_what_moved_before_a_refusal_is_seen():
    moved = []

    def moves():
        moved.append(1)
        ours()

    with pytest.raises(fuzzing.Wrong, match="It moved something, and then was refused"):
        fuzzing.judge(BAD, moves, lambda: list(moved), right)


def test_calls_are_the_same_again_and_failures_can_be_pasted():
    table = {
        "name": Values(["'a'"]),
        "value": Values([fuzzing.numbers(1e-3, 1e3)], bad=fuzzing.ANYTHING),
    }

    def make(rng):
        call = draw(rng, "checks.positive", table, required=list(table))
        names = {**vars(fuzzing), "checks": checks}
        arguments = {name: fuzzing.value(code, names) for name, code in call.arguments.items()}
        return call, lambda: checks.positive(**arguments), lambda: 0, lambda result: None

    outcomes, found = fuzzing.fuzz(60, 3, make)
    assert sum(outcomes.values()) == 60 and len(found) == outcomes["WRONG"] > 0
    assert [f.code for f in fuzzing.fuzz(60, 3, make)[1]] == [f.code for f in found]
    assert found[0].code in [f.code for f in fuzzing.fuzz(1, 3, make, first=found[0].number)[1]]
    assert any(f.code in fuzzing.report(found) for f in found)


def test_every_value_can_be_made():
    names = {**vars(fuzzing), "fa": fa}
    for code in fuzzing.ANYTHING:
        fuzzing.value(code, names)
