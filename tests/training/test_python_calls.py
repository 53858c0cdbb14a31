"""A loss, a layer, a metric or a `compute_loss` that calls Python, as by `tf.py_function`: trained
without XLA.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

rng = np.random.default_rng(0)
X = rng.normal(size=(28, 5)).astype("float32")  # the last update has 12 rows of 16
Y = rng.normal(size=(28, 2)).astype("float32")
COMPUTED = []  # rows that Python computed a loss for


def square_error(y_true, y_pred):
    COMPUTED.append(len(y_pred))
    return tf.reduce_mean(tf.square(y_true - y_pred), -1)


def python_loss(y_true, y_pred):
    losses = tf.py_function(square_error, [y_true, y_pred], tf.float32)
    return tf.ensure_shape(losses, y_pred.shape[:1])


def numpy_loss(y_true, y_pred):
    losses = tf.numpy_function(lambda a, b: np.square(a - b).mean(-1), [y_true, y_pred], tf.float32)
    return tf.ensure_shape(losses, y_pred.shape[:1])


def python_metric(y_true, y_pred):
    return tf.ensure_shape(
        tf.numpy_function(lambda a, b: np.abs(a - b).mean(), [y_true, y_pred], tf.float32), []
    )


def through_python(x):
    return tf.ensure_shape(tf.py_function(lambda t: tf.tanh(t) * 2.0, [x], tf.float32), x.shape)


class Own(keras.layers.Layer):
    def call(self, x):
        return through_python(x)


class WithLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(python_loss(y, y_pred))


def make_lambda():
    return keras.layers.Lambda(through_python, output_shape=(4,), name="culprit")


def make_own():
    return Own(name="culprit")


def make_model(make_layer=None, of=keras.Model):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(4)(inputs)
    if make_layer is not None:
        outputs = make_layer()(outputs)
    return of(inputs, keras.layers.Dense(2)(outputs))


def make_trainer(model, loss, metrics=(), **options):
    return fa.Trainer(
        model, keras.optimizers.Adam(0.01), loss, metrics, gradient_accumulation_steps=2, **options
    )


@pytest.mark.parametrize(
    "make_layer, of, loss, named",
    [
        (None, keras.Model, python_loss, "loss=['python_loss']"),
        (make_lambda, keras.Model, "mse", "layers=['culprit (Lambda)']"),
        (make_own, keras.Model, "mse", "layers=['culprit (Own)']"),
        (None, WithLoss, None, "WithLoss.compute_loss"),
        (make_own, keras.Model, python_loss, "layers=['culprit (Own)'], loss=['python_loss']"),
    ],
    ids=["loss", "Lambda", "layer", "compute_loss", "layer and loss"],
)
def test_python_calls_train_without_xla_as_in_keras(make_layer, of, loss, named):
    theirs = make_model(make_layer, of)
    theirs.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    theirs.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    trainer = make_trainer(make_model(make_layer, of), loss)
    with pytest.warns(
        UserWarning, match=f"{re.escape(named)}, which call Python.*trains without XLA"
    ) as said:
        trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert len([each for each in said if "XLA" in str(each.message)]) == 1
    for own, other in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    expected = theirs.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(X, Y, batch_size=8, verbose=0), expected, rtol=1e-5)


def test_jit_compile_true_names_all_python_calls_before_they_run():
    trainer = make_trainer(make_model(make_lambda), python_loss, [python_metric], jit_compile=True)
    before = trainer.model.get_weights()
    COMPUTED.clear()
    named = r"layers=\['culprit \(Lambda\)'\], loss=\['python_loss'\], metrics=\['python_metric'\], which call Python"
    with pytest.raises(
        ValueError, match=rf"{named}.*keras\.ops.*dataset\.map.*jit_compile='auto' or False"
    ):
        trainer.fit(X, Y, batch_size=8, verbose=0)
    for own, other in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, other)
    assert not COMPUTED


@pytest.mark.parametrize(
    "of, loss, named",
    [
        (keras.Model, python_loss, r"loss=\['python_loss'\]"),
        (WithLoss, None, r"WithLoss\.compute_loss"),
    ],
)
def test_the_input_pipeline_is_no_remedy_for_a_loss(of, loss, named):
    trainer = make_trainer(make_model(of=of), loss, jit_compile=True)
    with pytest.raises(
        ValueError, match=rf"{named}, which call Python.*jit_compile='auto' or False"
    ) as refused:
        trainer.fit(X, Y, batch_size=8, verbose=0)
    assert "dataset.map" not in str(refused.value)


def test_nor_is_it_for_a_loss_by_another_operation_that_xla_has_not():
    def by_text(y_true, y_pred):
        losses = tf.reduce_mean(tf.square(y_true - y_pred), -1)
        return losses * tf.strings.to_number(tf.strings.as_string(losses))

    trainer = make_trainer(make_model(), by_text, jit_compile=True)
    with pytest.raises(
        ValueError, match=r"no such operation\. Pass jit_compile=False\. XLA says"
    ) as refused:
        trainer.fit(X, Y, batch_size=8, verbose=0)
    assert "dataset.map" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:XLA cannot compile")
def test_a_loss_by_numpy_has_no_gradient():
    with pytest.raises(ValueError, match="reaches none of the 4 variables"):
        make_trainer(make_model(), numpy_loss).fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.filterwarnings("ignore:XLA cannot compile")
def test_figures_of_an_xla_program_are_refused_by_name():
    trainer = make_trainer(make_model(), python_loss)
    with pytest.raises(
        ValueError, match=r"loss=\['python_loss'\], which call Python: do without a summary"
    ):
        trainer.summary(X, Y, batch_size=8)
    with pytest.raises(
        ValueError, match=r"loss=\['python_loss'\], which call Python: pass a batch_size"
    ):
        fa.plan(trainer, (X, Y), global_batch_size=16)
