"""Layers in the forms that XLA compiles in a loop, or that TensorFlow has one operation for,
against Keras's own.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.layers import forms
from fastaccum.layers.interceptors import intercepting


@pytest.mark.parametrize(
    "options", [{"dilation_rate": 2}, {"dilation_rate": (2, 1), "groups": 2}, {"groups": 2}]
)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_dilated_and_grouped_layers_train_as_in_keras(options, padding):
    def make():
        keras.utils.set_random_seed(3)
        convolution = keras.layers.Conv2D(4, 3, padding=padding, **options)
        return keras.Sequential(
            [keras.Input((7, 6, 2)), convolution, keras.layers.Flatten(), keras.layers.Dense(1)]
        )

    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(6, 7, 6, 2)).astype("float32"),
        rng.normal(size=(6, 1)).astype("float32"),
    )
    ours, theirs = make(), make()
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    trainer.train_step((x.reshape(2, 3, 7, 6, 2), y.reshape(2, 3, 1)))
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all("convolution_op" not in vars(layer) for layer in ours.layers)


def normalized(shape, policy="float32", **options):
    """Builds a model of one BatchNormalization, and Keras's full batch of rows of that shape with
    its targets.
    """
    keras.utils.set_random_seed(3)
    norm = keras.layers.BatchNormalization(momentum=0.8, dtype=policy, **options)
    layers = [keras.Input(shape), norm, keras.layers.Flatten(), keras.layers.Dense(1)]
    rng = np.random.default_rng(0)
    x = (3 + 2 * rng.normal(size=(6, *shape))).astype("float32")
    return keras.Sequential(layers), x, rng.normal(size=(6, 1)).astype("float32")


@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 3, 5), (2, 4, 3, 5)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"scale": False}, {"center": False, "epsilon": 0.1}], ids=str
)
def test_batch_statistics_without_xla_are_those_of_keras(shape, options):
    (ours, x, y), (theirs, *_) = normalized(shape, **options), normalized(shape, **options)
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    for _ in range(3):
        trainer.train_step((x[None], y[None]))
        theirs.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    biased = x.astype("float64").reshape(-1, shape[-1]).var(axis=0)
    np.testing.assert_allclose(
        ours.layers[0].moving_variance, 0.8**3 + (1 - 0.8**3) * biased, rtol=1e-6
    )


class Smooth(keras.Sequential):
    """A loss of its own, with derivatives in forward mode or of a Jacobian."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with (
            tf.GradientTape() as tape,
            tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward,
        ):
            tape.watch(x)
            output = self(x, training=True)
        jacobian = tf.reduce_sum(tape.jacobian(output, x) ** 2)
        return (
            tf.reduce_mean((y_pred - y) ** 2) + tf.reduce_mean(forward.jvp(output) ** 2) + jacobian
        )


def test_other_derivatives_in_a_loss_of_the_models_own_are_those_of_keras():
    (made, x, y), updates = normalized((5,)), []
    for train in ("keras", "fastaccum"):
        model = Smooth(
            [
                keras.Input((5,)),
                *(type(each).from_config(each.get_config()) for each in made.layers),
            ]
        )
        model.set_weights(made.get_weights())
        if train == "keras":
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
            model.train_on_batch(x, y)
        else:
            fa.Trainer(model, keras.optimizers.SGD(0.1), jit_compile=False).train_step(
                (x[None], y[None])
            )
        updates.append(model.get_weights())
    for a, b in zip(*updates, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class OwnNorm(keras.layers.BatchNormalization):
    """A subclass, whose call may be another."""


@pytest.mark.parametrize(
    "fused, kind, options, call",
    [
        (True, keras.layers.BatchNormalization, {}, {}),
        (True, keras.layers.BatchNormalization, {"dtype": "mixed_bfloat16", "axis": 2}, {}),
        (False, keras.layers.BatchNormalization, {}, {"training": False}),
        (False, keras.layers.BatchNormalization, {}, {"mask": np.ones((6, 4), "bool")}),
        (False, keras.layers.BatchNormalization, {"trainable": False}, {}),
        (False, keras.layers.BatchNormalization, {"axis": 1}, {}),
        (False, keras.layers.BatchNormalization, {"dtype": "float64"}, {}),
        (False, OwnNorm, {}, {}),
    ],
    ids=str,
)
def test_the_gradient_of_kerass_own_batch_norm_over_the_last_axis_is_one_operation(
    fused, kind, options, call
):
    layer = kind(**options)
    x = np.random.default_rng(0).normal(size=(6, 4, 5)).astype(layer.compute_dtype)
    layer.build(x.shape)

    def normalize():
        with tf.GradientTape() as tape:
            tape.watch(inputs := tf.constant(x))
            y = layer(inputs, **{"training": True, **call})
        upstream = tf.reshape(tf.cast(tf.range(y.shape.num_elements()), y.dtype), y.shape) / 100
        return y, tape.gradient(y, inputs, upstream)

    theirs = tf.function(normalize)()
    statistics = [v.numpy() for v in layer.weights]
    layer.moving_mean.assign(np.zeros(layer.moving_mean.shape))
    layer.moving_variance.assign(np.ones(layer.moving_variance.shape))
    with intercepting(forms.make_forms([layer], uses_xla=False)):
        concrete = tf.function(normalize).get_concrete_function()
    assert fused is ("FusedBatchNormGradV3" in {op.type for op in concrete.graph.get_operations()})
    ours, theirs = (
        [tf.cast(t, "float64").numpy() for t in tensors] for tensors in (concrete(), theirs)
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    rounding = 1e-2 if layer.compute_dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(ours[1], theirs[1], rtol=rounding, atol=rounding)
    for a, b in zip(layer.weights, statistics, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
