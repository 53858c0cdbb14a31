"""The folder that a run leaves behind: config.json, metrics.csv, curve.png, model.keras and checkpoints."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, float]  # of metrics.csv: values by column

CHECKPOINTS = "checkpoints"
COLUMNS = {
    "step": int,
    "seconds": float,
    "tokens_per_second": int,
    "bits_per_byte": float,
    "held_out_bits_per_byte": float,
    "loss_scale": float,
    "grad_norm": float,
    "skipped_steps": int,
}


class RunFolder:
    """Writes a run's files into `path`, which is new or empty, or the folder of a run that is resumed.

    Every file but metrics.csv, which grows line by line, is there as a whole or not at all.
    """

    def __init__(self, path: str | os.PathLike[str], rows: Iterable[Row] = ()):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.rows = list(rows)  # of metrics.csv so far

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes config.json."""
        with self._replacing("config.json") as path:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def keep_rows(self, last_step: int) -> None:
        """Takes the rows beyond `last_step`, which a resumed run will write again, off metrics.csv."""
        self.rows = [row for row in self.rows if row["step"] <= last_step]
        with self._replacing("metrics.csv") as path, open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def add_row(self, row: Row) -> None:
        """Appends to metrics.csv a dict with keys of `COLUMNS`; what is missing stays blank."""
        with open(self.path / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)

    def save_model(self, model: Any) -> None:
        """Writes model.keras; `import fastaccum`, then `keras.saving.load_model` reads it."""
        with self._replacing("model.keras") as path:
            model.save(path)

    def draw_curve(self) -> bool:
        """Draws curve.png, bits per byte over steps; returns False where matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for column, label, style in (("bits_per_byte", "training", "-"), ("held_out_bits_per_byte", "held out", "o-")):
            points = [(row["step"], row[column]) for row in self.rows if column in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
        axes.set(xlabel="step", ylabel="bits per byte")
        axes.grid(alpha=0.3)
        axes.legend()
        with self._replacing("curve.png") as path:
            figure.savefig(path, dpi=150)
        return True

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """The path to write a file to; at the end it takes its place at once."""
        path = self.path / f".partial-{name}"
        yield path
        os.replace(path, self.path / name)


def read_config(path: Path) -> dict[str, Any]:
    """What config.json of the run folder `path` holds."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read, so {str(path)!r} is not a run folder: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{str(file)!r} holds a {type(config).__name__}, not the options of a run")
    return config


def read_rows(path: Path) -> list[Row]:
    """The rows of metrics.csv in the run folder `path`, with numbers as values; the last one left out if cut short."""
    file = path / "metrics.csv"
    if not file.exists():
        return []
    with open(file, newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        rows = [{name: value for name, value in row.items() if value != ""} for row in reader]
    try:
        if set(reader.fieldnames or COLUMNS) != COLUMNS.keys():
            raise ValueError(f"its columns are {reader.fieldnames}")
        return [{name: COLUMNS[name](value) for name, value in {"step": row["step"], **row}.items()} for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(file)!r} is not what a run writes: {error}") from None


def new_path(path: str | None, default: str) -> Path:
    """`path`, if it is free for a run; without one, the first of default, default-2, ... that does not exist."""
    if path is None:
        numbered = (Path(f"{default}-{n}") for n in itertools.count(2))
        return next(p for p in itertools.chain([Path(default)], numbered) if not p.exists())
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{path!r} has files in it, which are not overwritten: name a new folder")
    return folder
