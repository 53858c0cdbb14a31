"""Checks the planner's choices for six models and three limits against the next larger size."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import tensorflow as tf

import fastaccum as fa
from benchmarks.memory.models import CASES, Case
from benchmarks.memory.results import Result
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.memory.analysis import dispatch_memory, stacked

GLOBAL_BATCH = 1024  # rows
COMPILATIONS = 5  # the most that a plan may take
# The micro-batches, in rows, that the plans should choose. For each, the limit is a byte less than
# the next larger one, of twice the rows, takes.
CHOICES = (4, 64, 256)


def run(options: argparse.Namespace) -> Result:
    """Plans every model under its three limits; with `quick` the MLP under one."""
    if options.quick:
        table = planned(CASES["MLP"], CHOICES[:1])
    else:
        table = []
        for case in CASES.values():
            table += planned(case)
    missed = []
    for row in table:
        if not row["largest"]:
            missed.append(f"{row['model']} below {row['limit MiB']:.1f} MiB")
        if row["compiled"] > COMPILATIONS:
            missed.append(f"{row['model']}: {row['compiled']} compilations")
    notes = (
        f"`fa.plan` chooses among the divisors of a global batch of {GLOBAL_BATCH:,} rows. Each "
        "limit is a byte less than the step with one of these micro-batches takes, as a "
        "compilation apart from the plan shows. The plan must choose the next smaller "
        "micro-batch, and must have compiled the larger one as well."
    )
    return Result("The planner's choices", table, missed, notes)


def planned(case: Case, choices: tuple[int, ...] = CHOICES) -> list[dict[str, Any]]:
    """Plans a model for each limit and returns the rows of the table."""
    trainer = case.trainer()
    table = []
    for micro_batch in choices:
        row = _row(case, trainer, micro_batch)
        table.append(row)
        print(row, file=sys.stderr)
    return table


def _row(case: Case, trainer: fa.Trainer, micro_batch: int) -> dict[str, Any]:
    """Plans under the limit that allows this micro-batch, and no larger one."""
    larger_size = 2 * micro_batch
    larger_peak = _peak(case, trainer, larger_size)
    limit = larger_peak - 1
    plan = fa.plan(trainer, case.arrays(1), global_batch_size=GLOBAL_BATCH, memory_limit=limit)
    candidates = {candidate.batch_size: candidate for candidate in plan.considered}
    larger = candidates.get(larger_size)
    is_confirmed = larger is not None and larger.peak_bytes == larger_peak and not larger.fits
    is_choice_right = plan.batch_size == micro_batch and plan.peak_bytes <= limit
    return {
        "model": case.name,
        "limit MiB": limit / 2**20,
        "batch_size": plan.batch_size,
        "micro-batches": plan.accumulation_steps,
        "peak MiB": plan.peak_bytes / 2**20,
        "next larger MiB": larger_peak / 2**20,
        "largest": is_choice_right and is_confirmed,
        "compiled": plan.compilations,
        "s": plan.seconds,
    }


def _peak(case: Case, trainer: fa.Trainer, rows: int) -> int:
    """Compiles the step apart from any plan and returns its peak, in bytes."""
    x_spec, y_spec = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([rows, *spec.shape], spec.dtype), case.specs
    )
    batch = Batch(x_spec, y_spec, valid=tf.TensorSpec([rows], tf.bool))
    step = trainer._builder.get_or_build(batch, trainer._present_options)
    with step.temporary_retrace():
        return dispatch_memory(step, Dispatch((stacked(batch, GLOBAL_BATCH // rows),))).peak_bytes
