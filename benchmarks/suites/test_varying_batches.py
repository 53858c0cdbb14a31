"""Five epochs of batches of other sizes, or of texts padded per batch to other lengths, in a new
process each time: ours and Keras 3's accumulation, with the defaults of both and all that they
compile.

The batches come in another order in each epoch, in threes. Keras's update is a mean of the batches'
means, another one where they differ; that ours is that of all rows is held by
tests/step/test_varied_lengths.py.
"""

import functools
import importlib.util
import statistics
import time
import types

import keras
import numpy as np
import pytest

from benchmarks.support.processes import in_new_process
from benchmarks.support.race import race

SIZES = (17, 9, 32, 5, 21, 8, 30, 3, 13, 26)
EPOCHS, ACCUMULATION, ROUNDS = 5, 3, 3
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


def of_sizes(shape):
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(n, *shape)).astype("float32"), random.normal(size=(n, 1)))
        for n in SIZES
    ]


def of_lengths(batches=30, rows=16):
    """Texts of log-normal lengths from 8 to 128, each batch padded to its longest one."""
    random = np.random.default_rng(0)
    for _ in range(batches):
        lengths = np.clip(np.exp(random.normal(3.5, 0.6, rows)), 8, 128).astype(int)
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = random.integers(1, WORDS, mask.shape) * mask
        inputs = {"token_ids": ids, "segment_ids": np.zeros_like(ids), "padding_mask": mask}
        yield (
            {name: each.astype("int32") for name, each in inputs.items()},
            random.integers(0, 2, (rows, 1)),
        )


def gru():
    x = keras.Input((30, 8))
    return (
        keras.Model(x, layers.Dense(1)(layers.GRU(16)(layers.Masking()(x)))),
        "mse",
        of_sizes((30, 8)),
    )


def mlp():
    x = keras.Input((64,))
    hidden = layers.Dense(128, "relu")(layers.Dense(128, "relu")(x))
    return keras.Model(x, layers.Dense(1)(hidden)), "mse", of_sizes((64,))


def normalized():
    x = keras.Input((64, 8))
    hidden = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(16, 3)(x)))
    return (
        keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))),
        "mse",
        of_sizes((64, 8)),
    )


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
    return keras.Model(backbone.input, outputs), loss, list(of_lengths())


WORKLOADS = {"GRU": gru, "MLP": mlp, "Conv1D, BatchNorm": normalized, "KerasHub BERT": bert}


class Clock(keras.callbacks.Callback):
    """Times each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._begun)


def epochs_of(name, ours, epochs):
    """Returns the seconds of each epoch of a training, and how many programs ours took."""
    keras.utils.set_random_seed(0)
    model, loss, batches = WORKLOADS[name]()
    clock = Clock()
    arguments = {"epochs": epochs, "callbacks": [clock], "verbose": 0}
    if not ours:
        model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=ACCUMULATION), loss)
        model.fit(Batches(batches), **arguments)
        return clock.seconds, 0
    import fastaccum as fa

    trainer = fa.Trainer(
        model, keras.optimizers.Adam(1e-3), loss, gradient_accumulation_steps=ACCUMULATION
    )
    history = trainer.fit(Batches(batches), **arguments)
    return clock.seconds, sum(count for count, _ in history.programs.values())


@pytest.mark.parametrize("name", WORKLOADS)
def test_epochs_of_varying_batches(name, benchmark, report):
    if name.startswith("KerasHub") and not importlib.util.find_spec("keras_hub"):
        pytest.skip("needs keras-hub")
    epochs = 1 if benchmark.disabled else EPOCHS
    found = {True: [], False: []}

    def run(ours):
        found[ours].append(in_new_process(functools.partial(epochs_of, name, ours, epochs)))

    times = race(benchmark, lambda: run(True), {"theirs": lambda: run(False)}, ROUNDS)
    assert all(len(seconds) == epochs for runs in found.values() for seconds, _ in runs)
    if not times:
        return
    workload = types.SimpleNamespace(name=name)
    for what, part in (("epochs 1 to 5", slice(None)), ("epochs 3 to 5", slice(2, None))):
        ours, theirs = (
            statistics.median(sum(seconds[part]) for seconds, _ in found[who])
            for who in (True, False)
        )
        note = f"ours {ours:.2f} s, theirs {theirs:.2f} s; {found[True][0][1]} programs"
        report(f"varying batches, {what}: Keras GA default / ours", workload, theirs / ours, note)
