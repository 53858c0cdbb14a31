"""Tests that a training leaves no objects behind, and keeps no needless copies."""

import gc
import time
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def graphs():
    return {id(each) for each in gc.get_objects() if isinstance(each, tf.Graph)}


def collect():
    # Twice: what the first round ends held graphs in TensorFlow's C++, where Python does not see
    # them.
    gc.collect()
    gc.collect()


def assert_let_go(train):
    """`train()` returns what must not outlive it, and leaves no graph; the first call warms up what
    is kept once.
    """
    train()
    collect()
    before = graphs()
    references = [weakref.ref(each) for each in train()]
    for _ in range(100):
        collect()
        if not any(reference() is not None for reference in references) and not graphs() - before:
            break
        time.sleep(0.1)  # where another thread collects, this one's call does nothing
    assert not [reference() for reference in references if reference() is not None]
    assert not graphs() - before


def held(trainer):
    """Returns the objects that a trainer holds, in a list that does not hold them."""
    programs = [each for each in vars(trainer._engine).values() if hasattr(each, "trace")]
    return [
        trainer,
        trainer._engine,
        *programs,
        trainer.model,
        *[v.value for v in trainer.model.variables],
    ]


def layers(kind):
    if kind == "LayerStack":
        return [
            fa.kernels.LayerStack(lambda: keras.layers.Dense(4, "relu"), 2),
            keras.layers.Dense(1),
        ]
    dtype = "mixed_float16" if kind == "float16" else None
    return [keras.layers.Dense(4, "relu", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]


@pytest.mark.parametrize(
    "kind",
    [
        "LayerStack",
        "fit with all",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("XLA", "float16")),
    ],
)
def test_a_trainer_is_let_go_with_model_programs_and_graphs(kind, tmp_path):
    paths = iter(range(9))

    def train():
        model = keras.Sequential([keras.Input((4,)), *layers(kind)])
        trainer = fa.Trainer(
            model, "adamw", "mse", gradient_accumulation_steps=2, jit_compile=kind == "XLA"
        )
        more = {}
        if kind == "fit with all":
            more = {
                "validation_data": (X, Y),
                "checkpoint_dir": tmp_path / str(next(paths)),
                "checkpoint_every": 1,
            }
        trainer.fit(X, Y, batch_size=4, verbose=0, **more)
        if more:
            trainer.evaluate(X, Y, verbose=0)
            trainer.train_step((X.reshape(2, 12, 4), Y.reshape(2, 12, 1)))
        return held(trainer)

    assert_let_go(train)


def test_a_train_step_is_let_go():
    def train():
        w = tf.Variable(tf.zeros([4, 1]))
        step = fa.TrainStep(
            lambda x: (tf.reduce_sum((x @ w) ** 2), 1.0), [w], "adamw", jit_compile=False
        )
        step(X.reshape(2, 12, 4))
        return [step, step.optimizer, w]

    assert_let_go(train)


class Scaled(keras.layers.Layer):
    """A layer with a custom gradient in a `tf.function` of its own, which lives on from one trainer
    to the next.
    """

    @tf.function(autograph=False)
    def halved(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: 0.5 * dy

        return identity(x)

    def call(self, x):
        return self.halved(x)


def test_custom_gradients_of_a_function_that_lives_on_are_kept():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            Scaled(),
        ]
    )
    start = model.get_weights()
    x, y = X.reshape(1, 24, 4), np.zeros((1, 24, 1), "float32")
    moved = []
    for _ in range(2):
        model.set_weights(start)
        trainer = fa.Trainer(model, keras.optimizers.SGD(1.0), "mse", jit_compile=False)
        trainer.evaluate(X, y[0], verbose=0, batch_size=24)
        trainer.train_step((x, y))
        moved.append(start[0] - model.get_weights()[0])
        del trainer
        gc.collect()
    gradient = 2 * X.T @ (X @ start[0]) / 24
    np.testing.assert_allclose(moved, [0.5 * gradient] * 2, rtol=1e-5)


def test_a_kernels_own_gradient_lets_its_graph_go():
    def trace():
        attend = tf.function(
            lambda q: tf.gradients(fa.kernels.attention(q, q, q, block_size=4), q), autograph=False
        )
        concrete = attend.get_concrete_function(tf.TensorSpec([1, 8, 2, 4]))
        return [concrete, concrete.graph]

    assert_let_go(trace)


def by_length(lengths):
    """A dataset of four sequences of each length, a batch of two of them after the other."""

    def rows():
        for n in lengths:
            for _ in range(4):
                yield np.ones((n, 1), "float32"), np.ones((n, 1), "float32")

    spec = tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(rows, output_signature=(spec, spec)).padded_batch(2)


@pytest.mark.parametrize("lengths, warned", [(range(1, 6), 1), ([4, 8], 0)])
def test_fit_warns_once_of_lengths_that_never_settle(lengths, warned):
    model = keras.Sequential([keras.Input((None, 1)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2, jit_compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(by_length(lengths), epochs=2, verbose=0, validation_data=by_length(lengths))
    assert sum("programs were made" in str(each.message) for each in caught) == warned
