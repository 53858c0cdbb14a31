"""A training in a process of its own, which others kill."""

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
    """Tells when training has begun, and keeps it from being over at once."""

    def __init__(self, begun):
        super().__init__()
        self.begun = begun

    def on_train_batch_end(self, batch, logs=None):
        self.begun.set()
        time.sleep(0.005)


def kill_self_at(event, count, folder):
    """SIGKILL at the count-th time that Python is about to do `event` to a file below `folder`."""
    left = [count]

    def hook(name, arguments):
        # Files of a folder that is being removed are named without it.
        if name == event and str(arguments[0]).startswith((str(folder), "state.", "manifest.")):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def train(folder, kind, begun, result=None, kill=None):
    """Fits with checkpoints in `folder`, in this process; writes what came out to `result`.

    Args:
        folder: None for none.
        kind: "arrays" or "dataset".
        begun: an event, set after the first step.
        kill: (event, count) for `kill_self_at`.
    """
    keras.utils.set_random_seed(11)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    rule = fa.DynamicLossScale(init_scale=8.0, growth_interval=7)
    options = {"gradient_accumulation_steps": 3, "loss_scale": rule, "jit_compile": False}
    trainer = fa.Trainer(model, keras.optimizers.Adam(0.01), "mse", **options)
    data = {"x": x, "y": y, "batch_size": 4}
    if kind == "dataset":
        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(4)}
    if kill is not None:
        kill_self_at(*kill, folder)
    options = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 2, "keep": 2}
    history = trainer.fit(**data, epochs=EPOCHS, verbose=0, callbacks=[Watched(begun)], **options)
    variables = [*model.variables, *trainer.optimizer.variables, rule.current_scale, rule.good_steps]
    state = [np.asarray(v).tobytes().hex() for v in variables]
    if result is not None:
        with open(result, "w") as file:
            json.dump({"state": state, "history": history.history}, file)
