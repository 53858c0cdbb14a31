"""Max pooling and its gradient against TensorFlow's own, ties and remainders included."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels.cpu_layers import max_pool2d


def output_and_gradient(pool, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = pool(x)
    dy = np.random.default_rng(1).normal(size=y.shape)
    return y, tape.gradient(y, x, output_gradients=tf.cast(dy, y.dtype))


@pytest.mark.parametrize(
    ("shape", "window"), list(itertools.product([(2, 6, 8, 3), (1, 7, 5, 2)], [(2, 2), (3, 2), (1, 4), (5, 5)]))
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("values", ["distinct", "ties"])
def test_it_is_that_of_tensorflow(shape, window, dtype, values):
    rng = np.random.default_rng(0)
    x = rng.permutation(np.prod(shape)) - 40.0 if values == "distinct" else rng.integers(0, 3, shape)
    x = tf.cast(tf.reshape(x, shape), dtype)
    ours = output_and_gradient(lambda x: max_pool2d(x, window), x)
    theirs = output_and_gradient(lambda x: tf.nn.max_pool2d(x, window, window, "VALID"), x)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(tf.cast(a, tf.float64), tf.cast(b, tf.float64))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_bad_number_is_hidden(bad):
    """TensorFlow's own pooling leaves a NaN out."""
    x = np.full((1, 2, 2, 1), -np.inf, "float32")
    x[0, 1, 0, 0] = bad
    np.testing.assert_array_equal(max_pool2d(x, (2, 2)), [[[[bad]]]])


@pytest.mark.parametrize(
    ("pooling", "fast"),
    [
        ({"pool_size": 2}, True),
        pytest.param({"pool_size": (3, 1)}, True, marks=pytest.mark.variant),  # two rows remain
        ({"pool_size": 2, "padding": "same"}, True),
        ({"pool_size": (3, 1), "padding": "same"}, False),
        pytest.param({"pool_size": 3}, False, marks=pytest.mark.variant),
        pytest.param({"pool_size": 8}, False, marks=pytest.mark.variant),
        ({"pool_size": 3, "strides": 2}, False),
    ],
)
def test_a_model_uses_it_where_windows_do_not_overlap(pooling, fast):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.MaxPooling2D(**pooling)]
        return keras.Sequential([keras.Input((10, 10, 2)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 10, 10, 2)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")
    ours, theirs = make(), make()
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), "mse")
    stack = x.reshape(2, 3, 10, 10, 2), y.reshape(2, 3, 1)
    assert ("select-and-scatter" not in trainer.compiler_ir(stack, stage="hlo")) == fast
    trainer.train_step(stack)
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "call" not in vars(ours.layers[1])
