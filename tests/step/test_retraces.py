"""The warning of programs that are made for many shapes."""

import warnings

import pytest
import tensorflow as tf

from fastaccum.step.program import make_programs
from fastaccum.step.retraces import Retraces


def lengths(*numbers):
    return [{"ids": tf.zeros([2, 4, n]), "y": tf.zeros([2, 4])} for n in numbers]


def half_and_y(stack):
    return 0.5 * stack["ids"], stack["y"]


def test_one_warning_for_a_hundred_shapes():
    """For all programs of a training together; it says what varies."""
    first, second = make_programs([half_and_y, half_and_y], jit_compile=False)
    with pytest.warns(
        RuntimeWarning, match=r"32 shapes, .*: \(2, 4, 1\), \(2, 4, 2\).* \(2, 4, 32\)\..* pad to"
    ) as warned:
        for stack in lengths(*range(1, 101)):
            first(stack)
            second(stack)
    assert len(warned) == 1 and first.function.experimental_get_tracing_count() == 100


def test_the_warning_of_many_sizes_says_how_to_cut_batches():
    (program,) = make_programs([tf.reduce_sum], jit_compile=False, retraces=Retraces(many=3))
    for rows in (1, 2):
        program(tf.zeros([1, rows, 2]))
    with pytest.warns(
        RuntimeWarning, match=r"rows\. .*3 shapes.* of a few sizes, such as by dataset.unbatch\(\)"
    ):
        program(tf.zeros([1, 3, 2]))


def test_a_few_lengths_are_no_fault():
    (program,) = make_programs([half_and_y], jit_compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for stack in lengths(*range(31)):
                program(stack)
