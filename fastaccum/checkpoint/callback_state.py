"""The state of callbacks in a checkpoint: plain values and arrays."""

from __future__ import annotations

import collections
import json
import reprlib
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.callbacks import Callbacks
from fastaccum.basics.attributes import of_keras
from fastaccum.basics.warnings import warn
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.fingerprint.values import Json, plain
from fastaccum.kernels import private

# The attributes that Keras's own callbacks count with. Others of its callbacks hold nothing that
# outlives a step.
COUNTERS = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    "ModelCheckpoint": ("best", *private.MODEL_CHECKPOINT_COUNTERS),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": (private.EMA_WEIGHTS_IN_MODEL,),
    "TensorBoard": (private.global_train_batch.name, private.GLOBAL_TEST_BATCH),
}


class _Stateful(NamedTuple):
    """A callback whose state is saved."""

    name: str  # that no other of them has
    kind: str | None  # the name of its Keras class; None for one with `get_state`
    callback: keras.callbacks.Callback


def _stateful(callbacks: Callbacks) -> Iterator[_Stateful]:
    """Yields the callbacks whose state is saved."""
    counts = collections.Counter[str]()
    for callback in callbacks.callback_list.callbacks:
        kind = None
        if not hasattr(callback, "get_state"):
            kind = _kind(callback)
            if kind not in COUNTERS:
                continue
        name = type(callback).__name__
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}-{counts[name]}"
        yield _Stateful(name, kind, callback)


def _kind(callback: keras.callbacks.Callback) -> str:
    """Returns the name of the callback's class among Keras's own; "" where it has none."""
    for base in type(callback).__mro__:
        if of_keras(base):
            return base.__name__
    return ""


def state(callbacks: Callbacks) -> tuple[dict[str, Json], dict[str, np.ndarray]]:
    """Returns each callback's plain values and Keras class, by name, and all their arrays."""
    values: dict[str, Json] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, kind, callback in _stateful(callbacks):
        if kind is None:
            values[name] = {"kind": None, "state": _get_state(name, callback)}
            continue
        counters: Json = {}
        for attribute in COUNTERS[kind]:
            value = getattr(callback, attribute, None)
            if isinstance(value, list):  # weights
                counters[attribute] = {"arrays": len(value)}
                for i, array in enumerate(value):
                    arrays[f"{name}/{attribute}/{i}"] = np.array(array)
            else:
                counters[attribute] = plain(value)
        values[name] = {"kind": kind, "state": counters}
    return values, arrays


def own(callbacks: Callbacks) -> dict[str, Json]:
    """Returns what the callbacks' own `get_state` methods return, by name."""
    return {
        name: _get_state(name, callback)
        for name, kind, callback in _stateful(callbacks)
        if kind is None
    }


def restore_own(callbacks: Callbacks, states: dict[str, Json]) -> None:
    """Puts back what `own` returned."""
    for name, kind, callback in _stateful(callbacks):
        if kind is None and name in states:
            callback.set_state(states[name])


def _get_state(name: str, callback: keras.callbacks.Callback) -> Json:
    """Returns a copy of a callback's state; raises TypeError unless JSON gives it back."""
    returned = callback.get_state()
    try:
        copied = json.loads(json.dumps(returned))
        is_json = isinstance(returned, dict) and copied == returned
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise TypeError(
            f"{name}.get_state() returned {returned!r}, which is not a dict that JSON can store "
            "and give back unchanged."
        )
    return copied


def restore(callbacks: Callbacks, values: dict[str, Json], arrays: dict[str, tf.Tensor]) -> None:
    """Puts back what `state` returned.

    Raises IncompatibleCheckpointError if a callback does not take its state.
    """
    for name, kind, callback in _stateful(callbacks):
        saved = values.get(name)
        if saved is None or saved["kind"] != kind:
            warn(
                f"the callback {name} has no state in the checkpoint: it starts afresh.",
                UserWarning,
            )
        elif kind is None:
            try:
                callback.set_state(saved["state"])
            except Exception as error:
                raise IncompatibleCheckpointError(
                    f"{name}.set_state raised {type(error).__name__}: {error}. No variable was "
                    f"changed. It was given {reprlib.repr(saved['state'])}, as the checkpoint "
                    "has it: make set_state take that, or leave the callback out."
                ) from error
        else:
            for attribute, value in saved["state"].items():
                if isinstance(value, dict):
                    count = value["arrays"]
                    value = [arrays[f"{name}/{attribute}/{i}"].numpy() for i in range(count)]
                setattr(callback, attribute, value)


def prepare(callbacks: Callbacks) -> None:
    """Readies callbacks for a fit that goes on, before `on_train_begin`."""
    for callback in callbacks.callback_list.callbacks:
        kind = _kind(callback)
        if kind == "CSVLogger":
            callback.append = True  # or it would begin its file anew
        elif kind == "Callback" and not hasattr(callback, "get_state"):
            set_by_keras = ("validation_data", private.CALLBACK_MODEL, "params", "model")
            held = sorted(name for name in vars(callback) if name not in set_by_keras)
            if held:
                warn(
                    f"the callback {type(callback).__name__} starts afresh where training is "
                    "resumed: give it get_state() and set_state(state) to save what it holds "
                    f"({', '.join(held)}).",
                    UserWarning,
                )


def require_one_resume(callbacks: Callbacks) -> None:
    """Raises ValueError if a callback would resume as well."""
    for callback in callbacks.callback_list.callbacks:
        keras_classes = [base.__name__ for base in type(callback).__mro__ if of_keras(base)]
        if "BackupAndRestore" in keras_classes:
            raise ValueError(
                f"callbacks holds a {type(callback).__name__}, which resumes by itself: leave it "
                "out with checkpoint_dir."
            )
