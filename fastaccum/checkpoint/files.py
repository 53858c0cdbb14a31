"""Files in a folder that others may have written to: no link is followed, and no more than a bound is read."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

Json = dict[str, Any]  # an object of JSON


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as an absolute one; raises ValueError if TensorFlow cannot write to it, or not read from it."""
    found = Path(path).absolute()
    str(found).encode()  # as TensorFlow does
    if set("*?[\\") & set(str(found)):
        raise ValueError("TensorFlow takes * ? [ and \\ in a path for patterns when it reads files")
    return found


def opened(file: Path) -> BinaryIO:
    """Opens `file` for reading; OSError if `file` is a link, which could lead out of the folder, or a device."""
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(file))
    return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read(file: Path, most: int) -> bytes:
    """Reads a plain file; OSError if the file has more than `most` bytes."""
    with opened(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most} bytes", str(file))
    return content


def without_twins(pairs: list[tuple[str, object]]) -> Json:
    """Makes a dict of JSON's pairs (as `object_pairs_hook`); ValueError if a name stands twice."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r:.100} is in it twice")
    return dict(pairs)


def flush(path: Path) -> None:
    """Flushes to the disk: a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: BinaryIO) -> str:
    """Returns the SHA-256 of what is left to read of a file."""
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()
