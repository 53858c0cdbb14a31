"""Random loss scales and losses: the values of NumPy, or a refusal."""

import fuzzed_arrays  # noqa: F401  # which calls name
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import ANYTHING, Values, calls, codes, fuzz, integers, judge, numbers, without

import fastaccum as fa

pytestmark = pytest.mark.slow

NAMES_OF_LAYERS = without("None", "'x'", "Text('x')", "np.str_('a')")


# Loss scales


@st.composite
def loss_scale_calls(draw):
    kind = draw(st.sampled_from(["DynamicLossScale"] * 3 + ["StaticLossScale", "NoLossScale"]))
    low, init, high = sorted(draw(st.tuples(*[st.floats(0.05, 1e5)] * 3)))
    odd = [*ANYTHING, *codes("2**-65 | 2**101 | 1 + 1e-9 | 1 - 1e-9 | 3.4e38 | np.float16(2)")]
    if kind == "NoLossScale":
        return draw(calls("fa.NoLossScale", {"loss_scale": Values(["1.0"], bad=odd)}))
    if kind == "StaticLossScale":
        valid = ["8", "np.float32(0.5)", numbers(1e-5, 1e9)]
        table = {"loss_scale": Values(valid, odd=odd)}
        return draw(calls("fa.StaticLossScale", table, ["loss_scale"]))
    table = {
        "init_scale": Values([repr(init)], odd=odd),
        "growth_factor": Values(["3", numbers(1.01, 10)], odd=odd),
        "backoff_factor": Values([numbers(0.01, 0.99)], odd=odd),
        "growth_interval": Values(["2.0", "10**9", integers(1, 5)], odd=odd),
        "min_scale": Values([repr(low)], odd=odd),
        "max_scale": Values([repr(high)], odd=odd),
    }
    return draw(calls("fa.DynamicLossScale", table, ["init_scale", "min_scale", "max_scale"]))


def dynamic_scales(
    finite,
    init_scale,
    min_scale,
    max_scale,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
):
    """GradScaler's rule."""
    scale = np.float32(init_scale)
    good_steps = 0
    scales = [scale]
    for is_finite in finite:
        good_steps = good_steps + 1 if is_finite else 0
        if not is_finite:
            scale = max(scale * np.float32(backoff_factor), np.float32(min_scale))
        elif good_steps == growth_interval:
            scale = min(scale * np.float32(growth_factor), np.float32(max_scale))
            good_steps = 0
        scales.append(scale)
    return scales


@fuzz(400)
@given(call=loss_scale_calls(), finite=st.lists(st.booleans(), max_size=12))
def test_loss_scales(call, finite):
    arguments = call.values()

    def run():
        loss_scale = getattr(fa, call.function.removeprefix("fa."))(**arguments)
        scales = [float(loss_scale.scale())]
        for is_finite in finite:
            loss_scale.update(tf.constant(is_finite))
            scales.append(float(loss_scale.scale()))
        again = type(loss_scale)(**loss_scale.get_config())
        assert repr(again) == repr(loss_scale)
        return scales

    def check(scales):
        values = {name: float(value) for name, value in arguments.items()}
        if "Dynamic" in call.function:
            expected = dynamic_scales(finite, **values)
        else:
            expected = np.float32(values.get("loss_scale", 1.0))
        np.testing.assert_allclose(scales, expected, 1e-5)

    judge(call, run, check)


# LinearCrossEntropy


@st.composite
def loss_calls(draw):
    # Not of texts or complex numbers: Keras makes numbers of them before any loss of its is called.
    rows = draw(st.integers(1, 4))
    classes = draw(st.integers(1, 8))
    shape = f"{rows}" if draw(st.booleans()) else f"{rows}, 3"
    seed = draw(st.integers(0, 99))
    labels = f"array({shape}, dtype='int32', high={classes}, seed={seed})"
    logits = f"array({shape}, {classes}, seed={seed})"
    forms = codes("{0} | tf.constant({0}) | {0}[..., None] | {0}.astype('float32') | {0}.tolist()")
    odd_labels = codes("""
        {0} + 1 | {0} + 100 | {0} - 1 | {0} + 0.5 | {0}.astype('int64') + 2**31 | {0} + nan
        {0}.astype('int64') + 2**40 | {0}.astype('int8') | {0}.astype('uint64') | {0}.astype('bool')
        {0}.astype('float64') | {0}[1:] | {0}[None] | {0} * 0 - 100 | {1} | {0}.astype('>i4')
        array()
    """)
    odd_logits = codes("""
        {1}[..., 0] | {1}[..., :0] | {1}[None] | {1} * 1e4 | {1}.astype('int32') | array()
    """)
    reductions = codes("'sum' | 'sum_over_batch_size' | 'none' | 'mean_with_sample_weight'")
    odd_heads = without(*codes("None | '' | 'x' | Text('x') | '\\0' | '\\ud800' | np.str_('a')"))
    table = {
        "y_true": Values(
            [code.format(labels) for code in forms],
            odd=[code.format(labels, logits) for code in odd_labels],
        ),
        "y_pred": Values(
            [logits, f"tf.constant({logits})", f"tf.cast({logits}, 'float16')"],
            odd=[code.format(labels, logits) for code in odd_logits],
        ),
        "head": Values(["None", "'head'"], odd=odd_heads),
        "ignore_index": Values(["-100", integers(-1, 8)], odd=ANYTHING),
        "label_smoothing": Values(["0", numbers(1e-3, 0.9)], odd=[*ANYTHING, "1.0"]),
        "z_loss": Values(["0.0", numbers(1e-4, 1)], odd=ANYTHING),
        "chunk_size": Values(["None", integers(1, 100)], odd=ANYTHING),
        "reduction": Values(reductions, odd=[*ANYTHING, "'auto'", "'Sum'"]),
        "name": Values(["'x'", "'a loss'"], odd=NAMES_OF_LAYERS),
    }
    return draw(calls("loss", table, ["y_true", "y_pred"], names=("y",)))


def check_loss(
    result,
    y_true,
    y_pred,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="sum_over_batch_size",
    **unused,
):
    logits = np.asarray(y_pred, "float64")
    label = np.asarray(y_true)
    label = label[..., 0] if label.ndim == logits.ndim else label
    assert label.shape == logits.shape[:-1]
    label = np.where(label == np.trunc(label), label, 2**40)
    largest = logits.max(-1)
    log_sum = np.log(np.exp(logits - largest[..., None]).sum(-1)) + largest
    index = np.clip(label.astype("int64"), 0, logits.shape[-1] - 1)
    picked = np.take_along_axis(logits, index[..., None], -1)[..., 0]
    losses = (1 - label_smoothing) * (log_sum - picked)
    losses += label_smoothing * (log_sum - logits.mean(-1)) + z_loss * log_sum**2
    losses = np.where((label >= 0) & (label < logits.shape[-1]), losses, np.nan)
    counted = label != ignore_index
    losses = np.where(counted, losses, 0.0)
    if reduction == "sum":
        losses = losses.sum()
    elif reduction not in ("none", None):
        losses = losses.sum() / max(counted.sum(), 1e-7)
    atol = 3e-2 * np.abs(log_sum).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(result, "float64"), losses, 3e-2, atol)


@fuzz(150)
@given(call=loss_calls())
def test_linear_cross_entropy_from_logits(call):
    arguments = call.values()

    def run():
        options = {k: v for k, v in arguments.items() if k not in ("y_true", "y_pred")}
        return fa.LinearCrossEntropy(**options)(arguments["y_true"], arguments["y_pred"])

    judge(call, run, lambda result: check_loss(result, **arguments))
