"""Draws the temp memory of the kernels, forward and backward, beside the unfused operations'.

    python -m benchmarks.tools.draw_kernels docs/kernels.png

The memory is XLA's own plan for the CPU: the programs are compiled, not run.
"""

import sys

import matplotlib.pyplot as plt
import tensorflow as tf
from matplotlib.ticker import FuncFormatter, LogLocator

from fastaccum.kernels import attention, linear_cross_entropy
from fastaccum.step.compiler_ir import memory_analysis
from fastaccum.step.program import Program

# Attention is drawn against the length of the sequence.
SEQUENCE_LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
HEADS = 8
HEAD_DIM = 64
# The head with its cross-entropy is drawn against the vocabulary.
VOCABULARIES = [4096, 8192, 16384, 32768, 65536, 131072]
TOKENS = 8192
WIDTH = 512


def attention_memory(length, implementation):
    """Returns the bytes of causal self-attention over `length` tokens with its gradients."""

    def loss(query, key, value):
        outputs = attention(query, key, value, causal=True, implementation=implementation)
        return tf.reduce_sum(outputs)

    spec = tf.TensorSpec([1, length, HEADS, HEAD_DIM])  # of query, key and value alike
    return _temp_bytes(loss, spec, spec, spec)


def cross_entropy_memory(vocabulary, implementation):
    """Returns the bytes of the head and its loss over TOKENS tokens with their gradients."""

    def loss(hidden, kernel):
        labels = tf.zeros([TOKENS], tf.int32)
        losses = linear_cross_entropy(hidden, kernel, labels, implementation=implementation)
        return tf.reduce_sum(losses)

    return _temp_bytes(loss, tf.TensorSpec([TOKENS, WIDTH]), tf.TensorSpec([WIDTH, vocabulary]))


def _temp_bytes(loss, *specs):
    """Compiles a loss and its gradients for the CPU, and returns the plan's temp bytes."""

    def gradients(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = loss(*inputs)
        return value, tape.gradient(value, inputs)

    return memory_analysis(Program(gradients), *specs).temp_bytes


def main(path):
    """Draws both panels, prints their figures, and saves the picture to `path`."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    title = f"causal attention, {HEADS} heads x {HEAD_DIM}"
    _draw(left, title, "tokens in a sequence", SEQUENCE_LENGTHS, attention_memory)
    title = f"head + cross-entropy, {TOKENS:,} tokens x {WIDTH}"
    _draw(right, title, "vocabulary", VOCABULARIES, cross_entropy_memory)
    figure.savefig(path, dpi=120)


def _draw(axis, title, label, sizes, memory):
    for implementation, name in (("reference", "unfused"), ("auto", "kernel")):
        megabytes = [memory(size, implementation) / 1e6 for size in sizes]
        axis.plot(sizes, megabytes, marker="o", label=name)
        figures = {size: round(mb, 1) for size, mb in zip(sizes, megabytes, strict=True)}
        print(title, name, figures, flush=True)
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="XLA temp memory, MB", title=title)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(10))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.grid(alpha=0.3)
    axis.legend()


if __name__ == "__main__":
    main(*sys.argv[1:])
