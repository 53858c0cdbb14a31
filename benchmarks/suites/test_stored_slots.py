"""Cost of slots and weights that are stored in fewer bytes, beside float32 slots.

The time of a train step of a GPT, and of the optimizer's update alone.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.support import contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio
from fastaccum.adapters.storage import Storage
from fastaccum.families import adapt_optimizer


@dataclasses.dataclass(frozen=True)
class Update:
    """AdamW's update of matrices of 1,024 x 2,048, as many as `matrices`."""

    matrices: int = 4
    rounds: int = 20

    @property
    def name(self):
        return f"AdamW, {2 * self.matrices} million weights"


def compare(benchmark, report, score, workload, stored, float32):
    times = race(benchmark, stored, {"float32": float32}, workload.rounds)
    if times:
        note = f"{milliseconds(times['ours'], 1)}, float32 {milliseconds(times['float32'], 1)}"
        report(score, workload, ratio(times["ours"], times["float32"]), note)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_train_step(dtype, benchmark, report):
    workload = models.GPT
    batch = contestants.feed_stack(workload.stacks(1)[0])

    def make(**options):
        step = contestants.as_train_step(contestants.trainer(workload, **options))
        float(step.update(batch))  # traces and compiles
        return lambda: float(step.update(batch))

    stored = make(optimizer_state_dtype=dtype)
    compare(benchmark, report, f"train step: {dtype} / float32 slots", workload, stored, make())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_update(dtype, benchmark, report):
    workload = Update()

    def make(storage):
        rng = np.random.default_rng(models.SEED)
        shape = (1024, 2048)
        variables = []
        gradients = []
        for number in range(workload.matrices):
            weight = rng.normal(size=shape).astype("float32")
            variables.append(keras.Variable(weight, name=f"weight{number}"))
            gradients.append(tf.constant(rng.normal(size=shape), tf.float32))
        optimizer = adapt_optimizer(keras.optimizers.AdamW(1e-3))
        optimizer.build(variables, storage)

        @tf.function(jit_compile=True, autograph=False)
        def step(gradients, ok):
            optimizer.apply(gradients, variables, ok)

        def update():
            step(gradients, tf.constant(True))
            return float(variables[0].value[0, 0])  # waits

        update()
        return update

    stored = make(Storage(dtype, stochastic_rounding=True))
    compare(
        benchmark,
        report,
        f"update alone: {dtype} / float32 slots",
        workload,
        stored,
        make(Storage()),
    )
