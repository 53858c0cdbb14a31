"""What the program of one train step holds, and what it costs to build.

Temp memory is what XLA plans for the compiled step, arguments and results aside. It must not grow
with the number of micro-batches, and must stay within that of one plain micro-step (forward,
backward and update on one micro-batch, no accumulation) plus the accumulators, 4 bytes a parameter
in float32.
"""

import time

import pytest

from benchmarks.peers import full_batch
from benchmarks.support import contestants, models
from fastaccum.step.compiler_ir import memory_analysis


@pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
def test_memory(workload, benchmark, report):
    own = workload.micro_batches
    counts = sorted({2, own} if benchmark.disabled else {2, own, 64})
    temp, most = {count: temp_bytes_of_train_step(workload, count) for count in counts}, counts[-1]
    plain, parameters = temp_bytes_of_plain_micro_step(workload)

    trainer = contestants.trainer(workload, jit_compile=True)
    step = contestants.as_train_step(trainer)
    batch = step.feed(workload.stacks(1)[0])
    started = time.perf_counter()
    # The one call that traces and compiles.
    benchmark.pedantic(lambda: float(step.update(batch)), rounds=1)
    seconds = time.perf_counter() - started

    sizes = ", ".join(f"{count}: {size / 1e6:.4g} MB" for count, size in temp.items())
    report(f"temp memory: {most} micro-batches / 2", workload, temp[most] / temp[2], sizes)
    report(
        "temp memory beyond a plain micro-step, bytes per parameter",
        workload,
        (temp[own] - plain) / parameters,
        f"{own} micro-batches; {(temp[most] - plain) / parameters:.3g} with {most}; "
        f"plain micro-step {plain / 1e6:.4g} MB, {parameters / 1e6:.3g} M parameters",
    )
    report("first train step (trace, compile, run), seconds", workload, seconds)


def temp_bytes_of_train_step(workload, micro_batches):
    stack = workload.stacks(1, micro_batches)[0]
    return (
        contestants.trainer(workload, micro_batches, jit_compile=True)
        .memory_analysis(stack)
        .temp_bytes
    )


def temp_bytes_of_plain_micro_step(workload):
    """Temp bytes and parameters of the full-batch step, on one micro-batch."""
    model, step = full_batch.make_step(workload)
    batch = full_batch.feed_full_batch(workload.stacks(1, 1)[0])
    return memory_analysis(step, *batch).temp_bytes, model.count_params()
