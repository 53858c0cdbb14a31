"""Refuses optimizers that do the train step's work, or that no compiled program can run."""

from __future__ import annotations

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.packages import kinds, package

# What Keras's or tf_keras's own train step calls, and this one does not.
_UNCALLED = "scale_loss", "minimize", "compute_gradients", "_compute_gradients", "_transform_unaggregated_gradients"


def _is_users(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Tells if a class of the user's own, not of a known package, defines the method."""
    defined = next((c for c in type(optimizer).__mro__ if method in vars(c)), None)
    return defined is not None and package(defined) not in ("keras", "tf_keras", "tensorflow_addons", "transformers")


def require_supported(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises for an optimizer that does the train step's work, or that no compiled program can run."""
    own, hyper = kinds(optimizer), getattr(optimizer, "_hyper", {})
    rate = getattr(optimizer, "_learning_rate", hyper.get("learning_rate"))
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    scale = getattr(optimizer, "loss_scale_factor", None)
    step_does = "which is the train step's work: make it without, and pass Trainer"
    schedule = type(rate).__name__
    if isinstance(rate, (keras.Variable, tf.Variable)):
        rate = float(raw(rate).numpy())
    if {"keras.LossScaleOptimizer", "tf_keras.BaseLossScaleOptimizer"} & own.keys():
        problem = "scales the loss itself: pass the optimizer inside it, and Trainer(loss_scale=...)"
    elif steps is not None:
        problem = f"has gradient_accumulation_steps={steps}, {step_does}(gradient_accumulation_steps={steps})"
    elif scale is not None:
        problem = f"has loss_scale_factor={scale}, {step_does}(loss_scale=fastaccum.StaticLossScale({scale}))"
    elif "tensorflow_addons.MultiOptimizer" in own:
        problem = "has an optimizer for each of some layers: use keras.optimizers.MultiOptimizer, or one optimizer"
    elif uncalled := [name for name in _UNCALLED if _is_users(optimizer, name)]:
        problem = f"overrides {uncalled[0]}, which a train step never calls: override apply or update_step instead"
    elif isinstance(rate, (int, float)) and not checks.in_float32(rate):
        problem = f"has learning_rate={rate}: pass a finite one, which float32 holds"
    elif type(optimizer) is keras.Optimizer:
        problem = "is the base of optimizers, without an update of its own: pass one such as keras.optimizers.Adam()"
    elif "tf_keras.Nadam" in own and "tf_keras.OptimizerV2" not in own:
        problem = "counts updates in Python, which no compiled program does: use tf_keras.optimizers.legacy.Nadam"
    elif "keras.Optimizer" in own and "tf_keras.LearningRateSchedule" in kinds(rate):
        problem = f"cannot call tf_keras's {schedule}: use learning_rate=keras.optimizers.schedules.{schedule}"
    else:
        return
    raise ValueError(f"optimizer={type(optimizer).__name__} {problem}")
