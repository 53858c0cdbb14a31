"""manifest.json, read whole or not at all: a checksum says that every value is as it was written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.files import Json
from fastaccum.checkpoint.state import versions
from fastaccum.lines import one_line, warn

FORMAT = 4
MANIFEST = "manifest.json"


def read(path: Path) -> Json:
    """Reads the manifest in the checkpoint folder `path`.

    Raises:
        CorruptCheckpointError: raised unless it is as it was written.
        IncompatibleCheckpointError: raised if it is as another version wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        number = int(manifest["format"])
        whole = manifest.get("sha256") == digest(manifest)
        wrote = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} does not have this format: {error!r:.200}") from error
    if number > FORMAT or (whole and number != FORMAT):  # a later version may seal otherwise
        raise IncompatibleCheckpointError(
            f"{path} has format {number}, written by {wrote or 'an earlier fastaccum'}, where this version reads "
            f"{FORMAT}. Nothing was changed: go on with that version, or name another checkpoint_dir."
        )
    if not whole:
        raise CorruptCheckpointError(f"{MANIFEST} was changed after it was written: its checksum differs")
    return manifest


def warn_of_other_versions(path: Path, manifest: Json) -> None:
    """Warns with the versions that wrote a checkpoint, if this process has others."""
    saved, now = manifest["versions"], versions()
    others = [f"{name} {saved[name]}, now {now[name]}" for name in now if now[name] != saved[name]]
    if others:
        warn(
            f"{path} was written under {one_line('; '.join(others))}. Training goes on, but its bits may not be those "
            "of an uninterrupted one."
        )


def sealed(manifest: Json) -> Json:
    """Returns what manifest.json holds: a manifest with its format, versions and checksum."""
    plain: Json = json.loads(json.dumps({"format": FORMAT, "versions": versions(), **manifest}))
    return {**plain, "sha256": digest(plain)}


def digest(manifest: Json) -> str:
    """Returns the checksum of all that a manifest holds but the checksum."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
