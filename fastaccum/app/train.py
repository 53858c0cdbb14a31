"""`fastaccum train`: trains a byte-level transformer on text, and goes on in a run's folder."""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from fastaccum.app import text
from fastaccum.app.options import MODEL_FILE, BadArgument
from fastaccum.app.run import CHECKPOINTS, Run, begin, record_extension, replacing, resume, say
from fastaccum.checkpoint.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from fastaccum.checkpoint.lock import FolderInUseError
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.fingerprint.differences import differences
from fastaccum.step.guards import NonFiniteError

COLUMNS = (
    "step",
    "bits_per_byte",
    "held_out_bits_per_byte",
    "loss_scale",
    "grad_norm",
    "skipped_steps",
)
SAMPLE_BYTES = 400
INTERRUPTED = "ending after this step, to save what was learned; Ctrl-C again to abort"


def train(options: argparse.Namespace) -> int:
    """Trains as the parsed `options` say, and returns the exit code.

    Raises BadArgument, before a weight moves, for what cannot be trained.
    """
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
        smaller = (
            "halve --batch-size and double --accum, which makes the same updates in less memory"
        )
        print(f"out of memory: {smaller}\n{error}".rstrip(), file=sys.stderr)
    except (NonFiniteError, CheckpointWriteError, OSError) as error:
        if folder is None:  # the output has no reader
            raise
        print(
            f"{error}\nto resume: fastaccum train --resume {shlex.quote(str(folder))}",
            file=sys.stderr,
        )
    return 1


def _begin(options: argparse.Namespace) -> tuple[Run, Path]:
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
    options = run.options
    code = 0
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
            code = preempted.code
            if interrupt.requested:
                code = 130
        recorder.write()
        if code != 143:
            _finish(run, folder, recorder)
    if interrupt.requested:
        return 130
    return code


def _finish(run: Run, folder: Path, recorder: Recorder) -> None:
    """Saves the model, draws the curve, and prints the result and a sample."""
    held_out = None
    rows = recorder.rows()
    if rows and rows[-1]["step"] == recorder.steps:
        held_out = rows[-1].get("held_out_bits_per_byte")
    if held_out is None:
        x, y = run.held_out
        logs: Any = run.trainer.evaluate(
            x, y, batch_size=run.options.batch_size, return_dict=True, verbose=0
        )
        held_out = logs["loss"] / math.log(2)
    with replacing(folder / MODEL_FILE) as path:
        run.model.save(path)
    recorder.draw()
    say("held out", f"{held_out:.3f} bits per byte after {recorder.steps:,} steps")
    if recorder.seconds:
        speed = recorder.windows * run.context / recorder.seconds
        say(
            "speed",
            f"{speed:,.0f} tokens (bytes) a second, without the time to compile and evaluate",
        )
    say("saved", f"{folder}: config.json, metrics.csv, curve.png (with matplotlib), model.keras")
    if not math.isfinite(held_out):
        say("", f"the loss is not finite: a lower --lr than {run.options.lr:g} may help")
        return
    prompt = bytes(run.text.held_out[: run.context // 2])
    continuation = text.generate(
        run.model, prompt, SAMPLE_BYTES, run.context, seed=run.options.seed
    )
    say("sample", f"continues the first {len(prompt)} bytes held out")
    print(text.printable(prompt) + "│" + text.printable(continuation))
    say("generate", f"fastaccum generate {shlex.quote(str(folder))} --prompt TEXT")


class Recorder(keras.callbacks.Callback):
    """Ends a run after its last step, or when asked to, and writes metrics.csv.

    The file has a row for each epoch of `fit`.
    """

    def __init__(self, run: Run, folder: Path, interrupt: EndRequest):
        super().__init__()
        self.run = run
        self.folder = folder
        self.interrupt = interrupt
        self.steps = 0
        # Of each row of metrics.csv that is complete: the steps that were done by then, and if it
        # was evaluated.
        self.row_ends: list[int] = []
        self.row_evaluated: list[bool] = []
        self.windows = 0  # of text, trained on by this process in `seconds`
        self.seconds = 0.0

    def get_state(self) -> dict[str, object]:
        """Returns what a checkpoint holds: the steps and rows that are done, and of which run."""
        return {
            "steps": self.steps,
            "run": self.run.identity,
            "row_ends": [*self.row_ends],
            "row_evaluated": [*self.row_evaluated],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; raises ValueError if another run's did."""
        different = differences(state["run"], self.run.identity)
        if different:
            raise ValueError(f"another run wrote the checkpoint: {'; '.join(different)}")
        if "row_ends" not in state:
            raise ValueError(
                "an earlier version of fastaccum wrote the checkpoint: end the run with that "
                "version"
            )
        self.steps = state["steps"]
        self.row_ends = [*state["row_ends"]]
        self.row_evaluated = [*state["row_evaluated"]]

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        record_extension(self.run, self.folder)  # now that `fit` has found that the run can go on

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.write()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.row_ends.append(self.steps)
        self.row_evaluated.append("val_loss" in (logs or {}))
        speed = self.run.trainer.throughput
        if speed is not None:
            self.windows += speed.rows
            self.seconds += speed.seconds
        # The last row ends `fit`, be it a short one. A checkpoint of a fit that was stopped could
        # not be extended.
        self.model.stop_training = False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self.steps += 1
        if self.steps == self.run.steps:
            self.model.stop_training = True
        elif self.interrupt.requested:
            EndRequest.entered[signal.SIGTERM].requested = True  # by which `fit` saves and ends

    def rows(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.csv.

        A row without an evaluation lacks "held_out_bits_per_byte".
        """
        log = self.model.history.history
        held_out = iter(log.get("val_loss", ()))
        columns = zip(
            self.row_ends,
            self.row_evaluated,
            log.get("loss", ()),
            log.get("loss_scale", ()),
            log.get("grad_norm", ()),
            itertools.accumulate(log.get("skipped_steps", ())),
            strict=True,
        )
        rows = []
        for step, evaluated, loss, scale, norm, skipped in columns:
            row = {
                "step": step,
                "bits_per_byte": loss / math.log(2),
                "loss_scale": scale,
                "grad_norm": norm,
            }
            if evaluated:
                row["held_out_bits_per_byte"] = next(held_out) / math.log(2)
            row["skipped_steps"] = skipped
            rows.append(row)
        return rows

    def write(self) -> None:
        """Writes metrics.csv."""
        with (
            replacing(self.folder / "metrics.csv") as path,
            open(path, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())

    def draw(self) -> None:
        """Draws curve.png, bits per byte over steps, where matplotlib is installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for column, label, style in (
            ("bits_per_byte", "training", "-"),
            ("held_out_bits_per_byte", "held out", "o-"),
        ):
            rows = [row for row in self.rows() if column in row]
            axes.plot(
                [row["step"] for row in rows],
                [row[column] for row in rows],
                style,
                label=label,
                linewidth=1.2,
                markersize=4,
            )
        title = f"{self.run.name}: bits per byte of text over training steps"
        axes.set(xlabel="step", ylabel="bits per byte", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        with replacing(self.folder / "curve.png") as path:
            figure.savefig(path, dpi=150)
