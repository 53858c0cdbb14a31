"""A check that a GPU computes the same bits again in another process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from fastaccum.kernels.devices import has_op_determinism
from fastaccum.lines import warn


def deterministic(flags: str, op_determinism: bool, gpus: Sequence[str], jit_compile: bool) -> bool:
    """Tells if a step gives the same bits in every process on the same machine, as far as flags can ensure it.

    Args:
        flags: those of XLA, as XLA_FLAGS has them.
        op_determinism: whether `tf.config.experimental.enable_op_determinism()` was called (or TF_DETERMINISTIC_OPS is
            set).
        gpus: the devices; without any the answer is yes.

    >>> deterministic("--xla_gpu_deterministic_ops=true", False, ["GPU:0"], jit_compile=True)
    True
    >>> deterministic("", True, ["GPU:0"], jit_compile=True)  # may still tune a matmul to another algorithm
    False
    """
    if not gpus:
        return True
    if not jit_compile:
        return op_determinism
    parts = [flag.lstrip("-").partition("=") for flag in flags.split()]
    values = {name: value or "true" for name, _, value in parts}  # the last of a name counts
    on = {name for name, value in values.items() if value.lower() in ("true", "1")}
    untuned = values.get("xla_gpu_autotune_level") == "0"
    excluded = "xla_gpu_exclude_nondeterministic_ops" in on or op_determinism
    return "xla_gpu_deterministic_ops" in on or (excluded and untuned)


def warn_on_gpu(jit_compile: bool) -> None:
    """Warns where a training that is resumed runs on a GPU whose sums may come out otherwise than they would have."""
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    if deterministic(_xla_flags(), has_op_determinism(), gpus, jit_compile):
        return
    remedy = "the environment has XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    if not jit_compile:
        remedy = "tf.config.experimental.enable_op_determinism() is called"
    warn(
        f"This fit is resumed on {', '.join(gpus)} without deterministic operations: it goes on from the state that "
        "was saved, but not bit for bit as it would have without the interruption, since a GPU adds in an order that "
        "differs from run to run (gradients of embeddings, of pooling, of convolutions) and chooses its algorithms by "
        f"their time. It would where {remedy} in all of a training's processes, which costs speed."
    )


def _xla_flags() -> str:
    """Returns XLA's flags from the environment, which may name a file of flags."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags.strip() or flags.lstrip().startswith("-"):
        return flags
    try:
        return Path(flags).read_text()
    except OSError:
        return ""
