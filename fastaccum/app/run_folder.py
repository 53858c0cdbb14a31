"""The folder that a run leaves behind: config.json, metrics.csv, curve.png, model.keras and checkpoints.

The folder may come from others. Its files are read only if they are regular, no larger than a run writes, and hold what
a run writes. Nothing is read or written through a link.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras

from fastaccum.checkpoint import files, lock

Row = dict[str, float]  # of metrics.csv: values by column
Config = dict[str, Any]  # of config.json

FILES = ("config.json", "metrics.csv", "curve.png", "model.keras")
CHECKPOINTS = "checkpoints"
KEEP = 3  # checkpoints
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
MAY_BE_BLANK = {"tokens_per_second", "held_out_bits_per_byte"}
MOST_BYTES = 2**26  # of a file that is read, of which a run writes some thousands
LARGEST = 1e39  # beyond float32
_PARTIAL = ".partial-"


class RunFolder:
    """Writes a run's files into `path`, which is new or empty, or the folder of a run that is resumed.

    The folder belongs to one process at a time, until `held` is released. A file is written whole or not at all. A
    folder that is removed while the run goes on is made again.

    Args:
        config: the contents of config.json.
        rows: the rows of metrics.csv so far.
        held: the lock of this folder, if it is held already.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Config,
        rows: Iterable[Row] = (),
        held: lock.FolderLock | None = None,
    ):
        self.path, self.config = Path(path), config
        self.rows = list(rows)
        self.held = held or lock.FolderLock(path)
        for leftover in self.path.glob(f"{_PARTIAL}*"):  # of a process that was killed
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        self._write_config()

    def change_config(self, values: Config) -> None:
        """Writes config.json with other values."""
        self.config = {**self.config, **values}
        with self._replacing("config.json") as path:
            path.write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def keep_rows(self, last_step: int) -> None:
        """Removes from metrics.csv the rows after `last_step`, which a resumed run writes again."""
        self.rows = [row for row in self.rows if row["step"] <= last_step]
        self._write_rows()

    def add_row(self, row: Row) -> None:
        """Adds a dict with keys of `COLUMNS` to metrics.csv; missing values stay blank."""
        self.rows.append(row)
        self._write_rows()

    def save_model(self, model: keras.Model) -> None:
        """Writes model.keras; `import fastaccum`, then `keras.saving.load_model` reads it."""
        with self._replacing("model.keras") as path:
            model.save(path)

    def remove_model(self) -> None:
        """Removes the model.keras of the shorter training from which a run goes on."""
        (self.path / "model.keras").unlink(missing_ok=True)

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
        config = {"preset": "", "optimizer": "", **self.config}
        title = f"{config['preset']}, {config['optimizer']}: bits per byte of text over training steps"
        axes.set(xlabel="step", ylabel="bits per byte", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        with self._replacing("curve.png") as path:
            figure.savefig(path, dpi=150)
        return True

    def _write_rows(self) -> None:
        self._write_config()
        with self._replacing("metrics.csv") as path, open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def _write_config(self) -> None:
        """Writes config.json where there is none, in a folder that is new or was removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.held.acquire()
        if not os.path.lexists(self.path / "config.json"):
            self.change_config({})
        elif read_config(self.path) != self.config:
            raise FileExistsError(errno.EEXIST, "another run has taken this folder", str(self.path))

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """Yields a path in a new folder; after the block, the file there atomically replaces the one called `name`."""
        try:
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=self.path) as folder:
                path = Path(folder, name)
                yield path
                files.flush(path)
                os.replace(path, self.path / name)
            files.flush(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.path / name)) from error


def read_config(path: Path) -> Config:
    """Reads config.json of the run folder `path`: numbers, texts, and lists and dicts of these."""
    file = path / "config.json"
    try:
        config = json.loads(
            files.read(file, MOST_BYTES).decode(), object_pairs_hook=files.without_twins, parse_constant=_no_number
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} cannot be read, so {str(path)!r} is not a run folder: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{str(file)!r} holds a {type(config).__name__}, not the options of a run")
    for name, value in config.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(each, (dict, list)) for each in inner):
            raise ValueError(f"{str(file)!r}: {name!r} is nested, which is nothing that a run writes")
    return config


def read_rows(path: Path, steps: int) -> list[Row]:
    """Reads the rows of metrics.csv in the run folder `path`, without a last one that was cut short.

    Args:
        steps: of the whole run.
    """
    file = path / "metrics.csv"
    if not os.path.lexists(file):
        return []
    try:
        lines = io.StringIO(files.read(file, MOST_BYTES).decode(), newline="")
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        found = [{name: value for name, value in row.items() if value != ""} for row in reader]
        if list(reader.fieldnames or COLUMNS) != list(COLUMNS):
            raise ValueError(f"its columns are {reader.fieldnames}")
        rows = [{name: COLUMNS[name](value) for name, value in row.items()} for row in found]
        for before, row in itertools.pairwise([{"step": 0}, *rows]):
            if not (_is_sound(row) and before["step"] < row["step"] <= steps):
                raise ValueError(f"no run of {steps} steps writes {row} after step {before['step']}")
    except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise ValueError(f"{str(file)!r} is not what a run writes: {error}") from None
    return rows


def require_own_files(path: Path) -> None:
    """Raises ValueError if a file of a run in the folder `path` is a link, which could lead out of it, or a device."""
    if path.is_file():
        raise ValueError(f"{str(path)!r} is a file: name the folder of a run, such as {str(path.parent)!r}")
    for name, is_kind, kind in (*((n, stat.S_ISREG, "file") for n in FILES), (CHECKPOINTS, stat.S_ISDIR, "folder")):
        with contextlib.suppress(FileNotFoundError):
            if not is_kind(os.lstat(path / name).st_mode):
                raise ValueError(f"{str(path / name)!r} is not a {kind} of this run's own: remove it, if it is a link")


def require_free(path: str | os.PathLike[str]) -> None:
    """Raises an error unless the folder `path` is free for a run."""
    if os.path.lexists(path) and any(name != lock.NAME for name in os.listdir(path)):
        raise FileExistsError(f"{str(path)!r} has files in it, which are not overwritten: name a new folder")


def new_path(default: str) -> Path:
    """Makes the first of the folders default, default-2, ... that does not exist, for this process alone."""
    for number in itertools.count(1):
        path = Path(default if number == 1 else f"{default}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not os.path.lexists(path):
                raise  # of a folder above it
    raise AssertionError


def _is_sound(row: Row) -> bool:
    numbers = [value for value in row.values() if math.isfinite(value)]
    return (
        row.keys() >= COLUMNS.keys() - MAY_BE_BLANK
        and all(abs(value) < LARGEST for value in numbers)
        and 0 <= row["seconds"] < math.inf
        and 0 <= row["skipped_steps"] <= row["step"]
    )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
