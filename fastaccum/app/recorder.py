"""Records a run while it trains: counts and ends its steps, and writes metrics.csv from Keras's History."""

from __future__ import annotations

import csv
import itertools
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from fastaccum.app.run import Run, replacing
from fastaccum.checkpoint.signals import EndRequest
from fastaccum.checkpoint.state import differences

Row = dict[str, float]
COLUMNS = ("step", "bits_per_byte", "held_out_bits_per_byte", "loss_scale", "grad_norm", "skipped_steps")


class Recorder(keras.callbacks.Callback):
    """Ends a run after its last step, or when asked to, and writes metrics.csv.

    An epoch of `fit` is here the stretch of steps that one row of metrics.csv sums up.
    """

    def __init__(self, run: Run, folder: Path, interrupt: EndRequest):
        super().__init__()
        self.run, self.folder, self.interrupt = run, folder, interrupt
        self.steps = 0

    def get_state(self) -> dict[str, object]:
        """Returns what a checkpoint is to hold: the steps that are done, and of which run."""
        return {"steps": self.steps, "run": self.run.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; raises ValueError if another run's did."""
        if different := differences(state["run"], self.run.identity):
            raise ValueError(f"another run wrote the checkpoint: {'; '.join(different)}")
        self.steps = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.write()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self.steps += 1
        if self.steps == self.run.options.steps:
            self.model.stop_training = True
        elif self.interrupt.requested:
            EndRequest.entered[signal.SIGTERM].requested = True  # by which `fit` saves and ends

    def rows(self) -> list[Row]:
        """Returns the rows of metrics.csv; one without an evaluation lacks "held_out_bits_per_byte"."""
        log = self.model.history.history
        losses, evaluated = log.get("loss", ()), iter(log.get("val_loss", ()))
        others = zip(
            *(log.get(name, ()) for name in ("loss_scale", "grad_norm")),
            itertools.accumulate(log.get("skipped_steps", ())),
            strict=True,
        )
        rows = []
        for number, (loss, (scale, norm, skipped)) in enumerate(zip(losses, others, strict=True), 1):
            step = min(number * self.run.steps_per_row, self.run.options.steps)
            row = {"step": step, "bits_per_byte": loss / math.log(2), "loss_scale": scale, "grad_norm": norm}
            if number in self.run.evaluated_rows:
                row["held_out_bits_per_byte"] = next(evaluated) / math.log(2)
            rows.append({**row, "skipped_steps": skipped})
        return rows

    def write(self) -> None:
        """Writes metrics.csv."""
        with replacing(self.folder / "metrics.csv") as path, open(path, "w", newline="", encoding="utf-8") as file:
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
        for column, label, style in (("bits_per_byte", "training", "-"), ("held_out_bits_per_byte", "held out", "o-")):
            points = [(row["step"], row[column]) for row in self.rows() if column in row]
            axes.plot([x for x, _ in points], [y for _, y in points], style, label=label, linewidth=1.2, markersize=4)
        title = f"{self.run.name}: bits per byte of text over training steps"
        axes.set(xlabel="step", ylabel="bits per byte", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        with replacing(self.folder / "curve.png") as path:
            figure.savefig(path, dpi=150)
