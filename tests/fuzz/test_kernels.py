"""Random calls of the functions of tensors: those of plain tensors of float32, or a refusal.

tests/kernels compares calls of plain tensors with float64.
"""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from fuzzed_arrays import code_of_array, tensor
from hypothesis import given
from hypothesis import strategies as st
from random_calls import ANYTHING, Values, calls, code_of, codes, fuzz, integers, judge, numbers

import fastaccum as fa

pytestmark = pytest.mark.slow

TOLERANCES = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
DTYPES = ("float32", "float32", "float16", "bfloat16")


# How a function runs, and what its result must be.


def cotangent_of(y):
    flat = tf.cos(tf.cast(tf.range(tf.size(y)), tf.float32))
    return tf.cast(tf.reshape(flat, tf.shape(y)), y.dtype)


def run_with_gradients(function, arguments, way):
    """Returns the result, and its gradient by each floating tensor among the arguments.

    Args:
        way: "eager", "graph", "xla", or a graph that knows the ranks only ("unknown") or no shape
            at all ("unranked").
    """
    tensors = {}
    for name, value in arguments.items():
        is_eager = isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
        if is_eager and value.dtype not in (tf.string, tf.variant):
            tensors[name] = value

    def run(tensors):
        floating = {name: t for name, t in tensors.items() if t.dtype.is_floating}
        with tf.GradientTape() as tape:
            tape.watch(list(floating.values()))
            y = function(**{**arguments, **tensors})
        return y, tape.gradient(y, floating, cotangent_of(y)) if floating else {}

    if way == "eager":
        return run(tensors)
    signature = None
    if way == "unranked":
        signature = [{name: tf.TensorSpec(None, t.dtype) for name, t in tensors.items()}]
    elif way == "unknown":
        signature = [{}]
        for name, t in tensors.items():
            shape = [*[None] * (t.shape.rank - 2), *t.shape[-2:]]
            signature[0][name] = tf.TensorSpec(shape, t.dtype)
    compiled = tf.function(run, signature, autograph=False, jit_compile=way == "xla")
    return compiled(tensors)


def plain_values(arguments):
    """Returns the arguments with each floating tensor as a constant of float32 or float64."""
    plain = {}
    for name, value in arguments.items():
        plain[name] = value
        if tf.is_tensor(value) or isinstance(value, np.ndarray):
            tensor = tf.convert_to_tensor(value)
            if tensor.dtype.is_floating and tensor.dtype != tf.float64:
                tensor = tf.cast(tensor, tf.float32)
            plain[name] = tensor
    return plain


def check_result(function, result, arguments):
    """Compares a result and its gradients with those of plain values, where these are finite."""
    plain = plain_values(arguments)
    if "implementation" in inspect.signature(function).parameters:
        plain["implementation"] = "reference"
    dtypes = [getattr(value, "dtype", "float32") for value in arguments.values()]
    tolerance = max(TOLERANCES.get(tf.as_dtype(dtype).name, 0) for dtype in dtypes)
    y, gradients = result
    expected, plain_gradients = run_with_gradients(function, plain, "eager")
    check_close("the result", y, expected, tolerance)
    for name, gradient in gradients.items():
        plain_gradient = plain_gradients[name]
        if gradient is None:
            assert plain_gradient is None or not np.any(plain_gradient), f"{name} has no gradient"
        else:
            check_close(f"the gradient of {name}", gradient, plain_gradient, tolerance)


def check_close(what, result, expected, tolerance):
    result = np.asarray(tf.convert_to_tensor(result), "float64")
    expected = np.asarray(tf.convert_to_tensor(expected), "float64")
    assert result.shape == expected.shape, f"{what} has shape {result.shape}, not {expected.shape}"
    known = np.isfinite(expected)
    scale = max(1.0, float(np.abs(expected[known]).max(initial=0.0)))
    error = np.nan_to_num(np.abs(result[known] - expected[known]), nan=np.inf).max(initial=0.0)
    assert error <= tolerance * scale, f"{what} is off by {error:.3g}: {result} for {expected}"


@st.composite
def kernel_calls(draw, function, table, required):
    call = draw(calls(f"fa.kernels.{function}", table, required))
    way = draw(st.sampled_from(["eager"] * 30 + ["graph"] * 3 + ["unknown", "unranked", "xla"]))
    return call._replace(way=way, may_refuse=way in ("unknown", "unranked"))


def judge_kernel(call):
    arguments = call.values()
    function = getattr(fa.kernels, call.function.removeprefix("fa.kernels."))
    judge(
        call,
        lambda: run_with_gradients(function, arguments, call.way),
        lambda result: check_result(function, result, arguments),
    )


sizes = st.integers(1, 5)
leading_axes = st.lists(st.integers(0, 3), max_size=3)


# matmul_fp32_wgrad


@st.composite
def matmul_calls(draw):
    width = draw(sizes)
    dtype = draw(st.sampled_from([*DTYPES, "float64"]))
    kernel_dtype = "float64" if dtype == "float64" else "float32"
    table = {
        "x": tensor([*draw(leading_axes), width], dtype, 1),
        "kernel": tensor([width, draw(st.integers(0, 5))], kernel_dtype, 2),
    }
    return draw(kernel_calls("matmul_fp32_wgrad", table, ["x", "kernel"]))


@fuzz(150)
@given(call=matmul_calls())
def test_matmul(call):
    judge_kernel(call)


# linear_cross_entropy


@st.composite
def cross_entropy_calls(draw):
    width = draw(sizes)
    classes = draw(st.sampled_from([1, 2, 5, 9, 63, 64, 65, 130]))
    lead = draw(leading_axes)
    dtype = draw(st.sampled_from(DTYPES))
    kernel_dtype = draw(st.sampled_from(["float32", dtype]))
    label_dtype = draw(st.sampled_from(["int32", "int64", "int8", "uint8", "uint16", "uint64"]))
    labels = tensor(lead, label_dtype, 3, integral=True, high=classes)
    right = code_of_array(lead, "int64", 3, high=classes)
    extremes = (-1, -100, classes, 2**31, 2**32, 2**62, -(2**63))
    outside = [f"tf.constant(spoiled({right}, {label}))" for label in extremes]
    choices = codes("'auto' | 'chunked' | 'reference'")
    smoothing = [*ANYTHING, *codes("1.0 | 1 - 1e-9 | -1e-9 | 1.5")]
    table = {
        "hidden": tensor([*lead, width], dtype, 1),
        "kernel": tensor([width, classes], kernel_dtype, 2),
        "labels": labels._replace(
            valid=[*labels.valid, f"tf.constant(spoiled({right}, -100, -100))"],
            odd=[*labels.odd, *outside * 3],
        ),
        "bias": tensor([classes], draw(st.sampled_from(["float32", dtype])), 4),
        "ignore_index": Values([integers(-3, classes), "-100", "2**40"], odd=ANYTHING),
        "label_smoothing": Values(["0.0", numbers(1e-3, 0.9)], odd=smoothing),
        "z_loss": Values(["0", numbers(1e-4, 1.0)], odd=[*ANYTHING, "-1e-9", "1e-44", "1e39"]),
        "chunk_size": Values(["None", integers(1, 70), "10**9"], odd=ANYTHING),
        "implementation": Values(choices, odd=[*ANYTHING, "'blockwise'", "'Auto'"]),
    }
    return draw(kernel_calls("linear_cross_entropy", table, ["hidden", "kernel", "labels"]))


@fuzz(250)
@given(call=cross_entropy_calls())
def test_linear_cross_entropy(call):
    judge_kernel(call)


# attention


@st.composite
def attention_calls(draw):
    batch = draw(st.integers(1, 3))
    queries = draw(st.integers(1, 19))
    keys = draw(st.one_of(st.just(queries), st.integers(1, 19)))
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 3))
    width = draw(sizes)
    dtype = draw(st.sampled_from(DTYPES))
    id_dtype = draw(st.sampled_from(["int32", "int64", "int8", "uint8"]))
    of_queries = tensor([batch, queries], id_dtype, 4, integral=True, high=3)
    of_keys = tensor([batch, keys], id_dtype, 5, integral=True, high=3)
    query_ids = draw(code_of(of_queries.valid))
    key_ids = draw(code_of(of_keys.valid))
    ids = ["None", f"({query_ids}, {key_ids})"]
    if queries == keys:
        wide = code_of_array([batch, queries], "int64", 4)
        ids += [*of_queries.valid, f"spoiled({wide}, {2**63 - 1}, {-(2**63)}, {2**32}, -1)"]
    odd_ids = [f"({draw(code_of(of_queries.odd))}, {key_ids})"] * 3
    odd_ids += [f"({query_ids}, {draw(code_of(of_keys.odd))})"] * 3
    odd_ids += [f"[{query_ids}, {key_ids}]", f"({query_ids},)", f"({query_ids}, {key_ids}, None)"]
    scales = ["None", "0", "-0.5", "np.float32(0.25)", numbers(0.01, 2.0)]
    choices = codes("'auto' | 'blockwise' | 'reference'")
    table = {
        "query": tensor([batch, queries, heads, width], dtype, 1),
        "key": tensor([batch, keys, groups, width], dtype, 2),
        "value": tensor([batch, keys, groups, width], dtype, 3),
        "causal": Values(codes("True | False | np.True_"), odd=ANYTHING),
        "scale": Values(scales, odd=ANYTHING),
        "segment_ids": Values(ids, odd=[*odd_ids * 2, *of_queries.odd]),
        "block_size": Values(["None", "8", "10**6", integers(1, 24)], odd=ANYTHING),
        "implementation": Values(choices, odd=[*ANYTHING, *codes("'cudnn' | 'chunked' | 'AUTO'")]),
    }
    return draw(kernel_calls("attention", table, ["query", "key", "value"]))


@fuzz(200)
@given(call=attention_calls())
def test_attention(call):
    judge_kernel(call)
