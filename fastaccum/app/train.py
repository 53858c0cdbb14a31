"""`fastaccum train`: a byte-level transformer on text, from files to a run folder, and on from there."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

from fastaccum import checks
from fastaccum.app import text
from fastaccum.app.extend import adopt_last
from fastaccum.app.options import BadArgument, name_options
from fastaccum.app.progress import Display
from fastaccum.app.recorder import Recorder
from fastaccum.app.run import CHANGED, Run, require_resumable, resume, say
from fastaccum.app.run_folder import CHECKPOINTS, KEEP, RunFolder, new_path, read_config, require_free
from fastaccum.checkpoint import files
from fastaccum.checkpoint.errors import CheckpointWriteError, IncompatibleCheckpointError
from fastaccum.checkpoint.lock import FolderInUseError, FolderLock
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.memory.errors import OutOfMemoryError
from fastaccum.step import compile_messages
from fastaccum.step.guards import NonFiniteError

SAMPLE_BYTES = 400
INTERRUPTED = "ending after this step, to save what was learned; Ctrl-C again to abort"


def train(options: argparse.Namespace) -> int:
    """Trains as the parsed `options` say, and returns the exit code; BadArgument comes before anything is written."""
    with contextlib.ExitStack() as held:
        try:
            run, folder = _begin(options, held)
        except (ValueError, TypeError, ImportError, OSError, FolderInUseError) as error:
            raise BadArgument(str(error)) from error
        except (MemoryError, tf.errors.ResourceExhaustedError) as error:
            raise BadArgument(_out_of_memory(options)) from error
        try:
            return _train(run, folder)
        except Preempted as preempted:
            return preempted.code
        except IncompatibleCheckpointError as error:
            raise BadArgument(f"--resume {folder.path}: {error}") from error
        except (NonFiniteError, CheckpointWriteError, FolderInUseError, OSError) as error:
            message = f"{error}\nto resume: fastaccum train --resume {shlex.quote(str(folder.path))}"
        except (MemoryError, tf.errors.ResourceExhaustedError) as error:
            message = name_options(str(error)) if isinstance(error, OutOfMemoryError) else _out_of_memory(options)
        print(message, file=sys.stderr)
        return 1


def _begin(options: argparse.Namespace, held: contextlib.ExitStack) -> tuple[Run, RunFolder]:
    """Makes the run and its folder, which belongs to this process until `held` is closed."""
    place = options.resume or options.out or "runs"
    with checks.naming(f"no run can be in {os.path.abspath(place)!r}"):
        files.absolute(place)
    if options.resume is not None:
        path = require_resumable(options)
        lock = held.enter_context(FolderLock(path))
        run = resume(options)
        run.announce()
        folder = RunFolder(path, read_config(path), run.rows or (), lock)
        folder.change_config({name: run.config[name] for name in CHANGED})
        adopt_last(run, path / CHECKPOINTS)
        return run, folder
    if options.out is not None:
        require_free(options.out)
    run = Run(options)
    run.announce()
    try:
        path = new_path(f"runs/{run.name}") if options.out is None else Path(options.out)
        path.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context(FolderLock(path))
        require_free(path)  # still: another process may have taken it
        return run, RunFolder(path, run.config, held=lock)
    except (OSError, ValueError, FolderInUseError) as error:
        raise ValueError(f"--out: {error}") from error


def _train(run: Run, folder: RunFolder) -> int:
    with EndRequest(signal.SIGINT, INTERRUPTED) as interrupt:
        display = Display(run.options.steps)
        recorder = Recorder(run, folder, interrupt, display)
        try:
            with display, compile_messages.announce(display.hear):
                run.trainer.fit(
                    run.windows,
                    epochs=recorder.rows,
                    steps_per_epoch=run.steps_per_row,
                    shuffle=False,
                    callbacks=[recorder],
                    verbose=0,
                    checkpoint_dir=folder.path / CHECKPOINTS,
                    checkpoint_every=run.options.checkpoint_every,
                    keep=KEEP,
                )
        except Preempted:
            say("to resume", f"fastaccum train --resume {shlex.quote(str(folder.path))}", wraps=False)
            if not interrupt.requested:
                raise
        _finish(run, folder, recorder, sample=not interrupt.requested)
    return 130 if interrupt.requested else 0


def _out_of_memory(options: argparse.Namespace) -> str:
    return (
        f"out of memory at --batch-size {options.batch_size}, --accum {options.accum}: "
        "halve the one and double the other, which makes the same updates in less memory"
    )


def _finish(run: Run, folder: RunFolder, recorder: Recorder, sample: bool) -> None:
    """Saves the model, draws the curve, and prints the result and a sample."""
    recorder.finish()
    folder.save_model(run.model)
    has_curve = folder.draw_curve()
    seconds = time.monotonic() - recorder.started
    say("held out", f"{recorder.held_out:.3f} bits per byte after {recorder.steps:,} steps, {seconds:.0f} s")
    if not math.isfinite(recorder.held_out):
        say("", f"the loss is not finite: a lower --lr than {run.options.lr:g} may help")
    say("saved", f"{folder.path}: config.json, metrics.csv, {'curve.png, ' * has_curve}model.keras")
    if not has_curve:
        say("", "no curve.png, since matplotlib is not installed: pip install matplotlib")
    if sample and math.isfinite(recorder.held_out):
        prompt = bytes(run.text.held_out[: run.context // 2])
        continuation = text.generate(run.model, prompt, SAMPLE_BYTES, run.context, seed=run.options.seed)
        say("sample", f"continues the first {len(prompt)} bytes held out")
        print(text.printable(prompt) + "│" + text.printable(continuation))
        say("generate", f"fastaccum generate {shlex.quote(str(folder.path))} --prompt TEXT", wraps=False)
