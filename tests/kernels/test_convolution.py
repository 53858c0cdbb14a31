"""The convolution's gradients against float64 and TensorFlow's own, over shapes, strides and paddings."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels.cpu_layers import conv2d

SHAPES = [((2, 7, 9, 3), (3, 3, 3, 4)), ((1, 6, 5, 2), (2, 4, 2, 3)), ((3, 8, 8, 1), (1, 5, 1, 2))]
CASES = list(itertools.product(SHAPES, [(1, 1), (2, 2), (3, 1)], ["same", "valid"]))


def gradients(convolution, x, kernel, dy=None):
    with tf.GradientTape() as tape:
        tape.watch((x, kernel))
        y = convolution(x, kernel)
    dy = np.random.default_rng(2).normal(size=y.shape) if dy is None else dy
    return y, *tape.gradient(y, (x, kernel), output_gradients=tf.cast(dy, y.dtype))


@pytest.mark.parametrize(("shapes", "strides", "padding"), CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_are_those_of_tensorflow(shapes, strides, padding, dtype):
    rng = np.random.default_rng(0)
    x, kernel = (tf.constant(rng.normal(size=s), dtype) for s in shapes)

    def ours(x, kernel):
        return conv2d(x, kernel, strides, padding)

    def reference(x, kernel):
        return tf.nn.conv2d(x, kernel, list(strides), padding.upper())

    tolerance = 1e-12 if dtype == "float64" else 2e-5
    for got, expected in zip(gradients(ours, x, kernel), gradients(reference, x, kernel), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"dilation_rate": 2}, {"dilation_rate": (2, 1), "groups": 2}, {"groups": 2}])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_dilated_and_grouped_layers_train_as_in_keras(options, padding):
    def make():
        keras.utils.set_random_seed(3)
        convolution = keras.layers.Conv2D(4, 3, padding=padding, **options)
        return keras.Sequential([keras.Input((7, 6, 2)), convolution, keras.layers.Flatten(), keras.layers.Dense(1)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 7, 6, 2)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")
    ours, theirs = make(), make()
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), "mse")
    trainer.train_step((x.reshape(2, 3, 7, 6, 2), y.reshape(2, 3, 1)))
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_model_uses_it_in_the_loop():
    """No gradient convolution with permuted dimensions is left in the program, and nothing stays on the layers."""
    layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, padding="same"), keras.layers.Conv2D(4, 2, strides=2)]
    # A stack calls its layer again in the backward pass.
    stacked = fa.kernels.LayerStack(keras.layers.Conv2D(4, 3, padding="same"), depth=2)
    model = keras.Sequential([*layers, stacked, keras.layers.Flatten(), keras.layers.Dense(2)])
    trainer = fa.Trainer(model, "sgd", "mse")
    stack = np.zeros((2, 4, 8, 8, 3), "float32"), np.zeros((2, 4, 2), "float32")
    labels = re.findall(r"dim_labels=(\S+?)[,\s]", trainer.compiler_ir(stack, stage="hlo"))
    assert labels and set(labels) == {"b01f_01io->b01f"}
    assert all("convolution_op" not in vars(layer) for layer in (model.layers[0], stacked.template))
