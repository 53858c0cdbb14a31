"""XLA's persistent cache: a folder of compiled programs, which later processes load.

TensorFlow reads once, as it begins, where it keeps compiled programs. So a cache is chosen by the
environment variable FASTACCUM_COMPILE_CACHE, which `import fastaccum` reads, and this module
imports no TensorFlow. XLA itself then looks programs up, compares them byte for byte, and writes
each entry under another name before it moves it to its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import sys
from importlib import metadata
from pathlib import Path

from fastaccum.basics.warnings import warn

VARIABLE = "FASTACCUM_COMPILE_CACHE"
# Bytes of all entries, over all versions and devices. The program of a small GPT takes 1 MB or 2.
LIMIT = 2 * 2**30
# Bytes that the disk must have free, since XLA ends a training whose program it cannot write.
MIN_FREE = 256 * 2**20
# Environment variables that change the code that XLA generates.
_CODE_VARIABLES = (
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_DETERMINISTIC_OPS",
    "NVIDIA_TF32_OVERRIDE",
)
_FLAG = "--tf_xla_persistent_cache_directory"
# The flag as `choose` sets it, by the name that `_store_name` gives the folder.
_OUR_FLAG = re.compile(rf' ?{_FLAG}="[^"]*/tensorflow-[^"/]*-[0-9a-f]{{16}}"')
# What TensorFlow 2.21 says of an entry that it cannot read or write. An error that is phrased
# otherwise comes without the remedy.
_ENTRY_ERRORS = re.compile(
    r"Read less bytes than requested|Serialized cache key does not match|as binary proto"
    r"|Failed to parse serialized \w+CompilationResult|No space left on device"
)

# The folder of this version, device and flags that TensorFlow was told of, inside the user's.
_store: Path | None = None


def choose(folder: str | os.PathLike[str] | None) -> None:
    """Makes the TensorFlow that is imported next keep compiled programs in `folder`; None: nowhere.

    Where the folder cannot be used, a warning says why, and programs are compiled as without it.
    """
    global _store
    if folder is not None and _store is not None and _store.parent == _absolute(folder):
        return
    _store = None
    # The flag may be an earlier choice, or that of the process which started this one.
    flags = _OUR_FLAG.sub("", os.environ.get("TF_XLA_FLAGS", ""))
    if "TF_XLA_FLAGS" in os.environ:
        os.environ["TF_XLA_FLAGS"] = flags
    if folder is None:
        return
    path = _absolute(folder)
    try:
        _check_flags(flags)
        if "tensorflow" in sys.modules:
            raise ValueError("TensorFlow was imported before fastaccum. Import fastaccum first.")
        _make_private(path)
        _store = path / _store_name()
        _make_private(_store)
        _check_disk(_store)
        _remove_oldest(path)
    except (OSError, ValueError) as error:
        _store = None
        warn(f"The compile cache {str(path)!r} is not used: {error}")
        return
    quoted = str(_store).replace("\\", "\\\\").replace('"', '\\"')
    os.environ["TF_XLA_FLAGS"] = f'{flags} {_FLAG}="{quoted}"'.strip()


def require(folder: str | os.PathLike[str]) -> None:
    """Raises RuntimeError if `folder` is not the cache that this process uses."""
    path = _absolute(folder)
    if _store is not None and path == _store.parent:
        return
    in_use = "none is"
    if _store is not None:
        in_use = f"{str(_store.parent)!r} is"
    raise RuntimeError(
        f"compile_cache={str(folder)!r} is not in use in this process ({in_use}), and TensorFlow "
        "reads only as it begins where to keep compiled programs. Set the environment variable "
        f"{VARIABLE}={path}, and import fastaccum before tensorflow and keras."
    )


def entries() -> frozenset[str]:
    """Returns the names of the entries that this process may load."""
    if _store is None:
        return frozenset()
    return frozenset(path.name for path in _store.glob("*.pb"))


def remedy_for(error: BaseException) -> str | None:
    """Says what to do if TensorFlow's error is about an entry of the cache; None if it is not."""
    if _store is None or not _ENTRY_ERRORS.search(getattr(error, "message", "")):
        return None
    return (
        f"A program could not be read from the compile cache or written to it. Delete {_store}, "
        f"or set {VARIABLE} to nothing."
    )


def user_folder() -> Path | None:
    """Returns the folder that `fastaccum train` uses; None if FASTACCUM_COMPILE_CACHE is empty.

    That is $FASTACCUM_COMPILE_CACHE, or else `fastaccum` in $XDG_CACHE_HOME or ~/.cache.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "fastaccum"


def _absolute(folder: str | os.PathLike[str]) -> Path:
    return Path(folder).expanduser().absolute()


def _check_flags(flags: str) -> None:
    names_a_file = bool(flags.strip()) and not flags.strip().startswith("-")
    if names_a_file or _FLAG in flags:
        raise ValueError(f"TF_XLA_FLAGS={flags!r} is.")


def _make_private(folder: Path) -> None:
    """Makes a folder, or raises ValueError if others could put programs into it, which are run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise ValueError(f"it belongs to user {status.st_uid}. Choose a folder of your own.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            "others may write to it, and what it holds is run. `chmod go-w` it, if nobody has "
            "written to it, or choose another folder."
        )


def _check_disk(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise ValueError("it cannot be written to.")
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE:
        raise ValueError(f"its disk has {free >> 20} MiB free, of {MIN_FREE >> 20} MiB needed.")


def _store_name() -> str:
    """Names a folder for all but the program that decides on the code that XLA generates.

    A process that runs the code of another version, processor or flag may crash or compute
    something else, and XLA itself compares the programs alone.
    """
    distributions = metadata.packages_distributions().get("tensorflow", [])
    versions = sorted({metadata.version(name) for name in distributions})
    variables = [os.environ.get(name, "") for name in _CODE_VARIABLES]
    origin = [versions, platform.machine(), os.cpu_count(), _processor(), _gpus(), variables]
    key = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
    return f"tensorflow-{'-'.join(versions)}-{key}"


def _processor() -> list[str]:
    """Returns the lines of /proc/cpuinfo that tell which instructions there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return [platform.processor()]
    wanted = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(wanted)})


def _gpus() -> list[str]:
    """Returns the NVIDIA driver's version and the models of its GPUs."""
    driver = Path("/proc/driver/nvidia")
    lines = []
    for path in [driver / "version", *driver.glob("gpus/*/information")]:
        if path.exists():
            lines += path.read_text().splitlines()
    return sorted({line for line in lines if line.startswith(("NVRM", "Model"))})


def _remove_oldest(folder: Path) -> None:
    """Removes the entries that were read or written longest ago, until `LIMIT` holds the others."""
    files = []
    for path in folder.glob("tensorflow-*/*"):
        status = path.lstat()
        files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT:
            break
        path.unlink(missing_ok=True)
        total -= size
