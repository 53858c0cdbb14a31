"""Times a contestant and reports it as one JSON object, on the last line that it prints."""

import json
import math
import statistics
import time

from benchmarks.gpu import manifest

WARM_UP = 3  # steps before the timed ones
STEPS = 10
# The relative difference between losses of the same model that rounding explains: contestants round
# to half precision in different places. One step of the small model changes its loss ten times as
# much.
TOLERANCE = 1e-3


def timed(step, ready):
    """Times steps after a warm-up.

    Args:
        step: runs one train step, always on the same tokens, and returns its loss without waiting
            for it.
        ready: waits for a loss.

    Returns:
        Losses of the warm-up's steps, and the seconds of each timed step. Every step is waited for,
        as in a training loop that reads each loss.
    """
    losses = [float(ready(step())) for _ in range(WARM_UP)]
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        ready(step())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def rate_of_matmuls(product, ready, size):
    """Returns the best of ten rates, in FLOP/s, of `product()`, a matmul of `[size, size]`."""
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
