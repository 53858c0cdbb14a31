"""Thousands of small steps: memory stays flat, nothing is traced again, and nothing piles up."""

import contextlib
import ctypes
import gc
import os
import pathlib
import subprocess
import sys
import threading
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

pytestmark = pytest.mark.long

K, B, STEPS = 4, 8, 50  # micro-batches in a step, rows in a micro-batch, steps in an epoch
ROWS = K * B * STEPS
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def given_back():
    """Has the C library give free pages back: what it keeps for later goes up and down by megabytes
    by itself.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def counts(trainer):
    """Counts what must not grow from one epoch to the next."""
    objects = gc.get_objects()
    return {
        "traces": sum(
            p.function.experimental_get_tracing_count() for p in trainer._engine.programs.values()
        ),
        "programs": len(trainer._engine.compiled_execute._calls)
        + len(trainer._engine.compiled_evaluate._calls),
        "graphs": sum(isinstance(each, tf.Graph) for each in objects),
        "functions": sum(isinstance(each, types.FunctionType) for each in objects),
        "tensors": sum(isinstance(each, tf.Tensor) for each in objects),
        "objects": len(objects),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


class Everything(keras.callbacks.Callback):
    """Looks at the logs of every tenth step, as loggers do, and keeps those of the last as they
    came.
    """

    def on_train_batch_end(self, batch, logs=None):
        self.last = logs
        if batch % 10 == 0:
            assert "loss" in logs and logs["grad_norm"] is not None


def data():
    """Arrays, with a NaN in one row: one step in each epoch is skipped."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 16)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[ROWS // 2, 3] = np.nan
    return x, y


def make_trainer(**options):
    layers = [
        keras.layers.Dense(32, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
    ]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
    return fa.Trainer(
        model, "adamw", "mse", ["mae"], gradient_accumulation_steps=K, clip_norm=1.0, **options
    )


def soak(steps, folder):
    """Trains by turns on arrays and on tf.data, in fits of five epochs, and measures after each
    fit.

    Returns:
        Arrays of steps and of resident bytes [rounds, 2], before and after free pages were given
        back; and the counts after the first and the last round.
    """
    trainer, (x, y) = make_trainer(), data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256, seed=0).batch(B)
    validation = np.nan_to_num(x[: 4 * B]), y[: 4 * B]
    done, memory, first = [], [], None
    while not done or done[-1] < steps:
        feeds = {"x": x, "y": y, "batch_size": B}, {"x": dataset}
        for feed in feeds:
            callbacks = [
                Everything(),
                keras.callbacks.EarlyStopping("val_loss", patience=10**6),
                # No ModelCheckpoint: Keras's HDF5 files cost tens of KB of memory each, in its own
                # `fit` too.
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=10**6),
                keras.callbacks.CSVLogger(str(folder / "log.csv")),
            ]
            with (
                warnings.catch_warnings(),
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
            ):
                warnings.simplefilter("ignore", UserWarning)
                history = trainer.fit(
                    **feed, epochs=5, verbose=2, callbacks=callbacks, validation_data=validation
                )
            assert sum(history.history["skipped_steps"]) >= 5
        done.append((done[-1] if done else 0) + len(feeds) * 5 * STEPS)
        del history, callbacks
        memory.append((resident(), (given_back(), resident())[1]))
        first = counts(trainer) if first is None else first
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    return np.array(done), np.array(memory), first, counts(trainer)


def assert_nothing_piles_up(first, last, steps):
    for name in ("traces", "programs", "files"):
        assert last[name] == first[name], (name, first, last)
    # Those of earlier tests may be freed meanwhile.
    assert last["graphs"] <= first["graphs"], (first, last)
    assert last["threads"] <= first["threads"] + 2, (first, last)
    # Far fewer than one a step.
    for name in ("functions", "tensors", "objects"):
        assert last[name] - first[name] < 0.1 * steps, (name, first, last)


@pytest.mark.filterwarnings("ignore")  # pytest keeps each
def test_nothing_piles_up_in_a_short_run(tmp_path):
    done, _, first, last = soak(1_000, tmp_path)
    assert_nothing_piles_up(first, last, done[-1] - done[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # pytest keeps each
def test_memory_is_flat_over_ten_thousand_steps(tmp_path, capsys):
    done, memory, first, last = soak(12_000, tmp_path)
    warm = done >= 2_000
    (raw, slope), _ = np.polyfit(done[warm], memory[warm], 1)
    growth = slope * 10_000 / 2**20
    with capsys.disabled():
        print(
            f"\n{slope:.1f} bytes a step, {growth:+.2f} MiB in 10,000 steps (with free pages "
            f"kept {raw:.1f} bytes)"
        )
        print(
            "MiB after",
            dict(zip(done.tolist(), (memory[:, 1] / 2**20).round(1).tolist(), strict=True)),
        )
        print("counts", {name: (first[name], last[name]) for name in first})
    assert_nothing_piles_up(first, last, done[-1] - done[0])
    assert growth < 5.0


@pytest.mark.slow
def test_a_new_model_costs_no_more_than_in_keras(capsys):
    """XLA's programs are never freed; all else is. Side by side, so that both have the same
    machine.
    """
    script = pathlib.Path(__file__).parent / "helpers" / "many_models.py"
    runs = [
        subprocess.Popen([sys.executable, script, kind, "100"], stdout=subprocess.PIPE)
        for kind in ("ours", "keras")
    ]
    ours, of_keras = (float(run.communicate(timeout=3600)[0].split()[-1]) / 2**20 for run in runs)
    with capsys.disabled():
        print(
            f"\nMiB a model: {ours:.2f}, in Keras's own jitted fit {of_keras:.2f}, ratio "
            f"{ours / of_keras:.3f}"
        )
    assert ours <= of_keras
