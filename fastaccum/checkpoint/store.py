"""Checkpoints on disk: folders that are written whole or not at all, and read only if unchanged.

    run/checkpoints/step-00000050/
        manifest.json               what the training state is, with a checksum
        state.index                 the tensors, in the format of tf.train.Checkpoint, with
        state.data-00000-of-00001   checksums of TensorFlow's;
                                    tf.train.load_checkpoint("step-00000050/state") reads them

The tensors hold the manifest's checksum too, so that the files of two checkpoints are not taken for
one. Nothing here is pickled: a manifest is JSON, and a tensor file holds numbers. Where several
workers share the optimizer's slots out, each writes a file of tensors; state.index tells which
tensor is in which, and the manifest names the files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.warnings import one_line, warn
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.fingerprint.run import versions
from fastaccum.fingerprint.values import Json

FORMAT = 6
MANIFEST = "manifest.json"
TENSORS = "state"
SEAL = "manifest"  # the tensor with the manifest's checksum
# Tensors that are read and held at once: TensorFlow reads them in 8 threads.
READ_AT_ONCE = 8
_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})")
_LEFTOVER = re.compile(r"\.step-[0-9]{8,19}(\.writing-|\.removing-)[\w-]+")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One good checkpoint.

    Attributes:
        path: its folder.
        manifest: what manifest.json holds: "progress", "history", "description", ...
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
        return self.manifest["history"]["history"]

    @property
    def changes(self) -> list[Json]:
        """Returns the settings that `fit(resume=...)` has changed.

        Each has a "step", "epoch", "name", "saved" and "now".
        """
        return self.manifest["changes"]

    def warn_of_other_versions(self) -> None:
        """Warns with the versions that wrote the checkpoint, if this process has others."""
        different = []
        for name, now in versions().items():
            before = self.manifest["versions"].get(name, "unknown")
            if before != now:
                different.append(f"{name} {before}, now {now}")
        if different:
            warn(
                f"{self.path} was written with {one_line('; '.join(different))}. Training goes "
                "on, but may not be bit-identical to an uninterrupted one."
            )

    def tensors(self, without: Container[str] = ()) -> dict[str, tf.Tensor]:
        """Reads the tensors, by name, to host memory.

        Raises CorruptCheckpointError unless they are as they were written.
        """
        return dict(self.read(without))

    def read(self, without: Container[str] = ()) -> Iterator[tuple[str, tf.Tensor]]:
        """Yields the tensors with their names, and holds a few in memory; raises as `tensors`."""
        shares = self.manifest.get("shares", ())
        missing = [name for name in shares if not (self.path / name).is_file()]
        if missing:
            raise CorruptCheckpointError(f"its shares {missing}, which workers wrote, are missing")

        prefix = str(self.path / TENSORS)
        seal = None
        try:
            dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
            names = [name for name in dtypes if name not in without]
            for start in range(0, len(names), READ_AT_ONCE):
                piece = names[start : start + READ_AT_ONCE]
                with tf.device("CPU:0"):
                    values = tf.raw_ops.RestoreV2(
                        prefix=prefix,
                        tensor_names=piece,
                        shape_and_slices=[""] * len(piece),
                        dtypes=[dtypes[name] for name in piece],
                    )
                for name, value in zip(piece, values, strict=True):
                    if name == SEAL:
                        seal = value
                    else:
                        yield name, value
        except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
            reason = re.sub(r"^\{\{.*?\}\} ", "", str(error)).replace(prefix, TENSORS)[:200]
            raise CorruptCheckpointError(f"its tensors cannot be read: {reason}") from error
        if seal is None or seal.shape.rank > 0 or seal.numpy() != self.manifest["sha256"].encode():
            raise CorruptCheckpointError(
                f"its tensors are not those that its {MANIFEST} was written with"
            )


def latest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Finds the newest good checkpoint in the `checkpoint_dir` of a fit; None without any.

    Warns of each newer one that is not good, and says why.

    Raises:
        ValueError: raised if there are checkpoints, but no good one; names each, and what is wrong
            with it.
        IncompatibleCheckpointError: raised if the newest that is not damaged has another version's
            format.

    >>> latest("no/such/folder") is None
    True
    """
    bad = []
    for path in paths(directory):
        try:
            return inspect(path)
        except CorruptCheckpointError as error:
            bad.append(f"{path}: {error}")
            warn(f"checkpoint {path} is passed over: {error}")
    if bad:
        raise CorruptCheckpointError(
            f"None of the {len(bad)} checkpoints in {str(directory)!r} is good. Nothing was "
            "changed. Name another "
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
        raise ValueError(
            f"directory={str(directory)!r} cannot be read: {error.strerror}."
        ) from error
    return sorted(
        (Path(directory, name) for name in names if _FOLDER.fullmatch(name)),
        key=_step,
        reverse=True,
    )


def folder(directory: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def inspect(path: Path) -> Checkpoint:
    """Reads the checkpoint in a folder.

    Raises CorruptCheckpointError unless every byte is as it was written, and
    IncompatibleCheckpointError if another version wrote it.
    """
    checkpoint = Checkpoint(path, _read_manifest(path))
    if _step(path) != checkpoint.step:
        raise CorruptCheckpointError(f"it is of step {checkpoint.step}, whatever its name says")
    for _ in checkpoint.read():  # the checksum of each; a worker has no room for the slots of all
        pass
    return checkpoint


def _read_manifest(path: Path) -> Json:
    """Reads the manifest in a folder; raises as `inspect` does."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest = _digest(manifest) if isinstance(manifest, dict) else ""
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{MANIFEST} does not have this format: {error!r:.200}"
        ) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CorruptCheckpointError(f"{MANIFEST} does not have this format: no number")

    number = manifest["format"]
    is_whole = manifest.get("sha256") == digest
    if number > FORMAT or (is_whole and number != FORMAT):  # a later version may seal otherwise
        raise IncompatibleCheckpointError(
            f"{path} has format {number}, written by {_wrote(manifest)}, where this version reads "
            f"{FORMAT}. Nothing was changed: go on with that version, or name another "
            "checkpoint_dir."
        )
    if not is_whole:
        raise CorruptCheckpointError(
            f"{MANIFEST} was changed after it was written: its checksum differs"
        )
    return manifest


def _wrote(manifest: Json) -> str:
    """Returns the versions that wrote a manifest, whose format may be any."""
    saved = manifest.get("versions")
    if not isinstance(saved, dict) or not saved:
        return "an earlier fastaccum"
    return ", ".join(f"{name} {version}" for name, version in saved.items())


def _digest(manifest: Json) -> str:
    """Returns the checksum of all that a manifest holds but the checksum."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write(
    directory: Path,
    manifest: Json,
    tensors: Mapping[str, tf.Tensor | np.ndarray],
    keep: int,
    fit: str = "",
    waits: Sequence[Callable[[], object]] = (),
) -> Path:
    """Writes one checkpoint, then removes all but the `keep` newest; returns its folder.

    Everything goes to a hidden folder beside it, is flushed to the disk, and then takes its name in
    one operation of the file system. If that fails, older checkpoints are as they were. Each of
    `waits` waits for another worker of the `fit`, which writes its tensors by `write_share`.
    """
    path = folder(directory, manifest["progress"]["step"])
    temporary = _hidden(path, "writing", fit)
    prefix = str(temporary / TENSORS)
    sealed: Json = {"format": FORMAT, "versions": versions(), **manifest}
    if waits:
        workers = 1 + len(waits)
        sealed["shares"] = [f"{TENSORS}.data-{i:05d}-of-{workers:05d}" for i in range(workers)]
    try:
        temporary.mkdir(exist_ok=bool(waits))
        sealed = json.loads(json.dumps(sealed))  # as it will be read
        sealed["sha256"] = _digest(sealed)
        tensors = {**tensors, SEAL: sealed["sha256"]}
        if waits:
            _save(f"{temporary}/share-0", tensors)
            for wait in waits:
                wait()
            shares = [f"{temporary}/share-{worker}" for worker in range(workers)]
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shares, destination_prefix=prefix)
        else:
            _save(prefix, tensors)
        (temporary / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n")
        for written in (*temporary.iterdir(), temporary):
            flush(written)
        if os.path.lexists(path):  # a damaged one, since training went on from before it
            _remove(path)
        temporary.rename(path)
        flush(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    older = [other for other in paths(directory) if _step(other) < _step(path)]
    for superfluous in older[keep - 1 :]:
        _remove(superfluous)
    return path


def write_share(
    path: Path, fit: str, worker: int, tensors: Mapping[str, tf.Tensor | np.ndarray]
) -> None:
    """Writes the tensors of another worker than the chief, which writes a checkpoint to `path`."""
    temporary = _hidden(path, "writing", fit)
    temporary.mkdir(exist_ok=True)
    _save(f"{temporary}/share-{worker}", tensors)
    for file in temporary.glob(f"share-{worker}.*"):
        flush(file)


def _save(prefix: str, tensors: Mapping[str, tf.Tensor | np.ndarray | str]) -> None:
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=[tf.convert_to_tensor(value) for value in tensors.values()],
        )


def remove_leftovers(directory: Path) -> None:
    """Removes what a process that was killed had been writing or removing."""
    for entry in directory.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as an absolute one; raises ValueError for one that TensorFlow cannot use."""
    absolute_path = Path(path).absolute()
    str(absolute_path).encode()  # as TensorFlow does
    if set("*?[\\") & set(str(absolute_path)):
        raise ValueError("TensorFlow takes * ? [ and \\ in a path for patterns when it reads files")
    return absolute_path


def flush(path: Path) -> None:
    """Flushes to the disk: a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path, what: str, by: str = "") -> Path:
    """Returns a name beside `path` that nobody else has, or the workers of the fit `by` alone."""
    owner = by or f"{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{what}-{owner}")


def _remove(path: Path) -> None:
    """Removes a folder; a kill in the middle leaves nothing that looks like a checkpoint."""
    hidden = _hidden(path, "removing")
    path.rename(hidden)
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)
