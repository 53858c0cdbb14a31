"""Finds the part of a train step that a kernel belongs to, by the names of TensorFlow and JAX.

A name under "gradient_tape" in TensorFlow or "transpose" in JAX is of the backward pass; one under
a LayerStack's loop there is of recomputed layers. XLA hands a fusion the name of one of its
operations, so a fusion across a border counts on one side of it.
"""

from __future__ import annotations

import re

from benchmarks.h200.kernels import Kernel
from benchmarks.h200.programs import Gpt
from benchmarks.h200.roofline import Prediction

MATMULS = "matmuls"
ATTENTION = "attention"
RECOMPUTED = "recomputed"
LOSS = "head and loss"
NORMS = "norms"
ELEMENTWISE = "elementwise"
EMBEDDING = "embedding"
SUMS = "sums of gradients"
MOVES = "slices, copies, transposes"
UPDATE = "once a step"
# In the order in which pictures stack them.
PARTS = (MATMULS, RECOMPUTED, ATTENTION, LOSS, NORMS, ELEMENTWISE, MOVES, SUMS, EMBEDDING, UPDATE)

_LOSS = re.compile(r"linear_cross_entropy|\(loss\)")
_CORE = re.compile(r"attention/attention/|/dot_product/")  # attention without its projections
_AGAIN = re.compile(r"rematted_computation|/blocks/while/backward/(?!gradient)")


def part(kernel: Kernel, sizes: Gpt) -> str:
    """Returns the part of the step that a kernel belongs to, one of `PARTS`.

    Args:
        kernel: of a GPT's train step.
        sizes: the GPT.
    """
    scope = _scope(kernel)
    if not in_micro_batch(kernel, sizes):
        return UPDATE
    if _LOSS.search(scope):
        return LOSS
    if _AGAIN.search(scope):
        return RECOMPUTED
    if is_attention(kernel):
        return ATTENTION
    if kernel.kind == "gemm":
        return MATMULS
    weights = [*matrices(sizes), (sizes.vocabulary, sizes.width)]
    if "accumulate/" in scope or yields_weight_gradient(kernel, weights):
        return SUMS
    if kernel.kind == "scatter" or "embedding" in scope:
        return EMBEDDING
    if kernel.kind in ("slice", "copy", "fill", "transpose"):
        return MOVES
    if "_norm" in scope:
        return NORMS
    return ELEMENTWISE


def is_attention(kernel: Kernel) -> bool:
    """Says if a kernel is part of attention in any pass, without its projections."""
    return kernel.kind == "attention" or bool(_CORE.search(_scope(kernel)))


def milliseconds(prediction: Prediction, sizes: Gpt) -> dict[str, float]:
    """Sums the predicted milliseconds of each part of a step, in the order of `PARTS`."""
    ms = dict.fromkeys(PARTS, 0.0)
    for timed in prediction.kernels:
        ms[part(timed.kernel, sizes)] += timed.ms
    return ms


def matrices(sizes: Gpt) -> list[tuple[int, int]]:
    """Returns the shapes of a block's matrices."""
    width = sizes.width
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def in_micro_batch(kernel: Kernel, sizes: Gpt) -> bool:
    """Says if a kernel is launched for each micro-batch."""
    return kernel.loops[:1] == (sizes.micro_batches,)


def yields_weight_gradient(kernel: Kernel, shapes: list[tuple[int, int]]) -> bool:
    """Says if a kernel, no matmul, writes float32 arrays of these shapes, perhaps stacked."""
    if kernel.kind in ("gemm", "attention"):
        return False
    gradients = {tuple(sorted(shape)) for shape in shapes}
    return any(
        dtype == "f32" and tuple(sorted(shape[-2:])) in gradients for dtype, shape in kernel.results
    )


def _scope(kernel: Kernel) -> str:
    """Returns a kernel's scope without the numbers that tell layers of one name apart."""
    return re.sub(r"_\d+(?=/)", "", f"{kernel.scope}/")
