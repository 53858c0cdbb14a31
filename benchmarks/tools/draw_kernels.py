"""Draws the temp memory of the kernels, forward and backward, against that of what they replace.

    python -m benchmarks.tools.draw_kernels docs/kernels.png

XLA's own plan for the CPU: the programs are compiled, not run.
"""

import sys

import matplotlib.pyplot as plt
import tensorflow as tf
from matplotlib.ticker import FuncFormatter, LogLocator

from fastaccum.kernels import attention, linear_cross_entropy
from fastaccum.step.compiler_ir import memory_analysis
from fastaccum.step.program import Program

TIMES = [512, 1024, 2048, 4096, 8192, 16384]
VOCABULARIES = [4096, 8192, 16384, 32768, 65536, 131072]
HEADS, HEAD_DIM = 8, 64
TOKENS, WIDTH = 8192, 512


def attention_memory(time, implementation):
    """Bytes of causal self-attention over `time` tokens with its gradients."""

    def loss(query, key, value):
        return tf.reduce_sum(
            attention(query, key, value, causal=True, implementation=implementation)
        )

    return _temp_bytes(loss, *[tf.TensorSpec([1, time, HEADS, HEAD_DIM])] * 3)


def cross_entropy_memory(vocabulary, implementation):
    """Bytes of the head and its loss over TOKENS tokens with their gradients."""

    def loss(hidden, kernel):
        labels = tf.zeros([TOKENS], tf.int32)
        return tf.reduce_sum(
            linear_cross_entropy(hidden, kernel, labels, implementation=implementation)
        )

    return _temp_bytes(loss, tf.TensorSpec([TOKENS, WIDTH]), tf.TensorSpec([WIDTH, vocabulary]))


def _temp_bytes(loss, *specs):
    def gradients(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = loss(*inputs)
        return value, tape.gradient(value, inputs)

    return memory_analysis(Program(gradients), *specs).temp_bytes


def main(path):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = [
        (
            TIMES,
            attention_memory,
            "tokens in a sequence",
            f"causal attention, {HEADS} heads x {HEAD_DIM}",
        ),
        (
            VOCABULARIES,
            cross_entropy_memory,
            "vocabulary",
            f"head + cross-entropy, {TOKENS:,} tokens x {WIDTH}",
        ),
    ]
    for axis, (sizes, memory, label, title) in zip(axes, panels, strict=True):
        for implementation, name in (("reference", "unfused"), ("auto", "kernel")):
            megabytes = [memory(size, implementation) / 1e6 for size in sizes]
            axis.plot(sizes, megabytes, marker="o", label=name)
            print(
                title,
                name,
                dict(zip(sizes, [round(m, 1) for m in megabytes], strict=True)),
                flush=True,
            )
        axis.set(
            xscale="log", yscale="log", xlabel=label, ylabel="XLA temp memory, MB", title=title
        )
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(10))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
