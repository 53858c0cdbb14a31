"""Settings of the optimizer, such as its learning rate, that a resumed fit may change.

They change in two ways:

- `fit(resume={"learning_rate"})` names settings that it takes anew. They are then left out where
  the fit is compared with the checkpoint (`without`), and what they were is noted (`changes`).
- Callbacks set the learning rate in hooks that a resumed fit calls again. `HookRates` keeps them
  from changing it twice.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.callbacks import Callbacks
from fastaccum.checkpoint import callback_state
from fastaccum.fingerprint.differences import differences
from fastaccum.fingerprint.values import Json

RATE = "learning_rate"
# The hooks of callbacks that a resumed fit calls although the fit before it has called them.
TRAIN_HOOK = "on_train_begin"
EPOCH_HOOK = "on_epoch_begin"
# Settings of Keras's optimizers that are None where they are off, and numbers where they are on.
_OPTIONAL = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")
# The names of variables that hold a learning rate: `learning_rate` if it is a number, and
# `current_learning_rate`, in which tf_keras holds the value of a schedule.
_RATE_VARIABLE = re.compile(r"(.*/)?(current_)?learning_rate(-\d+)?")


class Change(NamedTuple):
    """A setting that differs from the saved one, with both values as a description has them."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        saved = self.saved
        now = self.now
        # A schedule is a dict. Beside a number it is shown by its class alone.
        if isinstance(saved, dict) != isinstance(now, dict):
            saved = _class_of(saved)
            now = _class_of(now)
        # As `differences` fills it in, {0} is the saved value and {1} the present one.
        return "; ".join(differences(saved, now, self.name, words="{1} instead of {0}"))


def _class_of(value: Any) -> Any:
    return value["class"] if isinstance(value, dict) else value


def names(resume: Any) -> frozenset[str]:
    """Returns the names in `resume`, which is one or a collection of them.

    Raises TypeError for anything else.
    """
    if isinstance(resume, str):
        return frozenset([resume])
    is_collection = isinstance(resume, (set, frozenset, list, tuple))
    if not is_collection or not all(isinstance(name, str) for name in resume):
        raise TypeError(
            f"resume={checks.shown(resume)} must be a name or several, "
            'as in resume={"learning_rate"}.'
        )
    return frozenset(resume)


def show(resume: frozenset[str]) -> str:
    """Writes names as Python does, in order."""
    return "{" + ", ".join(f'"{name}"' for name in sorted(resume)) + "}"


def is_rate(variable: str) -> bool:
    """Tells if the optimizer's variable of this name holds a learning rate."""
    return _RATE_VARIABLE.fullmatch(variable) is not None


def known(description: Json) -> list[str]:
    """Lists the settings that `resume` may name: the learning rate and the optimizer's numbers."""
    settings = []
    for name, value in _innermost(description["optimizer"]).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or name == RATE or name in _OPTIONAL:
            settings.append(name)
    return settings


def require_known(resume: frozenset[str], description: Json) -> None:
    """Raises ValueError if `resume` names anything else than a setting of the optimizer."""
    settings = known(description)
    unknown = sorted(resume.difference(settings))
    if unknown:
        raise ValueError(
            f"resume names {', '.join(map(repr, unknown))}, and may name settings of the "
            f"optimizer {description['optimizer']['class']}: "
            f"{', '.join(settings) or 'it has none'}. Arguments of fit that may change, such as "
            "epochs and callbacks, need no name."
        )


def changes(saved: Json, now: Json, resume: frozenset[str]) -> list[Change]:
    """Lists the named settings that differ between two descriptions."""
    settings_then = _innermost(saved["optimizer"])
    settings_now = _innermost(now["optimizer"])
    different = []
    for name in sorted(resume):
        change = Change(name, settings_then.get(name), settings_now.get(name))
        if differences(change.saved, change.now):
            different.append(change)
    return different


def without(description: Json, resume: frozenset[str]) -> Json:
    """Returns a description without the named settings, and the variables of a named rate."""
    optimizer = copy.deepcopy(description["optimizer"])
    innermost = _innermost(optimizer)  # a part of the copy, or all of it
    for name in resume:
        innermost.pop(name, None)
    if RATE in resume:
        for path in [*optimizer["variables"]]:
            if is_rate(path):
                del optimizer["variables"][path]
    return {**description, "optimizer": optimizer}


def _innermost(optimizer: Json) -> Json:
    """Returns the part of an optimizer's description that has its settings, by name.

    Optimizers of tensorflow-addons may wrap another, whose description is an item of theirs.
    """
    while isinstance(optimizer.get("optimizer"), dict):
        optimizer = optimizer["optimizer"]
    return optimizer


class HookRates:
    """Records the learning rates before and after callbacks' hooks, to repeat the hooks on resume.

    A resumed fit calls `on_train_begin` a second time, and `on_epoch_begin` too if it resumes
    within an epoch. A callback that halves the rate there would halve it twice. `prepare_repeat`
    therefore restores what the hook found when it was first called, so that it sets and prints the
    same rate as then. If it sets another rate, the callbacks have changed: `find_change` returns
    both rates, and `record_repeat` lets the new one hold.

        with rates.noting(hook):  # the first call
            call_the_hook()

        rates.prepare_repeat(hook)  # the call on resume
        call_the_hook()
        change = rates.find_change(hook)
        if change is not None and is_wanted(change):
            rates.record_repeat(hook)

    Attributes:
        record: by hook, as a checkpoint holds it: "found", the rates before the hook; "left", those
            after it; and "callbacks", the states of callbacks before it.
    """

    def __init__(self, variables: Sequence[tf.Variable], callbacks: Callbacks, record: Json):
        self.record = dict(record)
        self._variables = variables
        self._callbacks = callbacks

    @contextlib.contextmanager
    def noting(self, hook: str) -> Iterator[None]:
        """Records the rates before and after the block, which calls the hook."""
        found = self._read()
        states = {}
        if hook == EPOCH_HOOK:  # a callback may have no state before on_train_begin
            states = callback_state.own(self._callbacks)
        yield
        self.record[hook] = {"found": found, "left": self._read(), "callbacks": states}

    def can_repeat(self, hook: str) -> bool:
        """Tells if each recorded rate still has its variable; a schedule of Keras 3 has none."""
        return len(self.record[hook]["found"]) == len(self._variables)

    def prepare_repeat(self, hook: str) -> None:
        """Restores the rates and the states of callbacks from before the hook's first call."""
        noted = self.record[hook]
        for variable, rate in zip(self._variables, noted["found"], strict=True):
            variable.assign(rate)
        callback_state.restore_own(self._callbacks, noted["callbacks"])

    def find_change(self, hook: str) -> Change | None:
        """Returns the first rate that the repeated hook has set otherwise than recorded, if any."""
        for noted, now in zip(self.record[hook]["left"], self._read(), strict=True):
            if noted != now:
                return Change(RATE, noted, now)
        return None

    def record_repeat(self, hook: str) -> None:
        """Records the rates that the repeated hook has set in place of the earlier ones."""
        self.record[hook] = {**self.record[hook], "left": self._read()}

    def _read(self) -> list[float]:
        return [float(np.array(variable.read_value())) for variable in self._variables]
