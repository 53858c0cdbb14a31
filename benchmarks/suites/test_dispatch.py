"""Cost of a call of a compiled train step beyond its arithmetic, for many small variables.

A dispatch of one step takes A + D, one of k steps in the same program k A + D, with A the
arithmetic of a step and D the dispatch: Python, TensorFlow's handing of every variable to XLA and
back. So D = (k T(1) - T(k)) / (k - 1).
"""

import statistics
import time

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds

COUNTS = (10, 100, 500, 2000)
STEPS = 8


@pytest.mark.parametrize("count", COUNTS)
def test_dispatch(count, benchmark, report, series, request):
    if count > 100 and (benchmark.disabled or request.config.getoption("quick")):
        pytest.skip(f"full runs only: {count:,} variables take minutes to compile")
    workload = models.scales(count)
    trainer = contestants.trainer(workload)
    one, many = programs(trainer, workload)

    restore = agreement.snapshot(trainer)
    started = time.perf_counter()
    one()
    first_step = time.perf_counter() - started
    for _ in range(STEPS - 1):
        one()
    by_one = trainer.model.get_weights()
    restore()
    many()
    np.testing.assert_allclose(trainer.model.get_weights(), by_one, rtol=1e-5, atol=1e-6)

    times = race(benchmark, one, {"many": many}, workload.rounds)
    if times:
        seconds = [
            (STEPS * single - several) / (STEPS - 1)
            for single, several in zip(times["ours"], times["many"], strict=True)
        ]
        dispatch = 1e3 * statistics.median(seconds)
        note = (
            f"a step alone {milliseconds(times['ours'], 1)}, one of {STEPS} "
            f"{milliseconds(times['many'], STEPS)}"
        )
        report(f"dispatch at {count:,} variables, ms", workload, dispatch, note)
        line = "variables of 4 numbers"
        series("dispatch against variables", line, [count], [dispatch], "variables", "dispatch, ms")
        label = "first step, s"
        series("first step against variables", line, [count], [first_step], "variables", label)


def programs(trainer, workload):
    """Returns functions that run one step, and STEPS steps in one dispatch, until the loss."""
    stack = contestants.feed_stack(workload.stacks(1)[0])
    # `fit` calls this with steps_per_execution=STEPS; here it has no input pipeline.
    step, batch = trainer._step_inputs.prepare(stack)
    batches = tf.nest.map_structure(lambda t: tf.stack([t] * STEPS), batch)

    def one():
        return float(trainer.train_step(stack).loss)

    def many():
        return float(step.compiled_execute_many(batches).result.loss)

    return one, many
