"""Five epochs of batches whose sizes vary, or the lengths of their padded texts.

Contestants are ours and Keras 3's accumulation, with the defaults of both, each time in a new
process with all that it compiles. The batches come in another order in each epoch; an update takes
three. Keras's update is the mean of the batches' means, which differs from the mean of all rows if
the sizes differ; tests/step/test_varied_lengths.py holds ours to the latter.
"""

import functools
import importlib.util
import statistics
import time
import types
from typing import NamedTuple

import keras
import numpy as np
import pytest

from benchmarks.support.processes import in_new_process
from benchmarks.support.race import race

SIZES = (17, 9, 32, 5, 21, 8, 30, 3, 13, 26)
EPOCHS = 5
ACCUMULATION = 3
ROUNDS = 3
WORDS = 1000
layers = keras.layers


class Batches(keras.utils.PyDataset):
    """Batches that come in another order in each epoch."""

    def __init__(self, batches):
        super().__init__()
        self._batches = batches
        self._order = np.arange(len(batches))
        self._random = np.random.default_rng(5)

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, i):
        return self._batches[self._order[i]]

    def on_epoch_end(self):
        self._random.shuffle(self._order)


def batches_of_sizes(shape):
    """Draws a batch of each of the SIZES, of rows of this shape."""
    random = np.random.default_rng(0)
    batches = []
    for rows in SIZES:
        x = random.normal(size=(rows, *shape)).astype("float32")
        y = random.normal(size=(rows, 1))
        batches.append((x, y))
    return batches


def batches_of_texts(count=30, rows=16):
    """Draws texts of log-normal lengths from 8 to 128, each batch padded to its longest one."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        lengths = np.clip(np.exp(random.normal(3.5, 0.6, rows)), 8, 128).astype(int)
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = random.integers(1, WORDS, mask.shape) * mask
        x = {
            "token_ids": ids.astype("int32"),
            "segment_ids": np.zeros(ids.shape, "int32"),
            "padding_mask": mask.astype("int32"),
        }
        batches.append((x, random.integers(0, 2, (rows, 1))))
    return batches


# Each of these functions makes a model, its loss and its batches.


def gru():
    x = keras.Input((30, 8))
    hidden = layers.GRU(16)(layers.Masking()(x))
    return keras.Model(x, layers.Dense(1)(hidden)), "mse", batches_of_sizes((30, 8))


def mlp():
    x = keras.Input((64,))
    hidden = layers.Dense(128, "relu")(x)
    hidden = layers.Dense(128, "relu")(hidden)
    return keras.Model(x, layers.Dense(1)(hidden)), "mse", batches_of_sizes((64,))


def normalized():
    x = keras.Input((64, 8))
    hidden = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(16, 3)(x)))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(x, layers.Dense(1)(hidden)), "mse", batches_of_sizes((64, 8))


def bert():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=128,
    )
    outputs = layers.Dense(2)(backbone.output["pooled_output"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.Model(backbone.input, outputs), loss, batches_of_texts()


WORKLOADS = {"GRU": gru, "MLP": mlp, "Conv1D, BatchNorm": normalized, "KerasHub BERT": bert}


class Clock(keras.callbacks.Callback):
    """Keras callback that times each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._begun)


class Training(NamedTuple):
    """Seconds of each epoch of a training, and the programs that ours compiled."""

    seconds: list
    programs: int


def train(name, ours, epochs):
    """Trains a workload, and returns the `Training`.

    Args:
        name: the workload's.
        ours: whether to train with ours, and not with Keras's accumulation.
        epochs: how many.
    """
    keras.utils.set_random_seed(0)
    model, loss, batches = WORKLOADS[name]()
    clock = Clock()
    arguments = {"epochs": epochs, "callbacks": [clock], "verbose": 0}
    if not ours:
        model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=ACCUMULATION), loss)
        model.fit(Batches(batches), **arguments)
        return Training(clock.seconds, 0)
    import fastaccum as fa  # here, so that Keras trains in a process without it

    trainer = fa.Trainer(
        model, keras.optimizers.Adam(1e-3), loss, gradient_accumulation_steps=ACCUMULATION
    )
    history = trainer.fit(Batches(batches), **arguments)
    # By purpose, the number of programs and the seconds of their first calls.
    programs = sum(count for count, _seconds in history.programs.values())
    return Training(clock.seconds, programs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_epochs_of_varying_batches(name, benchmark, report):
    if name.startswith("KerasHub") and not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    epochs = 1 if benchmark.disabled else EPOCHS
    ours = []
    theirs = []

    def run_ours():
        ours.append(in_new_process(functools.partial(train, name, ours=True, epochs=epochs)))

    def run_theirs():
        theirs.append(in_new_process(functools.partial(train, name, ours=False, epochs=epochs)))

    # The race gives the turns alone. The epochs are timed within the processes.
    times = race(benchmark, run_ours, {"theirs": run_theirs}, ROUNDS)
    assert all(len(training.seconds) == epochs for training in ours + theirs)
    if times is None:  # benchmarks are disabled
        return
    workload = types.SimpleNamespace(name=name)
    for part, first in (("epochs 1 to 5", 0), ("epochs 3 to 5", 2)):
        our_time = statistics.median(sum(training.seconds[first:]) for training in ours)
        their_time = statistics.median(sum(training.seconds[first:]) for training in theirs)
        note = f"ours {our_time:.2f} s, theirs {their_time:.2f} s; {ours[0].programs} programs"
        measure = f"varying batches, {part}: Keras GA default / ours"
        report(measure, workload, their_time / our_time, note)
