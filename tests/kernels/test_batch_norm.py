"""Batch normalisation and its gradient against float64 autodiff, and in a model against Keras's own."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels.cpu_layers import batch_norm

EPSILON = 1e-3


def reference(x, scale, offset):
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, EPSILON), mean, variance


def outputs_and_gradients(fn, *args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        y, mean, variance = fn(*args)
    dy = tf.cast(np.random.default_rng(1).normal(size=y.shape), y.dtype)
    return [y, mean, variance, *tape.gradient(y, args, dy)]


@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 4), (2, 3, 5, 4), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_the_unfused_expression(shape, dtype):
    rng = np.random.default_rng(0)
    x, scale, offset = rng.normal(3, 2, shape), rng.normal(size=shape[-1]), rng.normal(size=shape[-1])
    ours = outputs_and_gradients(
        lambda *args: batch_norm(*args, EPSILON), *(tf.constant(t, dtype) for t in (x, scale, offset))
    )
    expected = outputs_and_gradients(reference, *map(tf.constant, (x, scale, offset)))
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    for got, wanted in zip(ours, expected, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_second_derivatives():
    """A gradient penalty: the derivative of |dy/dx|^2."""
    rng = np.random.default_rng(0)
    x, scale, offset, dy = (rng.normal(3, 2, shape) for shape in [(6, 4), 4, 4, (6, 4)])

    def penalty_gradients(fn):
        args = tuple(map(tf.constant, (x, scale, offset)))
        with tf.GradientTape() as outer:
            outer.watch(args)
            with tf.GradientTape() as inner:
                inner.watch(args)
                y = fn(*args)[0]
            penalty = tf.reduce_sum(inner.gradient(y, args[0], dy) ** 2)
        return outer.gradient(penalty, args[:2])

    for got, wanted in zip(
        penalty_gradients(lambda *args: batch_norm(*args, EPSILON)), penalty_gradients(reference), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rows", [2**20, 10**6, 2 * 4099])
def test_many_rows_lose_no_precision(rows):
    """Rows that divide into a square, and those that hardly divide."""
    x = np.random.default_rng(0).normal(5, 2, (rows, 2)).astype("float32")
    ours = tf.function(lambda x: batch_norm(x, tf.ones([2]), tf.zeros([2]), EPSILON), jit_compile=True)
    _, mean, variance = ours(x)
    np.testing.assert_allclose(mean, x.mean(0, dtype="float64"), rtol=2e-5)
    np.testing.assert_allclose(variance, x.var(0, dtype="float64"), rtol=2e-5)


def train(make, updates=3, fast=True, hidden=6):
    """A model after `updates` steps, by fastaccum or by Keras on the same micro-batch, and its predictions."""
    keras.utils.set_random_seed(3)
    model = make()
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 2, size=(8, 6, 5, 4)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    x[1:3, hidden:] = 0.0
    if fast:
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse")
        for _ in range(updates):
            trainer.train_step((x[None], y[None]))
    else:
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        for _ in range(updates):
            model.train_on_batch(x, y)
    return [*model.get_weights(), model.predict(x, verbose=0)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": False, "center": False, "momentum": 0.5},
        {"axis": 3, "epsilon": 0.1},
        {"axis": 1},
        {"renorm": True},
        {"trainable": False},
        {"dtype": "mixed_bfloat16"},
        {"dtype": "mixed_float16"},
    ],
    ids=str,
)
def test_a_model_trains_as_in_keras(options):
    def make():
        layer = keras.layers.BatchNormalization(**options)
        return keras.Sequential([keras.Input((6, 5, 4)), layer, keras.layers.Flatten(), keras.layers.Dense(1)])

    tolerance = 2e-2 if "dtype" in options else 2e-4
    for ours, theirs in zip(train(make), train(make, fast=False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_what_a_mask_hides_counts_in_no_moment():
    def make():
        layers = [keras.layers.Masking(), keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling1D()]
        return keras.Sequential([keras.Input((6, 5, 4)), keras.layers.Reshape((30, 4)), *layers, keras.layers.Dense(1)])

    for ours, theirs in zip(train(make, hidden=2), train(make, fast=False, hidden=2), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_its_sums_are_products_and_nothing_stays_on_the_layer():
    layer = keras.layers.BatchNormalization()
    trainer = fa.Trainer(keras.Sequential([keras.Input((6, 5, 7)), layer]), "sgd", "mse")
    stack = np.zeros((2, 8, 6, 5, 7), "float32"), np.zeros((2, 8, 6, 5, 7), "float32")
    hlo = trainer.compiler_ir(stack)
    assert len(re.findall(r"= f32\[7(?:,1)?\]\S+ dot\(", hlo)) == 4  # mean, variance, the gradients of scale and offset
    assert not re.search(r"= f32\[7\]\S+ reduce\(", hlo)
    assert "call" not in vars(layer)
