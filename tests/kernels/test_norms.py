"""Norms and GELU with their gradients against float64 autodiff, and in a model against Keras's own
layers.
"""

from unittest import mock

import h200
import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum.kernels import norms
from fastaccum.layers import forms
from fastaccum.layers.interceptors import intercepting
from fastaccum.step import compiler_ir as compiled

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
            loss = tf.reduce_sum(
                tf.sin(tf.cast(y, tf.float64 if y.dtype == tf.float64 else tf.float32))
            )
        first = tape.gradient(loss, args, unconnected_gradients="zero")
        penalty = tf.reduce_sum(tf.cast(first[0], loss.dtype) ** 2)
    return [y, *first, *outer.gradient(penalty, args, unconnected_gradients="zero")]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("float16", 4e-3)]
)
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
            # of a sum that is not 0 in each row
            first = tape.gradient(y, x) * tf.range(8, dtype=tf.float64)
        return outer.gradient(first, x)

    x = tf.constant(RNG.normal(size=(3, 8)))
    np.testing.assert_allclose(
        second(lambda x: norms.layer_norm(x, epsilon=EPSILON)), second(plain), atol=1e-12
    )
    of_keras = second(lambda x: keras.ops.layer_normalization(x, epsilon=EPSILON))
    # tf.nn.moments takes the mean in a variance for a constant
    assert np.abs(of_keras - second(plain)).max() > 0.1


def batch_norm_of_keras(x, scale, offset):
    moments = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    return tf.nn.batch_normalization(x, *moments, offset, scale, EPSILON)


def batch_norm_of_tensorflow(x, scale, offset):
    return tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=EPSILON)[0]


def gradients_of_a_penalty(norm, x, scale, offset):
    """The values, their gradients, and those of a penalty: of cubes, since the sum of the gradients
    to x is 0.
    """
    inputs = x, scale, offset
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(tf.sin(y := norm(*inputs)))
        first = tape.gradient(loss, inputs)
        penalty = tf.add_n([tf.reduce_sum(each**3) for each in first])
    return y, *first, *outer.gradient(penalty, inputs)


@pytest.mark.parametrize("shape", [(6, 5), (4, 2, 1, 5), (2, 3, 2, 2, 5)], ids=str)
def test_second_derivatives_of_batch_norm_are_those_of_keras(
    shape,
):
    x = tf.constant(RNG.normal(3, 2, shape), "float32")
    weights = [tf.constant(RNG.uniform(0.5, 2, 5), "float32") for _ in range(2)]

    def compute(norm, *inputs):
        return [t.numpy() for t in tf.function(lambda: gradients_of_a_penalty(norm, *inputs))()]

    ours = compute(lambda *inputs: norms.batch_norm(*inputs, epsilon=EPSILON)[0], x, *weights)
    exact = compute(batch_norm_of_keras, *(tf.cast(t, tf.float64) for t in (x, *weights)))
    np.testing.assert_array_equal(ours[0], batch_norm_of_keras(x, *weights))
    for got, truth in zip(ours, exact, strict=True):
        np.testing.assert_allclose(got, truth, rtol=2e-5, atol=2e-5 * np.abs(truth).max())
    if len(shape) == 4:
        others = compute(batch_norm_of_tensorflow, x, *weights)
        np.testing.assert_allclose(
            others[1], exact[1], rtol=2e-5, atol=2e-5 * np.abs(exact[1]).max()
        )
        assert np.abs(others[4] - exact[4]).max() > 1e-3 * np.abs(exact[4]).max()


def test_batch_norm_takes_jacobians_and_refuses_their_gradient_and_forward_mode():
    x, ones = tf.constant(RNG.normal(3, 2, (4, 5)), "float32"), tf.ones([5])

    @tf.function(autograph=False)
    def of_jacobian(norm, value=True):
        with tf.GradientTape() as outer, tf.GradientTape() as tape:
            outer.watch(x)
            tape.watch(x)
            y = norm(x, ones, ones)
        if value:
            return tape.jacobian(y, x)
        with outer:
            total = tf.reduce_sum(tape.jacobian(y, x) ** 2)
        return outer.gradient(total, x)

    def ours(*inputs):
        return norms.batch_norm(*inputs, epsilon=EPSILON)[0]

    np.testing.assert_allclose(
        of_jacobian(ours), of_jacobian(batch_norm_of_keras), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(LookupError, match="Jacobian's gradient without XLA: use jit_compile=True"):
        of_jacobian(ours, value=False)
    with pytest.raises(LookupError, match="no forward mode"), tf.autodiff.ForwardAccumulator(x, x):
        tf.function(ours, autograph=False)(x, ones, ones)


@pytest.mark.parametrize("gpu", [False, True])
def test_float16_far_from_0_keeps_its_spread(gpu):
    x = tf.constant(RNG.normal(1000, 1, (4, 256)), "float16")
    with mock.patch.object(norms, "has_gpu", lambda: gpu):
        got = norms.layer_norm(x, epsilon=EPSILON)
    np.testing.assert_allclose(got, layer_norm_by_hand(tf.cast(x, tf.float64), 1.0, 0.0), atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 3e-2)]
)
def test_gelu_as_a_gpu_computes_it(dtype, tolerance):
    x = tf.cast(tf.linspace(tf.constant(-9.0, tf.float64), 9.0, 401), dtype)
    with mock.patch.object(norms, "has_gpu", lambda: True):
        got = values_and_gradients(norms.gelu, x)
    expected = values_and_gradients(gelu_by_hand, tf.cast(x, tf.float64))
    for mine, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            tf.cast(mine, tf.float64), truth, atol=tolerance * np.abs(truth).max()
        )


@pytest.fixture
def gelu_of_keras(approximate, monkeypatch):
    if not approximate:
        return keras.activations.gelu

    def gelu_approximate(x):  # as KerasHub's, which need not be installed
        return keras.activations.gelu(x, approximate=True)

    monkeypatch.setattr(norms, "known_name", lambda thing: "keras_hub.gelu_approximate")
    return gelu_approximate


@pytest.mark.parametrize("approximate", [False, True])
def test_a_gelu_that_is_computed_again_is_kerass_own(gelu_of_keras):
    """Bit for bit; and its second derivative to rounding."""
    gelu = gelu_of_keras
    x = tf.cast(tf.linspace(-9.0, 9.0, 401), "bfloat16")
    with (
        mock.patch.object(norms, "has_gpu", lambda: True),
        mock.patch.object(norms, "in_xla", lambda: True),
    ):
        got = values_and_gradients(lambda x: norms.activated(gelu, x), x)
    for mine, kerass, tolerance in zip(
        got, values_and_gradients(gelu, x), (0, 0, 0.02), strict=True
    ):
        np.testing.assert_allclose(
            tf.cast(mine, tf.float32), tf.cast(kerass, tf.float32), atol=tolerance
        )


@pytest.mark.parametrize("approximate", [False, True])
def test_a_gpu_keeps_only_the_input_and_output_of_a_gelu(gelu_of_keras):
    gelu = gelu_of_keras
    rows, width, layers = 2**14, 2048, 3
    shapes = [[rows, width], *layers * [[width, 4 * width], [4 * width], [4 * width, width]]]

    def temp_bytes(activate):
        @tf.function(jit_compile=True, autograph=False)
        def step(x, *weights):
            for first, bias, second in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
                x += activate(x @ first + bias) @ second
            return tf.gradients(x, weights)

        with h200.as_on_a_gpu():
            specs = [tf.TensorSpec(shape, tf.bfloat16) for shape in shapes]
            exported = compiled.compiler_ir(step, *specs, stage="stablehlo_serialized")
        return h200.compile_for_h200(exported)[1].temp_bytes

    of_one = 2 * rows * 4 * width
    assert (
        temp_bytes(lambda x: norms.activated(gelu, x)) <= temp_bytes(gelu) - (layers - 1) * of_one
    )


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
    replacing = intercepting(forms.make_forms([layer], True))
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
    with intercepting(forms.make_forms([layer], True)):
        assert layer(tf.ones([1, 2])).numpy().tolist() == [[-1, -1]]
    assert layer.call is tf.negative
