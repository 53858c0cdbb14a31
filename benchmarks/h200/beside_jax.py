"""Our train steps of models of images beside Keras's own JAX backend: the same XLA compiles both
for the same H200.

JAX's program comes from a process of its own (`benchmarks.peers.jax_keras`), since a process has
one backend of Keras.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs, roofline, summary, vision
from benchmarks.h200.kernels import Kernel
from benchmarks.support.stablehlo import h200

ROOT = Path(__file__).parents[2]
FORWARD, DATA, WEIGHTS = (
    "products, forward",
    "products, gradients of data",
    "products, gradients of weights",
)
ATTENTION, STATISTICS, REDUCES = "fused attention", "reduces of BatchNorm", "other reduces"
ELEMENTWISE, COPIES = "elementwise, pooling", "casts and copies"
SUMS, UPDATE = "weights: casts, sums of gradients", "once a step"
PARTS = (FORWARD, DATA, WEIGHTS, ATTENTION, STATISTICS, REDUCES, ELEMENTWISE, COPIES, SUMS, UPDATE)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a train step.

    Attributes:
        size: pixels along each side of an image.
        batch: images in a micro-batch.
        micro_batches: in a train step.
    """

    size: int = 224
    batch: int = 64
    micro_batches: int = 8


def ours(name: str, sizes: Sizes, **flags: bool) -> tuple[programs.Compiled, frozenset[int]]:
    """Compiles our train step of a model of `vision.MODELS`, in mixed_bfloat16.

    Args:
        name: of the model.
        sizes: of the step.
        **flags: XLA's debug options.

    Returns:
        The program, and how many elements the model's matrices and convolutional kernels have.
    """
    policy, shape = keras.config.dtype_policy(), (sizes.micro_batches, sizes.batch)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with h200.weightless():
            model = vision.MODELS[name](sizes.size)
            trainer = fa.Trainer(model, vision.optimizer(), vision.loss(), clip_norm=1.0)
            images = np.zeros((*shape, sizes.size, sizes.size, 3), "float32")
            program = programs.of_trainer(trainer, (images, np.zeros(shape, "int32")), **flags)
            return program, frozenset(
                math.prod(v.shape) for v in model.trainable_variables if len(v.shape) > 1
            )
    finally:
        keras.config.set_dtype_policy(policy)
        keras.backend.clear_session()


def theirs(name: str, sizes: Sizes, **flags: bool) -> programs.Compiled:
    """Compiles JAX's train step of the same model: a scan over the same micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.mlir")
        numbers = map(str, dataclasses.astuple(sizes))
        command = [sys.executable, "-m", "benchmarks.peers.jax_keras", name, *numbers, str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "KERAS_BACKEND": "jax"})
        text, memory = programs.compiled(path.read_bytes(), **flags)
    return programs.Compiled(text, memory, sizes.micro_batches)


def part(kernel: Kernel, weights: Collection[int]) -> str:
    """Returns the part of the train step, one of `PARTS`, that a kernel belongs to.

    XLA hands a fusion the name of one of its operations: what it fuses across a border counts on
    one side of it.

    Args:
        kernel: of our program, or of JAX's.
        weights: as `ours` returns it; no activation may have as many elements.
    """
    if not kernel.loops:
        return UPDATE
    if kernel.kind == "attention":
        return ATTENTION
    of_weights = any(math.prod(shape) in weights for _, shape in kernel.results)
    if kernel.flops:
        is_backward = re.search(r"gradient_tape|transpose\(", kernel.scope)
        of_weights |= kernel.types.endswith("-> f32")  # where XLA splits it, in parts
        return WEIGHTS if of_weights and is_backward else DATA if is_backward else FORWARD
    if kernel.kind == "reduce":  # whose partial sums may have a weight's size
        return STATISTICS if re.search(r"bn\b|_bn_|batch_?norm|moments", kernel.scope) else REDUCES
    if of_weights or re.search(r"(^|/)accumulate/", kernel.scope):
        return SUMS
    return COPIES if kernel.kind in ("convert", "copy", "slice", "transpose") else ELEMENTWISE


def table(
    names: Collection[str], sizes: Sizes, rates: roofline.Rates, **flags: bool
) -> Iterator[str]:
    """Yields the lines of tables in Markdown: time and memory of each model's two programs, then
    the time by part.
    """
    compiled = {name: (*ours(name, sizes, **flags), theirs(name, sizes, **flags)) for name in names}
    images = f"{sizes.micro_batches} x {sizes.batch} images of {sizes.size} x {sizes.size}"
    yield f"| {images} | ms | JAX's ms | ratio | temp GB | JAX's GB | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, (our, _, their) in compiled.items():
        ms = [roofline.predict(each.kernels, rates).ms for each in (our, their)]
        temp = [each.memory.temp_bytes / 1e9 for each in (our, their)]
        times = f"{ms[0]:.1f} | {ms[1]:.1f} | {ms[0] / ms[1]:.2f}"
        yield f"| {name} | {times} | {temp[0]:.2f} | {temp[1]:.2f} | {temp[0] / temp[1]:.2f} |"
    for name, (our, weights, their) in compiled.items():
        yield ""
        yield f"| {name} | ms | launches | GB | JAX's ms | launches | GB |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        predicted = [roofline.predict(each.kernels, rates) for each in (our, their)]
        parts = [
            summary.grouped(each, lambda kernel, of=weights: part(kernel, of)) for each in predicted
        ]
        for row in PARTS:
            both = [each.get(row, summary.Group()) for each in parts]
            if any(group.launches for group in both):
                cells = (
                    f"{group.ms:.1f} | {group.launches:,} | {group.bytes / 1e9:.1f}"
                    for group in both
                )
                yield f"| {row} | {' | '.join(cells)} |"
