"""Strings: to models that encode them, and to models that preprocess what they are given."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

TEXT = np.array(["the fox", "a quick fox", "dog", "the the dog", "fox fox", "quick"] * 2)
Y = np.linspace(-1.0, 1.0, 12, dtype="float32")[:, None]
W = np.arange(1.0, 13.0, dtype="float32")


def encoder():
    """Strings to numbers, in the model."""
    vectorize = keras.layers.TextVectorization(max_tokens=8, output_sequence_length=3)
    vectorize.adapt(TEXT)
    return vectorize


def model_of_text():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((1,), dtype="string")
    h = keras.layers.Embedding(8, 3)(encoder()(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(h)))


class Task(keras.Model):
    """Preprocesses raw batches in fit, evaluate and predict, as KerasHub's tasks do."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.preprocessor = encoder().__call__  # no layer of the model's
        self.embedding, self.head = keras.layers.Embedding(8, 3), keras.layers.Dense(1)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        ids = self.preprocessor(x)
        # As a language model's preprocessing makes its own targets.
        y = tf.reduce_sum(tf.cast(ids, tf.float32), -1, keepdims=True) if y is None else y
        return keras.utils.pack_x_y_sample_weight({"ids": ids}, y, sample_weight)

    def call(self, x):
        return self.head(keras.ops.mean(self.embedding(x["ids"]), axis=1))

    def data(self, *given):
        return (
            tf.data.Dataset.from_tensor_slices(given).batch(len(TEXT)).map(self.preprocess_samples)
        )

    def predict(self, x, batch_size=None, **options):
        return super().predict(self.data(x), **options)


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(5)


def trainer_of(model, **options):
    optimizer = keras.optimizers.SGD(0.1)
    return fa.Trainer(model, optimizer, "mse", ["mae"], gradient_accumulation_steps=3, **options)


def reference(model, data):
    model.compile(
        keras.optimizers.SGD(0.1), "mse", metrics=["mae"], weighted_metrics=[], run_eagerly=True
    )
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.evaluate(data, verbose=0), [w.numpy() for w in model.trainable_variables]


@pytest.fixture(scope="module")
def expected_of_text():
    return reference(model_of_text(), dataset(TEXT[:, None], Y, W).unbatch().batch(12))


def assert_trained(trainer, history, expected, *data):
    logs, evaluated, weights = expected
    for name in logs:
        np.testing.assert_allclose(history.history[name], logs[name], rtol=1e-5)
    for ours, theirs in zip(trainer.model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-6)
    x, *rest = data
    weight = {"sample_weight": rest.pop()} if len(rest) == 2 else {}
    np.testing.assert_allclose(
        trainer.evaluate(x, *rest, **weight, verbose=0), evaluated, rtol=1e-5
    )


@pytest.mark.parametrize(
    "text",
    [TEXT[:, None], TEXT.astype(object), tf.constant(TEXT), None],
    ids=["column", "objects", "tensor", "dataset"],
)
def test_a_model_encodes_text_without_xla(expected_of_text, text):
    trainer = trainer_of(model_of_text(), jit_compile=False)
    data = (dataset(TEXT[:, None], Y, W),) if text is None else (text, Y, W)
    weight = {} if text is None else {"sample_weight": W}
    history = trainer.fit(*data[:2], **weight, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_trained(trainer, history, expected_of_text, *data)


def test_a_train_step_takes_text_without_xla(expected_of_text):
    trainer = trainer_of(model_of_text(), jit_compile=False)
    result = trainer.train_step((TEXT.reshape(3, 4, 1), Y.reshape(3, 4, 1), W.reshape(3, 4)))
    assert float(result.loss) == pytest.approx(expected_of_text[0]["loss"][0], rel=1e-5)
    assert trainer.predict(tf.constant(TEXT), verbose=0).shape == (12, 1)


def test_a_tf_keras_model_encodes_text_without_xla():
    tf_keras = pytest.importorskip("tf_keras")

    def model():
        vectorize = tf_keras.layers.TextVectorization(max_tokens=8, output_sequence_length=3)
        vectorize.adapt(TEXT)
        inputs = tf_keras.Input((1,), dtype=tf.string)
        h = tf_keras.layers.Embedding(
            8, 3, embeddings_initializer=tf_keras.initializers.RandomUniform(seed=1)
        )(vectorize(inputs))
        return tf_keras.Model(
            inputs,
            tf_keras.layers.Dense(1, kernel_initializer="ones")(tf_keras.layers.Flatten()(h)),
        )

    theirs = model()
    theirs.compile(tf_keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    expected = theirs.fit(TEXT.astype(object)[:, None], Y, batch_size=12, verbose=0).history["loss"]
    optimizer = tf_keras.optimizers.SGD(0.1)
    ours = fa.Trainer(model(), optimizer, "mse", gradient_accumulation_steps=3, jit_compile=False)
    assert ours.fit(TEXT[:, None], Y, batch_size=4, verbose=0).history["loss"] == pytest.approx(
        expected, rel=1e-5
    )
    for a, b in zip(ours.model.trainable_variables, theirs.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_text_that_xla_cannot_hold_says_what_to_do():
    with pytest.raises(ValueError, match=r"text_vectorization.*or pass jit_compile=False"):
        trainer_of(model_of_text(), jit_compile=True)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for x in (TEXT, tf.constant(TEXT), dataset(TEXT, Y)):
        with pytest.raises(
            TypeError, match=r"^x .*dtype .*: pass numbers.*without jit_compile=True"
        ):
            trainer_of(plain, jit_compile=True).fit(
                x, *(() if isinstance(x, tf.data.Dataset) else (Y,)), verbose=0
            )
    for data in ((np.ones((12, 1)), TEXT), (dataset(np.ones((12, 1)), TEXT),)):
        with pytest.raises(TypeError, match=r"dtype .*: pass numbers"):
            trainer_of(plain, jit_compile=False).fit(*data, verbose=0)


@pytest.mark.parametrize(
    ("data", "jit_compile"),
    [
        pytest.param(
            (TEXT.tolist(), Y.tolist()),
            False,
            marks=[pytest.mark.slow, pytest.mark.sample],
            id="lists",
        ),
        pytest.param(
            (TEXT.tolist(),), False, marks=[pytest.mark.slow, pytest.mark.sample], id="x alone"
        ),
        pytest.param((TEXT, Y, W), True, id="arrays"),
        pytest.param((dataset(TEXT, Y),), False, id="dataset"),
    ],
)
def test_a_model_preprocesses_what_it_is_given(data, jit_compile):
    task = Task()
    given = (TEXT, Y) if isinstance(data[0], tf.data.Dataset) else data
    expected = reference(task, task.data(*given))
    trainer = trainer_of(Task(), jit_compile=jit_compile)
    weight = {"sample_weight": W} if len(data) == 3 else {}
    # The default of `shuffle` too: KerasHub keeps the order of what it preprocesses.
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    history = trainer.fit(*data[:2], **weight, **options)
    assert_trained(trainer, history, expected, *data)
    np.testing.assert_allclose(
        trainer.predict(TEXT, verbose=0), task.predict(TEXT, verbose=0), atol=1e-6
    )


def test_validation_data_are_preprocessed_too():
    trainer = trainer_of(Task(), jit_compile=False)
    split = trainer.fit(TEXT, Y, batch_size=3, validation_split=0.25, verbose=0)
    (value,) = split.history["val_loss"]
    assert value == pytest.approx(trainer.evaluate(TEXT[9:].tolist(), Y[9:], verbose=0)[0])
    for given in ((TEXT[9:].tolist(), Y[9:].tolist()), dataset(TEXT[9:], Y[9:])):
        trainer.model.set_weights(weights := trainer.model.get_weights())
        trainer.optimizer.learning_rate = 0.0
        history = trainer.fit(TEXT, Y, batch_size=4, validation_data=given, verbose=0)
        assert history.history["val_loss"] == [pytest.approx(value)]
        assert all(
            (a == b).all() for a, b in zip(weights, trainer.model.get_weights(), strict=True)
        )


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (("text", 1.0), ValueError, "x holds a scalar.*a list of strings"),
        ((["a", "b"], [1.0]), ValueError, r"different numbers of rows: \{'x': \[2\], 'y': \[1\]\}"),
        ((TEXT, None, W), ValueError, "sample_weight without y"),
        ((TEXT, {"a": Y, "b": None}), ValueError, r"convert a value \(None\)"),
        (
            (iter([(TEXT, Y)]),),
            TypeError,
            "this model preprocesses .*: pass arrays, lists or a tf.data.Dataset",
        ),
    ],
)
def test_raw_inputs_that_do_not_fit_say_so(data, error, message):
    x, y, weight = (*data, None, None)[:3]
    with pytest.raises(error, match=message):
        trainer_of(Task(), jit_compile=False).fit(x, y, sample_weight=weight, verbose=0)
