"""Time and temp memory of causal attention and its gradients, against the unfused expression."""

import dataclasses
import statistics

import numpy as np
import tensorflow as tf

from benchmarks.support.race import race
from benchmarks.support.scores import ratio
from fastaccum.kernels import attention
from fastaccum.step.compiler_ir import memory_analysis
from fastaccum.step.program import Program

ROUNDS = 9


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one window of tokens."""

    tokens: int
    heads: int = 8
    width: int = 64

    @property
    def name(self):
        return f"{self.tokens:,} tokens, {self.heads} heads x {self.width}"

    def arguments(self):
        """Draws query, key, value and the output's cotangent."""
        rng = np.random.default_rng(0)
        shape = (1, self.tokens, self.heads, self.width)
        return [tf.constant(rng.normal(size=shape), tf.float32) for _ in range(4)]


def unfused(query, key, value):
    """Computes attention as a Keras model does: all scores, a mask, a softmax."""
    q = tf.transpose(query, [0, 2, 1, 3])
    k = tf.transpose(key, [0, 2, 1, 3])
    v = tf.transpose(value, [0, 2, 1, 3])
    scores = tf.matmul(q * query.shape[-1] ** -0.5, k, transpose_b=True)
    time = tf.range(query.shape[1])
    weights = tf.nn.softmax(tf.where(time[:, None] >= time[None, :], scores, -1e30))
    return tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3])


def ours(query, key, value):
    return attention(query, key, value, causal=True)


def with_gradients(function):
    def run(query, key, value, cotangent):
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            output = function(query, key, value)
        return output, *tape.gradient(output, (query, key, value), output_gradients=cotangent)

    return Program(run)


def megabytes(function, sizes):
    specs = [tf.TensorSpec([1, sizes.tokens, sizes.heads, sizes.width])] * 4
    return memory_analysis(with_gradients(function), *specs).temp_bytes / 1e6


def test_attention(benchmark, report):
    sizes = Sizes(512 if benchmark.disabled else 2048)
    arguments = sizes.arguments()
    programs = {"ours": with_gradients(ours), "unfused": with_gradients(unfused)}
    results = programs["ours"](*arguments)
    expected = programs["unfused"](*arguments)
    for result, expected_result in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=1e-4, atol=1e-4)

    def timed(name):
        return lambda: float(programs[name](*arguments)[1][0, 0, 0, 0])

    times = race(benchmark, timed("ours"), {"unfused": timed("unfused")}, ROUNDS)
    if times:
        our_time = 1e3 * statistics.median(times["ours"])
        unfused_time = 1e3 * statistics.median(times["unfused"])
        note = f"ours {our_time:.3g} ms, unfused {unfused_time:.3g} ms"
        report("attention: time / unfused", sizes, ratio(times["ours"], times["unfused"]), note)


def test_memory(benchmark, report):
    small = Sizes(2048)
    large = Sizes(8192)
    temp_small = benchmark.pedantic(lambda: megabytes(ours, small), rounds=1)
    temp_large = megabytes(ours, large)
    note = f"{temp_large:.4g} MB; unfused {megabytes(unfused, large):.4g} MB"
    report("attention: temp memory, 8,192 tokens / 2,048", large, temp_large / temp_small, note)
