"""Predicted memory beside what TensorFlow's allocator counts, each model in a process of its
own.
"""

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

BAR = 0.9, 1.1
STEPS = 8  # of an epoch
# TensorFlow's allocator for CPUs counts nothing; that for GPUs does, and may be asked for on a CPU.
COUNTED = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def run(options: argparse.Namespace) -> Result:
    """Every model at three micro-batches; with `quick` the MLP at one."""
    from benchmarks.memory.models import CASES

    rows, missed = [], []
    for case in [CASES["MLP"]] if options.quick else CASES.values():
        for size in [case.rows] if options.quick else [case.rows // 4, case.rows, case.rows * 2]:
            found = _in_a_process(case.name, size)
            rows.append(found)
            if not BAR[0] <= found["predicted / measured"] <= BAR[1]:
                missed.append(f"{case.name} at {size} rows: {found['predicted / measured']:.3f}")
    notes = (
        "Predicted: `dispatch_memory(...).peak_bytes`, before anything ran. Measured: the most "
        "bytes that TensorFlow's allocator for the CPU had given out at once over a `fit` after "
        "its first, and the stacks of NumPy's."
    )
    return Result("Predicted and measured memory of a train step", rows, missed, notes)


def _in_a_process(name: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, name, str(rows)]
    done = subprocess.run(
        command, env=os.environ | COUNTED, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} at {rows} rows: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, rows: int) -> dict[str, float]:
    """One model's row of the table; for a process of its own, with the environment above."""
    import tensorflow as tf

    # A pool that is there from the start, as on a GPU, is cut to size; one that grows gives out
    # more than is asked for.
    tf.raw_ops.Empty(shape=[2**31 - 1], dtype=tf.uint8)

    from benchmarks.memory.models import CASES
    from fastaccum.data.stacks import Batch, Dispatch
    from fastaccum.memory.analysis import dispatch_memory, stacked

    case = CASES[name]
    trainer = case.trainer()
    accumulation = trainer.gradient_accumulation_steps
    batch = Batch(
        *tf.nest.map_structure(lambda s: tf.TensorSpec([rows, *s.shape], s.dtype), case.specs)
    )
    predicted = dispatch_memory(
        trainer._builder.get_or_build(batch, trainer._present_options),
        Dispatch((stacked(batch, accumulation),)),
    )
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
    """Yields the bytes of all stacks alive, from time to time: on a CPU NumPy gives them out, not
    TensorFlow.
    """
    from fastaccum.data import rows

    make, alive = rows._aligned, [0]

    def counted(*args: Any) -> Any:
        array = make(*args)
        alive.append(alive[-1] + array.nbytes)
        weakref.finalize(array.base, lambda size=array.nbytes: alive.append(alive[-1] - size))
        return array

    with mock.patch.object(rows, "_aligned", counted):
        yield alive


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
