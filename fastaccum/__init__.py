"""Gradient accumulation for TensorFlow, the whole cycle as one XLA program."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastaccum.adapters.head import LinearCrossEntropy
    from fastaccum.checkpoint.signals import Preempted
    from fastaccum.step.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
    from fastaccum.step.nonfinite import NonFiniteError
    from fastaccum.step.train_step import StepResult, TrainStep
    from fastaccum.trainer import Trainer
    from fastaccum.transformer import gpt

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "LinearCrossEntropy",
    "NoLossScale",
    "NonFiniteError",
    "Preempted",
    "StaticLossScale",
    "StepResult",
    "TrainStep",
    "Trainer",
    "addons",
    "gpt",
    "kernels",
]

# Imported at first use, so that `fastaccum --help` needs no TensorFlow, and only who uses tensorflow-addons pays
# for it (it is optional, and changes what tf.keras is).
_MODULES = {
    "DynamicLossScale": "step.loss_scale",
    "LinearCrossEntropy": "adapters.head",
    "NoLossScale": "step.loss_scale",
    "NonFiniteError": "step.nonfinite",
    "Preempted": "checkpoint.signals",
    "StaticLossScale": "step.loss_scale",
    "StepResult": "step.train_step",
    "TrainStep": "step.train_step",
    "Trainer": "trainer",
    "gpt": "transformer",  # a module called gpt would take the function's place
}


def __getattr__(name: str) -> Any:
    if name in ("addons", "checkpoint", "kernels"):
        return importlib.import_module(f"fastaccum.{name}")
    if name in _MODULES:
        value = getattr(importlib.import_module(f"fastaccum.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastaccum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
