"""Linear cross-entropy against float64, next to the unfused expression of the same precision; and
its program.
"""

import contextlib
import re

import h200
import hlo
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastaccum.kernels import cross_entropy, logit_chunks, xla_ops
from fastaccum.kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_sum_and_scores,
)
from fastaccum.step import compiler_ir as compiled

TOLERANCES = {"float32": 5e-4, "float16": 1e-3, "bfloat16": 1e-2}
TOKENS, VOCABULARY, WIDTH = 123, 507, 35
CAPPED = {"soft_cap": 1.5, "z_loss": 0.01}
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}


def make(
    dtype="float32",
    shape=(TOKENS,),
    vocabulary=VOCABULARY,
    width=WIDTH,
    bias=True,
    ignored=0.2,
    seed=0,
):
    """(hidden, kernel, labels, bias or None), and the losses' cotangent."""
    rng = np.random.default_rng(seed)
    hidden = tf.constant(rng.normal(size=(*shape, width)), dtype)
    kernel = tf.constant(2 * rng.normal(size=(width, vocabulary)) / np.sqrt(width), "float32")
    labels = np.where(rng.random(shape) < ignored, -100, rng.integers(0, vocabulary, shape))
    labels = tf.constant(labels.astype("int32"))
    biases = tf.constant(rng.normal(size=vocabulary), "float32") if bias else None
    return (hidden, kernel, labels, biases), tf.constant(rng.uniform(0.1, 1.0, shape), "float32")


def outcome(inputs, cotangent, jit_compile=True, transposed=False, **options):
    """Losses, and the gradients of hidden, kernel and, where there is one, bias."""

    def run(hidden, kernel, labels, bias, cotangent):
        kernel = tf.transpose(kernel) if transposed else kernel
        watched = [t for t in (hidden, kernel, bias) if t is not None]
        with tf.GradientTape() as tape:
            tape.watch([*watched, cotangent])
            if options.get("implementation") == "one_pass":
                args = hidden, kernel, labels, cotangent, bias
                rounded = tf.cast(kernel, hidden.dtype) if transposed else None
                total, _ = linear_cross_entropy_sum_and_scores(
                    *args, rounded_kernel=rounded, transpose_kernel=transposed, **options
                )
            else:
                losses = linear_cross_entropy(
                    hidden, kernel, labels, bias, transpose_kernel=transposed, **options
                )
                total = tf.reduce_sum(losses * cotangent)
        # The losses are the gradients of their weights. Half of all, doubled: the cotangent of the
        # total is felt.
        gradients = tape.gradient(total, [cotangent, *watched], output_gradients=tf.constant(0.5))
        losses, dhidden, dkernel, *dbias = (2 * g for g in gradients)
        return losses, dhidden, tf.transpose(dkernel) if transposed else dkernel, *dbias

    if jit_compile is not None:
        run = tf.function(run, jit_compile=jit_compile, autograph=False)
    # a CPU would take the kernel [D, V]
    with h200.as_on_a_gpu() if transposed else contextlib.nullcontext():
        return run(*inputs, cotangent)


def truth(inputs, cotangent, label_smoothing=0.0, z_loss=0.0, soft_cap=None):
    """Computes the loss by hand in float64, from the inputs as the compute dtype rounds them."""
    hidden, kernel, labels, bias = inputs
    h = hidden.numpy().astype("float64").reshape(-1, hidden.shape[-1])
    k = tf.cast(kernel, hidden.dtype).numpy().astype("float64")
    y, g = labels.numpy().ravel(), cotangent.numpy().astype("float64").ravel()
    g = np.where(y == -100, 0.0, g)
    logits = h @ k + (0.0 if bias is None else bias.numpy().astype("float64"))
    slope = 1.0
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
        slope = 1 - np.square(logits / soft_cap)
    high = logits.max(-1, keepdims=True)
    lse = (high + np.log(np.exp(logits - high).sum(-1, keepdims=True)))[:, 0]
    q = np.eye(k.shape[1])[np.maximum(y, 0)] * (1 - label_smoothing) + label_smoothing / k.shape[1]
    losses = np.where(y == -100, 0.0, lse - (q * logits).sum(-1) + z_loss * lse**2)
    dlogits = (
        slope * g[:, None] * (np.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse[:, None]) - q)
    )
    gradients = [(dlogits @ k.T).reshape(hidden.shape), h.T @ dlogits]
    return losses.reshape(labels.shape), *gradients, *([] if bias is None else [dlogits.sum(0)])


def assert_as_good(ours, reference, expected, tolerance):
    """Asserts that no element is further from the truth than the reference's, plus a tolerance."""
    names = ("losses", "dhidden", "dkernel", "dbias")
    for name, got, unfused, want in zip(names, ours, reference, expected, strict=False):
        got, unfused = (t.numpy().astype("float64") for t in (got, unfused))
        excess = np.nan_to_num(np.abs(got - want), nan=np.inf) - np.abs(unfused - want)
        worst = np.unravel_index(excess.argmax(), excess.shape)
        assert excess[worst] <= tolerance, (
            f"{name}{list(map(int, worst))}: {got[worst]}, unfused {unfused[worst]}, truth "
            f"{want[worst]}"
        )


def check(
    inputs,
    cotangent,
    chunk_size,
    jit_compile=True,
    implementation="chunked",
    transposed=False,
    **options,
):
    how = {"implementation": implementation, "chunk_size": chunk_size, "transposed": transposed}
    ours = outcome(inputs, cotangent, jit_compile, **how, **options)
    reference = outcome(inputs, cotangent, None, implementation="reference", **options)
    dtype = inputs[0].dtype
    expected = truth(inputs, cotangent, **options)
    assert_as_good(ours, reference, expected, TOLERANCES[dtype.name])
    # The reference itself must be no alibi.
    assert_as_good(reference, ours, expected, TOLERANCES[dtype.name])
    np.testing.assert_allclose(reference[0], expected[0], rtol=2e-5, atol=2e-5)
    assert [t.dtype for t in ours] == [tf.float32, dtype, tf.float32, tf.float32][: len(ours)]


FORMS = {"plain": {}, "smoothed": SMOOTHED, "capped": CAPPED}
BASIC = {
    ("float32", "plain"),
    ("float16", "smoothed"),
    ("bfloat16", "smoothed"),
    ("bfloat16", "capped"),
}


@pytest.mark.parametrize("implementation", ["chunked", "one_pass"])
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(dtype, form, marks=() if (dtype, form) in BASIC else pytest.mark.slow)
        for dtype in TOLERANCES
        for form in FORMS
    ],
)
def test_losses_and_gradients_are_as_good_as_the_unfused_ones(dtype, implementation, form):
    options = FORMS[form]
    # with a bias and a kernel [D, V], or neither
    other = bool(options) == (implementation == "chunked")
    check(
        *make(dtype, bias=other),
        100,
        implementation=implementation,
        transposed=not other,
        **options,
    )


@pytest.mark.parametrize("jit_compile", [None, False], ids=["eager", "graph"])
def test_it_runs_without_xla(jit_compile):
    check(*make("float16", shape=(41,)), chunk_size=200, jit_compile=jit_compile, **SMOOTHED)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from([(1,), (7, 5), (2, 3, 11), (70,)]),
    vocabulary=st.integers(1, 300),
    width=st.integers(1, 40),
    chunk_size=st.integers(1, 310),
    options=st.sampled_from([{}, SMOOTHED, CAPPED]),
    how=st.sampled_from(
        [("chunked", False), ("chunked", True), ("one_pass", False), ("one_pass", True)]
    ),
)
def test_any_shape_and_any_chunk(shape, vocabulary, width, chunk_size, options, how):
    chunk_size = max(chunk_size, vocabulary // 4)  # eager loops: few steps
    inputs, cotangent = make(
        shape=shape, vocabulary=vocabulary, width=width, ignored=0.3, seed=vocabulary
    )
    implementation, transposed = how
    how = {"implementation": implementation, "transposed": transposed}
    check(inputs, cotangent, chunk_size, jit_compile=None, **how, **options)


def test_columns_and_tokens_counted_twice_are_noticed(monkeypatch):
    """The control: the last chunk overlaps the one before, and what it repeats must be left out."""
    with monkeypatch.context() as patched:
        patched.setattr(logit_chunks.Cut, "fresh", lambda cut, i: tf.ones([cut.length], tf.bool))
        with pytest.raises(AssertionError, match=r"losses\["):
            check(*make(), chunk_size=100, jit_compile=None)

    def cut_up(cut, t):
        return tf.stack([t[cut.start(i) :][: cut.length] for i in range(cut.pieces)])

    monkeypatch.setattr(logit_chunks.Cut, "cut_up", cut_up)
    with pytest.raises(AssertionError, match=r"dhidden\["):
        check(*make(), chunk_size=100, jit_compile=None, implementation="one_pass")


IMPLEMENTATIONS = ("chunked", "one_pass", "reference")


def test_all_ignored_is_zero_everywhere():
    inputs, cotangent = make(ignored=1.1)
    for implementation in IMPLEMENTATIONS:
        for tensor in outcome(
            inputs, cotangent, False, chunk_size=200, implementation=implementation, **SMOOTHED
        ):
            assert not tensor.numpy().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("label", [-1, VOCABULARY, 2**31 - 1])
def test_a_label_out_of_range_is_nan_and_so_are_the_gradients(implementation, label):
    (hidden, kernel, labels, bias), cotangent = make(shape=(9,), ignored=0.0)
    labels = tf.tensor_scatter_nd_update(labels, [[4]], [label])
    losses, *gradients = outcome(
        (hidden, kernel, labels, bias),
        cotangent,
        None,
        chunk_size=300,
        implementation=implementation,
    )
    assert np.isnan(losses).tolist() == [i == 4 for i in range(9)]
    assert all(np.isnan(g).any() for g in gradients)


def test_labels_of_any_integer_dtype_and_an_ignored_class_of_the_vocabulary():
    (hidden, kernel, labels, bias), _ = make(shape=(20,), vocabulary=200, ignored=0.0)
    expected = linear_cross_entropy(hidden, kernel, labels, bias)
    for dtype in ("uint8", "int64"):
        got = linear_cross_entropy(
            hidden, kernel, tf.cast(labels, dtype), bias, ignore_index=int(labels[3])
        )
        np.testing.assert_array_equal(got, tf.where(labels == labels[3], 0.0, expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_logits_and_impossible_classes_stay_finite(implementation):
    """Logits past float16's 65504, and a bias of -inf over a whole chunk."""
    hidden, kernel = (
        tf.fill([3, 64], tf.constant(200.0, tf.float16)),
        np.zeros((64, 300), "float32"),
    )
    kernel[:, 0] = 10.0
    bias = np.where(np.arange(300) < 150, 0.0, -np.inf).astype("float32")
    inputs = hidden, tf.constant(kernel), tf.constant([0, 0, 1]), tf.constant(bias)
    losses, dhidden, dkernel, dbias = outcome(
        inputs, tf.ones([3]), None, implementation=implementation, chunk_size=64
    )
    np.testing.assert_allclose(losses, [0.0, 0.0, 128000.0])
    assert all(np.isfinite(g).all() for g in (dhidden, dkernel, dbias))


def test_the_weight_gradient_of_float16_is_not_rounded_to_float16():
    """4096 tokens that each push by 40 past float16's largest number."""
    hidden, kernel = tf.fill([4096, 1], tf.constant(40.0, tf.float16)), tf.zeros([1, 2])
    inputs = hidden, kernel, tf.zeros([4096], tf.int32), None
    for implementation in IMPLEMENTATIONS:
        *_, dkernel = outcome(
            inputs, tf.ones([4096]), False, implementation=implementation, chunk_size=2048
        )
        np.testing.assert_allclose(dkernel, [[-81920.0, 81920.0]])


# The program.
LARGE = {"shape": (8, 160), "vocabulary": 3000, "width": 48}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float16"])
def test_one_loop_each_way_and_no_logits(dtype):
    inputs, cotangent = make(dtype, **LARGE)

    def hlo_and_sizes(implementation):
        def step(*arguments):
            options = {"implementation": implementation, "chunk_size": 320}
            return outcome(arguments[:4], arguments[4], jit_compile=None, **options)

        hlo = compiled.compiler_ir(
            tf.function(step, jit_compile=True, autograph=False), *inputs, cotangent
        )
        return hlo, {
            np.prod([int(d) for d in dims.split(",")])
            for dims in re.findall(r"\w+\[([\d,]+)\]", hlo)
        }

    hlo, sizes = hlo_and_sizes("chunked")
    loops = re.findall(r"^.* while\(.*$", hlo, re.MULTILINE)
    assert len(loops) == 2
    assert all(re.search(r'known_trip_count":\{"n":"40"\}', loop) for loop in loops)
    assert "conditional(" not in hlo
    assert 320 * 320 in sizes
    assert max(sizes) < 1280 * 3000 / 10
    _, control = hlo_and_sizes("reference")
    assert max(control) == 1280 * 3000


def test_memory_is_that_of_two_chunks_and_does_not_grow_with_the_vocabulary():
    def temp_bytes(implementation, **sizes):
        inputs, cotangent = make(**{**LARGE, **sizes}, bias=False)

        def step(hidden, kernel, labels, cotangent):
            options = {"implementation": implementation, "chunk_size": 320}
            return outcome((hidden, kernel, labels, None), cotangent, jit_compile=None, **options)

        program = tf.function(step, jit_compile=True, autograph=False)
        return compiled.memory_analysis(program, *inputs[:3], cotangent).temp_bytes

    ours = temp_bytes("chunked")
    assert ours < 2 * 4 * 320 * (320 + 2 * 48) + 50 * 1280
    assert ours < 0.08 * temp_bytes("reference")
    assert temp_bytes("chunked", vocabulary=12000) < 1.01 * ours


def test_one_pass_on_a_gpu():
    """The table as it lies, one loop of three matmuls, few launches, and the kernel's gradient
    summed in place.
    """
    tokens, width, vocabulary = 16384, 1024, 50304

    def step(hidden, table, labels, weights):
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            total, _ = linear_cross_entropy_sum_and_scores(
                hidden, table, labels, weights, transpose_kernel=True
            )
        return total, *tape.gradient(total, [hidden, table])

    arguments = [
        ((tokens, width), "bfloat16"),
        ((vocabulary, width), "float32"),
        ((tokens,), "int32"),
    ]
    specs = [tf.TensorSpec(*each) for each in (*arguments, ((tokens,), "float32"))]
    with h200.as_on_a_gpu():
        traced = tf.function(step, jit_compile=True, autograph=False)
        exported = compiled.compiler_ir(traced, *specs, stage="stablehlo_serialized")
    text, memory = h200.compile_for_h200(exported)
    program = hlo.Program(text)
    slices = 11
    assert program.count("while") == 1 and not program.unknown_trip_counts
    matmuls = [
        v for v in program.values if v.opcode == "dot" or "__cublas$" in v.instruction.attributes
    ]
    assert [v.times for v in matmuls] == [slices] * 3
    (gradient,) = program.weight_gradients([(vocabulary, width)])
    assert (gradient.dtype, gradient.added) == ("f32", "epilogue")
    free = ("bitcast", "constant", "get-tuple-element", "parameter")
    assert (
        len({v.kernel for v in program.values if v.times == slices and v.opcode not in free}) <= 11
    )
    assert not [
        v
        for v in program.values
        if v.opcode in ("copy", "transpose") and set(v.shape) == {vocabulary, width}
    ]
    sizes = [
        np.prod(v.shape) for v in program.values if vocabulary in v.shape and width not in v.shape
    ]
    logits = 4 * tokens * vocabulary
    assert 6 * max(sizes) <= 0.15 * logits  # in float32, and their gradients in bfloat16
    # Beside these the gradient of hidden in float32 and the table in bfloat16.
    assert memory.temp_bytes < 0.15 * logits + 4 * tokens * width + 2 * vocabulary * width + 2**22


def test_max_and_sum_in_one_read_are_those_of_two():
    rows = tf.constant(
        [[1.0, -2.0, 90.0], [-np.inf, 3.0, 3.0], [-np.inf, -np.inf, -np.inf], [0.0, np.nan, 1.0]]
    )
    with h200.as_on_a_gpu():
        row_max, row_sum = tf.function(xla_ops.max_and_exp_sum, jit_compile=True, autograph=False)(
            rows
        )
    expected_max, expected_sum = xla_ops.max_and_exp_sum(rows)
    np.testing.assert_array_equal(row_max[:3], expected_max[:3])
    np.testing.assert_array_equal(row_max[:3], [90.0, 3.0, tf.float32.min])
    np.testing.assert_allclose(row_sum, expected_sum, rtol=1e-6)
    assert np.isnan(row_sum[3])


def test_auto_takes_the_reference_where_the_logits_are_small(monkeypatch):
    chosen = []

    def noted(name, function):
        return lambda *args: chosen.append(name) or function(*args)

    monkeypatch.setattr(cross_entropy, "_chunked", noted("chunked", cross_entropy._chunked))
    monkeypatch.setattr(cross_entropy, "product", noted("reference", cross_entropy.product))
    cases = [  # tokens, vocabulary, width, chunk_size
        ((6, 5, 4, None), "reference"),
        ((60, 50, 4, 16), "chunked"),
        ((60, 50, 70, 16), "reference"),  # no larger than hidden
    ]
    for (tokens, vocabulary, width, chunk_size), expected in cases:
        hidden, kernel = tf.zeros([tokens, width]), tf.zeros([width, vocabulary])
        linear_cross_entropy(hidden, kernel, tf.zeros([tokens], tf.int32), chunk_size=chunk_size)
        assert chosen.pop() == expected


def test_no_tokens_have_no_losses():
    inputs = tf.zeros([0, 3]), tf.zeros([3, 5]), tf.zeros([0], tf.int32)
    for implementation in ("auto", "chunked", "reference"):
        assert linear_cross_entropy(*inputs, implementation=implementation).shape == [0]
    assert (
        linear_cross_entropy_sum_and_scores(*inputs, tf.zeros([0]), implementation="one_pass")[0]
        == 0
    )


GOOD = {"hidden": tf.zeros([4, 3]), "kernel": tf.zeros([3, 5]), "labels": tf.zeros([4], tf.int32)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": tf.zeros([4])}, TypeError, "labels have dtype float32"),
        ({"labels": tf.zeros([4, 1], tf.int32)}, ValueError, r"labels \(4, 1\)"),
        (
            {"labels": tf.zeros([3], tf.int32)},
            ValueError,
            r"hidden \(4, 3\), kernel \(3, 5\), labels \(3,\)",
        ),
        ({"kernel": tf.zeros([4, 5])}, ValueError, r"kernel \(4, 5\)"),
        ({"kernel": tf.zeros([3, 0])}, ValueError, r"kernel \(3, 0\)"),
        ({"kernel": tf.zeros([3])}, ValueError, r"kernel \(3,\)"),
        (
            {"kernel": tf.zeros([3, 5], tf.float16)},
            TypeError,
            "kernel has dtype float16, but hidden float32",
        ),
        ({"hidden": tf.zeros([4, 3], tf.int32)}, TypeError, "hidden has dtype int32"),
        ({"hidden": tf.zeros([4, 3], tf.float64)}, TypeError, "hidden has dtype float64"),
        ({"bias": tf.zeros([3])}, ValueError, r"bias \(3,\)"),
        ({"transpose_kernel": True}, ValueError, r"kernel \(3, 5\).*kernel \[V, D\]"),
        ({"transpose_kernel": 1}, TypeError, "transpose_kernel=1"),
        ({"bias": tf.zeros([5], tf.float64)}, TypeError, "bias has dtype float64"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing=1.0"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing=-0.1"),
        ({"z_loss": -1e-4}, ValueError, "z_loss=-0.0001"),
        ({"z_loss": "1"}, TypeError, "z_loss='1'"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"chunk_size": 2.5}, ValueError, "chunk_size=2.5"),
        ({"ignore_index": None}, TypeError, "ignore_index=None"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda'"),
    ],
)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**GOOD, **change})


def test_an_unknown_size_is_named():
    traced = tf.function(lambda hidden: linear_cross_entropy(**{**GOOD, "hidden": hidden}))
    with pytest.raises(ValueError, match=r"hidden \(None, 3\)"):
        traced.get_concrete_function(tf.TensorSpec([None, 3]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float16_gradients_keep_the_tail_whatever_the_loss_scale(implementation):
    """A mean over many tokens, unscaled: most gradients of logits lie below float16's smallest
    number.
    """
    inputs, _ = make("float16", shape=(256,), vocabulary=2048, width=16, bias=False, ignored=0.0)
    cotangent = tf.fill([256], 1e-6)
    *_, dkernel = outcome(inputs, cotangent, implementation=implementation, chunk_size=128)
    *_, exact = truth(inputs, cotangent)
    assert np.linalg.norm(dkernel - exact) <= 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("implementation", ["one_pass", "chunked", "reference"])
def test_an_ignored_token_has_no_part_in_the_sum_whatever_it_holds(implementation):
    hidden = tf.constant([[1.0, 2.0], [np.nan, np.inf]])
    total, _ = linear_cross_entropy_sum_and_scores(
        hidden,
        tf.zeros([2, 5]),
        tf.constant([3, -100]),
        tf.ones([2]),
        implementation=implementation,
    )
    np.testing.assert_allclose(total, np.log(5), rtol=1e-6)


# Implementations, with how the kernel lies and what cuts tokens and vocabulary unevenly.
WAYS = [
    *(("reference", False, None), ("chunked", False, 32), ("one_pass", True, 32)),
    pytest.param("chunked", True, 32, marks=pytest.mark.slow),
    pytest.param("one_pass", False, 32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("jit_compile", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("implementation", "transposed", "chunk_size"), WAYS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_scores_are_those_of_all_logits(dtype, implementation, transposed, chunk_size, jit_compile):
    """Labels' losses, best columns and ranks, next to the sum and the gradients that are there
    without scores too.
    """
    (hidden, kernel, labels, bias), weights = make(dtype)
    # equal logits far apart
    kernel, bias = tf.concat([kernel, kernel[:, :9]], 1), tf.concat([bias, bias[:9]], 0)

    def run(hidden, kernel, labels, weights, bias, ranks):
        table = tf.transpose(kernel) if transposed else kernel
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            total, scores = cross_entropy.linear_cross_entropy_sum_and_scores(
                *(hidden, table, labels, weights, bias),
                implementation=implementation,
                transpose_kernel=transposed,
                chunk_size=chunk_size,
                ranks=ranks,
                **SMOOTHED,
            )
        return (total, *tape.gradient(total, [hidden, table])), scores

    run = tf.function(run, jit_compile=jit_compile, autograph=False)
    with h200.as_on_a_gpu() if transposed and jit_compile else contextlib.nullcontext():
        plain, nothing = run(hidden, kernel, labels, weights, bias, None)
        sums, scores = run(hidden, kernel, labels, weights, bias, True)
    assert nothing is None
    for got, expected in zip(sums, plain, strict=True):
        np.testing.assert_allclose(
            *(tf.cast(t, tf.float32) for t in (got, expected)), rtol=1e-5, atol=1e-6
        )
    logits = (
        hidden.numpy().astype("float64") @ tf.cast(kernel, dtype).numpy().astype("float64")
        + bias.numpy()
    )
    counted = labels.numpy() >= 0
    at_label = np.take_along_axis(logits, np.maximum(labels, 0)[:, None], 1)
    losses = np.log(np.exp(logits).sum(-1)) - at_label[:, 0]
    np.testing.assert_allclose(
        scores.loss.numpy()[counted], losses[counted], rtol=TOLERANCES["float32"], atol=1e-4
    )
    np.testing.assert_array_equal(scores.best, logits.argmax(-1))
    assert scores.best.numpy().max() < VOCABULARY
    np.testing.assert_array_equal(
        scores.above.numpy()[counted], (logits > at_label + 1e-5).sum(-1)[counted]
    )


def test_equal_logits():
    """All of them equal, in some rows but for one: the first is the best, and none is above a
    label.
    """
    hidden, labels = tf.constant([[0.0], [0.0], [1.0]]), tf.constant([0, 99, 70])
    kernel = tf.constant(np.where(np.arange(100) == 80, 1.0, 0.0)[None], "float32")
    for implementation, chunk_size in (("reference", None), ("chunked", 32), ("one_pass", 32)):
        _, scores = cross_entropy.linear_cross_entropy_sum_and_scores(
            hidden,
            kernel,
            labels,
            tf.ones([3]),
            implementation=implementation,
            chunk_size=chunk_size,
            ranks=True,
        )
        assert scores.best.numpy().tolist() == [0, 0, 80] and scores.above.numpy().tolist() == [
            0,
            0,
            1,
        ]
