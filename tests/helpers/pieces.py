"""Trainings that go on in other pieces: `python pieces.py COUNT JOBS [PORTS INDEX]`, in a process
of COUNT devices.

JOBS is JSON: for each training that is to begin or to end here, how. With PORTS the process is one
worker of several. `test_resume_in_other_pieces.py` starts them, and does the same in its own
process, on one device.
"""

import contextlib
import itertools
import json
import os
import sys
from typing import NamedTuple

import numpy as np

EPOCHS = 2
ROWS = 100
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Job(NamedTuple):
    """A part of a training: to the end, or to a train step."""

    folder: str
    data: str
    batch_size: int
    accumulation: int
    replicas: bool = False
    stop: int | None = None


def trainer(accumulation, scope=contextlib.nullcontext, layers=(), **options):
    import keras

    import fastaccum as fa

    keras.utils.set_random_seed(1)
    with scope():
        hidden = [
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            *(make() for make in layers),
        ]
        model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.CosineDecay(0.05, 12)
    rule = fa.DynamicLossScale(init_scale=4.0, growth_interval=3)
    options = {
        "metrics": ["mae"],
        "loss_scale": rule,
        "clip_norm": 1.0,
        "jit_compile": False,
        **options,
    }
    adam = keras.optimizers.Adam(rate, use_ema=True)
    return fa.Trainer(model, adam, "mse", gradient_accumulation_steps=accumulation, **options)


def arrays(size):
    return {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": size}


def in_order(size):
    return {**arrays(size), "shuffle": False}


def dataset(size):
    import tensorflow as tf

    return {
        "x": tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).shuffle(30, seed=3).batch(size)
    }


def endless(size):
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).shuffle(30, seed=3).repeat()
    return {"x": rows.batch(size), "steps_per_epoch": 5}


def py_dataset(size, shuffle=False):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // size)

        def __getitem__(self, index):
            rows = slice(index * size, (index + 1) * size)
            return X[rows], Y[rows], WEIGHTS[rows]

    return {"x": Batches(), "shuffle": shuffle}


def generator(size):
    starts = itertools.chain.from_iterable(itertools.repeat(range(0, 96, size), EPOCHS))
    return {"x": ((X[i : i + size], Y[i : i + size]) for i in starts), "steps_per_epoch": 4}


def fit(trainer, data, **options):
    import keras

    keras.utils.set_random_seed(5)
    return trainer.fit(**data, epochs=EPOCHS, **{"verbose": 0, **options})


def numbers(trainer, history):
    """Every variable of a trainer after training, and its logs."""
    variables = [
        *trainer.model.variables,
        *trainer.optimizer.variables,
        *trainer.loss_scale.variables,
    ]
    logs = [np.array(values, np.float64) for _, values in sorted(history.history.items())]
    return [*(np.asarray(v.numpy(), np.float64) for v in variables), *logs]


def farthest(ours, theirs):
    """The largest difference between two lists of arrays, relative to the largest number of each
    array.
    """
    differences = (
        np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in zip(ours, theirs, strict=True)
    )
    return float(max(differences))


def run(job, trained):
    """Begins or goes on with a trainer; the numbers at the end, or None where it stopped before."""
    import keras
    from resuming import Interruption, StopAfter

    keras.utils.set_random_seed(1)  # as for a new one: datasets that are made here shuffle by it
    callbacks = [] if job.stop is None else [StopAfter(job.stop)]
    saved = {"checkpoint_dir": job.folder, "checkpoint_every": 1, "keep": 99}
    try:
        history = fit(trained, globals()[job.data](job.batch_size), callbacks=callbacks, **saved)
    except Interruption:
        return None
    return numbers(trained, history)


def main(count, jobs, ports=None, index="0"):
    if ports:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports.split(",")]}
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": int(index)}}
        )
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * int(count)
    )
    if ports:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(int(count))])
    for each in json.loads(jobs):
        job = Job(*each)
        ended = run(
            job,
            trainer(job.accumulation, strategy.scope if job.replicas else contextlib.nullcontext),
        )
        if ended is not None and index == "0":
            np.savez(f"{job.folder}.npz", *ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
