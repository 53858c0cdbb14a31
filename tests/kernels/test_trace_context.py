"""The context of a trace: what is entered reaches kernels, and nothing is left of it outside."""

import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels import trace_context
from fastaccum.kernels.checkpoint_name import checkpoint_name, collected_names
from fastaccum.kernels.gradients import OfferedTotals
from fastaccum.kernels.trace_context import TraceContext, accumulator_of


def test_an_extension_keeps_the_rest_and_ends_with_its_block():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0])
        context = TraceContext(OfferedTotals([variable], [tf.zeros([1])]))
        with context.entered():
            with collected_names() as names:
                named = checkpoint_name(tf.zeros([1]), "inner")
                assert accumulator_of(variable) is not None
            assert list(names.values()) == [(named, "inner")]
            checkpoint_name(tf.zeros([1]), "outer")  # that nobody asks for
            assert len(names) == 1 and trace_context.current() is context
    assert trace_context.current() == TraceContext()


def test_an_error_leaves_no_context():
    with pytest.raises(KeyError), TraceContext(names={}).entered():
        raise KeyError
    assert trace_context.current() == TraceContext()


def test_closed_accumulators_are_offered_no_more():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0])
        accumulators = OfferedTotals([variable], [tf.zeros([1])])
        with TraceContext(accumulators).entered():
            assert accumulator_of(variable) is not None
            accumulators.close()
            assert accumulator_of(variable) is None


def test_a_step_enters_one_in_its_micro_step_alone():
    weight, seen = tf.Variable([1.0]), []

    def loss(micro_batch):
        seen.append(trace_context.current())
        return tf.reduce_sum(weight * micro_batch), tf.constant(1.0)

    fa.TrainStep(loss, [weight], "sgd")(tf.ones([2, 1]))
    assert all(context.accumulators is not None for context in seen) and seen
    assert trace_context.current() == TraceContext()
