"""Random calls of the kernels: the result of plain tensors of float32, or a refusal.

tests/kernels compares calls of plain tensors with float64.
"""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import Argument, calls, fuzz, judge, or_none, positive, reals, whole

import fastaccum as fa

pytestmark = pytest.mark.slow

TOLERANCES = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
DTYPES = st.sampled_from(["float32", "float32", "float16", "bfloat16"])
FLAG = Argument(st.booleans())


def array(shape, dtype="float32", seed=0, high=5):
    """Draws normal numbers, or whole ones below `high`, as the dtype has them."""
    rng = np.random.default_rng((seed, *shape))
    if np.issubdtype(np.dtype(tf.as_dtype(dtype).as_numpy_dtype), np.integer):
        return rng.integers(0, high, shape).astype(dtype)
    return rng.normal(size=shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def tensor(shape, dtype, seed, high=5):
    right = array(shape, dtype, seed, high)
    return Argument(st.just(right), odd=st.sampled_from([tf.constant(right), tf.Variable(right)]))


def run_with_gradients(function, arguments, way):
    """Returns the result, and its gradient by each floating tensor among the arguments.

    Args:
        way: "eager", "graph", "xla", or a graph that knows no shape ("unranked").
    """
    tensors = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.dtype in TOLERANCES:
            tensors[name] = tf.constant(value)

    def run(tensors):
        with tf.GradientTape() as tape:
            tape.watch(list(tensors.values()))
            y = function(**{**arguments, **tensors})
        cotangent = tf.cos(tf.cast(tf.range(tf.size(y)), tf.float32))
        cotangent = tf.cast(tf.reshape(cotangent, tf.shape(y)), y.dtype)
        return y, tape.gradient(y, tensors, cotangent) if tensors else {}

    if way == "eager":
        return run(tensors)
    signature = None
    if way == "unranked":
        signature = [{name: tf.TensorSpec(None, t.dtype) for name, t in tensors.items()}]
    compiled = tf.function(run, signature, autograph=False, jit_compile=way == "xla")
    return compiled(tensors)


def plain(value, rounded_to):
    """Returns a floating tensor or array as an array of float32 or float64.

    Args:
        value: an argument of the kernel, of any type.
        rounded_to: the half-precision dtype that the kernel multiplies in, beyond whose range its
            result is infinite; None for no rounding.
    """
    if not hasattr(value, "__array__") or isinstance(value, np.generic):
        return value
    value = np.asarray(value)
    is_floating = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
    if not is_floating or value.dtype == "float64":
        return value
    if rounded_to is not None:
        with np.errstate(over="ignore"):
            value = value.astype(rounded_to)
    return value.astype("float32")


def check(function, arguments, result):
    """Compares a result and its gradients with those of plain values, where these are finite."""
    dtypes = [np.asarray(v).dtype.name for v in arguments.values() if hasattr(v, "__array__")]
    rounded_to = None
    for dtype in ("bfloat16", "float16"):
        if dtype in dtypes:
            rounded_to = tf.as_dtype(dtype).as_numpy_dtype
    plain_arguments = {name: plain(value, rounded_to) for name, value in arguments.items()}
    if "implementation" in inspect.signature(function).parameters:
        plain_arguments["implementation"] = "reference"
    tolerance = max(TOLERANCES.get(dtype, 0) for dtype in dtypes)
    y, gradients = result
    expected, plain_gradients = run_with_gradients(function, plain_arguments, "eager")
    check_close("the result", y, expected, tolerance)
    for name, gradient in gradients.items():
        if gradient is None:
            assert not np.any(plain_gradients[name]), f"{name} has no gradient"
        else:
            check_close(f"the gradient of {name}", gradient, plain_gradients[name], tolerance)


def check_close(what, result, expected, tolerance):
    result = np.asarray(result, "float64")
    expected = np.asarray(expected, "float64")
    assert result.shape == expected.shape, f"{what} has shape {result.shape}, not {expected.shape}"
    known = np.isfinite(expected)
    scale = max(1.0, np.abs(expected[known]).max(initial=0.0))
    error = np.nan_to_num(np.abs(result[known] - expected[known]), nan=np.inf).max(initial=0.0)
    assert error <= tolerance * scale, f"{what} is off by {error:.3g}: {result} for {expected}"


def one_of(*values):
    return Argument(
        st.sampled_from(values), lambda value: isinstance(value, str) and value in values
    )


sizes = st.integers(1, 5)
leading_axes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def of_matmul(draw):
    width = draw(sizes)
    dtype = draw(DTYPES | st.just("float64"))
    kernel_dtype = "float64" if dtype == "float64" else "float32"
    table = {
        "x": tensor([*draw(leading_axes), width], dtype, 1),
        "kernel": tensor([width, draw(st.integers(0, 5))], kernel_dtype, 2),
    }
    return draw(calls(table, ["x", "kernel"]))


@st.composite
def of_linear_cross_entropy(draw):
    width = draw(sizes)
    classes = draw(st.sampled_from([1, 2, 5, 9, 63, 64, 65, 130]))
    lead = draw(leading_axes)
    dtype = draw(DTYPES)
    parameters = st.sampled_from(["float32", dtype])
    label_dtype = draw(st.sampled_from(["int32", "int64", "int8", "uint8", "uint16", "uint64"]))
    table = {
        "hidden": tensor([*lead, width], dtype, 1),
        "kernel": tensor([width, classes], draw(parameters), 2),
        "labels": tensor(lead, label_dtype, 3, classes),
        "bias": tensor([classes], draw(parameters), 4),
        "ignore_index": Argument(st.integers(-3, classes)),
        "label_smoothing": Argument(reals(0.0, 0.9)),
        "z_loss": Argument(st.just(0.0) | positive(1e-4, 1.0).valid),
        "chunk_size": or_none(whole(1, 70)),
        "implementation": one_of("auto", "chunked", "reference"),
    }
    return draw(calls(table, ["hidden", "kernel", "labels"]))


@st.composite
def of_attention(draw):
    batch = draw(st.integers(1, 3))
    queries = draw(st.integers(1, 19))
    keys = draw(st.just(queries) | st.integers(1, 19))
    groups = draw(st.integers(1, 3))
    width = draw(sizes)
    dtype = draw(DTYPES)
    id_dtype = draw(st.sampled_from(["int32", "int64", "int8", "uint8"]))
    query_ids = array([batch, queries], id_dtype, 4, 3)
    ids = st.sampled_from([None, (query_ids, array([batch, keys], id_dtype, 5, 3))])
    table = {
        "query": tensor([batch, queries, groups * draw(st.integers(1, 3)), width], dtype, 1),
        "key": tensor([batch, keys, groups, width], dtype, 2),
        "value": tensor([batch, keys, groups, width], dtype, 3),
        "causal": FLAG,
        "scale": Argument(st.none() | reals(-0.5, 2.0)),
        "segment_ids": Argument(ids | st.just(query_ids) if queries == keys else ids),
        "block_size": or_none(whole(1, 24)),
        "implementation": one_of("auto", "blockwise", "reference"),
    }
    return draw(calls(table, ["query", "key", "value"]))


KERNELS = {
    "matmul_fp32_wgrad": of_matmul(),
    "linear_cross_entropy": of_linear_cross_entropy(),
    "attention": of_attention(),
}
ways = st.sampled_from(["eager"] * 30 + ["graph"] * 3 + ["unranked", "xla"])


@fuzz(600)
@given(
    drawn=st.sampled_from(list(KERNELS)).flatmap(lambda n: st.tuples(st.just(n), KERNELS[n])),
    way=ways,
)
def test_a_kernel(drawn, way):
    name, call = drawn
    function = getattr(fa.kernels, name)
    judge(
        call,
        lambda: run_with_gradients(function, call.arguments, way),
        lambda result: check(function, call.arguments, result),
        may_refuse=way == "unranked",
    )
