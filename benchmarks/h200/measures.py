"""What the report tells of a GPT's train step: its totals, and the parts that it falls into."""

from __future__ import annotations

from typing import Any

from benchmarks.h200 import parts, roofline, summary
from benchmarks.h200.programs import Compiled, Gpt


def of(program: Compiled, sizes: Gpt, rates: roofline.Rates) -> dict[str, Any]:
    """The figures of a GPT's train step, ready for JSON.

    Args:
        program: ours or JAX's.
        sizes: of the GPT.
        rates: of the device.
    """
    prediction = roofline.predict(program.kernels, rates)
    whole = summary.of(program, rates)
    attention = [timed for timed in prediction.kernels if parts.is_attention(timed.kernel)]
    loss = [timed for timed in prediction.kernels if parts.part(timed.kernel, sizes) == parts.LOSS]
    return {
        **{name: whole[name] for name in whole if name not in ("kernels", "ms")},
        "parts": parts.milliseconds(prediction, sizes),
        "attention ms": sum(timed.ms for timed in attention),
        "attention launches": _launches(attention, sizes),
        "loss launches": _launches(loss, sizes),
        "wide matmuls": sum(
            count for types, count in whole["matmuls"].items() if types.startswith("f32")
        ),
    }


def _launches(timed, sizes):
    return (
        sum(each.kernel.times for each in timed if parts.in_micro_batch(each.kernel, sizes))
        / sizes.micro_batches
    )
