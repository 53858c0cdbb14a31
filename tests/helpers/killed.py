"""A training in a process of its own, which others kill."""

import contextlib
import itertools
import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from resuming import Stateless

import fastaccum as fa

ROWS, EPOCHS = 240, 6
STEPS = 20 * EPOCHS


class Watched(Stateless):
    """Tells when `after` dispatches are done, holds then for so many seconds, and keeps training
    from being over at once.
    """

    def __init__(self, begun, after=1, hold=0.0):
        super().__init__()
        self.begun, self.left, self.hold = begun, after, hold

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.begun.set()
            time.sleep(self.hold)
        time.sleep(0.005)


class Batches(keras.utils.PyDataset):
    """Batches in an order that each pass changes."""

    def __init__(self, x, y, **options):
        super().__init__(**options)
        self.x, self.y, self.order = x, y, list(range(len(x) // 4))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        at = 4 * self.order[index]
        return self.x[at : at + 4], self.y[at : at + 4]

    def on_epoch_end(self):
        self.order = self.order[5:] + self.order[:5]


def endless(x, y):
    for at in itertools.cycle(range(0, len(x), 12)):
        yield x[at : at + 4], y[at : at + 4]


def sliced(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def doubled(x, y):
    return 2 * x, y


def interleaved(x, y):
    def part(i):
        return sliced(x, y).shard(6, i)

    return tf.data.Dataset.range(6).interleave(
        part, cycle_length=3, block_length=2, num_parallel_calls=2
    )


def watching(place):
    """Callbacks that hold what outlives an epoch, and validation."""
    callbacks = [
        keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=5.0, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=5.0),
        keras.callbacks.ModelCheckpoint(
            f"{place}.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.CSVLogger(f"{place}.csv"),
        keras.callbacks.TensorBoard(f"{place}-logs", update_freq=3),
    ]
    return {"callbacks": callbacks, "validation_split": 0.2}


# What `fit` is given: of arrays x and y, and a path for files beside the checkpoints.
DATA = {
    "arrays": lambda x, y, _: {"x": x, "y": y, "batch_size": 4},
    "dataset": lambda x, y, _: {"x": sliced(x, y).shuffle(100).batch(4)},
    "PyDataset": lambda x, y, _: {"x": Batches(x, y)},
    "PyDataset in threads": lambda x, y, _: {"x": Batches(x, y, workers=2)},
    "PyDataset in processes": lambda x, y, _: {
        "x": Batches(x, y, workers=2, use_multiprocessing=True)
    },
    "generator": lambda x, y, _: {"x": endless(x, y), "steps_per_epoch": 20},
    "interleave": lambda x, y, _: {"x": interleaved(x, y).shuffle(30, seed=3).batch(4)},
    "endless": lambda x, y, _: {
        "x": sliced(x, y).repeat().shuffle(50, seed=3).batch(4),
        "steps_per_epoch": 15,
    },
    "repeated": lambda x, y, _: {
        "x": sliced(x, y).repeat(2).shuffle(50, seed=3).batch(4),
        "steps_per_epoch": 20,
    },
    "cache": lambda x, y, _: {"x": sliced(x, y).map(doubled).cache().shuffle(30, seed=3).batch(4)},
    "cache in a file": lambda x, y, place: {
        "x": sliced(x, y).map(doubled).cache(f"{place}-cache").batch(4)
    },
    "parallel": lambda x, y, _: {
        "x": sliced(x, y)
        .shuffle(50)
        .map(doubled, tf.data.AUTOTUNE)
        .batch(4, num_parallel_calls=2)
        .prefetch(3)
    },
    "callbacks": lambda x, y, place: {"x": x, "y": y, "batch_size": 4, **watching(place)},
    # on two devices that share the slots out
    "shares": lambda x, y, _: {"x": x, "y": y, "batch_size": 4},
}


def kill_self_at(event, count, folder, number=signal.SIGKILL, named=""):
    """A signal at the count-th time that Python is about to do `event` to a file below `folder`
    that is `named` so.
    """
    left = [count]

    def hook(name, arguments):
        # Files of a folder that is being removed are named without it.
        path = str(arguments[0]) if name == event else ""
        if path.startswith((str(folder), "state.", "manifest.")) and named in path:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def on_two_devices():
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def train(
    folder, kind, begun, result=None, kill=None, after=1, epochs=EPOCHS, steps_per_execution=1
):
    """Fits with checkpoints in `folder`, in this process; writes what came out to `result`.

    Args:
        folder: None for none.
        kind: a key of `DATA`.
        begun: an event, set after `after` dispatches of this process.
        kill: (event, count) for `kill_self_at`.
    """
    keras.utils.set_random_seed(11)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    with on_two_devices().scope() if kind == "shares" else contextlib.nullcontext():
        layers = [
            keras.layers.Dense(4, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((4,)), *layers])
    rule = fa.DynamicLossScale(init_scale=8.0, growth_interval=7)
    options = {"gradient_accumulation_steps": 3, "loss_scale": rule, "jit_compile": False}
    options |= {
        "steps_per_execution": steps_per_execution,
        "shard_optimizer": kind == "shares" or "auto",
    }
    trainer = fa.Trainer(model, keras.optimizers.Adam(0.01), "mse", **options)
    data = DATA[kind](x, y, folder or result)
    # until it is killed, with the cache as it is
    hold = 5.0 if kind == "cache in a file" and result is None else 0.0
    callbacks = [Watched(begun, after, hold), *data.pop("callbacks", [])]
    if kill is not None:
        kill_self_at(*kill, folder)
    options = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 2, "keep": 2}
    history = trainer.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    variables = [
        *model.variables,
        *trainer.optimizer.variables,
        rule.current_scale,
        rule.good_steps,
    ]
    state = [v.numpy().tobytes().hex() for v in variables]
    if result is not None:
        with open(result, "w") as file:
            json.dump({"state": state, "history": history.history}, file)
