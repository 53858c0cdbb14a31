"""Compares predicted memory with what TensorFlow's allocator counts, a process for each model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.memory.results import Result

# The least and the most of predicted / measured.
MIN_RATIO = 0.9
MAX_RATIO = 1.1
STEPS = 8  # in an epoch
# TensorFlow's allocator for CPUs counts nothing; that for GPUs does, and may be asked for on a CPU.
COUNTED = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def run(options: argparse.Namespace) -> Result:
    """Measures every model at three micro-batches; with `quick` the MLP at one."""
    from benchmarks.memory.models import CASES

    if options.quick:
        settings = [("MLP", CASES["MLP"].rows)]
    else:
        settings = []
        for case in CASES.values():
            settings += [
                (case.name, case.rows // 4),
                (case.name, case.rows),
                (case.name, case.rows * 2),
            ]
    rows = []
    missed = []
    for name, size in settings:
        row = _in_a_process(name, size)
        rows.append(row)
        ratio = row["predicted / measured"]
        if not MIN_RATIO <= ratio <= MAX_RATIO:
            missed.append(f"{name} at {size} rows: {ratio:.3f}")
    notes = (
        "Predicted: `dispatch_memory(...).peak_bytes`, before anything ran. Measured: the most "
        "bytes that TensorFlow's allocator for the CPU had given out at once over a `fit` after "
        "its first, and the stacks of NumPy's."
    )
    return Result("Predicted and measured memory of a train step", rows, missed, notes)


def _in_a_process(name: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, name, str(rows)]
    process = subprocess.run(
        command, env=os.environ | COUNTED, capture_output=True, text=True, timeout=600, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{name} at {rows} rows: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def measure(name: str, rows: int) -> dict[str, float]:
    """Measures one model's row of the table, in a process of its own with `COUNTED`'s variables."""
    import tensorflow as tf

    # The pool exists from the start, as on a GPU: a pool that grows would give out larger buffers
    # than requested.
    tf.raw_ops.Empty(shape=[2**31 - 1], dtype=tf.uint8)

    from benchmarks.memory.models import CASES
    from fastaccum.data.stacks import Batch, Dispatch
    from fastaccum.memory.analysis import dispatch_memory, stacked

    case = CASES[name]
    trainer = case.trainer()
    accumulation = trainer.gradient_accumulation_steps
    x_spec, y_spec = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([rows, *spec.shape], spec.dtype), case.specs
    )
    batch = Batch(x_spec, y_spec)
    step = trainer._builder.get_or_build(batch, trainer._present_options)
    predicted = dispatch_memory(step, Dispatch((stacked(batch, accumulation),)))
    x, y = case.arrays(STEPS * rows * accumulation)
    trainer.fit(x, y, batch_size=rows, verbose=0)
    tf.config.experimental.reset_memory_stats("CPU:0")
    with _stacks_counted() as stacks:
        trainer.fit(x, y, batch_size=rows, verbose=0)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] + max(stacks)
    return {
        "model": name,
        "micro-batch": rows,
        "predicted MiB": predicted.peak_bytes / 2**20,
        "measured MiB": measured / 2**20,
        "predicted / measured": predicted.peak_bytes / measured,
        **{f"{kind} MiB": size / 2**20 for kind, size in predicted.by_kind.items()},
    }


@contextlib.contextmanager
def _stacks_counted() -> Iterator[list[int]]:
    """Yields a list of the bytes of all live stacks; on a CPU they are NumPy's."""
    from fastaccum.data import rows

    make = rows._aligned
    alive = [0]

    def counted(*args: Any) -> Any:
        array = make(*args)
        alive.append(alive[-1] + array.nbytes)
        weakref.finalize(array.base, lambda size=array.nbytes: alive.append(alive[-1] - size))
        return array

    with mock.patch.object(rows, "_aligned", counted):
        yield alive


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
