"""The state of callbacks in a checkpoint: plain values and arrays."""

from __future__ import annotations

import collections
import json
import reprlib
from collections.abc import Iterator

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


def _stateful(callbacks: Callbacks) -> Iterator[tuple[str, str | None, keras.callbacks.Callback]]:
    """Yields the callbacks whose state is saved, by names that differ; the Keras class is None
    where `get_state` is.
    """
    counts = collections.Counter[str]()
    for callback in callbacks.list.callbacks:
        kind = None if hasattr(callback, "get_state") else _kind(callback)
        if kind is None or kind in COUNTERS:
            name = type(callback).__name__
            counts[name] += 1
            yield name if counts[name] == 1 else f"{name}-{counts[name]}", kind, callback


def _kind(callback: keras.callbacks.Callback) -> str:
    """Returns the name of the callback's class among Keras's own; "" where it has none."""
    return next((c.__name__ for c in type(callback).__mro__ if of_keras(c)), "")


def state(callbacks: Callbacks) -> tuple[dict[str, Json], dict[str, np.ndarray]]:
    """Returns each callback's plain values and Keras class, by name, and the arrays of all
    callbacks.
    """
    values: dict[str, Json] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, kind, callback in _stateful(callbacks):
        own: Json = {}
        values[name] = {"kind": kind, "state": own}
        if kind is None:
            own.update(_get_state(name, callback))
            continue
        for attribute in COUNTERS[kind]:
            value = getattr(callback, attribute, None)
            if isinstance(value, list):  # weights
                own[attribute] = {"arrays": len(value)}
                arrays.update(
                    {f"{name}/{attribute}/{i}": np.array(each) for i, each in enumerate(value)}
                )
            else:
                own[attribute] = plain(value)
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
    given = callback.get_state()
    try:
        copied = json.loads(json.dumps(given))
        is_json = isinstance(given, dict) and copied == given
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise TypeError(
            f"{name}.get_state() returned {given!r}, which is not a dict that JSON can store and "
            "give back unchanged."
        )
    return copied


def restore(callbacks: Callbacks, values: dict[str, Json], arrays: dict[str, tf.Tensor]) -> None:
    """Puts back what `state` returned; raises IncompatibleCheckpointError if a callback does not
    take its state.
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
                    value = [
                        arrays[f"{name}/{attribute}/{i}"].numpy() for i in range(value["arrays"])
                    ]
                setattr(callback, attribute, value)


def prepare(callbacks: Callbacks) -> None:
    """Readies callbacks for a fit that goes on, before `on_train_begin`."""
    for callback in callbacks.list.callbacks:
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
    for callback in callbacks.list.callbacks:
        if "BackupAndRestore" in (
            base.__name__ for base in type(callback).__mro__ if of_keras(base)
        ):
            raise ValueError(
                f"callbacks holds a {type(callback).__name__}, which resumes by itself: leave it "
                "out with checkpoint_dir."
            )
