"""Traces that are open in lengths compute what a trace for each length computes."""

import math

import numpy as np
import tensorflow as tf

from fastaccum.step.program import make_programs


def test_a_program_that_may_relax_has_one_trace_for_all_lengths():
    traced = []

    def mean(stack):
        traced.append(stack.shape)
        return tf.reduce_mean(stack)

    (program,) = make_programs([mean], jit_compile=False)
    program.may_relax = True
    for rows, length in ((2, 3), (4, 3), (5, 3), (4, 7), (9, 9), (2, 3)):
        x = np.random.default_rng(rows).normal(size=(1, rows, length)).astype("float32")
        np.testing.assert_allclose(program(tf.constant(x)), x.mean(), rtol=1e-5)
    assert [shape.as_list() for shape in traced] == [[1, None, 3], [1, None, None]]


def test_a_function_that_needs_to_know_lengths_is_traced_for_each():
    def mean(stack):
        return tf.reduce_sum(stack) / math.prod(stack.shape)

    (program,) = make_programs([mean], jit_compile=False)
    program.may_relax = True
    for rows in (2, 3, 4):
        assert float(program(tf.ones([1, rows]))) == 1
    assert len(program.seconds) == 3
