"""Time and temp memory of linear cross-entropy and its gradients, against layer and loss apart."""

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
    """Sizes of the head of a language model."""

    tokens: int
    vocabulary: int
    width: int

    @property
    def name(self):
        return f"{self.tokens:,} tokens x {self.vocabulary:,} x {self.width}"

    def arguments(self):
        """Draws hidden, kernel, labels and the losses' weights."""
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(self.tokens, self.width))
        kernel = rng.normal(size=(self.width, self.vocabulary)) / self.width**0.5
        labels = rng.integers(0, self.vocabulary, self.tokens)
        weights = rng.uniform(0.5, 1.5, self.tokens)
        return (
            tf.constant(hidden, tf.float32),
            tf.constant(kernel, tf.float32),
            tf.constant(labels, tf.int32),
            tf.constant(weights, tf.float32),
        )


def unfused(hidden, kernel, labels):
    """Computes the losses as a Keras model does: a Dense layer, then cross-entropy from logits."""
    logits = tf.matmul(hidden, kernel)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


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
    sizes = Sizes(tokens=8192, vocabulary=32768, width=512)
    if benchmark.disabled:
        sizes = Sizes(tokens=4096, vocabulary=16384, width=64)
    arguments = sizes.arguments()
    programs = {"ours": with_gradients(linear_cross_entropy), "unfused": with_gradients(unfused)}
    our_temp = memory_analysis(programs["ours"], *arguments).temp_bytes
    unfused_temp = memory_analysis(programs["unfused"], *arguments).temp_bytes
    results = programs["ours"](*arguments)
    expected = programs["unfused"](*arguments)
    for result, expected_result in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=1e-4, atol=1e-5)

    def timed(name):
        return lambda: float(programs[name](*arguments)[0])

    times = race(benchmark, timed("ours"), {"unfused": timed("unfused")}, ROUNDS)
    report(
        "linear_cross_entropy: temp memory / unfused",
        sizes,
        our_temp / unfused_temp,
        f"{our_temp / 2**20:.4g} MiB, unfused {unfused_temp / 2**20:.4g} MiB",
    )
    if times:
        note = f"{seconds(times['ours'])}, unfused {seconds(times['unfused'])}"
        report(
            "linear_cross_entropy: time / unfused",
            sizes,
            ratio(times["ours"], times["unfused"]),
            note,
        )
