"""Random numbers under XLA on a CPU: the same as without the scope, with a key that is derived
once.
"""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels import random_keys
from fastaccum.kernels.random_keys import hash_bits, hoist_prng_key

SHAPE = [7, 5]
SEEDS = [[1, 2], [-7, 2**31 - 1], [-(2**31), 0]]
DRAWS = {
    "dropout": lambda seed: tf.nn.experimental.stateless_dropout(
        tf.ones(SHAPE), 0.3, seed, noise_shape=[7, 1]
    ),
    "uniform": lambda seed: tf.random.stateless_uniform(SHAPE, seed, -1.0, 2.0),
    "float16": lambda seed: tf.random.stateless_uniform(SHAPE, seed, dtype=tf.float16),
    "integers": lambda seed: tf.random.stateless_uniform(SHAPE, seed, 0, 9, tf.int32),
    "normal": lambda seed: tf.random.stateless_normal(SHAPE, seed),
    "truncated normal": lambda seed: tf.random.stateless_truncated_normal(SHAPE, seed),
}


def compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


def barriers(function, *args):
    operations = compiled(function).get_concrete_function(*args).graph.get_operations()
    return sum(operation.type == "XlaOptimizationBarrier" for operation in operations)


def draw():
    return DRAWS["uniform"]([1, 2])


@pytest.mark.parametrize(
    "name",
    ["dropout", *(pytest.param(n, marks=pytest.mark.slow) for n in DRAWS if n != "dropout")],
)
def test_the_same_numbers_are_drawn(name):
    ours, plain = hoist_prng_key()(DRAWS[name]), DRAWS[name]
    assert (barriers(ours, SEEDS[0]), barriers(plain, SEEDS[0])) == (1, 0)
    ours, plain = compiled(ours), compiled(plain)
    for seed in map(tf.constant, SEEDS):
        np.testing.assert_array_equal(ours(seed), plain(seed))


def test_on_a_gpu_without_xla_and_for_other_algorithms_nothing_changes(monkeypatch):
    @hoist_prng_key()
    def threefry():
        return tf.random.stateless_uniform(SHAPE, [1, 2], alg="threefry")

    @tf.function(autograph=False)
    def plain():
        return hoist_prng_key()(draw)()

    assert not barriers(threefry)
    np.testing.assert_array_equal(plain(), draw())
    monkeypatch.setattr(random_keys, "has_gpu", lambda: True)
    assert not barriers(hoist_prng_key()(draw))


def test_a_scope_is_of_one_thread_and_leaves_nothing_behind():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with hoist_prng_key():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError), hoist_prng_key():
        thread.start()
        assert entered.wait(10)
        assert barriers(draw)
        raise KeyError
    assert not barriers(draw)  # within the other's scope
    leave.set()
    thread.join()


@pytest.mark.parametrize("api", [pytest.param("Trainer", marks=pytest.mark.slow), "TrainStep"])
def test_a_training_draws_the_same_numbers(api, monkeypatch):
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype("float32")

    def trained():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        dropped = keras.layers.Dropout(0.5)(keras.layers.GaussianNoise(0.1)(inputs), training=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(dropped))
        if api == "TrainStep":
            step = fa.TrainStep(
                lambda x: (tf.reduce_sum(model(x) ** 2), 4.0), model.trainable_variables, "sgd"
            )
            step(x)
            return [*model.get_weights()]
        trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2)
        rows = x.reshape(8, 6), x.reshape(8, 6)[:, :1]
        trainer.fit(*rows, batch_size=4, shuffle=False, verbose=0)
        return [*model.get_weights(), trainer.evaluate(*rows, batch_size=4, verbose=0)]

    ours = trained()
    monkeypatch.setattr(random_keys, "has_gpu", lambda: True)
    for a, b in zip(ours, trained(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hashed_bits_stay_what_they_are():
    """Against Python's integers: a training that is resumed with another version draws the same."""

    def expected(keys, number):
        bits = keys[0] ^ (number * 0x9E3779B9 % 2**32)
        bits = ((bits ^ bits >> 16) * 0x7FEB352D + keys[1]) % 2**32
        bits = ((bits ^ bits >> 15) * 0x846CA68B + keys[0]) % 2**32
        return bits ^ bits >> 16

    keys, numbers = [[0, 0], [1, 2**32 - 1], [0xDEADBEEF, 0x12345678]], [0, 1, 99_999, 2**32 - 1]
    for function in (hash_bits, compiled(hash_bits)):
        found = function(tf.constant(keys, tf.uint32), tf.constant(numbers, tf.uint32))
        assert found.numpy().tolist() == [
            [expected(pair, number) for number in numbers] for pair in keys
        ]


def test_hashed_bits_are_independent():
    """Hashes 2,048 keys and numbers: each bit is as often 1 as 0, and no two rows or columns agree."""
    keys = np.random.default_rng(0).integers(0, 2**32, (2048, 2), np.uint64).astype("uint32")
    bits = hash_bits(
        tf.constant(keys), tf.range(2048, dtype=tf.int64).numpy().astype("uint32")
    ).numpy()
    for bit in range(0, 32, 5):
        x = (bits >> bit & 1).astype("float32") * 2 - 1
        assert abs(x.mean()) * 2048 < 5
        for products in (x @ x.T, x.T @ x):
            others = products[np.triu_indices(2048, 1)] / 2048**0.5
            assert abs(others.var() - 1) < 0.01 and np.abs(others).max() < 6.5
