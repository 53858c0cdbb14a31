"""Stochastic rounding to bfloat16: unbiased, and the same wherever it is computed."""

import numpy as np
import pytest
import tensorflow as tf

from fastaccum.kernels.stochastic_rounding import round_stochastically

DRAWS = 4000


def draws_of(x, jit=True, half=0):
    """Rounds x by as many keys: float64 [draws, ...]."""

    @tf.function(jit_compile=jit)
    def draw(keys):
        return tf.map_fn(
            lambda key: tf.cast(round_stochastically(x, key, half), tf.float32),
            keys,
            fn_output_signature=tf.float32,
        )

    numbers = np.arange(DRAWS, dtype="uint32")
    return draw(np.stack([numbers, numbers * 7 + 1], 1)).numpy().astype("float64")


def neighbours(x):
    """Returns the bfloat16 numbers towards 0 from x and away from it."""
    bits = np.asarray(x, "float32").view("uint32")
    towards = (bits & np.uint32(0xFFFF0000)).view("float32")
    away = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view("float32")
    return towards.astype("float64"), away.astype("float64")


@pytest.mark.parametrize("half", [0, 1])
def test_the_mean_is_exact_to_4_sigma(half):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=500) * np.exp(5 * rng.normal(size=500))).astype("float32")
    drawn = draws_of(tf.constant(x), half=half)
    towards, away = neighbours(x)
    assert np.all((drawn == towards) | (drawn == away))
    share = (x - towards) / (away - towards)
    sigma = np.abs(away - towards) * np.sqrt(share * (1 - share) / DRAWS)
    z = (drawn.mean(0) - x) / np.maximum(sigma, 1e-300)
    # 500 numbers: 4 sigma of one is the 3% tail of the largest of them all.
    assert np.abs(z).max() < 4.5
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    # A control: rounding to nearest is off by many sigma.
    to_nearest = tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy()
    assert np.median(np.abs(to_nearest - x) / sigma) > 20


def test_neighbouring_numbers_and_keys_are_independent():
    up = draws_of(tf.fill([200], np.float32(1.0 + 2**-8))) > 1.0  # half way: a fair coin
    up = up - up.mean()
    of_numbers = np.corrcoef(up.T) - np.eye(up.shape[1])
    assert np.abs(of_numbers).max() < 5.5 / np.sqrt(DRAWS)
    of_keys = [(up[:-lag] * up[lag:]).mean() * 4 for lag in (1, 2, 64)]
    assert np.abs(of_keys).max() < 5 / np.sqrt(up.size)


def test_the_halves_of_a_draw_are_independent():
    x = tf.fill([200], np.float32(1.0 + 2**-8))
    up = [draws_of(x, half=half) > 1.0 for half in (0, 1)]
    first, second = (each - each.mean() for each in up)
    assert abs((first * second).mean() * 4) < 5 / np.sqrt(first.size)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, 2.0**-120])
def test_what_bfloat16_holds_stays(value):
    drawn = draws_of(tf.fill([3], np.float32(value)))
    assert np.all(drawn == value)


def test_nan_stays_nan():
    key = tf.constant([1, 2], tf.uint32)
    rounded = round_stochastically(tf.constant([np.nan, -np.nan]), key)
    assert np.isnan(tf.cast(rounded, tf.float32)).all()


def test_xla_and_tensorflow_draw_alike():
    x = tf.random.stateless_normal([7, 5], [1, 2])
    key = tf.constant([5, 6], tf.uint32)
    plain = round_stochastically(x, key)
    compiled = tf.function(round_stochastically, jit_compile=True)(x, key)
    assert tf.bitcast(plain, tf.int16).numpy().tolist() == (
        tf.bitcast(compiled, tf.int16).numpy().tolist()
    )
