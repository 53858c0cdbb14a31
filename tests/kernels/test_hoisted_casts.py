"""Weights rounded once before a loop: the same bits as where each use rounds its own."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels import hoisted_casts
from fastaccum.kernels.matmul import convolution_fp32_wgrad, einsum_fp32_wgrad, matmul_fp32_wgrad
from fastaccum.kernels.trace_context import NO_CASTS, TraceContext

X = tf.random.stateless_normal([4, 6, 8], (0, 1))
ROWS = np.random.default_rng(0).normal(size=(3, 4, 8)).astype("float32")


@contextlib.contextmanager
def counting():
    """Counts the requests for a rounded copy, and whether one was at hand."""
    asked, copy_of = [], hoisted_casts.copy_of

    def counted(variable, dtype):
        copy = copy_of(variable, dtype)
        asked.append(copy is not None)
        return copy

    with mock.patch("fastaccum.kernels.fp32_layers.copy_of", counted):
        yield asked


def trained(once):
    keras.utils.set_random_seed(1)
    stack = fa.kernels.LayerStack(lambda: keras.layers.Dense(8, "tanh"), 2)
    model = keras.Sequential([keras.Input((8,)), stack, keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", clip_norm=1.0)
    never = mock.patch("fastaccum.step.train_step.hoisted_casts", lambda *values: NO_CASTS)
    with counting() as asked, contextlib.nullcontext() if once else never:
        losses = [trainer.train_step((ROWS, ROWS[..., :1])).loss.numpy() for _ in range(2)]
    assert asked and all(found == once for found in asked)
    return [*losses, *(weight.numpy() for weight in model.weights)]


def test_a_training_computes_the_same_bits():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for with_copies, without in zip(trained(True), trained(False), strict=True):
            np.testing.assert_array_equal(with_copies, without)
    finally:
        keras.config.set_dtype_policy(before)


def test_a_weight_that_the_forward_pass_assigns_has_no_copy():
    class Halving(keras.layers.Layer):
        def build(self, shape):
            self.dense = keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16")
            self.dense.build(shape)

        def call(self, x, training=False):
            if training:
                self.dense.kernel.assign(self.dense.kernel.value / 2)
            return self.dense(x)

    model = keras.Sequential([keras.Input((1,), dtype="float16"), Halving(dtype="mixed_float16")])
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.0), "mean_absolute_error", loss_scale=1.0)
    losses = trainer.train_step(
        (np.ones([2, 1, 1], "float32"), np.zeros([2, 1, 1], "float32"))
    ).loss
    assert losses.numpy() == (1 / 2 + 1 / 4) / 2


@pytest.mark.parametrize(
    ("function", "x", "kernel_shape"),
    [
        pytest.param(matmul_fp32_wgrad, X, [8, 5], marks=[pytest.mark.slow, pytest.mark.sample]),
        (lambda *operands: einsum_fp32_wgrad("abc,dce->adbe", *operands), X, [2, 8, 3]),
        pytest.param(
            lambda x, *kernels: convolution_fp32_wgrad(
                lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), x, *kernels
            ),
            X,
            [3, 8, 2],
            marks=[pytest.mark.slow, pytest.mark.sample],
        ),
    ],
)
def test_a_copy_changes_neither_values_nor_first_and_second_derivatives(function, x, kernel_shape):
    kernel, x = tf.random.stateless_normal(kernel_shape, (0, 2)), tf.cast(x, tf.float16)

    @tf.function(jit_compile=True)
    def derivatives(x, kernel, *copy):
        with tf.GradientTape() as outer:
            outer.watch((x, kernel))
            with tf.GradientTape() as tape:
                tape.watch((x, kernel))
                y = tf.square(function(x, kernel, *copy))
            first = tape.gradient(y, (x, kernel))
        return y, *first, *outer.gradient(first[0], (x, kernel))

    expected = derivatives(x, kernel)
    assert np.abs(expected[-1]).max() > 0
    for got, want in zip(derivatives(x, kernel, tf.cast(kernel, x.dtype)), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_copy_reaches_loops_but_no_function_that_is_kept_for_other_programs():
    weight, found, tables = tf.Variable([1 / 3]), {}, {}

    def look(where):
        found[where] = hoisted_casts.copy_of(weight, tf.float16)
        tables[where] = hoisted_casts.table(tf.range, 3, dtype=tf.float16)
        return tf.constant(0)

    kept = tf.function(lambda: look("function"))

    @tf.function
    def program():
        outside = tf.compat.v1.get_default_graph()

        def turn(i):
            casts = hoisted_casts.hoisted_casts([(weight, weight)], outside)
            with TraceContext(casts=casts).entered():
                look("loop")
                tables["unknown"] = hoisted_casts.table(tf.range, i, dtype=tf.float16)
                with keras.StatelessScope():  # in which a variable may have another value
                    look("scope")
                tf.cond(i > 0, lambda: look("branch"), kept)
            return i + 1

        tf.while_loop(lambda i: i < 2, turn, [tf.constant(0)])
        assert found["loop"].graph is outside

    program.get_concrete_function()
    assert found["loop"] is found["branch"] and found["loop"].dtype == tf.float16
    assert found["function"] is found["scope"] is None
    assert tables["loop"] is tables["branch"] and tables["loop"].graph is found["loop"].graph
    assert found["loop"].graph not in (tables["function"].graph, tables["unknown"].graph)
    assert hoisted_casts.copy_of(weight, tf.float16) is None
