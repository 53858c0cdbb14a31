"""Linear cross-entropy, forward and backward, against the unfused layer and loss: time, and XLA's
temp memory.
"""

import dataclasses
import statistics

import numpy as np
import tensorflow as tf

from benchmarks.support.race import race
from benchmarks.support.scores import ratio
from fastaccum.kernels.cross_entropy import linear_cross_entropy
from fastaccum.step.compiler_ir import memory_analysis
from fastaccum.step.program import Program

ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Sizes:
    tokens: int
    vocabulary: int
    width: int

    @property
    def name(self):
        return f"{self.tokens:,} tokens x {self.vocabulary:,} x {self.width}"

    def arguments(self):
        """hidden, kernel, labels and the losses' weights."""
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(self.tokens, self.width))
        kernel = rng.normal(size=(self.width, self.vocabulary)) / self.width**0.5
        labels = rng.integers(0, self.vocabulary, self.tokens)
        weights = rng.uniform(0.5, 1.5, self.tokens)
        hidden, kernel, weights = (tf.constant(a, tf.float32) for a in (hidden, kernel, weights))
        return hidden, kernel, tf.constant(labels, tf.int32), weights


def unfused(hidden, kernel, labels):
    """What a Keras model does: a Dense layer, then sparse categorical cross-entropy from its
    logits.
    """
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(hidden, kernel))


def with_gradients(losses):
    def run(hidden, kernel, labels, weights):
        with tf.GradientTape() as tape:
            tape.watch((hidden, kernel))
            total = tf.reduce_sum(weights * losses(hidden, kernel, labels))
        return total, *tape.gradient(total, (hidden, kernel))

    return Program(run)


def seconds(times):
    return f"{statistics.median(times):.3g} (fastest {min(times):.3g}) s"


def test_linear_cross_entropy(benchmark, report):
    sizes = Sizes(4096, 16384, 64) if benchmark.disabled else Sizes(8192, 32768, 512)
    arguments = sizes.arguments()
    programs = {"ours": with_gradients(linear_cross_entropy), "unfused": with_gradients(unfused)}
    temp = {
        name: memory_analysis(program, *arguments).temp_bytes for name, program in programs.items()
    }
    for got, expected in zip(
        programs["ours"](*arguments), programs["unfused"](*arguments), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    def timed(name):
        return lambda: float(programs[name](*arguments)[0])

    times = race(benchmark, timed("ours"), {"unfused": timed("unfused")}, ROUNDS)
    report(
        "linear_cross_entropy: temp memory / unfused",
        sizes,
        temp["ours"] / temp["unfused"],
        f"{temp['ours'] / 2**20:.4g} MiB, unfused {temp['unfused'] / 2**20:.4g} MiB",
    )
    if times:
        note = f"{seconds(times['ours'])}, unfused {seconds(times['unfused'])}"
        report(
            "linear_cross_entropy: time / unfused",
            sizes,
            ratio(times["ours"], times["unfused"]),
            note,
        )
