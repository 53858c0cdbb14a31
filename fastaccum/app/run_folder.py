"""The folder that a run leaves behind: config.json, metrics.csv, curve.png, model.keras and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from fastaccum import checks
from fastaccum.checkpoint import files

CHECKPOINTS = "checkpoints"


def begin(out: str | None, default: str, config: dict[str, object]) -> Path:
    """Makes the folder of a new run, with its config.json, and returns the path.

    Args:
        out: a folder that is new or empty; None for the first of default, default-2, ... that does not exist.
        config: the contents of config.json.

    Raises:
        OSError, ValueError: raised if `out` has files in it, or a run cannot be in it.
    """
    path = Path(default if out is None else out)
    with checks.naming(f"no run can be in {os.path.abspath(path)!r}"):
        files.absolute(path)
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True, exist_ok=out is not None)
            break
        except FileExistsError:
            if out is not None or not os.path.lexists(path):
                raise  # of a file, or of a folder above it
            path = Path(f"{default}-{number}")
    if os.listdir(path):
        raise FileExistsError(f"{str(path)!r} has files in it, which are not overwritten: name a new folder")
    with open(path / "config.json", "x", encoding="utf-8") as file:  # of two runs that begin at once, one has it
        json.dump(config, file, indent=2)
    files.flush(path / "config.json")
    return path


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path to write to; after the block, what is there atomically replaces `file`. An OSError names `file`."""
    partial = file.with_name(f".partial-{file.name}")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        yield partial
        files.flush(partial)
        os.replace(partial, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error
