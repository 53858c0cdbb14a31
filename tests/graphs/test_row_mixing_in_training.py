"""Rows that a model or a loss mixes: never padded, and told of where micro-batches cannot add up to
the full batch.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.data.stacks import Batch

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(11, n)).astype("float32") for n in (6, 3))


class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, 0, keepdims=True)


class Mixed(keras.layers.Layer):
    def call(self, x):
        return 0.7 * x + 0.3 * tf.reverse(x, [0])


class CentredInFunction(keras.layers.Layer):
    @tf.function
    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


MIXING = {
    "a layer": lambda h: Centred()(h),
    "a layer whose call is a tf.function": lambda h: CentredInFunction()(h),
    "mixup": lambda h: Mixed()(h),
    "softmax over rows": lambda h: keras.layers.Softmax(axis=0)(h),
    "an activation": lambda h: keras.layers.Dense(4, activation=lambda h: h - tf.reduce_mean(h, 0))(
        h
    ),
    "an operation": lambda h: h - keras.ops.mean(h, 0, keepdims=True),
    "attention over rows": lambda h: keras.layers.Lambda(
        lambda h: tf.matmul(h, h, transpose_b=True) @ h
    )(h),
}


def model_with(middle):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    return keras.Model(
        inputs, keras.layers.Dense(3)(middle(keras.layers.Dense(4, activation="tanh")(inputs)))
    )


@pytest.mark.parametrize("name", MIXING)
def test_no_row_is_repeated_where_it_would_be_felt(name):
    """11 rows in batches of 8: the short one must stay short, as in Keras."""
    theirs, ours = model_with(MIXING[name]), model_with(MIXING[name])
    theirs.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    for fit in (theirs.fit, trainer.fit):
        fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    expected = theirs.evaluate(X, Y, batch_size=4, verbose=0)
    assert trainer.evaluate(X, Y, batch_size=4, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_rows_by_themselves_are_padded_as_ever():
    trainer = fa.Trainer(
        model_with(keras.layers.Lambda(lambda h: tf.reverse(2 * h, [1]))), "sgd", "mse"
    )
    trainer._builder.get_or_build(
        tf.nest.map_structure(lambda a: tf.TensorSpec([8, *a.shape[1:]]), Batch(X, Y)),
        trainer._present_options,
    )
    assert not trainer._builder.training_layout(trainer._present_options).exact_rows


class Own(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.out, self.own = keras.layers.Dense(3), loss
        self.seen = tf.Variable(0.0, trainable=False)

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own(self, y, y_pred)


def compiled(model, y, y_pred):
    return keras.Model.compute_loss(model, None, y, y_pred)


def masked_mean(y, y_pred):
    mask = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(mask * (y - y_pred) ** 2) / tf.reduce_sum(mask)


@tf.function
def root_in_function(y, y_pred):
    return tf.sqrt(tf.reduce_mean((y - y_pred) ** 2))


IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
SUMS = {
    "half of the compiled": lambda m, y, p: 0.5 * compiled(m, y, p) + tf.reduce_mean(p**2) / 3.0,
    "a Keras loss": lambda m, y, p: (
        keras.losses.MeanSquaredError()(y, p) + tf.add_n([0.0, *m.losses])
    ),
    "by the number of rows": lambda m, y, p: (
        tf.reduce_sum((y - p) ** 2) / tf.cast(tf.shape(y)[0], tf.float32)
    ),
}
BEYOND = {
    "a root": lambda m, y, p: tf.sqrt(compiled(m, y, p)),
    "a reciprocal": lambda m, y, p: 1.0 / compiled(m, y, p),
    "a maximum": lambda m, y, p: tf.maximum(compiled(m, y, p), 1.85),
    "a root in a tf.function": lambda m, y, p: root_in_function(y, p),
    "a masked mean": lambda m, y, p: masked_mean(y, p),
    "a Keras loss that masks": lambda m, y, p: IGNORING(tf.argmax(y, -1), p),
    "a squared mean": lambda m, y, p: compiled(m, y, p) + tf.reduce_mean(tf.reduce_mean(p, 0) ** 2),
    "balanced losses": lambda m, y, p: (
        compiled(m, y, p) * (1 + tf.stop_gradient(tf.reduce_mean(p**2)))
    ),
}


@pytest.mark.parametrize("sequences", [True, False])
def test_a_recurrent_layer_needs_no_word(sequences):
    class Recurrent(keras.Model):
        def __init__(self):
            super().__init__()
            self.recurrent = keras.layers.GRU(3, return_sequences=sequences)

        def call(self, x):
            return self.recurrent(keras.ops.reshape(x, [-1, 3, 2]))

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(y_pred**2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa.Trainer(Recurrent(), "sgd", jit_compile=False).fit(X, batch_size=4, verbose=0)


def told(loss=None, own=None):
    """The warnings of losses that are no sums."""
    options = {"gradient_accumulation_steps": 2, "jit_compile": False}
    trainer = fa.Trainer(
        Own(own) if own else model_with(lambda h: h), "sgd", loss or "mse", **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(X, Y, batch_size=4, verbose=0)
    return [
        each for each in caught if "no sum or mean over the rows of a batch" in str(each.message)
    ]


@pytest.mark.parametrize("name", SUMS)
def test_sums_and_means_over_rows_need_no_word(name):
    assert not told(own=SUMS[name])


@pytest.mark.parametrize("name", BEYOND)
def test_functions_of_a_sum_over_rows_are_warned_of(name):
    assert told(own=BEYOND[name])


def test_compiled_losses_that_look_at_the_batch_are_told_of():
    def where_finite(y, y_pred):
        known = tf.math.is_finite(y)
        squares = tf.where(known, (tf.where(known, y, 0.0) - y_pred) ** 2, 0.0)
        return tf.reduce_sum(squares, -1) / tf.reduce_mean(tf.cast(known, tf.float32))

    def absolute(y, y_pred):
        return tf.reduce_mean(tf.abs(y - y_pred), -1)

    assert told(where_finite)
    assert told(tf.function(where_finite))
    assert not told(absolute)
    assert not told(tf.function(absolute))


def test_a_loss_may_not_assign_variables_that_no_layer_holds():
    def counting(model, y, y_pred):
        model.seen.assign_add(1.0)
        return compiled(model, y, y_pred) * (1.0 + 0.1 * model.seen)

    model = Own(counting)
    with pytest.raises(ValueError, match=r"Own assigns .* as it computes its loss"):
        fa.Trainer(model, "sgd", "mse", jit_compile=False).fit(X, Y, verbose=0)
    assert float(model.seen) == 0.0
