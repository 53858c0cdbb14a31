"""Norms and GELU with their gradients against float64 autodiff, and in a model against Keras's own layers."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum.adapters import layers
from fastaccum.adapters.interceptors import intercepting
from fastaccum.kernels import norms

RNG = np.random.default_rng(0)
EPSILON = 1e-3


def layer_norm_by_hand(x, scale, offset):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + EPSILON) * scale + offset


def rms_norm_by_hand(x, scale, _):
    return x * tf.math.rsqrt(tf.reduce_mean(x**2, -1, keepdims=True) + EPSILON) * scale


def gelu_by_hand(x):
    return 0.5 * x * (1 + tf.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


NORMS = {
    "layer": (lambda *args: norms.layer_norm(*args, epsilon=EPSILON), layer_norm_by_hand),
    "rms": (lambda x, scale, _: norms.rms_norm(x, scale, epsilon=EPSILON), rms_norm_by_hand),
}


def values_and_gradients(fn, *args):
    """The gradient of something that is not linear in the result, and its own gradient."""
    with tf.GradientTape() as outer:
        outer.watch(args)
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = fn(*args)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float64 if y.dtype == tf.float64 else tf.float32)))
        first = tape.gradient(loss, args, unconnected_gradients="zero")
        penalty = tf.reduce_sum(tf.cast(first[0], loss.dtype) ** 2)
    return [y, *first, *outer.gradient(penalty, args, unconnected_gradients="zero")]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_the_unfused_expression(name, dtype, tolerance, gpu):
    ours, by_hand = NORMS[name]
    wide = "float64" if dtype == "float64" else "float32"
    x = tf.constant(RNG.normal(5, 2, (3, 4, 32)), dtype)  # its mean is well away from 0
    weights = [tf.constant(RNG.normal(size=32), wide) for _ in range(2)]
    with mock.patch.object(norms, "has_gpu", lambda: gpu):
        got = values_and_gradients(ours, x, *weights)
    expected = values_and_gradients(by_hand, *(tf.cast(t, tf.float64) for t in (x, *weights)))
    assert [t.dtype.name for t in got[:4]] == [dtype, dtype, wide, wide]
    for mine, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, truth, atol=tolerance * max(1, np.abs(truth).max()))


def test_second_derivatives_are_those_of_the_formula_where_keras_leaves_a_term_out():
    def plain(x):
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, -1, keepdims=True) + EPSILON)

    def second(norm):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(norm(x) ** 3)
            first = tape.gradient(y, x) * tf.range(8, dtype=tf.float64)  # of a sum that is not 0 in each row
        return outer.gradient(first, x)

    x = tf.constant(RNG.normal(size=(3, 8)))
    np.testing.assert_allclose(second(lambda x: norms.layer_norm(x, epsilon=EPSILON)), second(plain), atol=1e-12)
    of_keras = second(lambda x: keras.ops.layer_normalization(x, epsilon=EPSILON))
    assert np.abs(of_keras - second(plain)).max() > 0.1  # tf.nn.moments takes the mean in a variance for a constant


@pytest.mark.parametrize("gpu", [False, True])
def test_float16_far_from_0_keeps_its_spread(gpu):
    x = tf.constant(RNG.normal(1000, 1, (4, 256)), "float16")
    with mock.patch.object(norms, "has_gpu", lambda: gpu):
        got = norms.layer_norm(x, epsilon=EPSILON)
    np.testing.assert_allclose(got, layer_norm_by_hand(tf.cast(x, tf.float64), 1.0, 0.0), atol=2e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 3e-2)])
def test_gelu_as_a_gpu_computes_it(dtype, tolerance):
    x = tf.cast(tf.linspace(tf.constant(-9.0, tf.float64), 9.0, 401), dtype)
    with mock.patch.object(norms, "has_gpu", lambda: True):
        got = values_and_gradients(norms.gelu, x)
    expected = values_and_gradients(gelu_by_hand, tf.cast(x, tf.float64))
    for mine, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(tf.cast(mine, tf.float64), truth, atol=tolerance * np.abs(truth).max())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("kind", "options", "replaces"),
    [
        ("LayerNormalization", {}, True),
        ("LayerNormalization", {"center": False, "axis": 2}, True),
        ("LayerNormalization", {"scale": False, "axis": [1, 2]}, False),
        ("LayerNormalization", {"axis": 1}, False),
        ("LayerNormalization", {"epsilon": None}, False),
        ("RMSNormalization", {}, True),
    ],
)
def test_a_layer_computes_as_keras_has_it(kind, options, replaces, policy):
    layer = getattr(keras.layers, kind)(**options, dtype=policy)
    x = tf.constant(RNG.normal(2, 1, (4, 3, 8)), layer.compute_dtype)
    layer(x)
    layer.set_weights([RNG.normal(size=w.shape) for w in layer.weights])
    weights = tuple(w.value for w in layer.weights)
    keras_own = values_and_gradients(lambda x, *_: layer(x), x, *weights)
    replacing = intercepting(layers.make_forms([layer]))
    with replacing, mock.patch.object(norms, "_norm", wraps=norms._norm) as norm:
        ours = values_and_gradients(lambda x, *_: layer(x), x, *weights)
    assert norm.called == replaces
    for got, wanted in zip(ours, keras_own, strict=True):
        assert got.dtype == wanted.dtype
        tolerance = 1e-5 if policy == "float32" else 0.03
        np.testing.assert_allclose(
            *(tf.cast(t, tf.float32) for t in (got, wanted)), atol=tolerance * np.abs(wanted).max()
        )


def test_a_call_that_was_set_on_a_layer_is_left_alone():
    layer = keras.layers.LayerNormalization()
    layer.call = tf.negative
    with intercepting(layers.make_forms([layer])):
        assert layer(tf.ones([1, 2])).numpy().tolist() == [[-1, -1]]
    assert layer.call is tf.negative
