"""`fastaccum train`: a byte-level transformer on text, from files to a run folder, and on from there."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from fastaccum.app import text
from fastaccum.app.options import BadArgument
from fastaccum.app.recorder import Recorder
from fastaccum.app.run import CHECKPOINTS, Run, begin, replacing, resume, say
from fastaccum.checkpoint.errors import CheckpointWriteError, CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.lock import FolderInUseError
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.step.guards import NonFiniteError

SAMPLE_BYTES = 400
INTERRUPTED = "ending after this step, to save what was learned; Ctrl-C again to abort"


def train(options: argparse.Namespace) -> int:
    """Trains as the parsed `options` say, and returns the exit code; BadArgument comes before a weight moves."""
    folder: Path | None = None
    try:
        try:
            run, folder = _begin(options)
        except (ValueError, TypeError, ImportError) as error:
            raise BadArgument(f"fastaccum train: error: {error}") from error
        return _train(run, folder)
    except (IncompatibleCheckpointError, CorruptCheckpointError, FolderInUseError) as error:
        raise BadArgument(f"fastaccum train: error: {error}") from error
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        smaller = "halve --batch-size and double --accum, which makes the same updates in less memory"
        print(f"out of memory: {smaller}\n{error}".rstrip(), file=sys.stderr)
    except (NonFiniteError, CheckpointWriteError, OSError) as error:
        if folder is None:  # the output has no reader
            raise
        print(f"{error}\nto resume: fastaccum train --resume {shlex.quote(str(folder))}", file=sys.stderr)
    return 1


def _begin(options: argparse.Namespace) -> tuple[Run, Path]:
    """Makes the run and its folder."""
    try:
        if options.resume is not None:
            return resume(options), Path(options.resume)
        run = Run(options)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(str(error)) from error
    try:
        return run, begin(options.out, f"runs/{run.name}", run.config)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out: {error}") from error


def _train(run: Run, folder: Path) -> int:
    options, code = run.options, 0
    with EndRequest(signal.SIGINT, INTERRUPTED) as interrupt:
        recorder = Recorder(run, folder, interrupt)
        try:
            run.trainer.fit(
                run.windows,
                epochs=run.rows,
                steps_per_epoch=run.steps_per_row,
                shuffle=False,
                validation_data=run.held_out,
                validation_batch_size=options.batch_size,
                validation_freq=sorted(run.evaluated_rows),
                callbacks=[recorder],
                verbose=1 if sys.stdout.isatty() else 2,
                checkpoint_dir=folder / CHECKPOINTS,
                checkpoint_every=options.checkpoint_every,
            )
        except Preempted as preempted:
            say("to resume", f"fastaccum train --resume {shlex.quote(str(folder))}")
            code = 130 if interrupt.requested else preempted.code
        recorder.write()
        if code != 143:
            _finish(run, folder, recorder)
    return 130 if interrupt.requested else code


def _finish(run: Run, folder: Path, recorder: Recorder) -> None:
    """Saves the model, draws the curve, and prints the result and a sample."""
    rows = recorder.rows()
    held_out = rows[-1].get("held_out_bits_per_byte") if rows and rows[-1]["step"] == recorder.steps else None
    if held_out is None:
        x, y = run.held_out
        logs: Any = run.trainer.evaluate(x, y, batch_size=run.options.batch_size, return_dict=True, verbose=0)
        held_out = logs["loss"] / math.log(2)
    with replacing(folder / "model.keras") as path:
        run.model.save(path)
    recorder.draw()
    say("held out", f"{held_out:.3f} bits per byte after {recorder.steps:,} steps")
    say("saved", f"{folder}: config.json, metrics.csv, curve.png (with matplotlib), model.keras")
    if not math.isfinite(held_out):
        say("", f"the loss is not finite: a lower --lr than {run.options.lr:g} may help")
        return
    prompt = bytes(run.text.held_out[: run.context // 2])
    continuation = text.generate(run.model, prompt, SAMPLE_BYTES, run.context, seed=run.options.seed)
    say("sample", f"continues the first {len(prompt)} bytes held out")
    print(text.printable(prompt) + "│" + text.printable(continuation))
    say("generate", f"fastaccum generate {shlex.quote(str(folder))} --prompt TEXT")
