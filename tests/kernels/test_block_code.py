"""Numbers in 8 bits: the code against a float64 search for the nearest, and beside bitsandbytes'."""

import argparse
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum.kernels.block_code import BLOCK, count_blocks, decode, encode


def numbers_of_code(octaves):
    """Lists the non-negative numbers of a code of scale 1, from the formula of `encode`."""
    numbers = [0.0]
    for k in range(octaves):
        m = octaves - 1 - k
        for j in range(1, 2**k + 1):
            numbers.append(8.0**-m * (1 / 8 + 7 / 8 * j / 2**k))
    return np.array(numbers)


def bitsandbytes_code(signed):
    """Makes the published dynamic map of bitsandbytes (`create_dynamic_map`) for 8 bits."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (i + (0 if signed else 1)) + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        numbers.extend(means)
        if signed:
            numbers.extend(-means)
    numbers.sort()
    assert len(numbers) == 256
    return np.array(numbers)


def nearest(x, numbers):
    places = np.searchsorted(numbers, x).clip(1, len(numbers) - 1)
    below = numbers[places - 1]
    above = numbers[places]
    return np.where(x - below < above - x, below, above)


def in_blocks(x):
    """Returns the blocks of x and their scales, in float64."""
    flat = np.asarray(x, "float64").ravel()
    rows = np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    return rows, np.abs(rows).max(1, keepdims=True)


def draw(signed, shape=(33, 100), seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))
    if not signed:
        x = x**2
    x[3, :7] = 0.0
    return x.astype("float32")


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("signed", [True, False])
def test_each_number_becomes_the_nearest_of_its_code(signed, jit):
    x = draw(signed)
    coded = tf.function(encode, jit_compile=jit)(x)
    decoded = tf.function(decode, jit_compile=jit)(coded)
    rows, scales = in_blocks(x)
    numbers = numbers_of_code(7 if signed else 8)
    if signed:
        numbers = np.concatenate([-numbers[:0:-1], numbers])
    expected = nearest(rows / scales, numbers)
    if not signed:  # only 0 becomes 0
        expected = np.where((rows > 0) & (expected == 0), numbers[1], expected)
    found = in_blocks(decoded.numpy())[0] / scales
    assert coded.codes.dtype == tf.int8 and coded.codes.shape == x.shape
    assert coded.scales.shape == (count_blocks(x.size),)
    # In float32 a number may lie on the other side of the middle between two of the code.
    differs = np.abs(found - expected) > 1e-6
    distance = np.abs(np.abs(found - rows / scales) - np.abs(expected - rows / scales))
    assert np.all(distance[differs] < 1e-6) and differs.mean() < 1e-3
    # A coded number stays what it is: nothing drifts where an update changes nothing.
    again = encode(decoded)
    assert np.array_equal(again.codes, coded.codes) and np.array_equal(again.scales, coded.scales)


def test_a_code_that_is_not_the_nearest_is_seen():
    x = draw(signed=True)
    coded = encode(tf.constant(x))
    off_by_one = coded._replace(codes=tf.where(coded.codes > 0, coded.codes - 1, coded.codes))
    rows, scales = in_blocks(x)
    error = np.abs(in_blocks(decode(coded))[0] - rows) / scales
    worse = np.abs(in_blocks(decode(off_by_one))[0] - rows) / scales
    assert error.max() < 0.0069 < worse.max()


def errors(x, signed):
    """Returns the errors of our code and of bitsandbytes', in shares of the blocks' scales."""
    rows, scales = in_blocks(x)
    scales = np.where(scales > 0, scales, 1.0)
    ours = np.abs(in_blocks(decode(encode(tf.constant(x))))[0] - rows) / scales
    theirs = np.abs(nearest(rows / scales, bitsandbytes_code(signed)) - rows / scales)
    return ours, theirs


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_error_is_at_most_that_of_bitsandbytes(signed, spread):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, BLOCK)) * np.exp(spread * rng.normal(size=(400, BLOCK)))
    if not signed:
        x = x**2
    x = x.astype("float32")
    ours, theirs = errors(x, signed)
    assert ours.max() <= theirs.max()
    assert ours.mean() <= theirs.mean()


@pytest.fixture(scope="module")
def trained_optimizer():
    """Trains a model that predicts the next byte of Python source from the eight before it."""
    text = np.frombuffer(inspect.getsource(argparse).encode(), "uint8").astype("int32")
    pieces = np.lib.stride_tricks.sliding_window_view(text, 9)[:25_600]
    model = keras.Sequential(
        [
            keras.layers.Embedding(256, 32),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(256),
        ]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    history = model.fit(pieces[:, :8], pieces[:, 8], batch_size=128, epochs=2, verbose=0)
    assert history.history["loss"][-1] < 2.6  # of ln 256 = 5.5: the slots are of a training
    return optimizer


@pytest.mark.parametrize(("slot", "signed"), [("momentum", True), ("velocity", False)])
def test_the_error_on_slots_of_a_training_is_at_most_that_of_bitsandbytes(
    trained_optimizer, slot, signed
):
    slots = [v for v in trained_optimizer.variables if v.name.endswith(slot) and len(v.shape) > 1]
    assert len(slots) == 3
    ours, theirs = np.concatenate([errors(v.numpy(), signed) for v in slots], axis=1)
    assert ours.max() <= theirs.max()
    assert ours.mean() <= 0.98 * theirs.mean()


@pytest.mark.parametrize(
    "x",
    [
        np.zeros([3, 100]),
        np.full([300], -2.5),
        np.float32([[1e-30, 2e-38, 3e38]]),
        np.full([300], 3e-34),
        np.float32(7.0),
    ],
    ids=["zeros", "alike", "extremes", "small", "a scalar"],
)
def test_blocks_of_any_numbers(x):
    x = np.asarray(x, "float32")
    decoded = decode(encode(tf.constant(x))).numpy()
    rows, scales = in_blocks(x)
    assert decoded.shape == x.shape and np.isfinite(decoded).all()
    assert np.all(np.abs(in_blocks(decoded)[0] - rows) <= 0.0069 * scales)
    assert np.array_equal(decoded == 0.0, x == 0.0)
