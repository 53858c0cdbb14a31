"""manifest.json, read whole or not at all: a checksum says that every value is as it was written."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from fastaccum.checkpoint import files
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.files import Json
from fastaccum.checkpoint.state import PACKAGES, versions
from fastaccum.lines import one_line, warn

FORMAT = 3
MANIFEST = "manifest.json"
LARGEST = 2**27  # bytes: what is larger is not read, nor written
# The parts that are read, and their types. The checksum tells damage; this tells what another program sealed.
_PARTS = {
    "versions": dict.fromkeys(("python", *PACKAGES), str),
    "progress": {**dict.fromkeys(("step", "epoch", "step_in_epoch", "first_epoch"), int), "stopped": bool},
    "data": dict,
    "history": {"epoch": list, "history": dict},
    "callbacks": dict,
    "description": dict.fromkeys(("model", "metrics", "optimizer", "loss_scale", "loss", "batch plan"), dict),
    "cut": {"gradient_accumulation_steps": int, "replicas": int},
    "tensors": dict,
    "files": dict,
}


def read(path: Path) -> Json:
    """Reads the manifest in the checkpoint folder `path`.

    Raises:
        CorruptCheckpointError: raised unless it is as it was written.
        IncompatibleCheckpointError: raised if it is as another version wrote it.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CorruptCheckpointError("it is not a directory")
        content = files.read(path / MANIFEST, LARGEST)
        manifest = json.loads(content.decode(), object_pairs_hook=files.without_twins)
        if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
            raise CorruptCheckpointError(f"{MANIFEST} does not have this format: it has no number of one")
        if manifest["format"] > FORMAT:  # which may be sealed otherwise
            raise IncompatibleCheckpointError(_of_another_version(path, manifest))
        if manifest.pop("sha256", None) != digest(manifest):
            raise CorruptCheckpointError(f"{MANIFEST} was changed after it was written: its checksum differs")
    except (CorruptCheckpointError, IncompatibleCheckpointError):
        raise
    except OSError as error:
        raise CorruptCheckpointError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except RecursionError as error:
        raise CorruptCheckpointError(f"{MANIFEST} is nested too deep") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{MANIFEST} is not JSON: {error}") from error
    if manifest["format"] != FORMAT:
        raise IncompatibleCheckpointError(_of_another_version(path, manifest))
    _require("", _PARTS, manifest)
    return manifest


def _of_another_version(path: Path, manifest: Json) -> str:
    saved = manifest.get("versions")
    wrote = ", ".join(f"{k} {v}" for k, v in saved.items()) if isinstance(saved, dict) else "an earlier fastaccum"
    return (
        f"{path} has format {manifest['format']}, written by {wrote}, where this version reads {FORMAT}. Nothing was "
        "changed: go on with that version, or name another checkpoint_dir."
    )


def _require(key: str, wanted: Any, value: Any) -> None:
    """Raises CorruptCheckpointError, with its key, for a part that is missing or of another type."""
    kind = dict if isinstance(wanted, dict) else wanted
    if type(value) is not kind:
        raise CorruptCheckpointError(f"{MANIFEST}: {key[1:]} is {reprlib.repr(value)}, which is no {kind.__name__}")
    for name, part in wanted.items() if isinstance(wanted, dict) else ():
        if name not in value:
            raise CorruptCheckpointError(f"{MANIFEST}: {f'{key}.{name}'[1:]} is missing")
        _require(f"{key}.{name}", part, value[name])


def warn_of_other_versions(path: Path, manifest: Json) -> None:
    """Warns with the versions that wrote a checkpoint, if this process has others."""
    saved, now = manifest["versions"], versions()
    others = [f"{name} {saved[name]}, now {now[name]}" for name in now if now[name] != saved[name]]
    if others:
        warn(
            f"{path} was written under {one_line('; '.join(others))}. Training goes on, but its bits may not be those "
            "of an uninterrupted one."
        )


def history_in(manifest: Json) -> Json:
    """Returns `History.history`, of plain values; some versions set apart what a user's callback had made of it."""
    others = manifest["history"].get("others", {})  # an empty list for a log that a callback had removed
    return manifest["history"]["history"] | {name: values for name, values in others.items() if values != []}


def written(manifest: Json) -> bytes:
    """Returns the content of manifest.json; raises CorruptCheckpointError if that would be too large to read."""
    plain: Json = json.loads(json.dumps({"format": FORMAT, "versions": versions(), **manifest}))
    content = (json.dumps({**plain, "sha256": digest(plain)}, indent=1) + "\n").encode()
    if len(content) > LARGEST:
        raise CorruptCheckpointError(f"{MANIFEST} would be larger than {LARGEST} bytes")
    return content


def digest(manifest: Json) -> str:
    """Returns the checksum of all that a manifest holds but the checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
