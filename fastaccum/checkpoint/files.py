"""Paths that TensorFlow can write to, and writes that reach the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # an object of JSON


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as an absolute one; raises ValueError if TensorFlow cannot write to it, or not read from it."""
    found = Path(path).absolute()
    str(found).encode()  # as TensorFlow does
    if set("*?[\\") & set(str(found)):
        raise ValueError("TensorFlow takes * ? [ and \\ in a path for patterns when it reads files")
    return found


def flush(path: Path) -> None:
    """Flushes to the disk: a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
