"""Keras callbacks around a loop that does not wait: logs that are read only when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

REDRAW_SECONDS = 0.1


class LateLogs(Mapping):
    """A step's logs as floats, fetched from the device at the first look at a value.

    >>> logs = LateLogs({"loss": tf.constant(0.5), "skipped_steps": tf.constant(0)})
    >>> "loss" in logs, logs["loss"], dict(logs)
    (True, 0.5, {'loss': 0.5, 'skipped_steps': 0})
    """

    def __init__(self, tensors: Mapping[str, tf.Tensor], check: Callable[[], None] | None = None):
        self._tensors, self._check = tensors, check
        self._values: dict[str, float] | None = None

    def fetch(self) -> dict[str, float]:
        """All values, as plain numbers; waits for the step, and raises what the step has to say."""
        if self._values is None:
            if self._check is not None:
                self._check()
            self._values = {name: tensor.numpy().item() for name, tensor in self._tensors.items()}
        return self._values

    def __getitem__(self, name: str) -> float:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


class Callbacks:
    """A Keras `CallbackList` whose batch hooks reach only those callbacks that have any.

    Keras turns every step's logs into floats, which waits for the device. Here a callback gets `LateLogs`, and
    the progress bar is drawn at most every 0.1 s, from the step before the one in flight.
    """

    def __init__(
        self, callbacks: Any, model: Any, *, verbose: Any, epochs: int, steps: int | None, history: bool
    ):
        if isinstance(callbacks, keras.callbacks.CallbackList):
            self.list = callbacks
        else:
            self.list = keras.callbacks.CallbackList(
                callbacks,
                add_history=history,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=steps,
                model=model,
            )
        self._last_draw = 0.0
        self._late = LateLogs({})

    def hooks(self, kind: str) -> tuple[Callable[[int], None], Callable[[int, LateLogs], None]]:
        """The batch-begin and batch-end hooks for kind "train" or "test"."""
        begins, ends, bars = [], [], []
        for callback in self.list.callbacks:
            if isinstance(callback, keras.callbacks.ProgbarLogger):
                bars.append(getattr(callback, f"on_{kind}_batch_end"))
            elif _overrides(callback, f"on_{kind}_batch_end") or (
                kind == "train" and _overrides(callback, "on_batch_end")
            ):
                ends.append(getattr(callback, f"on_{kind}_batch_end"))
            if _overrides(callback, f"on_{kind}_batch_begin") or (
                kind == "train" and _overrides(callback, "on_batch_begin")
            ):
                begins.append(getattr(callback, f"on_{kind}_batch_begin"))

        def begin(batch: int) -> None:
            for hook in begins:
                hook(batch, logs={})

        def end(batch: int, logs: LateLogs) -> None:
            for hook in ends:
                hook(batch, logs=logs)
            if bars and time.monotonic() - self._last_draw > REDRAW_SECONDS:
                self._last_draw = time.monotonic()
                for bar in bars:
                    bar(batch, logs=self._late)
            self._late = logs

        return begin, end


def _overrides(callback: Any, hook: str) -> bool:
    # LambdaCallback and its like set hooks on the instance.
    if hook in vars(callback):
        return True
    return getattr(type(callback), hook, None) is not getattr(keras.callbacks.Callback, hook)
