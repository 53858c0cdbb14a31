"""Puts methods of ours on an optimizer whose slots Keras's own would misread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.storage import assign, read, without_scales
from fastaccum.basics.attributes import package

_KNOWN_PACKAGES = ("keras", "tf_keras", "tensorflow_addons", "transformers")


class Guard(functools.partial):
    """A method that fastaccum gives an optimizer whose slots Keras's own would misread."""


def is_users(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Tells if a method is the user's own, of the object or of a class, not a known package's."""
    if method in vars(optimizer):
        return not isinstance(vars(optimizer)[method], Guard)
    function = getattr(type(optimizer), method, None)
    return function is not None and package(function) not in _KNOWN_PACKAGES


def guard(part: keras.optimizers.Optimizer) -> None:
    """Keeps Keras's own `fit` from reading slots that are stored in fewer bytes.

    Files of the optimizer are as Keras would write them: of int8 slots, the float32 numbers.
    """
    for name, method in _GUARDS.items():
        # Not by its `__setattr__`: Keras would track what that is given.
        vars(part).setdefault(name, Guard(method, part))


def unguard(part: keras.optimizers.Optimizer) -> None:
    """Takes back what `guard` has done."""
    for name, method in _GUARDS.items():
        present = vars(part).get(name)
        if isinstance(present, Guard) and present.func is method:
            del vars(part)[name]


def _refuse_update(part: keras.optimizers.Optimizer, *_: object) -> None:
    raise ValueError(
        f"{type(part).__name__} stores its slots in few bytes (optimizer_state_dtype), which "
        "Keras's own fit cannot update. Train with fastaccum.Trainer, or save the model and load "
        "it: the file has slots that Keras reads."
    )


def _save_as_keras(part: keras.optimizers.Optimizer, store: Any) -> None:
    """Saves the variables as Keras does, and of int8 slots the float32 numbers."""
    for place, slot in enumerate(without_scales(part)):
        store[str(place)] = read(slot).numpy()


def _load_as_keras(part: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> None:
    """Loads what `_save_as_keras` saves, or Keras's `save_own_variables`."""
    slots = without_scales(part)
    if len(store.keys()) != len(slots):
        raise ValueError(
            f"{type(part).__name__} has {len(slots)} variables, and the file {len(store.keys())}."
        )
    for place, slot in enumerate(slots):
        assign(slot, tf.convert_to_tensor(store[str(place)]))


_GUARDS: dict[str, Callable[..., None]] = {
    "update_step": _refuse_update,
    "save_own_variables": _save_as_keras,
    "load_own_variables": _load_as_keras,
}
