"""Tests what stops training, and the messages of its errors."""

import pytest
import tensorflow as tf

from fastaccum.step.guards import IndexChecks, StuckSteps


def test_the_end_is_found_late():
    steps, seen = StuckSteps(patience=2), []
    for stuck in (True, False, True, True, False):  # the last one comes after the end
        steps.count(tf.constant(stuck), tf.constant(True))
        seen.append((steps.since_end(steps.seen()), bool(steps.running())))
    assert seen == [(None, True), (None, True), (None, True), (0, False), (1, False)]


def test_indices_out_of_range_are_told_and_forgotten():
    checks = IndexChecks([("labels", 10)])
    checks.observe(0, tf.constant([3, 12]))
    assert not checks.in_range()
    with pytest.raises(
        ValueError,
        match=r"labels: values from 3 to 12 were seen, but only 0 to 9 exist.*13 classes",
    ):
        checks.require(checks.seen())
    assert checks.in_range()
