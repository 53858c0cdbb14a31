"""Gradient accumulation for TensorFlow, the whole cycle as one XLA program."""

import ast
import importlib
import os
import pkgutil
import platform
import sys
from typing import Any

from fastaccum.adapters import saving
from fastaccum.step import compile_cache

__version__ = "0.1.0"

if "tensorflow" not in sys.modules:  # which reads both while it is imported
    # Where an NVIDIA driver is, warnings say why a GPU is not used. Errors are Python's exceptions,
    # too.
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "1" if os.path.exists("/proc/driver/nvidia/version") else "3"
    )
    # convolutions gain also where TensorFlow's default is off
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

if os.environ.get(compile_cache.VARIABLE):
    compile_cache.choose(os.environ[compile_cache.VARIABLE])
saving.register()

# Imported at first use, so that `fastaccum --help` needs no TensorFlow, and only those who use
# tensorflow-addons pay for it (it is optional, and changes what tf.keras is). The stub lists each
# name once, with the module it stands in.
_MODULES = {
    alias.name: node.module or alias.name
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULES.keys() - {"addons"})  # which `help`, asking for every name, would import


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fastaccum' has no attribute {name!r}")
    module = importlib.import_module(f"fastaccum.{_MODULES[name]}")
    value = globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
