"""What a Trainer is told about its train step, checked and frozen."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import keras

from fastaccum import checks
from fastaccum.adapters.own_loss import Reduction
from fastaccum.lines import warn
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step.loss_scale import LossScale

OnNonfinite = Literal["skip", "raise"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the step, a checkpoint's description and the refusals read; the meanings are those of `Trainer`."""

    gradient_accumulation_steps: int = 1
    steps_per_execution: int = 1
    loss_scale: LossScale | float | None = None
    clip_norm: float | None = None
    fp32_weight_gradients: bool = True
    jit_compile: bool = True
    on_nonfinite: OnNonfinite = "skip"
    own_loss_reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        def check(name: str, checked: Any) -> None:
            object.__setattr__(self, name, checked)

        for name in ("gradient_accumulation_steps", "steps_per_execution"):
            check(name, checks.whole_number(name, getattr(self, name)))
        for name in ("fp32_weight_gradients", "jit_compile"):
            check(name, checks.true_or_false(name, getattr(self, name)))
        check("loss_scale", loss_scales.get(self.loss_scale, compute_dtype="float32"))
        check("clip_norm", checks.positive_or_none("clip_norm", self.clip_norm))
        check("on_nonfinite", checks.one_of("on_nonfinite", self.on_nonfinite, ("skip", "raise")))
        kinds = ("mean", "sum")
        check("own_loss_reduction", checks.one_of("own_loss_reduction", self.own_loss_reduction, kinds))

    NAMES = tuple(__annotations__)
    # How data are cut, which every fit may do anew. A step is built with the others.
    CUT = ("gradient_accumulation_steps", "steps_per_execution")
    # What a training may be resumed with otherwise: a checkpoint's "cut" tells the one, and the other moves no weight.
    MAY_DIFFER = ("gradient_accumulation_steps", "on_nonfinite")

    def replace(self, name: str, value: Any, *, built: bool) -> Options:
        """These options with another value; ValueError if a train step was built with the present one."""
        new = dataclasses.replace(self, **{name: value})
        if not built or name in self.CUT:
            return new
        if repr(getattr(new, name)) != repr(getattr(self, name)):  # which tells loss scales apart by their arguments
            raise ValueError(
                f"{name}={value!r} cannot be set: the train step was built with {getattr(self, name)!r}. Make a new "
                "Trainer, with a new optimizer."
            )
        return self


def capped(name: str, steps: int | None) -> int | None:
    """A number of steps, checked; at most `keras.config.max_steps_per_epoch()`, with a warning, as in Keras."""
    if steps is not None:
        steps = checks.whole_number(name, steps)
    return _at_most(name, steps, keras.config.max_steps_per_epoch())


def _at_most(name: str, value: int | None, limit: int | None) -> int | None:
    if not limit or (value is not None and value <= limit):
        return value
    warn(f"Limiting {name} to {limit}, as keras.config says.", UserWarning)
    return limit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When `fit` trains and when it validates, from its arguments of the same names."""

    epochs: int
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def __post_init__(self) -> None:
        *numbers, freq = (field.name for field in dataclasses.fields(self))
        for name in numbers:
            value, minimum = getattr(self, name), 0 if name == "initial_epoch" else 1
            if value is not None or name in ("epochs", "initial_epoch"):
                object.__setattr__(self, name, checks.whole_number(name, value, minimum))
        object.__setattr__(self, "epochs", _at_most("epochs", self.epochs, keras.config.max_epochs()))
        object.__setattr__(self, "steps_per_epoch", capped("steps_per_epoch", self.steps_per_epoch))
        several = isinstance(self.validation_freq, (list, tuple, set))
        if several and not self.validation_freq:
            raise ValueError(f"{freq}={self.validation_freq} names no epoch: pass the epochs to validate after.")
        for epoch in self.validation_freq if several else [self.validation_freq]:
            checks.whole_number(freq, epoch)

    def validates(self, epoch: int) -> bool:
        """Whether validation follows this epoch, counted from 0."""
        if isinstance(self.validation_freq, (list, tuple, set)):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % int(self.validation_freq) == 0
