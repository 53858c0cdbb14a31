"""`fastaccum train`: a byte-level transformer on text, from files to a run folder, and on from there."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time

import tensorflow as tf

from fastaccum.app import text
from fastaccum.app.options import BadArgument
from fastaccum.app.progress import Display
from fastaccum.app.recorder import Recorder
from fastaccum.app.run import Run, resumed, say
from fastaccum.app.run_folder import CHECKPOINTS, RunFolder
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.checkpoint.store import CheckpointWriteError, IncompatibleCheckpointError
from fastaccum.step.guards import NonFiniteError

SAMPLE_BYTES = 400
INTERRUPTED = "ending after this step, to save what was learned; Ctrl-C again to abort"


def train(options: argparse.Namespace) -> int:
    """Trains as the parsed `options` say, and returns the exit code; BadArgument comes before anything is written."""
    try:
        run = Run(options) if options.resume is None else resumed(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise BadArgument(str(error)) from error
    run.announce()
    try:
        folder = RunFolder(run.path, run.rows or ())
        if run.rows is None:
            folder.write_config(run.config)
    except OSError as error:
        raise BadArgument(f"--out: {error}") from error
    try:
        with EndRequest(signal.SIGINT, INTERRUPTED) as interrupt:
            display = Display(options.steps)
            recorder = Recorder(run, folder, interrupt, display)
            try:
                with display:
                    run.trainer.fit(
                        run.windows,
                        epochs=recorder.rows,
                        steps_per_epoch=recorder.steps_per_row,
                        shuffle=False,
                        callbacks=[recorder],
                        verbose=0,
                        checkpoint_dir=folder.path / CHECKPOINTS,
                        checkpoint_every=options.checkpoint_every,
                    )
            except Preempted:
                say("to resume", f"fastaccum train --resume {folder.path}")
                if not interrupt.requested:
                    raise
            _finish(run, folder, recorder, sample=not interrupt.requested)
        return 130 if interrupt.requested else 0
    except Preempted as preempted:
        return preempted.code
    except IncompatibleCheckpointError as error:
        raise BadArgument(f"--resume {run.path}: {error}") from error
    except (NonFiniteError, CheckpointWriteError) as error:
        message = f"{error}\nto resume: fastaccum train --resume {folder.path}"
    except tf.errors.ResourceExhaustedError:
        message = (
            f"out of memory at --batch-size {options.batch_size}: "
            "a smaller one with a larger --accum computes the same updates in less"
        )
    print(message, file=sys.stderr)
    return 1


def _finish(run: Run, folder: RunFolder, recorder: Recorder, sample: bool) -> None:
    """Saves the model, draws the curve, says what came out, and prints a sample."""
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
