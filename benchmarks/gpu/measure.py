"""How every contestant is timed, and what it reports: one JSON object on the last line that it
prints.
"""

import json
import math
import statistics
import time

from benchmarks.gpu import manifest

WARM_UP, STEPS = 3, 10
# Relative, between losses of the same model: contestants round to half precision in different
# places. One step of the small model changes its loss by ten times as much.
TOLERANCE = 1e-3


def timed(step, ready):
    """The first losses, and the median seconds of a step.

    Args:
        step: runs one train step, always on the same tokens, and returns its loss without waiting
            for it.
        ready: waits for a loss.

    Returns:
        losses of the warm-up's steps, and the seconds of each timed step: every one is waited for,
        so that a step costs what a training loop that reads its loss pays.
    """
    losses = [float(ready(step())) for _ in range(WARM_UP)]
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        ready(step())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def rate_of_matmuls(product, ready, size):
    """Floating point operations a second of `product()`, a matmul of two `[size, size]` matrices:
    the best of ten.
    """
    ready(product())
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        ready(product())
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def require_losses(program, losses):
    """Raises AssertionError if the first losses are not those that the manifest expects."""
    if not all(math.isfinite(loss) for loss in losses):
        raise AssertionError(f"{program['name']}: the losses {losses} are not finite.")
    for step, (loss, expected) in enumerate(zip(losses, program["losses"], strict=False)):
        if abs(loss - expected) > TOLERANCE * abs(expected):
            raise AssertionError(
                f"{program['name']}: the loss of step {step} is {loss}; TensorFlow's on a CPU "
                f"was {expected}."
            )


def report(contestant, program, losses, seconds, *, matmul_rate, peak_bytes, **more):
    """Shows what a step costs."""
    step = statistics.median(seconds)
    show(
        contestant=contestant,
        program=program["name"],
        losses=losses,
        step_seconds=step,
        fastest_seconds=min(seconds),
        tokens_per_second=manifest.tokens_per_step(program) / step,
        matmul_flops_per_second=matmul_rate,
        model_flops_utilisation=manifest.model_flops(program) / step / matmul_rate,
        peak_bytes=peak_bytes,
        **more,
    )


def show(**measured):
    """Prints the line that `python -m benchmarks.gpu` reads."""
    print(json.dumps(measured), flush=True)
