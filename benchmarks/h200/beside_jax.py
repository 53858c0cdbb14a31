"""Compares our train steps of models of images with those of Keras's JAX backend, for an H200.

Nothing is run: the same XLA compiles both for the GPU, and their times are predicted from the
kernels that the programs launch. JAX's program comes from a process of its own
(`benchmarks.peers.jax_keras`), since a process has one backend of Keras.
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
FORWARD = "products, forward"
DATA = "products, gradients of data"
WEIGHTS = "products, gradients of weights"
ATTENTION = "fused attention"
STATISTICS = "reduces of BatchNorm"
REDUCES = "other reduces"
ELEMENTWISE = "elementwise, pooling"
COPIES = "casts and copies"
SUMS = "weights: casts, sums of gradients"
UPDATE = "once a step"
PARTS = (FORWARD, DATA, WEIGHTS, ATTENTION, STATISTICS, REDUCES, ELEMENTWISE, COPIES, SUMS, UPDATE)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a train step.

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
        The program, and the weight sizes: how many elements the model's matrices and
        convolutional kernels have. By them `part` tells a weight from an activation.
    """
    policy = keras.config.dtype_policy()
    rows = (sizes.micro_batches, sizes.batch)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with h200.weightless():
            model = vision.MODELS[name](sizes.size)
            trainer = fa.Trainer(model, vision.optimizer(), vision.loss(), clip_norm=1.0)
            images = np.zeros((*rows, sizes.size, sizes.size, 3), "float32")
            program = programs.of_trainer(trainer, (images, np.zeros(rows, "int32")), **flags)
            shapes = [variable.shape for variable in model.trainable_variables]
            weight_sizes = frozenset(math.prod(shape) for shape in shapes if len(shape) > 1)
            return program, weight_sizes
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


def part(kernel: Kernel, weight_sizes: Collection[int]) -> str:
    """Returns the part of the train step, one of `PARTS`, that a kernel belongs to.

    XLA names a fusion after one of its operations. A fusion of operations of two parts counts for
    the part of that one.

    Args:
        kernel: of our program, or of JAX's.
        weight_sizes: as `ours` returns them. An activation with as many elements as a weight would
            be taken for the weight.
    """
    if not kernel.loops:  # outside the loop over micro-batches
        return UPDATE
    if kernel.kind == "attention":
        return ATTENTION
    has_weight_size = any(math.prod(shape) in weight_sizes for _, shape in kernel.results)
    if kernel.flops:
        if not re.search(r"gradient_tape|transpose\(", kernel.scope):
            return FORWARD
        # XLA may split a gradient of weights into parts, in float32.
        if has_weight_size or kernel.types.endswith("-> f32"):
            return WEIGHTS
        return DATA
    # Before a weight's size is looked at, which partial sums may have by chance.
    if kernel.kind == "reduce":
        if re.search(r"bn\b|_bn_|batch_?norm|moments", kernel.scope):
            return STATISTICS
        return REDUCES
    if has_weight_size or re.search(r"(^|/)accumulate/", kernel.scope):
        return SUMS
    if kernel.kind in ("convert", "copy", "slice", "transpose"):
        return COPIES
    return ELEMENTWISE


def table(
    names: Collection[str], sizes: Sizes, rates: roofline.Rates, **flags: bool
) -> Iterator[str]:
    """Yields tables in Markdown: time and memory of both programs of each model, then of parts."""
    images = f"{sizes.micro_batches} x {sizes.batch} images of {sizes.size} x {sizes.size}"
    yield f"| {images} | ms | JAX's ms | ratio | temp GB | JAX's GB | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    tables_of_parts = []
    for name in names:
        program, weight_sizes = ours(name, sizes, **flags)
        jax_program = theirs(name, sizes, **flags)
        prediction = roofline.predict(program.kernels, rates)
        jax_prediction = roofline.predict(jax_program.kernels, rates)
        ms = prediction.ms
        jax_ms = jax_prediction.ms
        temp = program.memory.temp_bytes / 1e9
        jax_temp = jax_program.memory.temp_bytes / 1e9
        times = f"{ms:.1f} | {jax_ms:.1f} | {ms / jax_ms:.2f}"
        yield f"| {name} | {times} | {temp:.2f} | {jax_temp:.2f} | {temp / jax_temp:.2f} |"
        tables_of_parts += ["", *_table_of_parts(name, prediction, jax_prediction, weight_sizes)]
    yield from tables_of_parts


def _table_of_parts(
    name: str,
    prediction: roofline.Prediction,
    jax_prediction: roofline.Prediction,
    weight_sizes: Collection[int],
) -> Iterator[str]:
    groups = summary.grouped(prediction, lambda kernel: part(kernel, weight_sizes))
    jax_groups = summary.grouped(jax_prediction, lambda kernel: part(kernel, weight_sizes))
    yield f"| {name} | ms | launches | GB | JAX's ms | launches | GB |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in PARTS:
        group = groups.get(row, summary.Group())
        jax_group = jax_groups.get(row, summary.Group())
        if group.launches or jax_group.launches:
            yield f"| {row} | {_cells(group)} | {_cells(jax_group)} |"


def _cells(group: summary.Group) -> str:
    return f"{group.ms:.1f} | {group.launches:,} | {group.bytes / 1e9:.1f}"
