"""Gradients that a stack of layers adds to a step's accumulators itself: the same sums as plain
autodiff's.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import fastaccum as fa
from fastaccum.kernels import gradients
from fastaccum.kernels.gradients import Accumulators
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.kernels.trace_context import TraceContext, accumulator_of

K, B, D, DEPTH = 3, 2, 4, 2


def once(stack, x):
    return stack(x)


def in_float16(stack, x):
    return stack(x)


def twice(stack, x):
    """Each weight's gradient is a sum of two, of which the kernel adds one."""
    return stack(tf.sin(stack(x)))


def also_read_by_the_loss(stack, x):
    return stack(x) * tf.reduce_sum(tf.square(stack.trainable_variables[0].value))


def in_a_branch(stack, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: stack(x), lambda: 2 * x)


def scaled_on_its_way(stack, x):
    """The gradients that the stack returns are not those that reach its weights."""
    weights = [weight.value for weight in stack.trainable_variables]

    @tf.custom_gradient
    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = stack(x)

        def gradient(dy, variables):
            dx, dw = tape.gradient(y, [x, weights], dy)
            by_name = {v.ref(): 3 * each for v, each in zip(weights, dw, strict=True)}
            return dx, [by_name[v.ref()] for v in variables]

        return y, gradient

    return call(x)


# And how many of two accumulators the kernel adds to.
FORMS = {
    once: 2,
    in_float16: 2,
    twice: 2,
    also_read_by_the_loss: 2,
    in_a_branch: 0,
    scaled_on_its_way: 0,
}


def trained(implementation):
    """The weights of a stack for each form, after a step."""
    keras.utils.set_random_seed(1)

    def made(form):
        dense = layers.Dense(D, "tanh", dtype="float16" if form is in_float16 else "float32")
        stack = LayerStack(dense, DEPTH, implementation=implementation)
        stack.build((B, D))
        return stack

    stacks = {form: made(form) for form in FORMS}

    def loss(x):
        outputs = [form(stack, tf.cast(x, stack.compute_dtype)) for form, stack in stacks.items()]
        return tf.add_n([tf.reduce_sum(tf.cast(y, tf.float32) ** 2) for y in outputs]), float(
            len(x)
        )

    weights = [weight for stack in stacks.values() for weight in stack.trainable_variables]
    step = fa.TrainStep(loss, weights, keras.optimizers.SGD(0.1), loss_scale=8.0)
    x = np.random.default_rng(0).normal(size=(K, B, D)).astype("float32")
    step(x)
    return {
        form: [weight.numpy() for weight in stack.trainable_variables]
        for form, stack in stacks.items()
    }


def test_a_step_is_that_of_plain_autodiff(monkeypatch):
    added, init = [], gradients.AddedAccumulator.__init__

    def spy(self, total, *terms):
        added.append(total.shape)
        init(self, total, *terms)

    monkeypatch.setattr(gradients.AddedAccumulator, "__init__", spy)
    ours, theirs = trained("auto"), trained("reference")
    assert len(added) == sum(FORMS.values())
    for form in FORMS:
        tolerance = 1e-3 if form is in_float16 else 1e-5
        for mine, expected in zip(ours[form], theirs[form], strict=True):
            np.testing.assert_allclose(
                mine, expected, rtol=tolerance, atol=tolerance, err_msg=form.__name__
            )


@pytest.mark.parametrize("added", range(3))
def test_a_kernel_adds_one_term_and_the_other_terms_are_left(added):
    with tf.Graph().as_default():
        terms, total = [tf.fill([2], float(i)) for i in range(3)], tf.zeros([2])
        variable = tf.Variable(total)
        accumulators = Accumulators([variable], [total])
        with TraceContext(accumulators).entered():
            with_it = total + terms[added]
            accumulator_of(variable).note(terms[added], with_it)
        found, left = accumulators.with_added(tf.add_n(terms))
    assert found is with_it and [*map(id, left)] == [
        id(t) for i, t in enumerate(terms) if i != added
    ]
