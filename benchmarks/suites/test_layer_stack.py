"""Time and memory of a LayerStack against the same blocks unrolled, without recomputation.

The first step is all of tracing, compiling and running forward and backward; the two depths are
timed on new stacks in alternation. Temp memory is XLA's plan for that program, with a batch for
which activations dominate, as in training, and not the weights' gradients.
"""

import dataclasses
import functools
import statistics
import time

import keras
import pytest
import tensorflow as tf

from benchmarks.support.models import SEED
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.step.compiler_ir import memory_analysis
from fastaccum.transformer import TransformerBlock


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Transformer blocks of one width over `batch` windows of `time` positions."""

    width: int
    batch: int
    time: int

    @property
    def name(self):
        return f"blocks of width {self.width}"

    def input(self):
        return tf.random.stateless_normal([self.batch, self.time, self.width], [SEED, 0])

    def program(self, depth, implementation="auto", policy="auto"):
        """Makes one compiled function for forward and backward; it is not traced yet."""
        keras.utils.set_random_seed(SEED)
        block = functools.partial(TransformerBlock, self.width // 32)
        stack = LayerStack(block, depth, policy=policy, implementation=implementation)
        stack.build([self.batch, self.time, self.width])
        weights = [v.value for v in stack.trainable_variables]

        def run(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(stack(x, training=True) ** 2)
            return loss, tape.gradient(loss, weights)

        return tf.function(run, jit_compile=True, autograph=False)


BLOCKS = Blocks(width=128, batch=4, time=128)
SMALL = Blocks(width=64, batch=2, time=64)


@pytest.fixture(params=[SMALL, BLOCKS], ids=lambda b: b.name)
def blocks(request, benchmark):
    if benchmark.disabled and request.param is not SMALL:
        pytest.skip("timed runs only: it compiles the same as the smaller blocks do")
    return request.param


def seconds_of_first_step(blocks, depth):
    program = blocks.program(depth)
    x = blocks.input()
    started = time.perf_counter()
    float(program(x)[0])
    return time.perf_counter() - started


def test_first_step(blocks, benchmark, report):
    rounds = 1 if benchmark.disabled else 5
    seconds_of_first_step(SMALL, 2)  # what TensorFlow does only once in a process
    times = {4: [], 48: []}

    def time_both():
        for depth, seconds in times.items():
            seconds.append(seconds_of_first_step(blocks, depth))

    benchmark.pedantic(time_both, rounds=rounds)
    note = f"4: {statistics.median(times[4]):.3g} s, 48: {statistics.median(times[48]):.3g} s"
    report("LayerStack: first step, depth 48 / 4", blocks, ratio(times[48], times[4]), note)


def test_step(blocks, benchmark, report):
    depth = 2 if benchmark.disabled else 12
    x = blocks.input()

    def make(implementation):
        program = blocks.program(depth, implementation)
        float(program(x)[0])  # traces and compiles
        return lambda: float(program(x)[0])

    times = race(benchmark, make("auto"), {"unrolled": make("reference")}, rounds=40)
    if times:
        note = (
            f"depth {depth}: {milliseconds(times['ours'], 1)}, unrolled "
            f"{milliseconds(times['unrolled'], 1)}"
        )
        report(
            "LayerStack: step / unrolled without recomputation",
            blocks,
            ratio(times["ours"], times["unrolled"]),
            note,
        )


def test_memory(benchmark, report):
    depth = 4 if benchmark.disabled else 48

    def temp(implementation, policy="auto"):
        program = BLOCKS.program(depth, implementation, policy)
        return memory_analysis(program, BLOCKS.input()).temp_bytes

    ours = benchmark.pedantic(temp, ["auto", "nothing_saveable"], rounds=1)
    default = temp("auto")
    unrolled = temp("reference")
    note = (
        f"depth {depth}, nothing_saveable: {ours / 1e6:.4g} MB, auto {default / 1e6:.4g}, "
        f"unrolled {unrolled / 1e6:.4g}"
    )
    report("LayerStack: temp memory / unrolled", BLOCKS, ours / unrolled, note)
