"""`fastaccum plan`: the micro-batch with which `fastaccum train` fits a device."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from fastaccum import trainer
from fastaccum.app.options import BadArgument
from fastaccum.app.run import chosen_precision, learning_rate, make_optimizer, make_trainer, require_preset, say
from fastaccum.transformer import PRESETS

PROG = "fastaccum plan"


def plan(options: argparse.Namespace) -> int:
    """Plans as the parsed `options` say, and returns the exit code: 1 where nothing fits."""
    try:
        require_preset(options.preset)
        precision = chosen_precision(options.precision)
        optimizer = make_optimizer(options.optimizer, learning_rate(1.0, 1))
        made = make_trainer(options.preset, precision, optimizer)
        window = np.zeros((1, PRESETS[options.preset]["context"]), np.int32)
        found = trainer.plan(
            made,
            (window, window),
            global_batch_size=options.global_batch,
            memory_limit=options.memory_limit,
            recompute=options.recompute,
        )
    except MemoryError as error:
        print(f"{options.preset}: {error}" if str(error) else f"{options.preset}: out of memory", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ImportError) as error:
        raise BadArgument(str(error), PROG) from error
    print(found)
    if found.recompute is None:
        say(
            "train",
            f"fastaccum train {_named(options)} --batch-size {found.batch_size} --accum {found.accumulation_steps}",
        )
    if options.plot is not None:
        try:
            found.plot(options.plot)
        except (OSError, ValueError, ImportError) as error:
            raise BadArgument(f"--plot: {error}", PROG) from error
        say("drawn", options.plot)
    return 0


def _named(options: argparse.Namespace) -> str:
    """The options of the model that are not the defaults of `fastaccum train`."""
    names = [
        name
        for name in ("preset", "precision", "optimizer")
        if getattr(options, name) != options.parser.get_default(name)
    ]
    return " ".join(f"--{name} {getattr(options, name)}" for name in names)
