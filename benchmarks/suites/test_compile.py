"""Programs that one epoch of `fit` compiles when everything varies that may.

The epoch has batches of varying size, a short last stack and a callback that moves the learning
rate. Programs are counted by the calls of a layer's Python code: tracing a program calls it,
running one does not. How many calls one program takes is measured first, with epochs that need one
program and two. With batch statistics only the last stack is short: padded rows would enter the
statistics, so every new size of a batch needs a program there.
"""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

ACCUMULATION = 4
FULL = (8, 8, 8, 8)
EPOCHS = {"plain": (*FULL, 8, 5, 8, 3, *FULL, 8, 8), "batch statistics": (*FULL, *FULL, 8, 8)}


class Probe(keras.layers.Layer):
    """Passes its input on, and counts the calls."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("kind", EPOCHS)
def test_programs_in_a_ragged_epoch(kind, benchmark, report):
    one = calls_in_fit(kind, [FULL])
    per_program = calls_in_fit(kind, [FULL, tuple(2 * size for size in FULL)]) - one
    assert per_program > 0, "the probe saw no second program, so it counts nothing"
    ragged = benchmark.pedantic(calls_in_fit, (kind, [EPOCHS[kind]]), rounds=1)
    programs = 1 + (ragged - one) / per_program
    report(
        f"programs compiled in a ragged epoch, {kind}", types.SimpleNamespace(name="MLP"), programs
    )


def calls_in_fit(kind, epochs):
    """Counts the calls of the probe in `fit`, over epochs of batches of these sizes."""
    probe = Probe()
    layers = [keras.Input((16,)), keras.layers.Dense(8)]
    if kind == "batch statistics":
        layers.append(keras.layers.BatchNormalization())
    model = keras.Sequential([*layers, probe, keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "adamw", "mse", gradient_accumulation_steps=ACCUMULATION)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    before = probe.calls
    for sizes in epochs:
        trainer.fit(batches(sizes), callbacks=[decay], verbose=0)
    return probe.calls - before


def batches(sizes):
    def generate():
        for size in sizes:
            yield np.ones((size, 16), "float32"), np.ones((size, 1), "float32")

    spec = tf.TensorSpec((None, 16), tf.float32), tf.TensorSpec((None, 1), tf.float32)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)
