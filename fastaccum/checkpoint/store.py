"""Checkpoints on disk: folders that are written whole or not at all, and read only if they are as they were written.

    run/checkpoints/step-00000050/
        manifest.json               what the training state is, and the size and sha256 of every file
        state.index                 the tensors, in the format of tf.train.Checkpoint:
        state.data-00000-of-00001   tf.train.load_checkpoint("step-00000050/state") reads them

Nothing here is pickled: a manifest is JSON, and a tensor file holds numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.checkpoint import files
from fastaccum.checkpoint import manifest as manifests
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.files import Json
from fastaccum.checkpoint.manifest import MANIFEST
from fastaccum.lines import warn

TENSORS = "state"
FILES = [f"{TENSORS}.data-00000-of-00001", f"{TENSORS}.index"]
_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})")
_LEFTOVER = re.compile(r"\.step-[0-9]{8,19}(\.writing-|\.removing-)[\w-]+")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One good checkpoint.

    Attributes:
        path: its folder.
        manifest: what manifest.json holds: "progress", "history", "description", "tensors", ...
    """

    path: Path
    manifest: Json

    @property
    def step(self) -> int:
        """Returns the number of train steps done."""
        return self.manifest["progress"]["step"]

    @property
    def epoch(self) -> int:
        """Returns the epoch, from 0, that training goes on in."""
        return self.manifest["progress"]["epoch"]

    @property
    def history(self) -> dict[str, list[Any]]:
        """Returns the logs of the epochs that ended, as in `History.history`."""
        return manifests.history_in(self.manifest)

    def tensors(self) -> dict[str, tf.Tensor]:
        """Reads every tensor, by name, to host memory; CorruptCheckpointError if they were changed meanwhile."""
        specs = self.manifest["tensors"]
        try:
            with tf.device("CPU:0"):
                values = tf.raw_ops.RestoreV2(
                    prefix=str(self.path / TENSORS),
                    tensor_names=list(specs),
                    shape_and_slices=[""] * len(specs),
                    dtypes=[tf.as_dtype(spec["dtype"]) for spec in specs.values()],
                )
        except tf.errors.OpError as error:
            raise CorruptCheckpointError(f"{self.path}: its tensors cannot be read: {str(error)[:200]}") from error
        return dict(zip(specs, values, strict=True))


def latest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Finds the newest good checkpoint in the `checkpoint_dir` of a fit; None if there is none at all.

    Warns of each newer one that is not good, and says why.

    Raises:
        ValueError: raised if there are checkpoints, but no good one; names each, and what is wrong with it.
        IncompatibleCheckpointError: raised if one, whichever it is, has another version's format.

    >>> latest("no/such/folder") is None
    True
    """
    found, bad = None, []
    for path in paths(directory):
        try:
            if found is not None:
                manifests.read(path)  # which may be another version's, and would be removed one day
                continue
            found = inspect(path)
        except CorruptCheckpointError as error:
            if found is None:
                bad.append(f"{path}: {error}")
                warn(f"checkpoint {path} is passed over: {error}")
    if found is not None:
        return found
    if bad:
        raise ValueError(
            f"None of the {len(bad)} checkpoints in {str(directory)!r} is good. Nothing was changed. Name another "
            "folder to start afresh. " + "; ".join(bad)
        )
    return None


def paths(directory: str | os.PathLike[str]) -> list[Path]:
    """Lists the folders of checkpoints, good or not, newest first."""
    try:
        names = os.listdir(checks.path("directory", directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"directory={str(directory)!r} cannot be read: {error.strerror}.") from error
    return sorted((Path(directory, name) for name in names if _FOLDER.fullmatch(name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def inspect(path: Path) -> Checkpoint:
    """Reads the checkpoint in a folder.

    Raises:
        CorruptCheckpointError: raised unless every byte is as it was written.
        IncompatibleCheckpointError: raised if another version wrote it.
    """
    manifest = manifests.read(path)
    try:
        _require_files(path, manifest["files"])
    except OSError as error:
        raise CorruptCheckpointError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} lists files without size or checksum: {error}") from error
    _require_tensors(path, manifest["tensors"], manifest["files"][FILES[0]]["size"])
    if _step(path) != manifest["progress"]["step"]:
        raise CorruptCheckpointError(f"it is of step {manifest['progress']['step']}, whatever its name says")
    return Checkpoint(path, manifest)


def _require_files(path: Path, listed: Json) -> None:
    if sorted(listed) != FILES:
        raise CorruptCheckpointError(f"{MANIFEST} lists the files {sorted(listed)}, which are not {FILES}")
    for name, written in listed.items():
        with files.opened(path / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != written["size"]:
                raise CorruptCheckpointError(f"{name} has {size} bytes of {written['size']}")
            if files.sha256(file) != written["sha256"]:
                raise CorruptCheckpointError(f"{name} was changed after it was written: its checksum differs")


def _require_tensors(path: Path, specs: Json, size: int) -> None:
    try:
        reader = tf.train.load_checkpoint(str(path / TENSORS))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"its tensors cannot be read: {str(error)[:200]}") from error
    held = {name: {"shape": list(shapes[name]), "dtype": dtypes[name].name} for name in shapes}
    if held != specs:
        differing = sorted(name for name in {*held, *specs} if held.get(name) != specs.get(name))
        raise CorruptCheckpointError(f"its tensors are not those that {MANIFEST} lists: {', '.join(differing[:3])}")
    # Memory for a tensor is taken before its bytes are looked at; of text, each element takes a byte at least.
    claimed = sum(math.prod(shapes[name]) * (dtypes[name].size or 1) for name in shapes)
    if claimed > size:
        raise CorruptCheckpointError(f"its tensors would be of {claimed} bytes, in a file of {size}")


def write(directory: Path, manifest: Json, tensors: Mapping[str, tf.Tensor | np.ndarray], keep: int) -> Path:
    """Writes one checkpoint, all of it or nothing, then removes all but the `keep` newest; returns its folder.

    Everything goes to a hidden folder beside it, is flushed to the disk, and then takes its name in one operation of
    the file system. If that fails, older checkpoints are as they were.

    Raises:
        IncompatibleCheckpointError: raised if another version's checkpoint is in its place.
    """
    path = directory / f"step-{manifest['progress']['step']:08d}"
    temporary = _hidden(path, "writing")
    try:
        temporary.mkdir()
        with tf.device("CPU:0"):
            values = [tf.convert_to_tensor(value) for value in tensors.values()]
            specs = {
                n: {"shape": v.shape.as_list(), "dtype": v.dtype.name} for n, v in zip(tensors, values, strict=True)
            }
            tf.raw_ops.SaveV2(
                prefix=str(temporary / TENSORS),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=values,
            )
        written = {}
        for name in FILES:
            with files.opened(temporary / name) as file:
                written[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": files.sha256(file)}
        (temporary / MANIFEST).write_bytes(manifests.written({**manifest, "tensors": specs, "files": written}))
        for each in (*temporary.iterdir(), temporary):
            files.flush(each)
        if os.path.lexists(path):  # a damaged one, since training went on from before it
            with contextlib.suppress(CorruptCheckpointError):
                manifests.read(path)
            _remove(path)
        temporary.rename(path)
        files.flush(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    step = _step(path)
    for older in [each for each in paths(directory) if _step(each) < step][keep - 1 :]:
        with contextlib.suppress(IncompatibleCheckpointError):  # of another version: never removed
            with contextlib.suppress(CorruptCheckpointError):
                manifests.read(older)
            _remove(older)
    return path


def remove_leftovers(directory: Path) -> None:
    """Removes what a process that was killed had been writing or removing."""
    with contextlib.suppress(FileNotFoundError):  # no folder, nothing left
        for each in directory.iterdir():
            if _LEFTOVER.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)


def _hidden(path: Path, what: str) -> Path:
    """Returns a name beside `path` that nobody else has."""
    return path.with_name(f".{path.name}.{what}-{os.getpid()}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Removes a folder; a kill in the middle leaves nothing that looks like a checkpoint."""
    hidden = _hidden(path, "removing")
    path.rename(hidden)
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)
