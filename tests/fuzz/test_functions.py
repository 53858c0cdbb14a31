"""Random calls of the public names that train nothing: an oracle's result, or a refusal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import (
    FLAG,
    Argument,
    calls,
    fuzz,
    is_number,
    is_whole,
    judge,
    one_of,
    or_none,
    positive,
    raises,
    reals,
    whole,
)

import fastaccum as fa

pytestmark = pytest.mark.slow

layers = keras.layers


# Loss scales


DYNAMIC = {
    "init_scale": positive(1.0, 1e3),
    "growth_factor": Argument(st.floats(1.01, 10), lambda v: is_number(v) and v > 1),
    "backoff_factor": Argument(st.floats(0.01, 0.99), lambda v: is_number(v) and 0 < v < 1),
    "growth_interval": whole(1, 5),
    "min_scale": positive(0.05, 1.0),
    "max_scale": positive(1e3, 1e5),
}


def dynamic_scales(
    finite, init_scale, min_scale, max_scale, growth_factor, backoff_factor, growth_interval
):
    """GradScaler's rule."""
    scale = init_scale
    good_steps = 0
    scales = [scale]
    for is_finite in finite:
        good_steps = good_steps + 1 if is_finite else 0
        if not is_finite:
            scale = max(scale * backoff_factor, min_scale)
        elif good_steps == growth_interval:
            scale = min(scale * growth_factor, max_scale)
            good_steps = 0
        scales.append(scale)
    return scales


@fuzz(250)
@given(call=calls(DYNAMIC, list(DYNAMIC)), finite=st.lists(st.booleans(), max_size=12))
def test_a_dynamic_loss_scale(call, finite):
    def run():
        loss_scale = fa.DynamicLossScale(**call.arguments)
        scales = [float(loss_scale.scale())]
        for is_finite in finite:
            loss_scale.update(tf.constant(is_finite))
            scales.append(float(loss_scale.scale()))
        again = fa.DynamicLossScale(**loss_scale.get_config())
        assert repr(again) == repr(loss_scale)
        return scales

    def check(scales):
        values = {name: float(value) for name, value in call.arguments.items()}
        np.testing.assert_allclose(scales, dynamic_scales(finite, **values), 1e-5)

    judge(call, run, check)


@fuzz(50)
@given(call=calls({"loss_scale": positive(1e-5, 1e9)}, ["loss_scale"]))
def test_a_static_loss_scale(call):
    def check(loss_scale):
        np.testing.assert_allclose(loss_scale.scale(), float(call.arguments["loss_scale"]), 1e-6)

    judge(call, lambda: fa.StaticLossScale(**call.arguments), check)


# LinearCrossEntropy from logits


@st.composite
def loss_calls(draw):
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = draw(st.sampled_from([(1,), (4,), (2, 3)]))
    classes = draw(st.integers(1, 8))
    labels = rng.integers(0, classes, shape)
    right = st.sampled_from([labels, labels[..., None], labels.astype("float32")])
    # Keras makes numbers of texts and complex numbers before any loss of its is called.
    odd = st.sampled_from([labels + 1, labels - 1, labels + 0.5, labels + 2**40, labels * 0 - 100])
    logits = rng.normal(size=(*shape, classes)).astype("float32")
    table = {
        "ignore_index": Argument(st.integers(-1, 8), lambda v: is_whole(v, -(2**63))),
        "label_smoothing": Argument(reals(0, 0.9), lambda v: is_number(v) and 0 <= v < 1),
        "z_loss": Argument(reals(0, 1), lambda v: is_number(v) and v >= 0),
        "chunk_size": or_none(whole(1, 100)),
        "reduction": or_none(one_of("sum", "sum_over_batch_size", "none")),
    }
    call = draw(calls(table))
    return draw(right | right | odd), logits, call


def check_loss(result, label, logits, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
               reduction="sum_over_batch_size", **unused):  # fmt: skip
    logits = logits.astype("float64")
    label = label.reshape(logits.shape[:-1])
    log_sum = np.log(np.exp(logits).sum(-1))
    index = np.clip(label, 0, logits.shape[-1] - 1).astype(int)
    picked = np.take_along_axis(logits, index[..., None], -1)[..., 0]
    losses = (1 - label_smoothing) * (log_sum - picked)
    losses += label_smoothing * (log_sum - logits.mean(-1)) + z_loss * log_sum**2
    losses = np.where(label == index, losses, np.nan)
    counted = label != ignore_index
    losses = np.where(counted, losses, 0.0)
    if reduction not in ("none", None):
        losses = losses.sum()
    if reduction == "sum_over_batch_size":
        losses /= max(counted.sum(), 1e-7)
    np.testing.assert_allclose(np.asarray(result), losses, 1e-3, 1e-3)


@fuzz(150)
@given(drawn=loss_calls())
def test_linear_cross_entropy_from_logits(drawn):
    labels, logits, call = drawn
    judge(
        call,
        lambda: fa.LinearCrossEntropy(**call.arguments)(labels, logits),
        lambda result: check_loss(result, labels, logits, **call.arguments),
        names=("y", "y_true", "labels"),
        may_refuse=True,  # labels that are no classes
    )


# LayerStack beside the layers that it stands for


MAKERS = st.sampled_from(
    [
        *(lambda: layers.Dense(3), lambda: layers.Dense(3, "tanh", kernel_regularizer="l2")),
        *(layers.LayerNormalization, layers.BatchNormalization, lambda: layers.Activation("tanh")),
        *(lambda: layers.Dense(3, dtype="mixed_float16"), lambda: layers.Dropout(0.5, seed=3)),
        lambda: keras.Sequential([layers.Dense(3, "relu"), layers.Dropout(0.2), layers.Dense(3)]),
        lambda: fa.kernels.LayerStack(lambda: layers.Dense(3), 2),
        *(
            lambda: layers.Conv1D(3, 2, padding="same"),
            lambda: layers.LSTM(3, return_sequences=True),
        ),
    ]
)
ODD_MAKERS = st.sampled_from(
    [
        *(layers.Flatten, keras.Model, layers.Add, keras.Sequential, lambda: layers.Dense(4)),
        *(lambda: layers.Lambda(raises), lambda: layers.Lambda(lambda x: None), layers.Layer),
        *(lambda: layers.Embedding(3, 3), lambda: layers.Dense(3, kernel_constraint="non_neg")),
        *(lambda: layers.MultiHeadAttention(1, 2), lambda: layers.Lambda(lambda x: (x, x))),
    ]
)
STACK = {
    "make_layer": Argument(MAKERS, odd=ODD_MAKERS),
    "depth": whole(1, 3),
    "implementation": one_of("auto", "reference"),
    "trainable": FLAG,
}


@fuzz(80)
@given(
    call=calls(STACK, ["make_layer", "depth"]),
    training=st.sampled_from([None, False, True]),
    way=st.sampled_from(["eager"] * 20 + ["graph", "xla"]),
)
def test_a_layer_stack(call, training, way):
    keras.utils.set_random_seed(0)
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 4, 3)), tf.float32)

    def gradients(function, variables):
        def run():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x, training=training)
            return y, tape.gradient(y, [x, *variables()], unconnected_gradients="zero")

        if way != "eager":
            run = tf.function(run, autograph=False, jit_compile=way == "xla")
        return run()

    def run():
        stack = fa.kernels.LayerStack(**call.arguments)
        stack.build(x.shape)
        plain = stack.unstack()
        result = gradients(stack, lambda: [v.value for v in stack.trainable_variables])

        def call_in_turn(y, training):
            for layer in plain:
                y = layer(y, training=training)
            return y

        def plain_variables():
            return [v.value for layer in plain for v in layer.trainable_variables]

        y, of_layers = gradients(call_in_turn, plain_variables)
        count = len(plain[0].trainable_variables)
        stacked = [tf.stack(of_layers[1 + i :: count]) for i in range(count)]
        return result, (y, [of_layers[0], *stacked])

    def check(results):
        (y, of_stack), (plain_y, of_layers) = results
        for value, plain in zip([y, *of_stack], [plain_y, *of_layers], strict=True):
            plain = np.asarray(plain, "float64")
            scale = max(1.0, np.abs(plain).max(initial=0))
            tolerance = 3e-2 if y.dtype == tf.float16 else 1e-3
            np.testing.assert_allclose(value, plain, tolerance, tolerance * scale)

    judge(call, run, check, names=("layer", "layers", "Layer", "regularizer"))


# Functions of shapes, models and folders


@pytest.fixture(scope="module")
def trainer():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    return fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def folder(trainer, tmp_path_factory):
    """A folder with a checkpoint, an empty folder and a file."""
    path = tmp_path_factory.mktemp("checkpoints")
    options = {"batch_size": 1, "verbose": 0, "checkpoint_dir": path / "good"}
    trainer.fit(np.ones((4, 4)), np.ones((4, 1)), **options)
    (path / "file").write_text("x")
    (path / "empty").mkdir()
    return path


SHAPES = Argument(
    st.tuples(*[st.none() | st.integers(1, 300)] * 4)
    | st.lists(st.integers(1, 9), min_size=4, max_size=4)
)
SIZES = Argument(st.integers(1, 9), lambda v: v is None or is_whole(v))  # a preset has others
STACKS = Argument(st.just((np.ones([2, 3, 4], "float32"), np.ones([2, 3, 1], "float32"))))
# Of each function: its arguments, those that are required, and other words of its errors.
FUNCTIONS = {
    "attention_implementation": (
        {
            "query_shape": SHAPES,
            "key_shape": SHAPES,
            "block_size": or_none(whole(1, 300)),
            "dtype": Argument(st.sampled_from(["float32", "bfloat16", tf.float16])),
            **dict.fromkeys(["causal", "packed", "jit_compile"], FLAG),
        },
        ["query_shape", "key_shape"],
        (),
    ),
    "gpt": (
        {
            **dict.fromkeys(["vocabulary_size", "context", "layers"], SIZES),
            "width": Argument(st.just(8)),
            "heads": Argument(st.just(2)),
            "key_value_heads": Argument(st.sampled_from([None, 1, 2])),
            "positions": one_of("rotary", "learned"),
            "tied": or_none(FLAG),
            "stacked": or_none(FLAG),
            "preset": or_none(one_of("nano")),
            "dtype": Argument(st.sampled_from([None, "float32", "mixed_bfloat16"])),
        },
        ["vocabulary_size", "context", "width", "layers", "heads"],
        (),
    ),
    "latest": (
        {"directory": Argument(st.sampled_from(["good", "empty", "new"]))},
        ["directory"],
        (),
    ),
    "memory_analysis": ({"stack": STACKS}, ["stack"], ("x", "y", "train step")),
    "compiler_ir": (
        {"stack": STACKS, "stage": one_of("hlo", "optimized_hlo")},
        ["stack", "stage"],
        ("x", "y", "train step"),
    ),
}


@st.composite
def function_calls(draw):
    name = draw(st.sampled_from(list(FUNCTIONS)))
    table, required, names = FUNCTIONS[name]
    return name, draw(calls(table, required)), names


@fuzz(350)
@given(drawn=function_calls())
def test_a_function(drawn, trainer, folder, monkeypatch):
    monkeypatch.chdir(folder)
    name, call, names = drawn
    arguments = call.arguments
    functions = {
        "attention_implementation": fa.kernels.attention_implementation,
        "gpt": fa.gpt,
        "latest": fa.checkpoint.latest,
        "memory_analysis": trainer.memory_analysis,
        "compiler_ir": trainer.compiler_ir,
    }

    def state():
        return [np.asarray(v).tobytes() for v in trainer.model.weights]

    def check(result):
        if name == "gpt":
            assert np.all(np.isfinite(result(np.zeros([2, 1], "int32"))))
        elif name == "latest":
            assert (result is not None) == (arguments["directory"] == "good")
        elif name == "attention_implementation":
            queries, keys = arguments["query_shape"][1], arguments["key_shape"][1]
            block = arguments.get("block_size") or 128
            is_small = queries is None or keys is None or queries * keys <= block**2
            assert result == ("reference" if is_small else "blockwise")

    judge(call, lambda: functions[name](**arguments), check, state, names, name == "gpt")
