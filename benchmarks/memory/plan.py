"""The planner's choices over six models and three limits, each confirmed by the next larger
size.
"""

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

GLOBAL_BATCH = 1024
COMPILATIONS = 5
# The micro-batch that each limit is to allow: it is a byte less than what the next larger one
# takes.
CHOICES = (4, 64, 256)


def run(options: argparse.Namespace) -> Result:
    """Every model under its three limits; with `quick` the MLP under one."""
    rows, missed = [], []
    for case in [CASES["MLP"]] if options.quick else CASES.values():
        found = planned(case, CHOICES[:1] if options.quick else CHOICES)
        rows += found
        missed += [
            f"{row['model']} below {row['limit MiB']:.1f} MiB"
            for row in found
            if not row["largest"]
        ]
        missed += [
            f"{row['model']}: {row['compiled']} compilations"
            for row in found
            if row["compiled"] > COMPILATIONS
        ]
    notes = (
        f"`fa.plan` with a global batch of {GLOBAL_BATCH:,} rows, whose divisors are the "
        f"micro-batches from 1 to {GLOBAL_BATCH:,}. Each limit is a byte less than what one of "
        "them takes, which was compiled apart from the plan: the choice is to be the next "
        "smaller one, and the plan itself to have compiled both."
    )
    return Result("The planner's choices", rows, missed, notes)


def planned(case: Case, choices: tuple[int, ...] = CHOICES) -> list[dict[str, Any]]:
    """A model's plans, one for each limit."""
    trainer = case.trainer()
    found = []
    for rows in choices:
        found.append(_planned(case, trainer, rows))
        print(found[-1], file=sys.stderr)
    return found


def _planned(case: Case, trainer: fa.Trainer, rows: int) -> dict[str, Any]:
    exceeds = _peak(case, trainer, 2 * rows)
    limit = exceeds - 1
    plan = fa.plan(trainer, case.arrays(1), global_batch_size=GLOBAL_BATCH, memory_limit=limit)
    larger = {each.batch_size: each for each in plan.considered}.get(2 * rows)
    confirmed = larger is not None and larger.peak_bytes == exceeds and not larger.fits
    return {
        "model": case.name,
        "limit MiB": limit / 2**20,
        "batch_size": plan.batch_size,
        "micro-batches": plan.accumulation_steps,
        "peak MiB": plan.peak_bytes / 2**20,
        "next larger MiB": exceeds / 2**20,
        "largest": plan.batch_size == rows and plan.peak_bytes <= limit and confirmed,
        "compiled": plan.compilations,
        "s": plan.seconds,
    }


def _peak(case: Case, trainer: fa.Trainer, rows: int) -> int:
    """Compiled apart from any plan."""
    valid = tf.TensorSpec([rows], tf.bool)
    batch = Batch(
        *tf.nest.map_structure(lambda s: tf.TensorSpec([rows, *s.shape], s.dtype), case.specs)
    )._replace(valid=valid)
    step = trainer._builder.get_or_build(batch, trainer._present_options)
    with step.temporary_retrace():
        return dispatch_memory(step, Dispatch((stacked(batch, GLOBAL_BATCH // rows),))).peak_bytes
