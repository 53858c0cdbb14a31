"""`jit_compile="auto"`: what it chooses for a model, and that a training, its checkpoints and its
plans follow.
"""

import json
import pathlib
import platform
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from benchmarks.tools import jit_forms
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.data.stacks import Batch
from fastaccum.families import adapt_model
from fastaccum.graphs import jit_choice
from fastaccum.training import step_builder

RESULTS = pathlib.Path(jit_forms.__file__).parents[1] / "results"
FOLDERS = {  # by whether oneDNN was on, and whether the CPU had AVX-512
    (False, False): "2026-11-23-jit-forms",
    (True, False): "2026-11-24-jit-forms",
    (True, True): "2026-11-25-jit-forms",
}
TIMES = {
    on: json.loads((RESULTS / folder / "jit_forms.json").read_text())
    for on, folder in FOLDERS.items()
}
# How long the form that is chosen may take beside the other one.
LIMIT = 1.10
# The rule does not see what XLA saves in passes over weights.
LIMIT_WITH_MANY_WEIGHTS = {"Conv2D, wide dense head": 1.40}
SMALL = [
    "dense, narrow",
    "dense, wide",
    "embeddings and dense",
    "LSTM",
    "Conv2D, tiny",
    "Conv2D, wide dense head",
]
SMALL += ["Conv1D", "Conv2D, MNIST", "Conv3D", "depthwise", "transposed", "average pooling"]
X = np.random.default_rng(0).normal(size=(16, 16, 16, 3)).astype("float32")
Y = X.mean(axis=(1, 2))


def conv_net():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    kinds = [
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(8, 3),
        layers.Flatten(),
    ]
    return keras.Sequential([keras.Input((16, 16, 3)), *kinds, layers.Dense(3)], name="conv_net")


def make_trainer(model=None, **options):
    return fa.Trainer(
        model or conv_net(),
        keras.optimizers.SGD(0.1),
        "mse",
        gradient_accumulation_steps=2,
        **options,
    )


def chosen(trainer, x=X, y=Y, rows=8):
    sample = Batch(*(tf.TensorSpec([rows, *each.shape[1:]], each.dtype) for each in (x, y)))
    return trainer._builder.get_or_build(
        sample, trainer._present_options
    ).objective.options.uses_xla


@pytest.mark.parametrize(
    "name",
    [
        name if name in SMALL else pytest.param(name, marks=pytest.mark.slow)
        for name in jit_forms.MODELS
    ],
)
def test_no_choice_takes_more_than_a_tenth_longer_than_the_other_form(name, monkeypatch):
    limit = LIMIT_WITH_MANY_WEIGHTS.get(name, LIMIT)
    for (onednn, avx512), times in TIMES.items():
        monkeypatch.setattr(jit_choice, "ONEDNN", onednn)
        trainer, (x, y) = jit_forms.make_trainer(name, "auto")
        with_xla, without = times[name]
        if chosen(trainer, x[0], y[0], rows=x.shape[1]):
            ratio = with_xla / without
        else:
            ratio = without / with_xla
        assert ratio <= limit, f"oneDNN {onednn}, AVX-512 {avx512}"


@pytest.mark.parametrize(
    "name, with_xla", [("dense, narrow", True), ("Conv2D, tiny", True), ("Conv2D, MNIST", False)]
)
def test_a_graph_says_it_for_layers_of_the_users_own_too(name, with_xla):
    inner, (x, y) = jit_forms.make(name)

    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    model = keras.Sequential([keras.Input(x.shape[2:]), Own()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert chosen(fa.Trainer(model, "sgd", loss), x[0], y[0], rows=x.shape[1]) is with_xla


def test_a_gpu_runs_xla_whatever_the_layers(monkeypatch):
    assert chosen(make_trainer()) is False
    monkeypatch.setattr(step_builder, "has_gpu", lambda: True)
    assert chosen(make_trainer()) is True


def test_layers_that_xla_cannot_compile_run_without_it():
    layers = keras.layers.RandomRotation(0.1), keras.layers.Flatten(), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers])
    trainer = make_trainer(model)
    trainer.fit(X, Y, batch_size=4, verbose=0)
    assert trainer.jit_compile == "auto" and chosen(trainer) is False
    with pytest.raises(
        ValueError, match=r"XLA cannot compile these layers: .*, or pass a batch_size"
    ):
        fa.plan(trainer, (X, Y), global_batch_size=8)
    with pytest.raises(ValueError, match="XLA cannot compile these layers"):
        make_trainer(model, jit_compile=True)


@pytest.mark.parametrize(
    "without", [{"dtype": "mixed_float16"}, {"data_format": "channels_first"}], ids=str
)
def test_layers_without_a_kernel_for_a_cpu_run_with_xla(without):
    def large(**options):
        kinds = (
            keras.layers.Conv3D(16, 3, **options),
            keras.layers.MaxPooling3D(**options),
            keras.layers.Flatten(),
        )
        return make_trainer(
            keras.Sequential([keras.Input((8, 8, 8, 8)), *kinds, keras.layers.Dense(3)])
        )

    x, y = np.zeros((1, 8, 8, 8, 8), "float32"), np.zeros((1, 3), "float32")
    assert chosen(large(**without), x, y, rows=64) and not chosen(large(), x, y, rows=64)
    assert not chosen(large(dtype="mixed_bfloat16"), x, y, rows=64)


def test_large_micro_batches_of_a_model_near_the_bound_run_without_xla():
    choices = []  # 8.76 ms with XLA and 11 without; 53 and 18 in three runs
    for rows in (16, 128):
        trainer, (x, y) = jit_forms.make_trainer("Conv1D and LSTM", "auto")
        choices.append(chosen(trainer, x[0], y[0], rows=rows))
    assert choices == [True, False]


def test_the_work_per_row_does_not_depend_on_the_micro_batch():
    def work(rows):
        kinds = [
            keras.layers.Conv2D(64, 5, dtype="mixed_bfloat16"),
            keras.layers.Flatten(),
            keras.layers.Dense(128),
        ]
        model = adapt_model(keras.Sequential([keras.Input((8, 8, 3)), *kinds]))
        return model.work(tf.TensorSpec([rows, 8, 8, 3], tf.float32))

    one, *others = map(work, (1, 2, 16))
    assert one.multiply_adds > 0 and [one, one] == others


KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])


@pytest.mark.parametrize(
    "layer, with_xla",  # with oneDNN, and without
    [
        # Keras 3.16 compiles it by itself on a CPU, as all versions compile grouped ones.
        (
            lambda: keras.layers.Conv2D(32, 3, strides=2, data_format="channels_first"),
            (KERAS >= (3, 16), True),
        ),
        (lambda: keras.layers.Conv2DTranspose(16, 3, dilation_rate=2), (False, True)),
        (lambda: keras.layers.Conv2D(32, 3, groups=4), (True, True)),
    ],
    ids=["channels first", "dilated and transposed", "grouped"],
)
def test_xla_stays_where_tensorflow_has_no_kernel(layer, with_xla, monkeypatch):
    for onednn, expected in zip((True, False), with_xla, strict=True):
        monkeypatch.setattr(jit_choice, "ONEDNN", onednn)
        inputs = keras.Input((16, 16, 16))
        y = keras.layers.GlobalAveragePooling2D()(
            layer()(keras.layers.Conv2D(16, 5, padding="same")(inputs))
        )
        trainer = make_trainer(keras.Model(inputs, keras.layers.Dense(3)(y)))
        x = np.zeros((64, 16, 16, 16), "float32")
        assert chosen(trainer, x, np.zeros((64, 3), "float32"), rows=64) is expected


def test_work_is_counted_by_row():
    @tf.function
    def called(x):
        y = tf.nn.conv2d(x, tf.ones([3, 3, 3, 4]), 1, "SAME")
        y = tf.nn.depthwise_conv2d(y, tf.ones([3, 3, 4, 1]), [1] * 4, "SAME")
        return tf.nn.max_pool2d(y, 2, 2, "VALID")

    (few, many) = (
        jit_choice.count(called.get_concrete_function(tf.TensorSpec([n, 16, 16, 3])))
        for n in (2, 200)
    )
    assert few.multiply_adds == 256 * (3 * 3 * 3 * 4 + 4 * 3 * 3 * 4)
    assert few.operations > 2 and few == many


def test_an_update_is_that_of_keras_on_the_full_batch():
    ours, theirs, other = conv_net(), conv_net(), conv_net()
    make_trainer(ours).fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    theirs.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
    other.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    other.fit(X, Y, batch_size=8, verbose=0, shuffle=False)  # two updates: the control
    for own, each, control in zip(
        ours.get_weights(), theirs.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_allclose(own, each, rtol=0, atol=1e-7)
        assert np.abs(own - control).max() > 1e-5


def test_a_training_resumes_bit_for_bit_and_under_its_own_form_alone(tmp_path):
    options = {"batch_size": 8, "verbose": 0}
    whole, parts = make_trainer(), conv_net()
    whole.fit(X, Y, epochs=3, checkpoint_dir=tmp_path / "whole", **options)
    keras.utils.set_random_seed(0)
    make_trainer(parts).fit(X, Y, epochs=1, checkpoint_dir=tmp_path / "parts", **options)
    with pytest.raises(
        IncompatibleCheckpointError,
        match=r"pass jit_compile=False to the Trainer; .*jit_compile: False was saved, now True",
    ):
        make_trainer(jit_compile=True).fit(
            X, Y, epochs=3, checkpoint_dir=tmp_path / "parts", **options
        )
    for jit_compile in ("auto", False):  # which say the same
        resumed = make_trainer(jit_compile=jit_compile)
        resumed.fit(X, Y, epochs=3, checkpoint_dir=tmp_path / "parts", **options)
        for own, each in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
            np.testing.assert_array_equal(own, each)


def test_plans_and_summaries_read_an_xla_program_of_the_same_step():
    trainer = make_trainer()
    found = fa.plan(trainer, (X, Y), global_batch_size=16)
    assert found.batch_size == 16 and found.peak_bytes > 0
    summary = trainer.summary(X, Y, batch_size=8, verbose=False)
    assert not summary.jit_compile and summary.flops > 0
    assert trainer.summary(X, Y, batch_size=8, verbose=False).flops == summary.flops
    trainer.fit(X, Y, batch_size="auto", global_batch_size=16, verbose=0)
    assert (
        not trainer._engine.objective.options.uses_xla
        and not trainer._engine.programs["train step"].jit_compile
    )
    with pytest.raises(ValueError, match="jit_compile=True"):
        trainer.memory_analysis((X.reshape(2, 8, 16, 16, 3), Y.reshape(2, 8, 3)))
    for call in (
        lambda t: t.summary(X, Y, batch_size=8),
        lambda t: fa.plan(t, (X, Y), global_batch_size=16),
    ):
        with pytest.raises(ValueError, match=r"jit_compile=False: .*jit_compile='auto'"):
            call(make_trainer(jit_compile=False))


def test_fit_says_once_that_it_runs_without_xla(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    trainer = make_trainer()
    for _ in range(2):
        trainer.fit(X, Y, batch_size=8, verbose=2)
    assert capsys.readouterr().out.count("without XLA") == 1


@pytest.mark.parametrize(
    "machine, onednn, setting, hints",
    [
        ("x86_64", False, None, 1),
        ("x86_64", False, "0", 0),
        ("x86_64", True, None, 0),
        ("aarch64", False, None, 0),
    ],
)
def test_fit_says_how_to_turn_onednn_on_where_nobody_has_chosen(
    capsys, monkeypatch, machine, onednn, setting, hints
):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(jit_choice, "ONEDNN", onednn)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if setting is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", setting)
    make_trainer().fit(X, Y, batch_size=8, verbose=2)
    assert capsys.readouterr().out.count("import fastaccum before TensorFlow") == hints
