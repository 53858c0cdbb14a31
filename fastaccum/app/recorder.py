"""Records a run while it trains: metrics.csv, the display, and the place of a checkpoint."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from typing import Any, cast

import keras

from fastaccum.app.progress import Display
from fastaccum.app.run import Run
from fastaccum.app.run_folder import RunFolder
from fastaccum.checkpoint.signals import EndRequest
from fastaccum.step import compile_messages

Logs = Mapping[str, Any]  # of numbers and tensors
EVALUATIONS = 10
SHOW_SECONDS = 0.25


class Recorder(keras.callbacks.Callback):
    """Shows progress, evaluates, writes metrics.csv, and stops when asked to.

    An epoch of `fit` is here the stretch of steps that one row of metrics.csv sums up.
    """

    def __init__(self, run: Run, folder: RunFolder, interrupt: EndRequest, display: Display):
        super().__init__()
        self.run, self.folder, self.interrupt, self.display = run, folder, interrupt, display
        self.total = run.options.steps
        self.rows = math.ceil(self.total / run.steps_per_row)
        # A run that had ended has nothing left to train, and reports what it reached.
        last = folder.rows[-1] if folder.rows else {}
        self.steps, self.skipped = 0, int(last.get("skipped_steps", 0))
        self.held_out = last.get("held_out_bits_per_byte", math.nan)
        self.shown = self.row_started = time.monotonic()
        self.started = self.shown - last.get("seconds", 0)
        self.row_began = 0  # after so many steps
        self.steps_at_row: int | None = None  # None until a step has run
        self.rate = math.nan
        self.logs: Logs = {}

    def get_state(self) -> dict[str, object]:
        """Returns the place of a checkpoint in the run and its rows, and the run's identity, beside metrics.csv."""
        rows = [str(sorted(row.items())) for row in self.folder.rows if row["step"] <= self.row_began]
        return {"steps": self.steps, "row_began": self.row_began, "run": self.run.identity, "rows": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; raises ValueError for anything else."""
        steps, row_began = state.get("steps"), state.get("row_began")
        if not (type(steps) is type(row_began) is int and 0 <= row_began <= steps <= self.total):
            raise ValueError(f"no run of {self.total} steps is at {state}: another version of fastaccum wrote it")
        self.steps, self.row_began = steps, row_began
        self.display.status("", steps)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self.run.rows is not None and self.steps_at_row is None:
            # Without what was written after the checkpoint from which the run goes on, if only in part.
            self.folder.keep_rows(self.row_began)
            self.skipped = int(self.folder.rows[-1]["skipped_steps"]) if self.folder.rows else 0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self.logs = logs
        self.steps += 1
        if self.steps_at_row is None:
            # Until here it compiled, which says nothing of its speed.
            float(logs["loss"])
            self.row_started, self.steps_at_row = time.monotonic(), self.steps
            self.folder.remove_model()
        if self.steps == self.total:
            self.model.stop_training = True
        elif self.interrupt.requested:
            EndRequest.entered[signal.SIGTERM].requested = True
        # A look at the logs waits for the step, so it must be rare.
        if time.monotonic() - self.shown > SHOW_SECONDS:
            skipped = self.skipped + int(logs.get("skipped_steps", 0))
            self.display.update(self.steps, _bits(logs), self.rate, _scale(logs), skipped)
            self.shown = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.logs = logs
        self._end_row()
        self.row_began = self.steps

    def finish(self) -> None:
        """Completes metrics.csv after an interruption, and evaluates where no row says what was reached."""
        if self.steps_at_row not in (None, self.steps):
            self._end_row()
        if math.isnan(self.held_out):
            self.held_out = self._evaluate()

    def _end_row(self) -> None:
        """Writes a row of metrics.csv for the steps since the last one."""
        now = time.monotonic()
        self.skipped += int(self.logs.get("skipped_steps", 0))
        row = {
            "step": self.steps,
            "seconds": round(now - self.started, 2),
            "bits_per_byte": _bits(self.logs),
            "loss_scale": _scale(self.logs),
            "grad_norm": float(self.logs["grad_norm"]),
            "skipped_steps": self.skipped,
        }
        if trained := self.steps - (self.steps_at_row or 0):
            self.rate = trained * self.run.tokens_per_step / (now - self.row_started)
        if math.isfinite(self.rate):
            row["tokens_per_second"] = round(self.rate)
        last = self.steps == self.total or self.interrupt.requested
        if last or self.steps // self.run.steps_per_row % math.ceil(self.rows / EVALUATIONS) == 0:
            self.held_out = row["held_out_bits_per_byte"] = self._evaluate()
            self.display.row(
                self.steps, row["bits_per_byte"], self.held_out, self.rate, row["loss_scale"], self.skipped
            )
        self.folder.add_row(row)
        self.row_started, self.steps_at_row = time.monotonic(), self.steps

    def _evaluate(self) -> float:
        x, y = self.run.held_out
        self.display.status("evaluating")
        with compile_messages.announce(lambda _: self.display.status("compiling the evaluation")):
            logs = self.run.trainer.evaluate(x, y, batch_size=self.run.options.batch_size, return_dict=True, verbose=0)
        return _bits(cast(Logs, logs))


def _scale(logs: Logs) -> float:
    """Reads the loss scale, which is 1 without loss scaling."""
    return float(logs.get("loss_scale", 1))


def _bits(logs: Logs) -> float:
    return float(logs["loss"]) / math.log(2)
