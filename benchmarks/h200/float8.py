"""Train steps with `float8` beside those in half precision, as predicted for an H200."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.h200 import models, roofline


def table(names: Iterable[str], rates: roofline.Rates, sizes: Sequence[int]) -> Iterator[str]:
    """Yields a table in Markdown: the times of both, and what float8 leaves in half precision."""
    layers, batch, context = sizes
    header = [
        f"{layers} layers, {batch} x {context:,} tokens",
        "ms",
        "ms, float8",
        "float8 / half",
        "temp, float8 / half",
        "products in float8",
        "others",
        "ms of the others",
    ]
    yield f"| {' | '.join(header)} |"
    yield f"| --- |{' ---: |' * (len(header) - 1)}"
    for name in names:
        half = models.compile_step(name, layers, batch, context)
        step = models.compile_step(name, layers, batch, context, float8=True)
        half_ms = roofline.predict(half.kernels, rates).ms
        prediction = roofline.predict(step.kernels, rates)
        products = [timed for timed in prediction.kernels if timed.kernel.kind == "gemm"]
        others = [timed for timed in products if not timed.kernel.is_float8]
        cells = [
            f"{half_ms:.0f}",
            f"{prediction.ms:.0f}",
            f"{prediction.ms / half_ms:.2f}",
            f"{step.memory.temp_bytes / half.memory.temp_bytes:.2f}",
            f"{len(products) - len(others)}",
            f"{len(others)}",
            f"{sum(timed.ms for timed in others):.0f}",
        ]
        yield f"| {' | '.join([name, *cells])} |"
