"""The rules of a Trainer's options in one table, and the schedule of a fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal

import keras
import numpy as np

from fastaccum import checks
from fastaccum.adapters.own_loss import Reduction
from fastaccum.adapters.storage import STATE_DTYPES, StateDtype, Storage
from fastaccum.basics.warnings import warn
from fastaccum.layers.attention import FlashAttention
from fastaccum.layers.float8 import Float8
from fastaccum.layers.scan import ScanLayers
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
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={checks.shown(value)} must be 'auto', True or False.")
    return bool(value)


def _auto_or_count(name: str, value: Any) -> int | str:
    if isinstance(value, str):
        return checks.one_of(name, value, ("auto",))
    return checks.whole_number(name, value)


def _loss_scale(_: str, value: Any) -> loss_scales.LossScale:
    return loss_scales.get(value, "float32")  # a Trainer has resolved "auto" by its model's dtype


def _rules(check: Check, *, may_change: bool = False, must_agree: bool = True) -> dict[str, object]:
    """Returns the rules of an option.

    Args:
        check: takes the option's name and a value; returns the value to use, or raises TypeError
            or ValueError.
        may_change: whether the Trainer's attribute may be set after the train step was built.
        must_agree: False if a training may be resumed with another value, as the option moves no
            weight.
    """
    return {"check": check, "may_change": may_change, "must_agree": must_agree}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a train step, checked and frozen.

    Each is an argument of `Trainer`, whose signature has its default.
    """

    # A checkpoint's "cut" has the accumulation, since other pieces may make the same update.
    gradient_accumulation_steps: int = field(
        metadata=_rules(checks.whole_number, may_change=True, must_agree=False)
    )
    steps_per_execution: int = field(metadata=_rules(checks.whole_number, may_change=True))
    loss_scale: loss_scales.LossScale | float | None = field(metadata=_rules(_loss_scale))
    clip_norm: float | None = field(metadata=_rules(checks.positive_or_none))
    fp32_weight_gradients: bool = field(metadata=_rules(checks.true_or_false))
    flash_attention: FlashAttention = field(metadata=_rules(_one_of("auto", True, False)))
    jit_compile: JitCompile = field(metadata=_rules(_auto_or_bool))
    float8: Float8 = field(metadata=_rules(_auto_or_bool))
    scan_layers: ScanLayers = field(metadata=_rules(_auto_or_bool, must_agree=False))
    # A checkpoint is converted to what a resumed training has.
    optimizer_state_dtype: StateDtype = field(
        metadata=_rules(_one_of(*STATE_DTYPES), must_agree=False)
    )
    stochastic_rounding: bool = field(metadata=_rules(checks.true_or_false))
    on_nonfinite: OnNonfinite = field(metadata=_rules(_one_of("skip", "raise"), must_agree=False))
    shard_optimizer: ShardOptimizer = field(metadata=_rules(_auto_or_bool, must_agree=False))
    max_programs: int | Literal["auto"] = field(
        metadata=_rules(_auto_or_count, may_change=True, must_agree=False)
    )
    own_loss_reduction: Reduction = field(metadata=_rules(_one_of("mean", "sum")))

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            check = option.metadata["check"]
            value = check(option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)

    @property
    def uses_xla(self) -> bool:
        """True if XLA compiles the step; "auto" must have become a choice."""
        assert self.jit_compile != "auto"
        return self.jit_compile

    @property
    def storage(self) -> Storage:
        """The storage of slots and bfloat16 weights."""
        return Storage(self.optimizer_state_dtype, self.stochastic_rounding)

    @classmethod
    def names(cls, **rules: bool) -> list[str]:
        """Lists the options that have these rules, such as `may_change=True`; all without any."""
        names = []
        for option in dataclasses.fields(cls):
            if all(option.metadata[rule] == value for rule, value in rules.items()):
                names.append(option.name)
        return names

    def replace(self, name: str, value: Any, *, built: bool) -> Options:
        """Returns these options with another value.

        Raises:
            ValueError: raised if a train step was built with the present value, and keeps it.
        """
        new = dataclasses.replace(self, **{name: value})
        if not built or name in self.names(may_change=True):
            return new
        # Texts are compared: those of loss scales have their arguments.
        if repr(getattr(new, name)) != repr(getattr(self, name)):
            raise ValueError(
                f"{name}={value!r} cannot be set: the train step was built with "
                f"{getattr(self, name)!r}. Make a new Trainer, with a new optimizer."
            )
        return self


def capped(name: str, value: int | None) -> int | None:
    """Checks a number of epochs or steps, and limits it to what `keras.config` allows.

    A number that is limited is warned of, as in Keras.
    """
    if value is not None:
        value = checks.whole_number(name, value)
    limit = keras.config.max_steps_per_epoch()
    if name == "epochs":
        limit = keras.config.max_epochs()
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
        self._check("epochs", self.epochs)
        self._check("initial_epoch", self.initial_epoch, minimum=0)
        for name in ("steps_per_epoch", "validation_steps", "validation_batch_size"):
            value = getattr(self, name)
            if value is not None:
                self._check(name, value)
        for name in ("epochs", "steps_per_epoch"):
            object.__setattr__(self, name, capped(name, getattr(self, name)))

        epochs = [self.validation_freq]
        if self._lists_epochs:
            epochs = self.validation_freq
            if not epochs:
                raise ValueError(
                    f"validation_freq={epochs} names no epoch: pass the epochs to validate after."
                )
        for epoch in epochs:
            checks.whole_number("validation_freq", epoch)

    def _check(self, name: str, value: object, minimum: int = 1) -> None:
        object.__setattr__(self, name, checks.whole_number(name, value, minimum))

    @property
    def _lists_epochs(self) -> bool:
        return isinstance(self.validation_freq, (list, tuple, set))

    def validates(self, epoch: int) -> bool:
        """Tells if validation follows this epoch, counted from 0."""
        if self._lists_epochs:
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % int(self.validation_freq) == 0
