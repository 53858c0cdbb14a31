"""Temp memory of one train step's program, and the time to build it.

Temp memory is XLA's plan for the compiled step beside arguments and results. It must not grow with
the number of micro-batches, and must stay within that of one plain micro-step (forward, backward
and update on one micro-batch, no accumulation) plus the accumulators, 4 bytes a parameter in
float32.
"""

import time

import pytest

from benchmarks.peers import full_batch
from benchmarks.support import contestants, models
from fastaccum.step.compiler_ir import memory_analysis


@pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
def test_memory(workload, benchmark, report):
    default = workload.micro_batches
    counts = {2, default}
    if not benchmark.disabled:
        counts.add(64)
    most = max(counts)
    temp = {count: temp_bytes_of_train_step(workload, count) for count in sorted(counts)}
    plain, parameters = temp_bytes_of_plain_micro_step(workload)

    trainer = contestants.trainer(workload, jit_compile=True)
    step = contestants.as_train_step(trainer)
    batch = step.feed(workload.stacks(1)[0])
    started = time.perf_counter()
    benchmark.pedantic(lambda: float(step.update(batch)), rounds=1)  # traces and compiles
    seconds = time.perf_counter() - started

    sizes = ", ".join(f"{count}: {size / 1e6:.4g} MB" for count, size in temp.items())
    report(f"temp memory: {most} micro-batches / 2", workload, temp[most] / temp[2], sizes)
    report(
        "temp memory beyond a plain micro-step, bytes per parameter",
        workload,
        (temp[default] - plain) / parameters,
        f"{default} micro-batches; {(temp[most] - plain) / parameters:.3g} with {most}; "
        f"plain micro-step {plain / 1e6:.4g} MB, {parameters / 1e6:.3g} M parameters",
    )
    report("first train step (trace, compile, run), seconds", workload, seconds)


def temp_bytes_of_train_step(workload, micro_batches):
    trainer = contestants.trainer(workload, micro_batches, jit_compile=True)
    stack = workload.stacks(1, micro_batches)[0]
    return trainer.memory_analysis(stack).temp_bytes


def temp_bytes_of_plain_micro_step(workload):
    """Returns temp bytes and parameters of the full-batch step on one micro-batch."""
    model, step = full_batch.make_step(workload)
    batch = full_batch.feed_full_batch(workload.stacks(1, 1)[0])
    return memory_analysis(step, *batch).temp_bytes, model.count_params()
