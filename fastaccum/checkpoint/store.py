"""Checkpoints on disk: folders that are written whole or not at all, and read only if they are as
they were written.

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
        """Returns what `fit(resume=...)` has changed: "step", "epoch", "name", "saved" and "now" of
        each setting.
        """
        return self.manifest.get("changes", [])

    def warn_of_other_versions(self) -> None:
        """Warns with the versions that wrote the checkpoint, if this process has others."""
        saved = self.manifest["versions"]
        pairs = {name: (saved.get(name, "unknown"), now) for name, now in versions().items()}
        others = [
            f"{name} {before}, now {now}" for name, (before, now) in pairs.items() if before != now
        ]
        if others:
            warn(
                f"{self.path} was written with {one_line('; '.join(others))}. Training goes on, "
                "but may not be bit-identical to an uninterrupted one."
            )

    def tensors(self, without: Container[str] = ()) -> dict[str, tf.Tensor]:
        """Reads the tensors, by name, to host memory; CorruptCheckpointError unless they are as
        they were written.
        """
        return dict(self.read(without))

    def read(self, without: Container[str] = ()) -> Iterator[tuple[str, tf.Tensor]]:
        """Yields the tensors with their names, and holds a few in memory; raises as `tensors`."""
        prefix, seal = str(self.path / TENSORS), None
        if missing := [
            name for name in self.manifest.get("shares", ()) if not (self.path / name).is_file()
        ]:
            raise CorruptCheckpointError(f"its shares {missing}, which workers wrote, are missing")
        try:
            dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
            names = [name for name in dtypes if name not in without]
            # TensorFlow reads in 8 threads
            for piece in (names[i : i + 8] for i in range(0, len(names), 8)):
                given = {
                    "shape_and_slices": [""] * len(piece),
                    "dtypes": [dtypes[name] for name in piece],
                }
                with tf.device("CPU:0"):
                    values = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=piece, **given)
                tensors = dict(zip(piece, values, strict=True))
                seal = tensors.pop(SEAL, seal)
                yield from tensors.items()
        except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
            reason = re.sub(r"^\{\{.*?\}\} ", "", str(error)).replace(prefix, TENSORS)[:200]
            raise CorruptCheckpointError(f"its tensors cannot be read: {reason}") from error
        if seal is None or seal.shape.rank or seal.numpy() != self.manifest["sha256"].encode():
            raise CorruptCheckpointError(
                f"its tensors are not those that its {MANIFEST} was written with"
            )


def latest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Finds the newest good checkpoint in the `checkpoint_dir` of a fit; None if there is none at
    all.

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


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def inspect(path: Path) -> Checkpoint:
    """Reads the checkpoint in a folder; raises CorruptCheckpointError unless every byte is as it
    was written, and IncompatibleCheckpointError if another version wrote it.
    """
    found = Checkpoint(path, _read_manifest(path))
    if _step(path) != found.step:
        raise CorruptCheckpointError(f"it is of step {found.step}, whatever its name says")
    for _ in found.read():  # the checksum of each; a worker has no room for the slots of all
        pass
    return found


def _read_manifest(path: Path) -> Json:
    """Reads the manifest in a folder; raises as `inspect` does."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        number = int(manifest["format"])
        whole = manifest.get("sha256") == _digest(manifest)
        wrote = ", ".join(
            f"{name} {version}" for name, version in manifest.get("versions", {}).items()
        )
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise CorruptCheckpointError(
            f"{MANIFEST} does not have this format: {error!r:.200}"
        ) from error
    if number > FORMAT or (whole and number != FORMAT):  # a later version may seal otherwise
        raise IncompatibleCheckpointError(
            f"{path} has format {number}, written by {wrote or 'an earlier fastaccum'}, where "
            f"this version reads {FORMAT}. Nothing was changed: go on with that version, or name "
            "another checkpoint_dir."
        )
    if not whole:
        raise CorruptCheckpointError(
            f"{MANIFEST} was changed after it was written: its checksum differs"
        )
    return manifest


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
    others: Sequence[Callable[[], None]] = (),
) -> Path:
    """Writes one checkpoint, all of it or nothing, then removes all but the `keep` newest; returns
    its folder.

    Everything goes to a hidden folder beside it, is flushed to the disk, and then takes its name in
    one operation of the file system. If that fails, older checkpoints are as they were. Each of
    `others` waits for another worker of the `fit`, which writes its tensors by `write_share`.
    """
    path = directory / f"step-{manifest['progress']['step']:08d}"
    temporary = _hidden(path, "writing", fit)
    shares = [f"{temporary}/share-{worker}" for worker in range(1 + len(others))]
    if others:
        manifest = {
            **manifest,
            "shares": [f"{TENSORS}.data-{i:05d}-of-{len(shares):05d}" for i in range(len(shares))],
        }
    try:
        temporary.mkdir(exist_ok=bool(others))
        plain: Json = json.loads(json.dumps({"format": FORMAT, "versions": versions(), **manifest}))
        sealed, prefix = {**plain, "sha256": _digest(plain)}, str(temporary / TENSORS)
        _save(shares[0] if others else prefix, {**tensors, SEAL: sealed["sha256"]})
        for wait in others:
            wait()
        if others:
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shares, destination_prefix=prefix)
        (temporary / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n")
        for each in (*temporary.iterdir(), temporary):
            flush(each)
        if os.path.lexists(path):  # a damaged one, since training went on from before it
            _remove(path)
        temporary.rename(path)
        flush(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    step = _step(path)
    for older in [each for each in paths(directory) if _step(each) < step][keep - 1 :]:
        _remove(older)
    return path


def write_share(
    path: Path, fit: str, worker: int, tensors: Mapping[str, tf.Tensor | np.ndarray]
) -> None:
    """Writes the tensors of another worker than the first, for the checkpoint that the first writes
    to `path`.
    """
    folder = _hidden(path, "writing", fit)
    folder.mkdir(exist_ok=True)
    _save(f"{folder}/share-{worker}", tensors)
    for each in folder.glob(f"share-{worker}.*"):
        flush(each)


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
    for each in directory.iterdir():
        if _LEFTOVER.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as an absolute one; raises ValueError if TensorFlow cannot write to it, or not
    read from it.
    """
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


def _hidden(path: Path, what: str, by: str = "") -> Path:
    """Returns a name beside `path` that nobody else has, or the workers of the fit `by` alone."""
    return path.with_name(f".{path.name}.{what}-{by or f'{os.getpid()}-{secrets.token_hex(4)}'}")


def _remove(path: Path) -> None:
    """Removes a folder; a kill in the middle leaves nothing that looks like a checkpoint."""
    hidden = _hidden(path, "removing")
    path.rename(hidden)
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)
