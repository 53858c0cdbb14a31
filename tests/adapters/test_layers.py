"""Layers in the forms that XLA compiles in a loop, against Keras's own."""

import keras
import numpy as np
import pytest

import fastaccum as fa


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
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    trainer.train_step((x.reshape(2, 3, 7, 6, 2), y.reshape(2, 3, 1)))
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all("convolution_op" not in vars(layer) for layer in ours.layers)
