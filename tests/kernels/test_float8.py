"""Products in float8 against NumPy in float64, with ml_dtypes's own rounding to float8."""

import re

import h200
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import fastaccum as fa
from fastaccum.kernels.float8 import E4M3, E5M2, quantize
from fastaccum.kernels.matmul import einsum_float8, matmul_float8
from fastaccum.kernels.xla_ops import loop
from fastaccum.step.compiler_ir import compiler_ir

HALVES = ["float16", "bfloat16"]
ROUNDING = 8e-3  # of a result to bfloat16, against its largest number
FLOAT8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def power_of_two(x, largest):
    """The scale, found by counting exponents."""
    if not np.abs(x).max():
        return 1.0
    return 2.0 ** np.ceil(np.log2(np.abs(x).max() / largest))


def rounded(x, kind, scale=None):
    dtype, largest = FLOAT8[kind]
    scale = scale or power_of_two(x, largest)
    return np.clip(x / scale, -largest, largest).astype(dtype).astype("float64") * scale


def oracle(x, kernel, dy, of_dy="e5m2", scales=(None, None, None)):
    """Returns y, dx and dkernel in float64, each scale by the formula if it is None."""
    x, kernel, dy = (np.asarray(t, "float64") for t in (x, kernel, dy))
    x = rounded(x, "e4m3", scales[0])
    kernel = rounded(kernel, "e4m3", scales[1])
    dy = rounded(dy, of_dy, scales[2])
    return x @ kernel, dy @ kernel.T, x.T @ dy


def vjp(function, x, kernel, dy):
    with tf.GradientTape() as tape:
        tape.watch((x, kernel))
        y = function(x, kernel)
    return y, *tape.gradient(y, (x, kernel), dy)


def compiled(function):
    return tf.function(lambda *args: vjp(function, *args), jit_compile=True, autograph=False)


def worst(got, exact):
    return np.abs(np.asarray(got, "float64") - exact).max() / np.abs(exact).max()


def inputs(dtype, spread=1.0, shape=(50, 24, 40)):
    """x, kernel and dy; their magnitudes vary by e to the power of `spread`, typically."""
    generator = np.random.default_rng(0)

    def draw(*sizes):
        return generator.normal(size=sizes) * np.exp(spread * generator.normal(size=sizes))

    rows, width, width_out = shape
    x = tf.cast(3.0 * draw(rows, width), dtype)
    # XLA on a CPU rounds float32 to float8 by way of float16, which these numbers have room in.
    kernel = tf.cast(tf.cast(0.05 * draw(width, width_out), tf.bfloat16), tf.float32)
    dy = tf.cast(1e-6 * draw(rows, width_out), dtype)  # the scale is no number of float16
    return x, kernel, dy


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("implementation", ["float8", "reference"])
@pytest.mark.parametrize("wrap", [compiled, lambda f: lambda *args: vjp(f, *args)])
def test_products_are_those_of_rounded_numbers(dtype, implementation, wrap):
    x, kernel, dy = inputs(dtype)

    def multiply(x, kernel):
        return fa.kernels.matmul_float8(x, kernel, implementation=implementation)

    y, dx, dkernel = wrap(multiply)(x, kernel, dy)
    assert (y.dtype, dx.dtype, dkernel.dtype) == (x.dtype, x.dtype, tf.float32)
    exact = oracle(x, kernel, dy)
    assert worst(y, exact[0]) < ROUNDING
    assert worst(dx, exact[1]) < ROUNDING
    assert worst(dkernel, exact[2]) < 2e-6  # rounded nowhere


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"scales": (1.0, 1.0, 1.0)}, id="no scales"),
        pytest.param({"of_dy": "e4m3"}, id="e4m3 for dy"),
        pytest.param({"scales": (None, None, 2**-40)}, id="the scale of another micro-batch"),
    ],
)
def test_a_wrong_formula_is_found(wrong):
    x, kernel, dy = inputs("bfloat16", spread=2.0)
    _, dx, dkernel = compiled(matmul_float8)(x, kernel, dy)
    right = oracle(x, kernel, dy)
    control = oracle(x, kernel, dy, **wrong)
    assert worst(dkernel, right[2]) < 2e-6 < 1e-3 < worst(dkernel, control[2])
    assert worst(dx, right[1]) < ROUNDING


@settings(max_examples=50, deadline=None)
@given(
    exponents=st.lists(st.integers(-110, 118), min_size=1, max_size=6),
    kind=st.sampled_from([("e4m3", E4M3), ("e5m2", E5M2)]),
)
def test_scales_are_powers_of_two_and_the_largest_number_fits(exponents, kind):
    name, dtype = kind
    x = np.float32(1.37) * np.exp2(np.float32(exponents))
    values, scale = quantize(tf.constant(x), dtype)
    assert np.frexp(scale.numpy())[0] == 0.5  # what is left of a power of two
    got = np.asarray(tf.cast(values, tf.float32), "float64") * scale.numpy()
    np.testing.assert_array_equal(got, rounded(x.astype("float64"), name, float(scale)))
    step = 2.0**-4 if name == "e4m3" else 2.0**-3  # half a unit of the last place
    largest = np.abs(x).max()
    assert abs(np.abs(got).max() - largest) <= step * largest  # nothing is clipped


@pytest.mark.parametrize("wrap", [tf.function(jit_compile=True, autograph=False), lambda f: f])
def test_zero_is_zero_and_what_is_not_finite_stays_so(wrap):
    @wrap
    def of(x, kernel):
        return matmul_float8(x, kernel)

    kernel = tf.ones([16, 8])
    assert not np.any(of(tf.zeros([4, 16], tf.bfloat16), kernel))
    assert not np.any(of(tf.ones([4, 16], tf.bfloat16), 0 * kernel))
    tiny = tf.fill([4, 16], tf.cast(2.0**-133, tf.bfloat16))  # below float32's normal numbers
    assert np.isfinite(np.asarray(of(tiny, kernel), "float32")).all()
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((4, 16))
        x[1, 2] = bad
        y = np.asarray(of(tf.cast(x, tf.bfloat16), kernel), "float32")
        assert not np.isfinite(y[1]).any()


@pytest.mark.parametrize("equation", ["abc,cde->abde", "abde,dec->abc", "gac,gcd->gad"])
def test_einsums_are_products_of_matrices(equation):
    shapes = {"a": 3, "b": 5, "c": 16, "d": 4, "e": 8, "g": 2}
    of_x, of_kernel = equation.partition("->")[0].split(",")
    generator = np.random.default_rng(0)
    x = tf.cast(generator.normal(size=[shapes[axis] for axis in of_x]), tf.bfloat16)
    kernel = tf.cast(generator.normal(size=[shapes[axis] for axis in of_kernel]), tf.bfloat16)
    kernel = tf.cast(kernel, tf.float32)

    @tf.function(jit_compile=True, autograph=False)
    def einsum(x, kernel):
        return einsum_float8(equation, x, kernel)

    x64, kernel64 = np.asarray(x, "float64"), np.asarray(kernel, "float64")
    exact = np.einsum(equation, rounded(x64, "e4m3"), rounded(kernel64, "e4m3"))
    assert worst(einsum(x, kernel), exact) < ROUNDING


def test_stacked_kernels_have_a_scale_each():
    kernels = tf.constant(np.random.default_rng(0).normal(size=(3, 8, 4)), tf.float32)
    kernels *= tf.constant([1.0, 100.0, 1e-6])[:, tf.newaxis, tf.newaxis]
    stacked = quantize(kernels, E4M3, layer_axes=1)
    for i in range(3):
        alone = quantize(kernels[i], E4M3)
        np.testing.assert_array_equal(stacked.values[i], alone.values)
        assert stacked.scale[i] == alone.scale


def test_what_does_not_fit_is_refused():
    x, kernel = tf.ones([4, 16], tf.bfloat16), tf.ones([16, 8])
    with pytest.raises(TypeError, match=r"x has dtype float32.*matmul_fp32_wgrad"):
        fa.kernels.matmul_float8(tf.cast(x, tf.float32), kernel)
    with pytest.raises(ValueError, match="does not fit kernel"):
        fa.kernels.matmul_float8(x, kernel[:8])
    with pytest.raises(ValueError, match="implementation='fast' must be one of 'float8'"):
        fa.kernels.matmul_float8(x, kernel, implementation="fast")


@pytest.mark.parametrize("dtype", HALVES)
def test_on_an_h200_all_products_are_float8_and_add_to_their_accumulator(dtype):
    def step(xs, kernel, dys):
        copy = quantize(kernel, E4M3)

        def turn(i, total):
            def multiply(x, kernel):
                return matmul_float8(x, kernel, copy)

            x, dy = xs[i], dys[i]
            y, dx, dkernel = vjp(multiply, x, kernel, dy)
            return [total + dkernel + 0 * tf.cast(tf.reduce_sum(y) + tf.reduce_sum(dx), tf.float32)]

        return loop(4, turn, [tf.zeros_like(kernel)])[0]

    stacks = (
        tf.zeros([4, 512, 256], dtype),
        tf.zeros([256, 1024]),
        tf.zeros([4, 512, 1024], dtype),
    )
    with h200.as_on_a_gpu():
        function = tf.function(step, jit_compile=True, autograph=False)
        exported = compiler_ir(function, *stacks, stage="stablehlo_serialized")
    text, _ = h200.compile_for_h200(exported, xla_gpu_enable_triton_gemm=False)
    products = re.findall(r"= \((\w+)\[.*__cublas\$lt\$matmul\$f8.*", text)
    assert sorted(products) == ["bf16", "bf16", "f32"]
    (gradient,) = re.findall(r"= \(f32\[256,1024\].*__cublas\$lt\$matmul\$f8.*", text)
    assert '"beta":1' in gradient and "output_to_operand_aliasing={{0}: (2, {})}" in gradient
    assert " dot(" not in text
