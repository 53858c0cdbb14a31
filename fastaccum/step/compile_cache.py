"""Keeps compiled programs in a folder for the next process: XLA's persistent cache, with seals.

XLA reads and writes a staging folder of this process alone. An entry is linked into it from the
store once its checksum is verified. Whole files that XLA wrote there are moved to the store and
sealed: the seal is a file with the program's name, the seconds of its compilation and the checksum,
and is written last.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import platform
import shutil
import socket
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from fastaccum.basics.warnings import warn
from fastaccum.kernels import private
from fastaccum.kernels.devices import has_gpu

T = TypeVar("T")
LIMIT = 2 * 2**30  # bytes, over all versions and devices; the entries used longest ago are removed
# Errors that no entry causes: of memory, and of other workers.
_OF_NO_ENTRY = (
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_SEAL, _DAMAGED = ".seal", ".damaged"
# Environment variables that change the code that XLA generates.
_VARIABLES = (
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_DETERMINISTIC_OPS",
    "NVIDIA_TF32_OVERRIDE",
)
_numbers = threading.local()
_armed: list[Callable[[], int]] = []  # TensorFlow's own numbering, once the cache is enabled
_traces: collections.Counter[str] = collections.Counter()


class Seal(NamedTuple):
    """The seal of an entry: when it was sealed, the seconds of its compilation, and its
    checksum.
    """

    sealed: float
    seconds: float
    sha256: str


class CompileCache:
    """The entries of one folder for these versions, this device and these flags; refused if others
    may write to it.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = _make_private(Path(folder).expanduser().absolute())
        self.key = hashlib.sha256(json.dumps(_origin()).encode()).hexdigest()[:16]
        device = "gpu" if has_gpu() else "cpu"
        self.store = _make_private(self.folder / f"tensorflow-{tf.__version__}-{device}-{self.key}")

    def seals(self, function: str) -> dict[str, Seal]:
        """Reads the seals of a program's entries, and of entries for any program, by the entries'
        names.
        """
        found = {}
        for path in self.store.glob(f"*{_SEAL}"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                seal = json.loads(_read(path))
                if seal["key"] == self.key and seal["function"] in (function, ""):
                    name, sealed = path.name.removesuffix(_SEAL), path.stat().st_mtime
                    found[name] = Seal(sealed, float(seal["seconds"]), str(seal["sha256"]))
        return found

    def offer(self, function: str, staging: Path) -> list[str]:
        """Links a program's verified entries into `staging`, and returns their names; moves damaged
        entries aside.
        """
        offered = []
        for name, seal in self.seals(function).items():
            entry = self.store / name
            try:
                whole = hashlib.sha256(_read(entry)).hexdigest() == seal.sha256
            except FileNotFoundError:  # removed by another process since
                continue
            except OSError:
                whole = False
            with contextlib.suppress(OSError):
                if whole:
                    os.link(entry, staging / name)
                    os.utime(entry)
                    offered.append(name)
                else:
                    self.reject(name)
        return offered

    def reject(self, name: str) -> None:
        """Moves an entry aside, with a warning."""
        warn(
            f"{self.store / name} is damaged or was changed: moved aside, to {name}{_DAMAGED}, "
            "and compiled anew."
        )
        (self.store / f"{name}{_SEAL}").unlink(missing_ok=True)
        os.replace(self.store / name, self.store / f"{name}{_DAMAGED}")

    def keep(self, function: str, seconds: float, written: list[Path]) -> None:
        """Moves whole files that XLA wrote to the store, and seals them."""
        for path in written:
            # how fast kernels ran, which any program may ask for
            of = function if path.suffix == ".pb" else ""
            seal = {"key": self.key, "function": of, "seconds": seconds}
            seal["sha256"] = hashlib.sha256(_read(path)).hexdigest()
            (half := path.with_suffix(".half")).write_text(json.dumps(seal))
            os.replace(path, self.store / path.name)
            os.replace(half, self.store / f"{path.name}{_SEAL}")
        if written:
            self._prune()

    def _prune(self) -> None:
        # of what another process has removed since: the next one goes on
        with contextlib.suppress(OSError):
            found = [
                path
                for path in self.folder.glob("tensorflow-*/*")
                if path.suffix != _SEAL and path.is_file()
            ]
            entries = sorted(
                (status.st_mtime, status.st_size, path)
                for path in found
                if (status := path.lstat())
            )
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= LIMIT:
                    break
                path.with_name(path.name + _SEAL).unlink(missing_ok=True)
                path.unlink()
                total -= size


class _Process:
    """The staging folder of this process's XLA, which is set once, and the cache in use, if any."""

    def __init__(self) -> None:
        self.cache: CompileCache | None = None
        self.staging: Path | None = None
        self._lock = threading.Lock()

    def use(self, folder: str | os.PathLike[str]) -> None:
        try:
            cache = CompileCache(folder)
            if self.staging is None:
                _remove_left(cache.store)
                mine = f"staging-{socket.gethostname()}-{os.getpid()}-"
                staging = Path(tempfile.mkdtemp(prefix=mine, dir=cache.store))
                atexit.register(self._leave, os.getpid(), staging)
                if not _enable(staging):
                    return
                self.staging = staging
            self.cache = cache
        except OSError as error:
            self._give_up(error)

    def call(self, function: str, call: Callable[[], T], again: Callable[[], T]) -> tuple[T, bool]:
        """Makes a program's first call, by `again` if its entry cannot be loaded; returns if it was
        loaded, too.
        """
        if (staging := self.staging) is None:
            return call(), False
        with self._lock:
            self._clear()
            start = time.perf_counter()
            offered = self.cache.offer(function, staging) if self.cache is not None else []
            try:
                with silence_tensorflow() if offered else contextlib.nullcontext():
                    outputs = call()
            except tf.errors.OpError as error:
                if not self._can_do_without(error, offered):
                    raise
                offered, start = [], time.perf_counter()
                outputs = again()
            seconds = time.perf_counter() - start
            written = [
                p
                for p in staging.iterdir()
                if p.name not in offered and p.is_file() and not p.is_symlink()
            ]
            if self.cache is not None:
                try:
                    self.cache.keep(function, seconds, written)
                except OSError as error:
                    self._give_up(error)
            self._clear()
        return outputs, any(name.endswith(".pb") for name in offered) and not any(
            p.suffix == ".pb" for p in written
        )

    def last(self, function: str) -> float | None:
        """Returns the seconds of the latest compilation of a program of this name, or None."""
        seals = self.cache.seals(function).values() if self.cache is not None else ()
        return max(seals).seconds if seals else None

    def _can_do_without(self, error: tf.errors.OpError, offered: list[str]) -> bool:
        """Prepares another try after an error of an entry, and returns whether there may be one."""
        if str(self.staging) in str(error) and not any(name in str(error) for name in offered):
            self._give_up(error)
            return self._elsewhere()
        if self.cache is None or not offered or isinstance(error, _OF_NO_ENTRY):
            return False
        for name in offered:
            with contextlib.suppress(OSError):
                self.cache.reject(name)
        self._clear()
        return True

    def _elsewhere(self) -> bool:
        """Points the staging folder to memory or another disk, since XLA stops where it cannot
        write.
        """
        assert self.staging is not None
        with contextlib.suppress(OSError):
            other = tempfile.mkdtemp(
                prefix="fastaccum-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            )
            atexit.register(shutil.rmtree, other, ignore_errors=True)
            full = self.staging.rename(self.staging.with_suffix(".full"))
            self.staging.symlink_to(other)
            shutil.rmtree(full, ignore_errors=True)
            return True
        return False

    def _give_up(self, error: Exception) -> None:
        self.cache = None
        warn(f"compile_cache is not used from here on: {getattr(error, 'message', error)}")

    def _clear(self) -> None:
        assert self.staging is not None
        with contextlib.suppress(OSError):
            for path in self.staging.iterdir():
                path.unlink()

    def _leave(self, process: int, staging: Path) -> None:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                staging.unlink() if staging.is_symlink() else shutil.rmtree(staging)


_process = _Process()
use, called, seconds_last_time = _process.use, _process.call, _process.last


def user_folder() -> Path | None:
    """Returns $FASTACCUM_COMPILE_CACHE, or fastaccum in $XDG_CACHE_HOME or ~/.cache; None if the
    variable is empty.
    """
    if (named := os.environ.get("FASTACCUM_COMPILE_CACHE")) is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fastaccum"


def _origin() -> dict[str, object]:
    """Describes all but the program that decides on the code that XLA generates, and on who can run
    the code.
    """
    cpu = {}
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        wanted = ("model name", "flags", "Features", "CPU part")
        cpu = {name.strip(): value.strip() for name, _, value in lines if name.strip() in wanted}
    gpus = [
        tf.config.experimental.get_device_details(gpu)
        for gpu in tf.config.get_visible_devices("GPU")
    ]
    return {
        "versions": [
            metadata.version("fastaccum"),
            tf.__version__,
            tf.version.GIT_VERSION,
            keras.__version__,
        ],
        "build": str(sorted(tf.sysconfig.get_build_info().items())),
        "cpu": [
            platform.machine(),
            cpu,
            os.cpu_count(),
            tf.config.threading.get_intra_op_parallelism_threads(),
        ],
        "gpus": [str(sorted(gpu.items())) for gpu in gpus],
        "precision": tf.config.experimental.tensor_float_32_execution_enabled(),
        "variables": [os.environ.get(name, "") for name in _VARIABLES],
    }


def _make_private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise ValueError(
            f"compile_cache={str(folder)!r} belongs to user {status.st_uid}: pass a folder of "
            "your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"compile_cache={str(folder)!r} may be written to by others, and what it holds is "
            "run: chmod go-w it, if nobody did, or pass another folder."
        )
    return folder


def _read(path: Path) -> bytes:
    """Reads a file of this user; raises OSError if it is a link or belongs to another user."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is no file of this user's")
        return stream.read()


def _remove_left(store: Path) -> None:
    """Removes the staging folders of this machine's killed processes."""
    prefix = f"staging-{socket.gethostname()}-"
    for path in store.glob(f"{prefix}*"):
        try:
            os.kill(int(path.name.removeprefix(prefix).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):
            continue


@contextlib.contextmanager
def number_by_function(function: Callable[..., object]) -> Iterator[None]:
    """Numbers the names in a trace of `function` by the function, not by all that was traced
    before.

    XLA finds a compiled program by these names, and a resumed run traces more before it than the
    first run did.
    """
    name = getattr(function, "__qualname__", "")
    if not _armed or _traces[name] == 2**12:
        yield
        return
    # far above TensorFlow's own
    first = ((zlib.crc32(name.encode()) >> 2) + 1 << 32) + (_traces[name] << 20)
    _traces[name] += 1
    before, _numbers.of_trace = getattr(_numbers, "of_trace", None), itertools.count(first)
    try:
        yield
    finally:
        _numbers.of_trace = before


class _StringView(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("text", ctypes.c_char_p))


def _enable(folder: Path) -> bool:
    """Makes XLA keep compiled programs in `folder`; returns False, with a warning, if XLA ignores
    the setting.
    """
    quoted = '"' + str(folder).replace("\\", "\\\\").replace('"', '\\"') + '"'
    given = os.environ.get("TF_XLA_FLAGS", "").strip()
    if not f"{given}-".startswith("-") or "tf_xla_persistent_cache_directory" in given:
        warn(f"compile_cache is not used, since TF_XLA_FLAGS={given!r} is.")
        return False
    flags = {"TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={quoted}"}
    if has_gpu():
        flags["XLA_FLAGS"] = f"--xla_gpu_per_fusion_autotune_cache_dir={quoted}"
    try:
        forget = _library()[private.FORGET_FLAGS_SYMBOL]
    except (OSError, AttributeError):
        warn("compile_cache is not used: it needs another build of TensorFlow.")
        return False
    forget.argtypes, forget.restype = [_StringView, ctypes.c_void_p, ctypes.c_void_p], None
    with _environment(flags):
        forget(
            _StringView(12, b"TF_XLA_FLAGS"), *(ctypes.byref(ctypes.c_void_p()) for _ in range(2))
        )
        private.pywrap_tfe.TF_ResetJitCompilerFlags()
        # Reads the other flags, and shows whether XLA writes where it was told to.
        with tf.init_scope():
            tf.function(
                lambda: tf.random.stateless_uniform([], [1, 2]), jit_compile=True, autograph=False
            )()
    if not any(folder.iterdir()):
        warn(
            "compile_cache is not used: XLA had compiled a program in this process before, and "
            "reads once where to keep them. Make the Trainer with compile_cache before anything "
            "is compiled."
        )
        return False
    _armed.append(uid := private.framework_ops.uid)
    private.framework_ops.uid = lambda: (
        next(numbers) if (numbers := getattr(_numbers, "of_trace", None)) else uid()
    )
    return True


@contextlib.contextmanager
def silence_tensorflow() -> Iterator[None]:
    """Silences TensorFlow's log, of which loading an entry makes two harmless lines of error,
    inside the block.
    """
    with contextlib.ExitStack() as undone:
        with contextlib.suppress(OSError, AttributeError):  # of another build, whose lines appear
            level, set_level = _log_level_functions()
            undone.callback(set_level, level())
            set_level(3)  # fatal, of absl's severities
        yield


def _log_level_functions() -> tuple[Any, Any]:
    """Finds the functions that read and set the level of TensorFlow's log, by the release of abseil
    in it.
    """
    library = _library()
    for read, write in private.LOG_LEVEL_SYMBOLS:
        if hasattr(library, read):
            return library[read], library[write]
    raise AttributeError("no known release of abseil")


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))


@contextlib.contextmanager
def _environment(flags: dict[str, str]) -> Iterator[None]:
    """Adds flags to environment variables inside the block; a process that is started later does
    not inherit them.
    """
    before = {name: os.environ.get(name) for name in flags}
    os.environ.update(
        {name: f"{before[name] or ''} {flag}".strip() for name, flag in flags.items()}
    )
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
