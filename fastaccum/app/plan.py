"""`fastaccum plan`: finds the micro-batch with which `fastaccum train` fits a device."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from fastaccum import planning
from fastaccum.app.options import BadArgument, name_options
from fastaccum.app.run import make_optimizer, make_schedule, make_trainer, resolve_precision, say
from fastaccum.memory import device
from fastaccum.memory.plan import Plan
from fastaccum.transformer import PRESETS

PROG = "fastaccum plan"


def plan(options: argparse.Namespace) -> int:
    """Plans as the parsed `options` say, and returns the exit code: 1 where nothing fits."""
    try:
        found = _found(options)
    except MemoryError as error:
        print(f"--preset {options.preset}: {name_options(str(error)) or 'out of memory'}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ImportError) as error:
        raise BadArgument(str(error), PROG) from error
    print(found)
    if found.recompute is None:
        names = [
            n for n in ("preset", "precision", "optimizer") if getattr(options, n) != options.parser.get_default(n)
        ]
        given = "".join(f" --{name} {getattr(options, name)}" for name in names)
        cut = f"--batch-size {found.batch_size} --accum {found.accumulation_steps}"
        say("to train", f"fastaccum train{given} {cut}", wraps=False)
    return 0


def _found(options: argparse.Namespace) -> Plan:
    limit = None if options.memory_limit is None else device.parse_size(options.memory_limit, "--memory-limit")
    optimizer = make_optimizer(options.optimizer, make_schedule(1.0, 1))
    made = make_trainer(options.preset, resolve_precision(options.precision), optimizer)
    window = np.zeros((1, PRESETS[options.preset]["context"]), np.int32)
    return planning.plan(
        made,
        (window, window),
        global_batch_size=options.global_batch,
        memory_limit=limit,
        recompute=options.recompute,
    )
