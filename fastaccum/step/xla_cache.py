"""Settings of TensorFlow's XLA that have no public switch: its persistent cache, its log, its numbering of names."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import ops

from fastaccum.kernels.devices import has_gpu
from fastaccum.lines import warn

# Makes TensorFlow parse its flags again, which it parses before the first variable is made.
_FORGET_FLAGS = (
    "_ZN3xla27ResetFlagsFromEnvForTestingESt17basic_string_viewIcSt11char_traitsIcEEPPiPPSt6vectorIPcSaIS7_EE"
)
_LOG_LEVEL = "_ZN4absl12lts_2025081411MinLogLevelEv", "_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"
_FATAL = 3  # of absl's severities
_levels: list[int] = []  # log levels before each open block: the first is TensorFlow's default
_levels_lock = threading.Lock()
_numbers = threading.local()
_armed: list[Callable[[], int]] = []  # TensorFlow's own numbering, once the cache is enabled
_traces: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def number_by_function(function: Callable[..., object]) -> Iterator[None]:
    """Numbers the names in a trace of `function` by the function, not by all that was traced before.

    XLA finds a compiled program by these names, and a resumed run traces more before it than the first run did.
    """
    name = getattr(function, "__qualname__", "")
    if not _armed or _traces[name] == 2**12:
        yield
        return
    first = ((zlib.crc32(name.encode()) >> 2) + 1 << 32) + (_traces[name] << 20)  # far above TensorFlow's own
    _traces[name] += 1
    before, _numbers.of_trace = getattr(_numbers, "of_trace", None), itertools.count(first)
    try:
        yield
    finally:
        _numbers.of_trace = before


class _StringView(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("text", ctypes.c_char_p))


def enable_persistent_cache(folder: Path) -> bool:
    """Makes XLA keep compiled programs in `folder`; returns False, with a warning, if XLA ignores the setting."""
    quoted = '"' + str(folder).replace("\\", "\\\\").replace('"', '\\"') + '"'
    given = os.environ.get("TF_XLA_FLAGS", "").strip()
    if not f"{given}-".startswith("-") or "tf_xla_persistent_cache_directory" in given:
        warn(f"compile_cache is not used, since TF_XLA_FLAGS={given!r} is.")
        return False
    flags = {"TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={quoted}"}
    if has_gpu():
        flags["XLA_FLAGS"] = f"--xla_gpu_per_fusion_autotune_cache_dir={quoted}"
    try:
        forget = _library()[_FORGET_FLAGS]
    except (OSError, AttributeError):
        warn("compile_cache is not used: it needs another build of TensorFlow.")
        return False
    forget.argtypes, forget.restype = [_StringView, ctypes.c_void_p, ctypes.c_void_p], None
    with _environment(flags):
        forget(_StringView(12, b"TF_XLA_FLAGS"), *(ctypes.byref(ctypes.c_void_p()) for _ in range(2)))
        pywrap_tfe.TF_ResetJitCompilerFlags()
        # Reads the other flags, and shows whether XLA writes where it was told to.
        with tf.init_scope():
            tf.function(lambda: tf.random.stateless_uniform([], [1, 2]), jit_compile=True, autograph=False)()
    if not any(folder.iterdir()):
        warn(
            "compile_cache is not used: XLA had compiled a program in this process before, and reads once where to "
            "keep them. Make the Trainer with compile_cache before anything is compiled."
        )
        return False
    _armed.append(uid := ops.uid)
    ops.uid = lambda: next(numbers) if (numbers := getattr(_numbers, "of_trace", None)) else uid()
    return True


@contextlib.contextmanager
def silence_tensorflow() -> Iterator[None]:
    """Silences TensorFlow's log inside the block, in all threads, but for lines that end the process.

    Compilation logs harmless lines in the middle of fastaccum's. Loading an entry logs two lines as errors: TensorFlow
    parses the entry as text first, and XLA misses processor features that are only preferences of LLVM.
    """
    try:
        level, set_level = (_library()[name] for name in _LOG_LEVEL)
    except (OSError, AttributeError):  # another build, whose lines appear
        yield
        return
    with _levels_lock:
        _levels.append(level())
        set_level(_FATAL)
    try:
        yield
    finally:
        with _levels_lock:
            before = _levels.pop()
            if not _levels:
                set_level(before)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))


@contextlib.contextmanager
def _environment(flags: dict[str, str]) -> Iterator[None]:
    """Adds flags to environment variables inside the block; a process that is started later does not inherit them."""
    before = {name: os.environ.get(name) for name in flags}
    os.environ.update({name: f"{before[name] or ''} {flag}".strip() for name, flag in flags.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
