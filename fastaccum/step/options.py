"""The options of a Trainer in one table, and the schedule of a fit, checked and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal

import keras

from fastaccum import checks
from fastaccum.adapters.own_loss import Reduction
from fastaccum.basics.warnings import warn
from fastaccum.layers.attention import FlashAttention
from fastaccum.step import loss_scale as loss_scales

OnNonfinite = Literal["skip", "raise"]
JitCompile = bool | Literal["auto"]
ShardOptimizer = bool | Literal["auto"]
Check = Callable[[str, Any], object]


def _one_of(*values: str | bool) -> Check:
    return lambda name, value: checks.one_of(name, value, values)


def _auto_or_bool(name: str, value: Any) -> JitCompile:
    if isinstance(value, str):
        return checks.one_of(name, value, ("auto", True, False))
    return checks.true_or_false(name, value)


def _auto_or_count(name: str, value: Any) -> int | str:
    return (
        checks.one_of(name, value, ("auto",))
        if isinstance(value, str)
        else checks.whole_number(name, value)
    )


def _rules(
    # takes the option's name and a value; returns the value to use, or raises TypeError or
    # ValueError
    check: Check,
    *,
    # True if an attribute of a Trainer may be set after the train step was built
    may_change: bool = False,
    # False if a training may be resumed with another value, as the option moves no weight
    must_agree: bool = True,
) -> dict[str, object]:
    return {"check": check, "may_change": may_change, "must_agree": must_agree}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a train step, checked and frozen; their meanings are those of `Trainer`'s
    arguments.
    """

    # A checkpoint's "cut" has the accumulation, since other pieces may make the same update.
    gradient_accumulation_steps: int = field(
        default=1, metadata=_rules(checks.whole_number, may_change=True, must_agree=False)
    )
    steps_per_execution: int = field(
        default=1, metadata=_rules(checks.whole_number, may_change=True)
    )
    loss_scale: loss_scales.LossScale | float | None = field(
        default=None, metadata=_rules(lambda _, value: loss_scales.get(value, "float32"))
    )
    clip_norm: float | None = field(default=None, metadata=_rules(checks.positive_or_none))
    fp32_weight_gradients: bool = field(default=True, metadata=_rules(checks.true_or_false))
    flash_attention: FlashAttention = field(
        default="auto", metadata=_rules(_one_of("auto", True, False))
    )
    jit_compile: JitCompile = field(default="auto", metadata=_rules(_auto_or_bool))
    on_nonfinite: OnNonfinite = field(
        default="skip", metadata=_rules(_one_of("skip", "raise"), must_agree=False)
    )
    shard_optimizer: ShardOptimizer = field(
        default="auto", metadata=_rules(_auto_or_bool, must_agree=False)
    )
    max_programs: int | Literal["auto"] = field(
        default="auto", metadata=_rules(_auto_or_count, may_change=True, must_agree=False)
    )
    own_loss_reduction: Reduction = field(default="mean", metadata=_rules(_one_of("mean", "sum")))

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            object.__setattr__(
                self, option.name, option.metadata["check"](option.name, getattr(self, option.name))
            )

    @property
    def uses_xla(self) -> bool:
        """True if XLA compiles the step that is built with these options, in which "auto" has
        become a choice.
        """
        assert self.jit_compile != "auto"
        return self.jit_compile

    @classmethod
    def names(cls, **wanted: bool) -> list[str]:
        """Returns the options' names, of those alone whose rules have the `wanted` values."""
        return [
            option.name
            for option in dataclasses.fields(cls)
            if wanted.items() <= option.metadata.items()
        ]

    def replace(self, name: str, value: Any, *, built: bool) -> Options:
        """Returns these options with another value; ValueError if a train step was built with the
        present one.
        """
        new = dataclasses.replace(self, **{name: value})
        if not built or name in self.names(may_change=True):
            return new
        # which tells loss scales apart by their arguments
        if repr(getattr(new, name)) != repr(getattr(self, name)):
            raise ValueError(
                f"{name}={value!r} cannot be set: the train step was built with "
                f"{getattr(self, name)!r}. Make a new Trainer, with a new optimizer."
            )
        return self


def capped(name: str, value: int | None) -> int | None:
    """Returns a number of epochs or steps, checked; at most what `keras.config` says, with a
    warning, as in Keras.
    """
    value = None if value is None else checks.whole_number(name, value)
    limit = keras.config.max_epochs() if name == "epochs" else keras.config.max_steps_per_epoch()
    if not limit or (value is not None and value <= limit):
        return value
    warn(f"Limiting {name} to {limit}, as keras.config says.", UserWarning)
    return limit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The epochs in which `fit` trains and validates, from its arguments of the same names."""

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
        for name in ("epochs", "steps_per_epoch"):
            object.__setattr__(self, name, capped(name, getattr(self, name)))
        several = isinstance(self.validation_freq, (list, tuple, set))
        if several and not self.validation_freq:
            raise ValueError(
                f"{freq}={self.validation_freq} names no epoch: pass the epochs to validate after."
            )
        for epoch in self.validation_freq if several else [self.validation_freq]:
            checks.whole_number(freq, epoch)

    def validates(self, epoch: int) -> bool:
        """Tells if validation follows this epoch, counted from 0."""
        if isinstance(self.validation_freq, (list, tuple, set)):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % int(self.validation_freq) == 0
