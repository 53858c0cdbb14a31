"""Which part of a train step a kernel belongs to, by the names that TensorFlow and JAX give it: one
table for both.

A name under "gradient_tape" in TensorFlow or "transpose" in JAX is of the backward pass; one under
a LayerStack's loop there is of the layers once more. XLA hands a fusion the name of one of its
operations, so what it fuses across a border counts on one side of it.
"""

from __future__ import annotations

import re

from benchmarks.h200.kernels import Kernel
from benchmarks.h200.programs import Gpt
from benchmarks.h200.roofline import Prediction

MATMULS, ATTENTION, RECOMPUTED, LOSS, NORMS = (
    "matmuls",
    "attention",
    "recomputed",
    "head and loss",
    "norms",
)
ELEMENTWISE, EMBEDDING, SUMS = "elementwise", "embedding", "sums of gradients"
MOVES, UPDATE = "slices, copies, transposes", "once a step"
# In the order in which pictures stack them.
PARTS = (MATMULS, RECOMPUTED, ATTENTION, LOSS, NORMS, ELEMENTWISE, MOVES, SUMS, EMBEDDING, UPDATE)

_LOSS = re.compile(r"linear_cross_entropy|\(loss\)")
_CORE = re.compile(r"attention/attention/|/dot_product/")  # attention without its projections
_AGAIN = re.compile(r"rematted_computation|/blocks/while/backward/(?!gradient)")


def part(kernel: Kernel, sizes: Gpt) -> str:
    """The part of the step that a kernel belongs to, one of `PARTS`.

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
    if "accumulate/" in scope or yields_weight_gradient(
        kernel, [*matrices(sizes), (sizes.vocabulary, sizes.width)]
    ):
        return SUMS
    if kernel.kind == "scatter" or "embedding" in scope:
        return EMBEDDING
    if kernel.kind in ("slice", "copy", "fill", "transpose"):
        return MOVES
    return NORMS if "_norm" in scope else ELEMENTWISE


def is_attention(kernel: Kernel) -> bool:
    """Whether it is part of attention, forward, once more, or backward, without its projections."""
    return kernel.kind == "attention" or bool(_CORE.search(_scope(kernel)))


def milliseconds(prediction: Prediction, sizes: Gpt) -> dict[str, float]:
    """Predicted milliseconds of each part of a step, in the order of `PARTS`."""
    found = dict.fromkeys(PARTS, 0.0)
    for timed in prediction.kernels:
        found[part(timed.kernel, sizes)] += timed.ms
    return found


def matrices(sizes: Gpt) -> list[tuple[int, int]]:
    """The shapes of a block's matrices."""
    width = sizes.width
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def in_micro_batch(kernel: Kernel, sizes: Gpt) -> bool:
    """Whether it is launched for each micro-batch."""
    return kernel.loops[:1] == (sizes.micro_batches,)


def yields_weight_gradient(kernel: Kernel, shapes: list[tuple[int, int]]) -> bool:
    """Whether a kernel, no matmul, writes float32 arrays of these shapes, of one layer, all layers
    or partial sums.
    """
    if kernel.kind in ("gemm", "attention"):
        return False
    wanted = {tuple(sorted(shape)) for shape in shapes}
    return any(
        dtype == "f32" and tuple(sorted(array[-2:])) in wanted for dtype, array in kernel.results
    )


def _scope(kernel):
    """Its scope, without the numbers that tell layers of one name apart."""
    return re.sub(r"_\d+(?=/)", "", f"{kernel.scope}/")
