"""Attention against float64, next to the unfused expression of the same precision; and its
program.
"""

import functools
import json
import math
import re

import h200
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastaccum.kernels import (
    attention,
    attention_implementation,
    blockwise_attention,
    cudnn_attention,
)
from fastaccum.kernels.blockwise_attention import Form, reference_attention
from fastaccum.step import compiler_ir as compiled
from fastaccum.step.program import Program

TOLERANCES = {"float32": 5e-4, "float16": 1e-3, "bfloat16": 1e-2}


def make(
    dtype="float32", batch=2, time=37, keys=None, heads=4, groups=2, width=9, segments=None, seed=0
):
    """query, key, value, the output's cotangent, and segment ids [B, T] and [B, S] (or None)."""
    rng = np.random.default_rng(seed)
    keys = keys or time
    shapes = [
        (batch, time, heads, width),
        (batch, keys, groups, width),
        (batch, keys, groups, width),
    ]
    tensors = [tf.constant(rng.normal(size=shape), dtype) for shape in [*shapes, shapes[0]]]
    if segments:
        segments = tuple(
            np.sort(rng.integers(0, segments, (batch, length))).astype("int32")
            for length in (time, keys)
        )
    return tensors, segments


def outcome(tensors, jit_compile=True, **options):
    """The output, and the gradients of query, key and value."""

    def run(query, key, value, cotangent):
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            output = attention(query, key, value, **options)
        return output, *tape.gradient(output, (query, key, value), output_gradients=cotangent)

    if jit_compile is not None:
        run = tf.function(run, jit_compile=jit_compile, autograph=False)
    return run(*tensors)


def truth(
    tensors,
    causal=False,
    scale=None,
    segment_ids=None,
    window=None,
    soft_cap=None,
    factor=1.0,
    **of_gradient,
):
    """Computes attention by hand in float64; `factor` [B, H, T, S] multiplies the weights for
    dropout.
    """
    factor_of_gradient = of_gradient.get("factor_of_gradient", factor)
    q, k, v, g = (t.numpy().astype("float64") for t in tensors)
    (_, time, heads, width), (_, keys, groups, _) = q.shape, k.shape
    scale = width**-0.5 if scale is None else scale
    k, v = (np.repeat(t, heads // groups, axis=2) for t in (k, v))
    seen = np.ones((1, 1, time, keys), bool)
    if causal:
        seen = seen & (np.arange(keys)[None, :] <= np.arange(time)[:, None] + keys - time)
    if window is not None:
        seen = seen & (
            np.abs(np.arange(keys)[None, :] - np.arange(time)[:, None] - keys + time) < window
        )
    if segment_ids is not None:
        seen = seen & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
    scores, slope = np.einsum("bthk,bshk->bhts", q, k) * scale, 1.0
    if soft_cap is not None:
        scores, slope = soft_cap * np.tanh(scores / soft_cap), np.cosh(scores / soft_cap) ** -2
    scores = np.where(seen, scores, -1e300)
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    dweights = factor_of_gradient * np.einsum("bthk,bshk->bhts", g, v)
    dscores = slope * weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * scale
    dk, dv = (
        np.einsum("bhts,bthk->bshk", dscores, q),
        np.einsum("bhts,bthk->bshk", factor_of_gradient * weights, g),
    )
    dk, dv = (t.reshape(*t.shape[:2], groups, -1, width).sum(3) for t in (dk, dv))
    return (
        np.einsum("bhts,bshk->bthk", factor * weights, v),
        np.einsum("bhts,bshk->bthk", dscores, k),
        dk,
        dv,
    )


def assert_as_exact(got, reference, exact, tolerance):
    """Each element errs at most as far as the unfused expression of the same precision, and a
    tolerance.
    """
    for name, a, b, c in zip(
        ("output", "dquery", "dkey", "dvalue"), got, reference, exact, strict=True
    ):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, allowed = (np.abs(t.numpy().astype("float64") - c) for t in (a, b))
        excess = error - allowed - tolerance * np.maximum(1, np.abs(c))
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, (
            f"{name}{list(worst)}: {a.numpy()[worst]}, reference {b.numpy()[worst]}, {c[worst]}"
        )


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [
        ("float32", False),
        ("float16", True),
        ("bfloat16", True),
        pytest.param("float32", True, marks=pytest.mark.slow),
    ],
)
def test_as_exact_as_the_reference(dtype, causal):
    tensors, segment_ids = make(dtype, segments=3)
    options = {"causal": causal, "segment_ids": segment_ids}
    reference, exact = (
        outcome(tensors, False, implementation="reference", **options),
        truth(tensors, **options),
    )
    got = outcome(tensors, block_size=20, implementation="blockwise", **options)
    assert_as_exact(got, reference, exact, TOLERANCES[dtype])


@settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    time=st.integers(1, 40),
    keys=st.integers(1, 40),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    block_size=st.integers(1, 50),
    causal=st.booleans(),
    segments=st.sampled_from([None, 2]),
    window=st.sampled_from([None, 1, 3, 12]),
    soft_cap=st.sampled_from([None, 1.5]),
    implementation=st.sampled_from(["blockwise", "reference"]),
    jit_compile=st.sampled_from([True, False, None]),
)
def test_any_shape(
    time,
    keys,
    groups,
    per_group,
    block_size,
    causal,
    segments,
    window,
    soft_cap,
    implementation,
    jit_compile,
):
    if time * keys > 25 * block_size**2:
        block_size = 8  # an eager loop over hundreds of blocks is slow
    tensors, segment_ids = make(
        time=time, keys=keys, heads=groups * per_group, groups=groups, width=5, segments=segments
    )
    options = {
        "causal": causal,
        "segment_ids": segment_ids,
        "scale": 0.7,
        "window": window,
        "soft_cap": soft_cap,
    }
    got = outcome(
        tensors, jit_compile, block_size=block_size, implementation=implementation, **options
    )
    for a, b in zip(got, truth(tensors, **options), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("wrong", [{"window": 6}, {"window": 8}, {"soft_cap": None}])
def test_a_window_off_by_one_and_a_cap_that_is_dropped_are_seen(wrong):
    tensors, _ = make()
    options = {"causal": True, "window": 7, "soft_cap": 1.5}
    got = outcome(tensors, block_size=8, implementation="blockwise", **options)
    for a, b, c in zip(
        got, truth(tensors, **options), truth(tensors, **options | wrong), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(a - c).max() > 0.01


def test_a_query_that_sees_nothing_gets_zero_and_moves_nothing():
    """More queries than keys, ends aligned: the first 20 see none. And a segment that no key
    has.
    """
    tensors, _ = make(time=37, keys=17)
    for options in (
        {"causal": True},
        {"segment_ids": (np.repeat([[0, 1]], 2, 0).repeat([20, 17], 1), np.ones((2, 17), int))},
    ):
        for implementation in ("blockwise", "reference"):
            output, dquery, *others = outcome(
                tensors, False, block_size=8, implementation=implementation, **options
            )
            assert not output[:, :20].numpy().any() and not dquery[:, :20].numpy().any()
            assert output[:, 20:].numpy().all()
            assert all(np.isfinite(t).all() for t in others)


def test_a_wrong_mask_is_seen():
    """The control: ends not aligned, where queries and keys differ in number."""
    tensors, _ = make(time=20, keys=30)
    output = outcome(tensors, False, causal=True, block_size=8, implementation="blockwise")[0]
    np.testing.assert_allclose(output, truth(tensors, causal=True)[0], atol=2e-5)
    q, k, v, g = tensors
    starts_aligned = truth((q, k[:, :20], v[:, :20], g), causal=True)[0]
    assert np.abs(output - starts_aligned).max() > 0.1


def drawn(rate, seed, batch=2, time=37, heads=4, implementation="blockwise"):
    """Returns the factors by which dropout multiplies the weights, [B, H, T, S].

    They are read off outputs for equal scores and unit values.
    """
    query, key = tf.zeros([batch, time, heads, time]), tf.zeros([batch, time, 1, time])
    value = tf.broadcast_to(tf.eye(time)[:, None], key.shape)
    output = attention(
        query, key, value, dropout=rate, seed=seed, implementation=implementation, block_size=64
    )
    return np.transpose(time * output.numpy().astype("float64"), [0, 2, 1, 3])


@pytest.mark.parametrize(
    ("dtype", "segments"),
    [("float32", None), ("float16", 3), pytest.param("bfloat16", 3, marks=pytest.mark.slow)],
)
def test_dropout_is_that_of_float64_with_the_same_draw(dtype, segments):
    tensors, segment_ids = make(dtype, segments=segments)
    options, factor = {"causal": True, "segment_ids": segment_ids}, drawn(0.3, [5, 7])
    exact = truth(tensors, factor=factor, **options)
    options |= {"dropout": 0.3, "seed": [5, 7]}
    reference = outcome(tensors, False, implementation="reference", **options)
    got = outcome(tensors, block_size=20, implementation="blockwise", **options)
    assert_as_exact(got, reference, exact, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("jit_compile", [True, None])
@pytest.mark.parametrize("block_size", [8, 37])
def test_dropped_weights_depend_on_the_seed_alone(block_size, jit_compile):
    tensors, _ = make()
    exact = truth(tensors, factor=drawn(0.3, [5, 7], implementation="reference"))
    options = {
        "dropout": 0.3,
        "seed": tf.constant([5, 7], tf.uint32),
        "implementation": "blockwise",
    }
    for a, b in zip(
        outcome(tensors, jit_compile, block_size=block_size, **options), exact, strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_another_draw_for_the_gradient_is_seen():
    """The control: the backward pass drops other weights than the forward one."""
    tensors, _ = make()
    factor, other = drawn(0.3, [5, 7]), drawn(0.3, [5, 8])
    got = outcome(tensors, dropout=0.3, seed=[5, 7], block_size=8, implementation="blockwise")
    np.testing.assert_allclose(got[0], truth(tensors, factor=factor)[0], atol=2e-5)
    wrong = truth(tensors, factor=factor, factor_of_gradient=other)
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(got[1:], wrong[1:], strict=True))


@pytest.mark.parametrize("rate", [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_dropout_is_fair_and_independent(rate):
    """Checks that means and correlations over rows, heads, queries, keys and successive seeds lie
    within 5.5 standard deviations.
    """
    masks = np.stack([drawn(rate, [3, step], time=96) for step in range(4)])  # [steps, B, H, T, S]
    assert np.allclose(np.unique(masks), [0, 1 / (1 - rate)])
    x = (masks - 1) * np.sqrt((1 - rate) / rate)  # of mean 0 and variance 1
    for axes in [(), (1, 2, 3, 4), (0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4), (0, 1, 2, 3)]:
        axes = axes or tuple(range(5))
        count = np.prod([x.shape[axis] for axis in axes])
        assert np.abs(x.mean(axes)).max() * count**0.5 < 5.5
    for axis in range(5):
        for lag in {1, x.shape[axis] // 2}:
            pairs = np.take(x, range(lag, x.shape[axis]), axis) * np.take(
                x, range(x.shape[axis] - lag), axis
            )
            assert abs(pairs.mean()) * pairs.size**0.5 < 5.5
    queries = x.reshape(-1, 96) @ x.reshape(-1, 96).T / 96**0.5
    assert abs(queries[np.triu_indices(len(queries), 1)].var() - 1) < 0.02


def test_scores_beyond_float16_stay_finite():
    tensors, _ = make("float16")
    # scores of about 30,000, some above 65,504
    tensors = [tensors[0] * 100, tensors[1] * 100, *tensors[2:]]
    scores = np.einsum(
        "bthk,bshk->bhts",
        *(t.numpy().astype("float32") for t in (tensors[0][:, :, ::2], tensors[1])),
    )
    assert np.abs(scores).max() > 65504
    for implementation in ("blockwise", "reference"):
        for t in outcome(tensors, False, block_size=20, implementation=implementation):
            assert np.isfinite(t).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_reaches_the_gradients(bad):
    """So that a train step sees it and is skipped."""
    (query, *others), _ = make()
    query = tf.tensor_scatter_nd_update(query, [[0, 5, 0, 0]], [bad])
    output, dquery, *_ = outcome(
        [query, *others], False, block_size=16, implementation="blockwise", causal=True
    )
    assert not np.isfinite(output[0, 5, 0]).any() and not np.isfinite(dquery).all()


def test_auto_picks_by_the_number_of_scores():
    assert attention_implementation((1, 128, 4, 8), (1, 128, 4, 8)) == "reference"
    assert attention_implementation((1, 256, 4, 8), (1, 256, 4, 8)) == "blockwise"
    assert attention_implementation((1, 64, 4, 8), (1, 64, 4, 8), block_size=16) == "blockwise"
    assert attention_implementation((1, None, 4, 8), (1, None, 4, 8)) == "reference"
    tensors, _ = make(time=40)
    picked, blockwise = (
        outcome(tensors, False, block_size=16, implementation=i)[0] for i in ("auto", "blockwise")
    )
    np.testing.assert_array_equal(picked, blockwise)


def program(time, causal=True, block_size=32, implementation="blockwise", **options):
    def run(*tensors):
        return outcome(
            tensors,
            None,
            causal=causal,
            block_size=block_size,
            implementation=implementation,
            **options,
        )

    return Program(run), make(batch=1, time=time, heads=2, groups=2, width=16)[0]


@pytest.mark.parametrize(("causal", "pairs"), [(True, 8 * 9 // 2), (False, 8 * 8)])
def test_two_loops_over_the_blocks_that_see_each_other(causal, pairs):
    hlo = compiled.compiler_ir(*_call(program(256, causal)))
    whiles = re.findall(r"= .* while\(.*", hlo)
    assert [re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1] for line in whiles] == [
        str(pairs)
    ] * 2
    assert "conditional(" not in hlo
    # Blocks of the running sums, [n, N, q] and [n, N, q, K], are written in place.
    assert _loops_copies(hlo) == []
    assert not re.search(r"\[(\d+,)*256,256\]", hlo)  # no [T, S] buffer
    reference = compiled.compiler_ir(*_call(program(256, causal, implementation="reference")))
    assert re.search(r"\[(\d+,)*256,256\]", reference)


def test_blocks_beyond_a_window_are_not_computed():
    hlo = compiled.compiler_ir(*_call(program(256, window=40)))
    assert re.findall(r'known_trip_count":\{"n":"(\d+)"', hlo) == [str(1 + 2 + 6 * 3)] * 2
    assert _loops_copies(hlo) == []


def _loops_copies(hlo):
    bodies = [
        computation
        for computation in hlo.split("\n\n")
        if re.match(r"%\S*while\S*body", computation)
    ]
    assert len(bodies) == 2
    return [
        line
        for body in bodies
        for line in body.splitlines()
        if re.search(r"f32\[8,2,32.* copy\(", line)
    ]


def test_memory_is_linear_in_time():
    def temp_bytes(time, implementation):
        return compiled.memory_analysis(
            *_call(program(time, implementation=implementation))
        ).temp_bytes

    assert temp_bytes(1024, "blockwise") <= 4.3 * temp_bytes(256, "blockwise")
    assert temp_bytes(1024, "reference") > 8 * temp_bytes(256, "reference")


@pytest.mark.parametrize(("batch", "block"), [(8, 1024), (64, 512), (1, 2048)])
def test_on_a_gpu_without_cudnn_blocks_are_as_large_as_memory_allows(batch, block):
    """Expects two loops over blocks of at least 512 queries and keys, and of all 2,048 where their
    scores take at most 256 MiB.
    """
    shapes = [tf.TensorSpec([batch, 2048, heads, 64], tf.bfloat16) for heads in (4, 2, 2, 4)]

    def run(*tensors):
        return outcome(tensors, None, causal=True, implementation="auto")

    step = tf.function(run, jit_compile=True, autograph=False)
    with h200.as_on_a_gpu(cudnn=False):
        exported = compiled.compiler_ir(step, *shapes, stage="stablehlo_serialized")
    hlo, _ = h200.compile_for_h200(exported)
    pieces = 2048 // block
    turns = re.findall(r'known_trip_count":\{"n":"(\d+)"', hlo)
    assert turns == ([] if pieces == 1 else 2 * [str(pieces * (pieces + 1) // 2)])


def attending(implementation="auto", packed=False, **options):
    """Output and gradients as one compiled function of query, key, value, cotangent (and segment
    ids).
    """

    def run(*tensors):
        *tensors, ids = tensors if packed else (*tensors, None)
        return outcome(
            tensors, None, scale=0.25, segment_ids=ids, implementation=implementation, **options
        )

    return tf.function(run, jit_compile=True, autograph=False)


CUDNN_TAKES = {
    "causal": ({}, {"causal": True}),
    "all seen": ({"dtype": "float16", "keys": 192, "width": 128}, {}),
    "grouped": ({"heads": 6, "groups": 2, "width": 256}, {"causal": True}),
    "packed": ({"batch": 1, "segments": 3}, {"causal": True, "packed": True}),
}


@pytest.mark.parametrize("case", CUDNN_TAKES)
def test_auto_is_one_call_of_cudnns_each_way_on_tensors_as_they_are(case):
    """Reads the calls, which are those that JAX makes (see the next test).

    Only a device can tell whether cuDNN takes them.
    """
    sizes, options = CUDNN_TAKES[case]
    tensors, segment_ids = make(**{"dtype": "bfloat16", "time": 128, "width": 64} | sizes)
    tensors += [segment_ids[0]] if segment_ids else []
    with h200.as_on_a_gpu():
        exported = compiled.compiler_ir(
            attending(**options), *tensors, stage="stablehlo_serialized"
        )
    hlo, memory = h200.compile_for_h200(exported)
    bias = "ScaleBias" if segment_ids else ""
    targets = re.findall(r'custom_call_target="(.*?)"', hlo)
    assert targets == [f"__cudnn$fmha{bias}Softmax", f"__cudnn$fmha{bias}SoftmaxBackward"]
    assert re.findall(r'"mask_type": ?"(\w+)"', hlo) == 2 * ["CAUSAL" if options else "NO_MASK"]
    assert re.findall(r'"fmha_scale": ?([\d.]+)', hlo) == 2 * ["0.25"]
    # Beside them the mask of packed sequences, once, and nothing: no product, no transposed or
    # copied operand.
    kernels = re.findall(r"^  (?:ROOT )?%\S+ = \S+ ([\w\-]+)\(", hlo.partition("ENTRY")[2], re.M)
    assert set(kernels) <= {"parameter", "bitcast", "get-tuple-element", "fusion"}
    assert kernels.count("fusion") == bool(segment_ids)
    batch, time, heads, _ = tensors[0].shape
    assert memory.temp_bytes < 4 * batch * heads * time + bool(segment_ids) * 2 * time**2 + 2000


def test_dropped_weights_are_drawn_again_in_the_backward_pass():
    """Covers a loop of one block too, for which XLA would keep the dropped positions."""

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def step(given, seed):
        x = given
        for layer in range(2):
            x = attention(x, x, x, dropout=0.1, seed=seed + layer, implementation="blockwise")
        return tf.gradients(x, given)

    with h200.as_on_a_gpu():
        specs = tf.TensorSpec([2, 512, 8, 64], tf.bfloat16), tf.TensorSpec([2], tf.int64)
        exported = compiled.compiler_ir(step, *specs, stage="stablehlo_serialized")
    hlo, _ = h200.compile_for_h200(exported)
    written = hlo.partition("ENTRY")[2]
    assert "bf16[16,512,512]" in written and "pred[16,512,512]" not in written


def test_a_padded_call_keeps_one_output():
    """Keeps the output in which queries without a visible key are 0, and frees cuDNN's own."""
    shape, layers = [2, 512, 8, 64], 4
    specs = [tf.TensorSpec(shape, tf.bfloat16), *2 * [tf.TensorSpec(shape[:2], tf.int32)]]
    weights = layers * [tf.TensorSpec([512, 512], tf.bfloat16)]

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def step(given, queries, keys, *weights):
        x = given
        for weight in weights:
            attended = attention(x, x, x, causal=True, segment_ids=(queries, keys))
            x = tf.reshape(tf.reshape(attended, [-1, 512]) @ weight, shape)
        return tf.gradients(x, [given, *weights])

    with h200.as_on_a_gpu():
        exported = compiled.compiler_ir(step, *specs, *weights, stage="stablehlo_serialized")
    hlo, memory = h200.compile_for_h200(exported)
    assert hlo.count("SoftmaxBackward") == layers
    of_one, mask = 2 * math.prod(shape), 2 * 2 * 512**2
    # inputs and outputs; gradients and workspaces
    assert memory.temp_bytes < (2 * layers + 4) * of_one + mask


def compute_as_cudnn(target, operands, results, config):
    """Computes what cuDNN documents of a call: softmax(scale * query @ key + mask) @ value, and its
    gradients.
    """
    options = config["cudnn_fmha_backend_config"]
    inputs, backward = operands[:3], target.endswith("Backward")
    mask = operands[5 if backward else 3] if "Bias" in target else 0

    per_group = inputs[0].shape[2] // inputs[1].shape[2]
    query, key, value = (tf.cast(each, tf.float32) for each in inputs)
    key, value = (tf.repeat(each, per_group, 2) for each in (key, value))
    scale = options["fmha_scale"]
    scores = tf.einsum("bthk,bshk->bhts", query, key) * scale
    causal = tf.linalg.band_part(
        tf.ones(scores.shape[-2:]), -1, 0 if options["mask_type"] == "CAUSAL" else -1
    )
    scores = tf.where(causal > 0, scores + tf.cast(mask, tf.float32), -1e38)
    if not backward:
        weights = tf.cast(tf.nn.softmax(scores), inputs[0].dtype)
        output = tf.einsum("bhts,bshk->bthk", tf.cast(weights, tf.float32), value)
        return [tf.cast(output, inputs[0].dtype), tf.reduce_logsumexp(scores, -1)]
    # As FlashAttention does, from the log-sum-exp and the output that it is given.
    lse, doutput, output = (
        operands[3],
        *(tf.cast(each, tf.float32) for each in (operands[4], operands[-1])),
    )
    weights = tf.exp(scores - lse[..., None])
    delta = tf.einsum("bthk,bthk->bht", doutput, output)
    dscores = scale * weights * (tf.einsum("bthk,bshk->bhts", doutput, value) - delta[..., None])
    found = [
        tf.einsum("bhts,bshk->bthk", dscores, key),
        tf.einsum("bhts,bthk->bshk", dscores, query),
        tf.einsum("bhts,bthk->bshk", weights, doutput),
    ]
    of_groups = [
        tf.reduce_sum(tf.reshape(t, [*t.shape[:2], -1, per_group, t.shape[3]]), 3)
        for t in found[1:]
    ]
    return [tf.cast(t, inputs[0].dtype) for t in (found[0], *of_groups)]


@pytest.mark.parametrize(
    "form", [{}, {"causal": True}, {"segments": 3}, {"causal": True, "segments": 3}], ids=str
)
@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 6e-3), ("bfloat16", 5e-2)])
def test_dropout_as_two_calls_of_cudnns(monkeypatch, form, dtype, allowed):
    """Drops the same weights as the unfused expression. With one call alone their sum would differ."""
    monkeypatch.setattr(cudnn_attention, "_call", compute_as_cudnn)
    tensors, (ids, _) = make(dtype, time=38, width=16, segments=form.get("segments", 1))
    options = {"causal": form.get("causal", False), "dropout": 0.3, "seed": [4, 5]}
    options["segment_ids"] = (
        (ids, np.roll(np.minimum(ids, 1), 5, 1)) if "segments" in form else None
    )

    def results(implementation, dtype):
        with h200.as_on_a_gpu():
            return outcome(
                [tf.cast(t, dtype) for t in tensors], implementation=implementation, **options
            )

    fused, exact = results("cudnn", dtype), results("reference", "float32")
    half = results("reference", dtype)
    for got, unfused, expected in zip(fused, half, exact, strict=True):
        np.testing.assert_allclose(tf.cast(got, tf.float32), expected, atol=allowed)
        error, error_unfused = (
            np.abs(tf.cast(t, tf.float32) - expected).max() for t in (got, unfused)
        )
        assert error <= 2.5 * error_unfused + allowed / 10
    monkeypatch.setattr(cudnn_attention, "_scaled", lambda t, *_: t)  # negative control
    wrong = zip(results("cudnn", dtype), exact, strict=True)
    assert (
        max(np.abs(tf.cast(got, tf.float32) - expected).max() for got, expected in wrong)
        > 5 * allowed
    )


def test_a_row_whose_keys_are_all_dropped_passes_nothing_on(monkeypatch):
    """Uses the log-sum-exp of the mask alone.

    A kernel that rounds it otherwise would get an infinite weight.
    """

    def compute(target, operands, results, config):
        if target.endswith("Backward"):
            operands = [*operands[:3], operands[3] * (1 + 2**-20), *operands[4:]]
        return compute_as_cudnn(target, operands, results, config)

    monkeypatch.setattr(cudnn_attention, "_call", compute)
    tensors, _ = make("bfloat16", time=8, width=16)
    with h200.as_on_a_gpu():
        results = outcome(tensors, causal=True, dropout=0.8, seed=[4, 5], implementation="cudnn")
    assert (tf.reduce_max(tf.abs(results[0]), -1) == 0).numpy().any()
    assert all(np.isfinite(tf.cast(t, tf.float32)).all() for t in results)


def test_kept_weights_are_drawn_again_in_the_backward_pass():
    """No mask of all heads is kept from one pass to the other."""
    shape, layers = [2, 512, 4, 64], 8
    mask = 2 * 2 * 4 * 512**2

    def step(x, seed):
        y = x
        for i in range(layers):
            y += attention(y, y, y, dropout=0.1, seed=seed + i, implementation="cudnn")
        return tf.gradients(y, x)

    with h200.as_on_a_gpu():
        specs = tf.TensorSpec(shape, tf.bfloat16), tf.TensorSpec([2], tf.int32)
        compiled_step = tf.function(step, jit_compile=True, autograph=False)
        hlo, memory = h200.compile_for_h200(
            compiled.compiler_ir(compiled_step, *specs, stage="stablehlo_serialized")
        )
    assert hlo.count("fmhaScaleBiasSoftmaxBackward") == hlo.count("fmhaSoftmaxBackward") == layers
    assert memory.temp_bytes < 5 * mask


@pytest.mark.parametrize("causal", [False, True])
def test_padding_in_cudnns_mask(monkeypatch, causal):
    """A query that sees nothing gets 0 and passes no gradient on; cuDNN by itself would return a
    mean.
    """
    monkeypatch.setattr(cudnn_attention, "_call", compute_as_cudnn)
    tensors, (ids, _) = make("float16", time=38, width=16, segments=3)
    pair, results = (ids, np.roll(np.minimum(ids, 1), 5, 1)), []
    for dtype, implementation in (("float16", "cudnn"), ("float32", "reference")):
        with h200.as_on_a_gpu():
            inputs = [tf.cast(each, dtype) for each in tensors]
            results.append(
                outcome(inputs, causal=causal, segment_ids=pair, implementation=implementation)
            )
    sees = (ids[:, :, None] == pair[1][:, None]) & (np.tri(38, dtype=bool) | (not causal))
    assert 0 < sees.any(2).mean() < 1
    for fused, exact in zip(*results, strict=True):
        np.testing.assert_allclose(tf.cast(fused, tf.float32), exact, atol=6e-3)


@pytest.mark.slow
def test_cudnns_calls_are_jaxs():
    """Operands, results, their layouts and what XLA reads beside them. JAX also asks for the mask's
    gradient.
    """
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.h200 import jax_cudnn

    for sizes, options in CUDNN_TAKES.values():
        tensors, segment_ids = make(**{"dtype": "bfloat16", "time": 128, "width": 64} | sizes)
        tensors += [segment_ids[0]] if segment_ids else []

        attend = functools.partial(
            jax.nn.dot_product_attention,
            scale=0.25,
            is_causal="causal" in options,
            implementation="cudnn",
        )

        def theirs(query, key, value, cotangent, *ids, attend=attend):
            mask = ids[0][:, None, :, None] == ids[0][:, None, None, :] if ids else None
            output, gradient = jax.vjp(functools.partial(attend, mask=mask), query, key, value)
            return output, *gradient(cotangent)

        shapes = [jax.ShapeDtypeStruct(t.shape, getattr(t.dtype, "name", t.dtype)) for t in tensors]
        with jax_cudnn.cudnn_of_the_described_gpu():
            lowered = jax.jit(theirs).trace(*shapes).lower(lowering_platforms=("cuda",))
        with h200.as_on_a_gpu():
            exported = compiled.compiler_ir(
                attending(**options), *tensors, stage="stablehlo_serialized"
            )
        ours, of_jax = (_cudnn_calls(module) for module in (exported, lowered.as_text()))
        assert len(ours) == 2 and ours == of_jax


def _cudnn_calls(module):
    hlo, _ = h200.compile_for_h200(module)
    calls = []
    for line in hlo.splitlines():
        if "__cudnn$fmha" in line:
            types, target, layouts = re.search(
                r"= \((.*?)\) custom-call\(.*?(__cudnn\$\w+).*?operand_layout_constraints=\{(.*?\})\}",
                line,
            ).groups()
            types = types.replace(" bf16[1,1,128,128]{3,2,1,0},", "")  # of a mask
            config = json.loads(re.search(r"backend_config=(\{.*\})$", line)[1])[
                "cudnn_fmha_backend_config"
            ]
            scores = config.pop("intermediate_tensor_shape")
            calls.append(
                (target, types, layouts, scores["dimensions"], scores["element_type"], config)
            )
    return calls


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dtype": "float32"}, "float32: it must be float16 or bfloat16"),
        ({"width": 12}, "heads 12 wide: they must be a multiple of 8, up to 256"),
        ({"width": 264}, "heads 264 wide"),
        ({"keys": 50}, "37 queries and 50 keys: there must be as many"),
        ({"segments": 2}, "packed sequences or dropout over 37 tokens: their number must be even"),
        ({"dropout": 0.1}, "packed sequences or dropout over 37 tokens: their number must be even"),
        (
            {"dropout": 0.1, "keys": 50, "causal": False},
            "37 queries and 50 keys: .* or with dropout",
        ),
    ],
)
def test_auto_leaves_calls_that_cudnn_refuses_to_other_forms(sizes, message):
    options = {key: sizes[key] for key in ("causal", "dropout") if key in sizes}
    tensors, ids = make(
        **{"dtype": "float16", "width": 16} | {k: v for k, v in sizes.items() if k not in options}
    )

    def program(implementation):
        def run(*tensors):
            form = {
                "causal": True,
                "segment_ids": ids,
                "seed": [1, 2] if "dropout" in options else None,
            } | options
            return attention(*tensors, **form, implementation=implementation)

        return tf.function(run, jit_compile=True, autograph=False).get_concrete_function(
            *tensors[:3]
        )

    with h200.as_on_a_gpu():
        assert not calls_in(program("auto"))
        with pytest.raises(ValueError, match=f'{message}.*implementation="blockwise"'):
            program("cudnn")


def calls_in(function):
    return [op for op in function.graph.get_operations() if op.type == "XlaCallModule"]


@pytest.mark.parametrize(
    ("capability", "width", "takes"),
    [((9, 0), 256, True), ((8, 9), 256, False), ((8, 9), 128, True), ((7, 5), 64, False)],
)
def test_the_device_limits_the_width(capability, width, takes):
    shape = [2, 64, 4, width]
    with h200.as_on_a_gpu(compute_capability=capability):
        assert (attention_implementation(shape, shape, dtype="float16") == "cudnn") == takes


def test_calls_on_the_cpu_beside_a_gpu_do_not_use_cudnn():
    tensors, _ = make("bfloat16", time=16, width=16)
    device = cudnn_attention._device  # of this machine, which is a CPU
    with h200.as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        assert calls_in(attending().get_concrete_function(*tensors))
        patch.setattr(cudnn_attention, "_device", device)
        with tf.device("CPU:0"):
            assert not calls_in(attending().get_concrete_function(*tensors))


def test_a_mask_too_large_is_left_to_the_blocks():
    sizes = {"dtype": "bfloat16", "causal": True, "packed": True}
    with h200.as_on_a_gpu():
        assert attention_implementation([8, 8192, 8, 64], [8, 8192, 8, 64], **sizes) == "cudnn"
        assert attention_implementation([9, 8192, 8, 64], [9, 8192, 8, 64], **sizes) == "blockwise"
        sizes["dropout"] = True  # of each head its own
        assert attention_implementation([1, 8192, 8, 64], [1, 8192, 8, 64], **sizes) == "cudnn"
        assert attention_implementation([1, 8192, 9, 64], [1, 8192, 9, 64], **sizes) == "blockwise"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mask_of_packed_sequences_leaves_no_weight_to_others(dtype):
    """Ids in any order; each query sees the key of its own place at least, and scores are of
    thousands.
    """
    rng = np.random.default_rng(0)
    ids, scores = (
        rng.integers(0, 3, (2, 16)),
        rng.normal(size=(2, 4, 16, 16)).astype("float32") * 5000,
    )
    form = Form(1.0, False, (tf.constant(ids), tf.constant(ids)))
    (mask,) = cudnn_attention._masks(form, tf.as_dtype(dtype))
    assert mask.dtype == dtype and mask.shape == [2, 1, 16, 16]
    weights = tf.nn.softmax(scores + tf.cast(mask, tf.float32)).numpy()
    same = np.broadcast_to(ids[:, None, :, None] == ids[:, None, None, :], weights.shape)
    assert not weights[~same].any()
    np.testing.assert_allclose(weights, tf.nn.softmax(np.where(same, scores, -np.inf)), atol=1e-6)


def test_cudnn_needs_a_gpu_and_xla():
    tensors, _ = make("float16", width=16)
    with pytest.raises(ValueError, match="needs a GPU"):
        attending("cudnn").get_concrete_function(*tensors)
    with h200.as_on_a_gpu():
        with pytest.raises(ValueError, match="jit_compile=True"):
            attention(*tensors[:3], implementation="cudnn")
        assert attention(*tensors[:3]).shape == tensors[0].shape
        shapes = tensors[0].shape, tensors[1].shape
        assert attention_implementation(*shapes, dtype="float16") == "cudnn"
        assert attention_implementation(*shapes, dtype="float16", jit_compile=False) == "reference"
    assert attention_implementation(*shapes, dtype="float16") == "reference"


def test_auto_falls_back_if_cudnn_fails_on_the_device_and_warns_once():
    """Fails in the middle of a trace, with a tape, in a loop: this machine's XLA has no such call."""
    tensors, _ = make("bfloat16", time=40, groups=4, width=24)
    step = attending(causal=True, block_size=16)

    def in_a_loop(*tensors):
        return tf.while_loop(
            lambda i, *_: i < 1,
            lambda i, *_: [i + 1, *step.python_function(*tensors)],
            [0, *tensors],
        )

    with h200.as_on_a_gpu(cudnn=None):
        with pytest.warns(
            RuntimeWarning, match=r"causal=True.*No registered implementation.*fmhaSoftmax"
        ) as warned:
            traced = tf.function(
                in_a_loop, jit_compile=True, autograph=False
            ).get_concrete_function(*tensors)
        step.get_concrete_function(*tensors)
    assert len(warned) == 1 and not calls_in(traced)
    with h200.as_on_a_gpu(cudnn=False):
        assert not calls_in(step.get_concrete_function(*tensors))


@pytest.mark.parametrize(
    ("dtype", "time", "wrong"),
    [
        ("bfloat16", 32, {"causal": False}),
        pytest.param("float16", 600, {"scale": 0.11}, marks=pytest.mark.slow),
        pytest.param("bfloat16", 600, {"scale": 0.11}, marks=pytest.mark.slow),
        pytest.param("float16", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_the_trial_accepts_rounding_and_rejects_another_mask_or_scale(
    dtype, time, wrong, monkeypatch
):
    """The unfused expression of half precision stands in for the kernel of a device that has one,
    right or wrong.
    """

    def tried(**wrong):
        def stand_in(query, key, value, form):
            return reference_attention(query, key, value, form._replace(**wrong))

        monkeypatch.setattr(cudnn_attention, "cudnn_attention", stand_in)
        cudnn_attention._tried.cache_clear()
        shapes = [8, time, 4, 64], [8, time, 2, 64]
        options = {"causal": True, "packed": time > 1, "dropout": time == 32, "block_size": 1}
        return attention_implementation(*shapes, dtype=dtype, **options)

    with h200.as_on_a_gpu(cudnn=None):
        assert tried() == "cudnn"
        if wrong:
            with pytest.warns(RuntimeWarning, match="output is off by"):
                assert tried(**wrong) == "blockwise"
    cudnn_attention._tried.cache_clear()


def test_an_unknown_time_is_for_the_reference():
    signature = [tf.TensorSpec([2, None, 2, 4])] * 3
    traced = tf.function(attention, autograph=False).get_concrete_function(*signature)
    assert traced.output_shapes.rank == 4
    blockwise = tf.function(lambda *t: attention(*t, implementation="blockwise"), autograph=False)
    with pytest.raises(ValueError, match=r"times must be known.*query \(2, None, 2, 4\)"):
        blockwise.get_concrete_function(*signature)


def _call(made):
    return made[0], *made[1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": [2, 8, 3, 4]},
            ValueError,
            r"query \(2, 8, 3, 4\).*heads must be a multiple of groups",
        ),
        ({"query": [2, 8, 16]}, ValueError, r"query \(2, 8, 16\)"),
        ({"query": [3, 8, 4, 4]}, ValueError, r"query \(3, 8, 4, 4\)"),
        ({"key": [2, 8, 2, 5]}, ValueError, r"key \(2, 8, 2, 5\)"),
        ({"key": [2, 9, 2, 4]}, ValueError, r"value \(2, 8, 2, 4\)"),
        ({"query": [2, 0, 4, 4]}, ValueError, "no axis may be empty"),
        ({"value_dtype": "float16"}, TypeError, "value float16"),
        ({"query_dtype": "float64"}, TypeError, "query float64"),
        ({"block_size": 0}, ValueError, "block_size=0"),
        ({"block_size": "8"}, TypeError, "block_size='8'"),
        ({"block_size": "8", "implementation": "reference"}, TypeError, "block_size='8'"),
        ({"scale": "8"}, TypeError, "scale='8'"),
        ({"scale": np.nan}, ValueError, "scale=nan"),
        ({"causal": "yes"}, TypeError, "causal='yes'"),
        ({"implementation": "flash"}, ValueError, "implementation='flash'.*blockwise"),
        ({"segment_ids": np.zeros((2, 7), int)}, ValueError, r"segment_ids of shape \(2, 7\)"),
        ({"segment_ids": np.zeros((2, 8))}, TypeError, "segment_ids have dtype float64"),
        ({"window": 0}, ValueError, "window=0 must be a whole number of at least 1"),
        (
            {"soft_cap": -1.0},
            ValueError,
            "soft_cap=-1.0 must be a positive, finite number, or None",
        ),
        ({"dropout": 1.0}, ValueError, r"dropout=1\.0 must be a number of at least 0 and below 1"),
        ({"dropout": "0.1"}, TypeError, "dropout='0.1'"),
        ({"dropout": 0.1}, ValueError, "must be two integers, which determine what dropout drops"),
        ({"dropout": 0.1, "seed": [1, 2, 3]}, ValueError, "seed=.* must be two integers"),
        ({"dropout": 0.1, "seed": [1.0, 2.0]}, ValueError, "seed=.* must be two integers"),
        (
            {"window": 2, "implementation": "cudnn"},
            ValueError,
            "no window or soft cap.*blockwise",
        ),
    ],
)
def test_bad_input_names_the_culprit(change, error, message):
    shapes = {"query": [2, 8, 4, 4], "key": [2, 8, 2, 4], "value": [2, 8, 2, 4]}
    tensors = [
        tf.zeros(change.pop(name, shape), change.pop(f"{name}_dtype", "float32"))
        for name, shape in shapes.items()
    ]
    with pytest.raises(error, match=message):
        attention(*tensors, **change)


SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SIZES, SIZES[:2]), TypeError, r"key_shape=\[1, 2\] must be four sizes"),
        ((np.array(1), SIZES), TypeError, r"query_shape=array\(1\) must be four sizes"),
        ((tf.TensorShape(None), SIZES), TypeError, "query_shape=.* must be four sizes"),
        (([1, -2, 3, 4], SIZES), ValueError, "query_shape=-2 must be a whole number"),
        ((SIZES, [1, np.nan, 3, 4]), ValueError, "key_shape=nan must be a whole number"),
        (([None] * 4, SIZES, {"a": 1}), TypeError, "block_size={'a': 1} must be a whole number"),
    ],
)
def test_shapes_that_auto_cannot_read(arguments, error, message):
    with pytest.raises(error, match=message):
        attention_implementation(*arguments[:2], block_size=dict(enumerate(arguments)).get(2))


@pytest.mark.parametrize("jit_compile", [True, False, None])
def test_second_derivatives_are_refused(jit_compile):
    """Expects an error: autodiff takes the results of the loops for constants, so second
    derivatives would be wrong.
    """
    (query, key, value, _), _ = make(time=20)

    def run(query):
        with tf.GradientTape() as outer:
            outer.watch(query)
            with tf.GradientTape() as inner:
                inner.watch(query)
                output = attention(query, key, value, block_size=8, implementation="blockwise")
            squared = tf.reduce_sum(inner.gradient(output, query) ** 2)
        return outer.gradient(squared, query)

    if jit_compile is not None:
        run = tf.function(run, jit_compile=jit_compile, autograph=False)
    with pytest.raises(Exception, match="no second derivatives"):
        run(query)


def test_blocks_of_other_segments_are_left_out_on_a_cpu():
    """Only pairs with a segment in common come first, and are counted."""
    queries = blockwise_attention._cut(64, 8)
    form = blockwise_attention.Form(1.0, causal=True)
    pairs = blockwise_attention._list_pairs(queries, queries, form)
    for ids in (np.repeat(np.arange(8), 8), np.repeat([1, 2, 9], [20, 20, 24]), np.zeros(64)):
        ids = np.stack([ids, np.sort(ids)]).astype("int32")
        ordered, count = blockwise_attention._needed_pairs(pairs, queries, queries, (ids, ids))
        blocks = ids.reshape(2, 8, 8)
        needed = {(i, j) for i, j, _ in pairs.T if any(set(row[i]) & set(row[j]) for row in blocks)}
        found = ordered.numpy()[:, : int(count)].T
        assert {(i, j) for i, j, _ in found} == needed
        assert [first for _, _, first in found] == [
            int(k == 0 or found[k][0] != found[k - 1][0]) for k in range(len(found))
        ]


def test_one_program_serves_all_segments():
    """XLA compiles anew for other values of an argument that some operations take as a constant."""
    query = tf.random.stateless_normal([1, 32, 2, 4], [0, 0])

    @tf.function(jit_compile=True)
    def gradient(segment_ids):
        with tf.GradientTape() as tape:
            tape.watch(query)
            output = attention(
                query,
                query,
                query,
                causal=True,
                segment_ids=segment_ids,
                block_size=8,
                implementation="blockwise",
            )
        return tape.gradient(output, query)

    programs = {
        gradient.experimental_get_compiler_ir(tf.constant(ids, tf.int32))(stage="hlo")
        for ids in (np.zeros((1, 32)), np.arange(32)[None] // 8)
    }
    assert len(programs) == 1
