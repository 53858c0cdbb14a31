"""Figures of a GPT's train step for the report: its totals, and its parts."""

from __future__ import annotations

from typing import Any

from benchmarks.h200 import parts, roofline, summary
from benchmarks.h200.programs import Compiled, Gpt


def of(program: Compiled, sizes: Gpt, rates: roofline.Rates) -> dict[str, Any]:
    """Computes the figures of a GPT's train step, ready for JSON.

    Args:
        program: ours or JAX's.
        sizes: of the GPT.
        rates: of the device.
    """
    prediction = roofline.predict(program.kernels, rates)
    totals = summary.of(program, rates)
    attention = [timed for timed in prediction.kernels if parts.is_attention(timed.kernel)]
    loss = [timed for timed in prediction.kernels if parts.part(timed.kernel, sizes) == parts.LOSS]
    wide_matmuls = [count for types, count in totals["matmuls"].items() if types.startswith("f32")]
    del totals["kernels"], totals["ms"]
    return {
        **totals,
        "parts": parts.milliseconds(prediction, sizes),
        "attention ms": sum(timed.ms for timed in attention),
        "attention launches": _launches(attention, sizes),
        "loss launches": _launches(loss, sizes),
        "wide matmuls": sum(wide_matmuls),
    }


def _launches(timed_kernels: list[roofline.Timed], sizes: Gpt) -> float:
    """Returns the launches of a micro-batch."""
    launches = 0
    for timed in timed_kernels:
        if parts.in_micro_batch(timed.kernel, sizes):
            launches += timed.kernel.times
    return launches / sizes.micro_batches
