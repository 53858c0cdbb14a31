"""Compares the verdict of a trace, whether a model mixes the rows of a batch, with numbers."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum.families import adapt_model

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

L = keras.layers
ROWS, STEPS, WIDTH, IDS = 4, 6, 3, 50


def recurrent(layer, **options):
    return lambda: layer(2, **options)


class Averaged(L.Layer):
    """A cell whose state is the mean over the rows."""

    state_size = output_size = WIDTH

    def call(self, x, states):
        mean = tf.reduce_mean(x + states[0], axis=0, keepdims=True) + 0 * x
        return mean, [mean]


class OwnCell(L.Layer):
    state_size = output_size = WIDTH

    def call(self, x, states):
        state = tf.tanh(x + states[0])
        return state, [state]


class Calls(L.Layer):
    """Calls a function of a batch [rows, steps, width]."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class Mapped(L.Layer):
    """Computes each row in a turn of a loop; with `carried`, from the turn before."""

    def __init__(self, carried):
        super().__init__()
        self.carried = carried

    def call(self, x):
        if self.carried:
            return tf.scan(lambda before, row: 0.5 * before + row, x)
        return tf.map_fn(lambda row: row / tf.reduce_max(row), x)


class WithStates(L.Layer):
    """Calls an RNN, and keeps its states."""

    def __init__(self, **options):
        super().__init__()
        self.rnn = L.LSTM(2, return_state=True, **options)

    def call(self, x):
        return tf.concat(self.rnn(x), axis=-1)


class Attentive(L.Layer):
    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.attention = L.MultiHeadAttention(2, 2)

    def call(self, x):
        return self.attention(x, x)


def reversed_rows(x):
    return x[::-1]


class Gated(L.Layer):
    """Lets in the rows in reverse, by a gate that is 0 before the training."""

    def build(self, shape):
        self.gate = self.add_weight(shape=[], initializer="zeros")

    def call(self, x):
        return x + self.gate * x[::-1]


def of_heads(x):
    """Folds parts of the width into the rows, as attention does by hand, and back."""
    folded = tf.concat(tf.split(x, WIDTH, axis=-1), axis=0)
    return tf.concat(tf.split(tf.nn.softmax(folded, axis=1), WIDTH, axis=0), axis=-1)


BY_ROW = {
    "GRU": recurrent(L.GRU),
    "GRU as in Keras 1": recurrent(L.GRU, reset_after=False, return_sequences=True),
    "GRU, unrolled": recurrent(L.GRU, unroll=True),
    "LSTM, backwards": recurrent(L.LSTM, go_backwards=True),
    "LSTM, dropout": recurrent(L.LSTM, dropout=0.3, recurrent_dropout=0.3, seed=1),
    "LSTM, its states": WithStates,
    "SimpleRNN": recurrent(L.SimpleRNN),
    "stacked cells": lambda: L.RNN([L.GRUCell(2), L.LSTMCell(2)]),
    "a cell of one's own": lambda: L.RNN(OwnCell()),
    "Bidirectional": lambda: L.Bidirectional(L.GRU(2), merge_mode="sum"),
    "TimeDistributed": lambda: L.TimeDistributed(L.Dense(2)),
    "ConvLSTM1D": lambda: keras.Sequential([L.Reshape((2, STEPS // 2, WIDTH)), L.ConvLSTM1D(2, 2)]),
    "self-attention": Attentive,
    "Conv1D": lambda: L.Conv1D(2, 3, padding="causal"),
    "Conv1D, dilated": lambda: L.Conv1D(2, 2, dilation_rate=2),
    "LayerNormalization": L.LayerNormalization,
    "GroupNormalization": lambda: L.GroupNormalization(1),
    "heads in the rows": lambda: Calls(of_heads),
    "a Fourier transform of steps": lambda: Calls(
        lambda x: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64)))
    ),
    "steps turned": lambda: Calls(lambda x: x[:, ::-1]),
    "steps sorted": lambda: Calls(lambda x: tf.sort(x, axis=1)),
    "tf.map_fn": functools.partial(Mapped, carried=False),
    "tf.vectorized_map": lambda: Calls(
        lambda x: tf.vectorized_map(lambda row: row / tf.reduce_max(row), x)
    ),
    "a branch": lambda: Calls(lambda x: tf.cond(tf.shape(x)[1] > 1, lambda: tf.tanh(x), lambda: x)),
}
MIXING = {
    "a cell over the rows": lambda: L.RNN(Averaged()),
    "UnitNormalization of the batch": lambda: L.UnitNormalization(axis=0),
    "softmax of the batch": lambda: L.Softmax(axis=0),
    "mean of the batch": lambda: Calls(lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True)),
    "largest of the batch": lambda: Calls(lambda x: x / tf.reduce_max(x)),
    "rows compared": lambda: Calls(lambda x: tf.einsum("btw,ctw->bc", x, x)),
    "rows turned": lambda: Calls(reversed_rows),
    "rows turned in a tf.function": lambda: Calls(tf.function(reversed_rows)),
    "rows by tf.gather": lambda: Calls(lambda x: tf.gather(x, tf.argsort(x[:, 0, 0]))),
    "rows shifted": lambda: Calls(lambda x: tf.roll(x, 1, axis=0)),
    "rows sorted": lambda: Calls(lambda x: tf.sort(x, axis=0)),
    "rows added up": lambda: Calls(lambda x: tf.cumsum(x, axis=0)),
    "rows in another order of axes": lambda: Calls(
        lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), tf.shape(x))
    ),
    "a gate of rows that is 0 at first": Gated,
    "softmax over all": lambda: Calls(
        lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1])), tf.shape(x))
    ),
    "an einsum over other rows": lambda: Calls(
        lambda x: x * tf.einsum("btw,ctw->b", x, x)[:, None, None]
    ),
    "rows added up as the last axis": lambda: Calls(
        lambda x: tf.transpose(tf.cumsum(tf.transpose(x, [1, 2, 0]), axis=-1), [2, 0, 1])
    ),
    "logsumexp of the rows before": lambda: Calls(
        lambda x: tf.math.cumulative_logsumexp(x, axis=0)
    ),
    "a Fourier transform of the rows": lambda: Calls(
        lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x[:, :, 0], tf.complex64)))
    ),
    "tf.scan": functools.partial(Mapped, carried=True),
    "a branch over the rows": lambda: Calls(
        lambda x: tf.cond(tf.shape(x)[1] > 1, lambda: x - tf.reduce_mean(x, 0), lambda: x)
    ),
}
MASKS = {
    "no mask": [],
    "Masking": [lambda: L.Masking(0.5)],
    "zeros masked": [lambda: L.Embedding(IDS, WIDTH, mask_zero=True)],
}


class Subclassed(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.chain = layers

    def call(self, x, training=False):
        for layer in self.chain:
            x = layer(x)
        return x


def functional(layers):
    masked = isinstance(layers[0], L.Embedding)
    x = keras.Input([STEPS], dtype="int32") if masked else keras.Input([STEPS, WIDTH])
    return keras.Model(x, functools.reduce(lambda h, layer: layer(h), layers, x))


def sequential(layers):
    masked = isinstance(layers[0], L.Embedding)
    x = keras.Input([STEPS], dtype="int32") if masked else keras.Input([STEPS, WIDTH])
    return keras.Sequential([x, *layers])


def drawn(spec, seed):
    random = np.random.default_rng(seed)
    if spec.dtype.is_integer:
        return random.integers(0, IDS, [ROWS, *spec.shape[1:]]).astype("int32")
    steps = random.choice([0.0, 1.0], [ROWS, STEPS, 1])  # those of 0.5 are masked
    return (0.5 + steps * random.uniform(0.1, 2, [ROWS, *spec.shape[1:]])).astype("float32")


def mixes_in_numbers(model, spec):
    """Tells if a row's output, or the gradient of it, changes with another row, in three drawn
    batches.
    """
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def row(x, number):
        with tf.GradientTape() as tape:
            y = model(x, training=False)[number]
            loss = tf.reduce_sum(y * tf.reshape(tf.linspace(1.0, 2.0, tf.size(y)), tf.shape(y)))
        return [y, *tape.gradient(loss, weights, unconnected_gradients="zero")]

    for seed in range(3):
        x, other = drawn(spec, seed), drawn(spec, seed + 10)
        for number in range(ROWS):
            changed = other.copy()
            changed[number] = x[number]
            for a, b in zip(
                row(x, tf.constant(number)), row(changed, tf.constant(number)), strict=True
            ):
                if not np.allclose(
                    tf.convert_to_tensor(a), tf.convert_to_tensor(b), rtol=1e-4, atol=1e-6
                ):
                    return True
    return False


OTHER_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in (sequential, Subclassed)]


@pytest.mark.parametrize("kind", [functional, *OTHER_KINDS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*BY_ROW, *MIXING])
def test_the_verdict_is_that_of_numbers(name, mask, kind):
    keras.utils.set_random_seed(1)
    if mask != "no mask" and name == "softmax of the batch":
        pytest.skip("Keras's Softmax takes a mask of the shape of its input")
    model = kind([make() for make in (*MASKS[mask], (BY_ROW | MIXING)[name])])
    ids, values = tf.TensorSpec([None, STEPS], tf.int32), tf.TensorSpec([None, STEPS, WIDTH])
    spec = ids if mask == "zeros masked" else values
    adapted = adapt_model(model)
    adapted.symbolic_call(spec, training=True)
    assert adapted.effects.mixes_rows == (name in MIXING) == mixes_in_numbers(model, spec)


BEHIND_THRESHOLDS = {
    "a condition over all rows": lambda: Calls(
        lambda x: tf.where(tf.reduce_any(x > 1.5), x - 1, x)
    ),
    "turns until all rows are done": lambda: Calls(
        lambda x: tf.while_loop(lambda h: tf.reduce_any(h > 1), lambda h: [0.5 * h], [x])[0]
    ),
    "rows of a threshold gathered": lambda: Calls(
        lambda x: tf.where(x < -0.3, tf.gather(x, tf.argsort(x[:, 0, 0])), x)
    ),
}


@pytest.mark.parametrize("name", BEHIND_THRESHOLDS)
def test_what_mixes_rows_for_some_values_alone(name):
    adapted = adapt_model(functional([BEHIND_THRESHOLDS[name]()]))
    adapted.symbolic_call(tf.TensorSpec([None, STEPS, WIDTH]), training=True)
    assert adapted.effects.mixes_rows


@pytest.mark.parametrize("layer", [L.GRU, L.LSTM])
def test_sequences_of_any_length_are_by_row(layer):
    x = keras.Input([None, WIDTH])
    adapted = adapt_model(keras.Model(x, layer(2)(L.Masking()(x))))
    adapted.symbolic_call(tf.TensorSpec([None, None, WIDTH]), training=True)
    assert not adapted.effects.mixes_rows


@pytest.mark.parametrize("name", ["MixUp", "CutMix", "AugMix"])
def test_layers_that_mix_images_in_training(name):
    if not hasattr(L, name):
        pytest.skip(f"This Keras has no {name}")
    adapted = adapt_model(keras.Sequential([keras.Input([6, 6, 3]), getattr(L, name)()]))
    adapted.symbolic_call(tf.TensorSpec([None, 6, 6, 3]), training=True)
    assert adapted.effects.mixes_rows
