"""`Trainer.throughput`: what is counted, what is left out, and MFU as a division."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

ROWS = 22  # steps of 8, 8 and 6 rows
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Slow(keras.callbacks.Callback):
    """Waits in each step and in validation, and notes the speed that callbacks see."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.seen = trainer, []

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(1.0)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.trainer.throughput)


def make(**options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    return fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2, **options)


@pytest.fixture(scope="module")
def timed():
    trainer = make()
    assert trainer.throughput is None
    slow = Slow(trainer)
    start = time.perf_counter()
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[slow])
    return trainer, slow.seen, time.perf_counter() - start


def test_what_is_counted(timed):
    trainer, (first, second), whole = timed
    # The call that compiled is left out with its 8 rows.
    assert (first.steps, first.rows) == (2, 14)
    assert (second.steps, second.rows) == (3, ROWS)
    assert trainer.throughput == second
    assert second.rows_per_second == pytest.approx(ROWS / second.seconds)
    assert second.steps_per_second == pytest.approx(3 / second.seconds)
    # Three callbacks of 0.1 s, and nothing of the validation's 3 s; the rest is for a machine that
    # does much else.
    assert 0.3 <= second.seconds < 2.5
    assert first.seconds < 2.5 and whole > 6.0


@pytest.mark.parametrize("several", [1, 2], ids=["steps", "dispatches of two steps"])
def test_rows_of_datasets_and_arrays_alike(several):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for given in ((X, Y), (data,)):
        trainer = make(steps_per_execution=several)
        trainer.fit(*given, batch_size=4 if len(given) == 2 else None, epochs=2, verbose=0)
        assert (trainer.throughput.steps, trainer.throughput.rows) == (3, ROWS)


def test_mfu_is_a_division(timed):
    trainer = timed[0]
    summary = trainer.summary(X, Y, batch_size=4, verbose=False)
    speed = trainer.throughput
    peak = 1e9
    mfu = speed.steps_per_second * summary.flops / peak
    # By hand: a step's 8 rows of 4 x 1, forward and by weights.
    assert mfu == pytest.approx(3 / speed.seconds * 2 * (2 * 8 * 4) / peak, rel=0.1)
