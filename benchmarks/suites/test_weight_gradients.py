"""Precision and cost of float32 weight gradients under mixed precision.

The error is that of the weight gradient alone, for the same inputs and output gradients, against
float64. The time is that of the whole train step of a GPT; in float32 the switch must change
nothing.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from benchmarks.support import contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Product of a micro-batch of `tokens` with the weights of a dense layer."""

    dtype: str
    tokens: int
    width: int
    width_out: int

    @property
    def name(self):
        return f"matmul {self.tokens} x {self.width} x {self.width_out}, {self.dtype}"


def gpt(policy):
    def build():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return models.GPT.build()
        finally:
            keras.config.set_dtype_policy(before)

    return dataclasses.replace(models.GPT, name=f"GPT, {policy}", build=build, rounds=20)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_error(dtype, benchmark, report):
    matmul = Matmul(dtype, tokens=4096, width=512, width_out=1024)
    rng = np.random.default_rng(models.SEED)
    x = tf.cast(rng.normal(size=(matmul.tokens, matmul.width)), dtype)
    dy = tf.cast(rng.normal(size=(matmul.tokens, matmul.width_out)), dtype)
    kernel = tf.zeros([matmul.width, matmul.width_out])
    exact = x.numpy().astype("float64").T @ dy.numpy().astype("float64")

    def error(product):
        difference = weight_gradient(product, x, kernel, dy).numpy() - exact
        return np.linalg.norm(difference) / np.linalg.norm(exact)

    ours = benchmark.pedantic(error, [fa.kernels.matmul_fp32_wgrad], rounds=1)
    theirs = error(lambda x, kernel: tf.matmul(x, tf.cast(kernel, x.dtype)))
    note = f"relative to its norm: {ours:.2g}, autodiff {theirs:.2g}"
    report("weight-gradient error: fp32 / plain autodiff", matmul, ours / theirs, note)


@pytest.mark.parametrize("workload", [gpt("mixed_float16"), gpt("float32")], ids=lambda w: w.name)
def test_train_step(workload, benchmark, report):
    batch = contestants.feed_stack(workload.stacks(1)[0])

    def make(switch):
        trainer = contestants.trainer(workload, fp32_weight_gradients=switch)
        step = contestants.as_train_step(trainer)
        float(step.update(batch))  # traces and compiles
        return lambda: float(step.update(batch))

    times = race(benchmark, make(True), {"without": make(False)}, workload.rounds)
    if times:
        note = f"with {milliseconds(times['ours'], 1)}, without {milliseconds(times['without'], 1)}"
        report(
            "train step: fp32 weight gradients / without",
            workload,
            ratio(times["ours"], times["without"]),
            note,
        )


@tf.function(jit_compile=True, autograph=False)
def weight_gradient(product, x, kernel, dy):
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        y = product(x, kernel)
    return tape.gradient(y, kernel, dy)
