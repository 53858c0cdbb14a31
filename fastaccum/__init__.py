"""Gradient accumulation for TensorFlow, the whole cycle as one XLA program."""

import importlib
from typing import Any

from fastaccum import kernels
from fastaccum.gpt import gpt
from fastaccum.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from fastaccum.train_step import StepResult, TrainStep
from fastaccum.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "NoLossScale",
    "StaticLossScale",
    "StepResult",
    "TrainStep",
    "Trainer",
    "addons",
    "gpt",
    "kernels",
]


def __getattr__(name: str) -> Any:
    # tensorflow-addons is optional and changes how tf.keras resolves: only those who use it pay for it.
    if name == "addons":
        return importlib.import_module("fastaccum.addons")
    raise AttributeError(f"module 'fastaccum' has no attribute {name!r}")
