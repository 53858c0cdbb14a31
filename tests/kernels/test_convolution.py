"""The convolution's gradients against float64 and TensorFlow's own, over shapes, strides and paddings."""

import importlib
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.interceptors import intercepting
from fastaccum.adapters.layers import make_forms
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


LAYERS = {
    "Conv1D": [{}, {"padding": "causal"}, {"strides": 2, "padding": "same"}],
    "Conv1DTranspose": [{}, {"strides": 2, "padding": "same", "output_padding": 1}],
    "Conv2DTranspose": [
        *({"strides": strides, "padding": padding} for strides in (1, 2, (3, 2)) for padding in ("same", "valid")),
        *({"strides": 3, "output_padding": 2, "padding": padding} for padding in ("same", "valid")),
    ],
    "DepthwiseConv1D": [{"strides": 2}, {"depth_multiplier": 2, "padding": "same"}],
    "DepthwiseConv2D": [
        *({"strides": strides, "padding": padding} for strides in (1, 2, 3) for padding in ("same", "valid")),
        {"depth_multiplier": 2, "use_bias": False},
    ],
    "SeparableConv1D": [{"padding": "same"}],
    "SeparableConv2D": [{"strides": 2}, {"depth_multiplier": 2, "activation": "relu", "padding": "same"}],
}


def make_layer(kind, family=keras, **options):
    filters = {} if kind.startswith("Depthwise") else {"filters": 6}
    return getattr(family.layers, kind)(**{"kernel_size": 3, **filters, **options})


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("family", ["keras", pytest.param("tf_keras", marks=pytest.mark.variant)])
@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind, each in LAYERS.items() for options in each])
def test_other_convolutions_are_those_of_keras(kind, options, family, taps):
    layer = make_layer(kind, importlib.import_module(family), kernel_size=taps, dtype="float64", **options)
    rng = np.random.default_rng(0)
    for size in [(7, 9), (12, 8)]:
        x = tf.constant(rng.normal(size=(2, *size[: int(kind.partition("Conv")[2][0])], 3)))
        layer(x)
        (form,), results = make_forms([layer], fast_gradients=True), []
        assert form.method == "call"
        for interceptors in ([], [form]):
            with intercepting(interceptors), tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
                loss = tf.reduce_sum(y * np.random.default_rng(1).normal(size=y.shape))
            results.append([y, *tape.gradient(loss, [x, *map(raw, layer.trainable_variables)])])
        for got, expected in zip(*results, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["DepthwiseConv2D", "SeparableConv2D"])
def test_sums_over_windows_lose_nothing_in_half_precision(kind):
    x = np.random.default_rng(0).normal(size=(2, 9, 9, 4)).astype("float16")
    layer, exact = make_layer(kind, kernel_size=5, dtype="mixed_float16"), make_layer(kind, kernel_size=5)
    layer(x)
    exact(x)
    exact.set_weights([w.astype("float16") for w in layer.get_weights()])
    with intercepting(make_forms([layer], fast_gradients=True)):
        y = layer(tf.constant(x))
    assert y.dtype == "float16"
    np.testing.assert_allclose(y, exact(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Conv1D", {"dilation_rate": 2}),
        ("Conv1D", {"groups": 3}),
        ("Conv2DTranspose", {"dilation_rate": 2}),
        ("DepthwiseConv2D", {"data_format": "channels_first"}),
        ("SeparableConv2D", {"kernel_size": 9}),
    ],
)
def test_what_has_no_form_is_left_to_keras(kind, options):
    assert not make_forms([make_layer(kind, **options)], fast_gradients=True)


def test_a_subclass_is_left_alone():
    class Own(keras.layers.DepthwiseConv2D):
        pass

    assert not make_forms([Own(3)], fast_gradients=True)


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


@pytest.mark.variant
@pytest.mark.parametrize("height", [64, 9])  # where a gradient is summed in parts, and where not
def test_compiled_models_of_other_convolutions_train_as_in_keras(height):
    def make():
        keras.utils.set_random_seed(3)
        layers = [make_layer(kind, strides=2) for kind in ("DepthwiseConv2D", "Conv2DTranspose", "SeparableConv2D")]
        return keras.Sequential([keras.Input((height, 64, 8)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, height, 64, 8)).astype("float32"), rng.normal(size=(16, 1)).astype("float32")
    ours, theirs = make(), make()
    fa.Trainer(ours, keras.optimizers.SGD(0.01), "mse").train_step((x.reshape(2, 8, *x.shape[1:]), y.reshape(2, 8, 1)))
    theirs.compile(keras.optimizers.SGD(0.01), "mse")
    theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_no_other_convolution_is_left_in_the_loop(name):
    """Nothing is left to the group convolutions and strided gradients that XLA runs as scalar code on a CPU."""
    family = importlib.import_module(name)
    layers = [make_layer(kind, family, strides=2) for kind in ("DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose")]
    layers += [family.layers.Conv2D(4, 3), family.layers.MaxPooling2D(2), family.layers.Flatten()]
    model = family.Sequential([family.Input((16, 16, 3)), *layers, family.layers.Dense(2)])
    trainer = fa.Trainer(model, "sgd", "mse")
    text = trainer.compiler_ir((np.zeros((2, 4, 16, 16, 3), "float32"), np.zeros((2, 4, 2), "float32")), stage="hlo")
    assert set(re.findall(r"dim_labels=(\S+?)[,\s]", text)) == {"b01f_01io->b01f"}
    assert not re.search("(feature|batch)_group_count|select-and-scatter", text)
    assert all(name not in vars(layer) for layer in layers for name in ("call", "convolution_op"))
