"""Keras's callbacks for a loop that does not wait: a log is read from the device when a callback
asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.attributes import kinds
from fastaccum.kernels import private

REDRAW_SECONDS = 0.1

Kind = Literal["train", "test"]
Logs = Callable[[], dict[str, float]]


def log_value(tensor: tf.Tensor) -> Any:
    """Returns a log as a number, or as an array where a metric has one value for each class, as in
    Keras.
    """
    value = tensor.numpy()
    return value if value.ndim else value.item()


class LateLogs(dict):  # callbacks ask for a dict: TensorBoard ignores anything else
    """A step's logs as plain numbers, fetched from the device at the first look at one."""

    def __init__(
        self,
        tensors: Mapping[str, tf.Tensor] | None = None,
        check: Callable[[], None] | None = None,
    ):
        super().__init__(tensors or {})
        self._check = check
        self._late = True

    def __iter__(self) -> Iterator[str]:
        # Overridden, or `dict(logs)` would copy the tensors behind this class's back.
        return super().__iter__()


def _fetching(name: str) -> Callable:
    method = getattr(dict, name)

    @functools.wraps(method)
    def fetched(self: LateLogs, *args: object, **kwargs: object) -> object:
        if self._late:
            if self._check is not None:
                self._check()  # waits for the step, and raises what it has to say
            self._late = False
            dict.update(self, {name: log_value(tensor) for name, tensor in dict.items(self)})
        return method(self, *args, **kwargs)

    return fetched


for _name in (
    *(
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__eq__",
        "__ne__",
        "__repr__",
        "__or__",
        "__ror__",
        "__ior__",
    ),
    *("get", "items", "values", "copy", "pop", "popitem", "setdefault", "update"),
):
    setattr(LateLogs, _name, _fetching(_name))


class _Progress(keras.callbacks.ProgbarLogger):
    """Keras's progress line with the loss first, and without a loss scale of 1 or 0 skipped
    steps.
    """

    # of the epoch that ends; not in its logs, whose numbers are reproducible
    rows_per_second: float | None = None

    def set_params(self, params: dict[str, Any]) -> None:
        # In a file, a line for each epoch: a bar would fill it with the codes that move a
        # terminal's cursor.
        if params["verbose"] == "auto" and not _is_read_live():
            params = {**params, "verbose": 2}
        super().set_params(params)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        super().on_train_batch_end(batch, _worth_saying(logs))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        shown = _worth_saying(logs)
        if self.rows_per_second is not None:
            shown["rows_per_second"] = self.rows_per_second
        super().on_epoch_end(epoch, shown)


def _is_read_live() -> bool:
    """Tells if somebody reads as it goes: in a terminal, or in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _hook(
    callback: keras.callbacks.Callback, name: str
) -> Callable[[int, Mapping[str, float]], None]:
    """Returns a batch hook, which tf_keras calls with the logs by position and Keras by the name
    `logs`.
    """
    hook = getattr(callback, name)
    by_position = any(kind.startswith("tf_keras.") for kind in kinds(callback))
    return hook if by_position else lambda batch, logs: hook(batch, logs=logs)


def _worth_saying(logs: Mapping[str, float] | None) -> dict[str, float]:
    says_nothing = {"loss_scale": 1, "skipped_steps": 0}
    in_order = sorted((logs or {}).items(), key=lambda log: log[0] != "loss")
    return {
        name: value
        for name, value in in_order
        if name not in says_nothing or value != says_nothing[name]
    }


class Callbacks:
    """A Keras `CallbackList` whose batch hooks reach only those callbacks that have any, and get
    `LateLogs`.
    """

    def __init__(
        self,
        callbacks: Any,
        model: keras.Model,
        *,
        verbose: Any,
        epochs: int,
        steps: int | None,
        history: bool,
        validates: bool = False,  # within a fit, whose progress line counts train steps alone
    ):
        require(callbacks, verbose)
        self._validates = validates
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            params = {"verbose": verbose, "epochs": epochs, "steps": steps}
            given = [] if callbacks is None else tf.nest.flatten(callbacks)
            bar = (
                []
                if verbose == 0 or any(_is(each, "ProgbarLogger") for each in given)
                else [_Progress()]
            )
            callbacks = keras.callbacks.CallbackList([*given, *bar], history, model=model, **params)
        self.list = callbacks
        if history and private.train_counter.exists(model):
            private.train_counter(model).assign(0)  # as tf_keras's fit does
        shown = verbose != 0 and keras.config.is_interactive_logging_enabled()
        # Prints parts of a line while a program compiles, also to a file: nothing else tells that
        # the fit goes on.
        self.announce: Callable[[str], None] | None = self._print_part if shown else None
        self.say = self.announce if _is_read_live() else None  # prints advice
        self._last_draw = 0.0
        self._is_within_line = False  # of an announcement
        self._previous: Logs = dict

    def _print_part(self, part: str) -> None:
        """Prints a part of a line, which begins below the progress line if that was drawn."""
        if self._last_draw and not self._is_within_line and _is_read_live():
            print()
        self._is_within_line = not part.endswith("\n")
        print(part, end="", flush=True)

    def require_none(self, name: str, reason: str) -> None:
        """Raises ValueError if one of the callbacks is of this class."""
        if any(_is(each, name) for each in self.list.callbacks):
            raise ValueError(f"callbacks holds a {name}, {reason}.")

    def show_rate(self, rows_per_second: float | None) -> None:
        """Lets the progress line of the epoch that ends tell how many rows a second it trained
        with, where known.
        """
        for callback in self.list.callbacks:
            if isinstance(callback, _Progress):
                callback.rows_per_second = rows_per_second

    def hooks(self, kind: Kind) -> tuple[Callable[[int], None], Callable[[int, Logs], None]]:
        """Returns the batch-begin and batch-end hooks; logs are made only if a callback asks for
        them.
        """
        name = f"on_{kind}_batch_end"
        bars = [c for c in self.list.callbacks if _is(c, "ProgbarLogger")]
        others = [c for c in self.list.callbacks if c not in bars]
        if self._validates:
            bars = []
        begins = [
            _hook(c, f"on_{kind}_batch_begin") for c in others if _overrides(c, kind, "begin")
        ]
        ends = [(c, _hook(c, name)) for c in others if _overrides(c, kind, "end")]

        def begin(batch: int) -> None:
            if batch == 0:
                self._previous = dict  # the epoch before has nothing to say of this one
            for hook in begins:
                hook(batch, {})

        boards = (
            [c for c in others if "tf_keras.TensorBoard" in kinds(c)] if kind == "train" else []
        )

        def end(batch: int, read: Logs) -> None:
            # which takes the number of a step from what tf_keras's own loop counts with
            for board in boards:
                private.train_counter(board.model).assign(private.global_train_batch(board))
            logs = read() if ends else {}
            for callback, hook in ends:
                hook(batch, logs if _records(callback) else {})
            for bar in bars:
                bar.seen = batch + 1  # tf_keras's may count samples, of which a step says nothing
            if bars and time.monotonic() - self._last_draw > REDRAW_SECONDS:
                self._last_draw = time.monotonic()
                for bar in bars:  # in training from the step before the one in flight
                    getattr(bar, name)(batch, logs=read() if kind == "test" else self._previous())
            self._previous = read

        return begin, end


def require(callbacks: Any, verbose: Any, kind: str | None = None) -> None:
    """Raises TypeError or ValueError unless these are callbacks, of a `kind` if one is given, and a
    verbosity.
    """
    checks.require_nest("callbacks", callbacks)
    for callback in (
        [] if callbacks is None else tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    ):
        if isinstance(callback, type):
            raise TypeError(
                f"callbacks holds the class {callback.__name__}: call it, and pass what it makes."
            )
        if not hasattr(callback, "set_model"):
            raise TypeError(f"callbacks holds {callback!r}: pass keras.callbacks.Callback objects.")
        if kind is not None and kind not in kinds(callback):
            raise TypeError(
                f"callbacks holds {callback!r}: a tf_keras model's own loop takes tf_keras's "
                "callbacks."
            )
        if _is(callback, "BaseLogger"):
            raise ValueError(
                "callbacks holds a BaseLogger, which fails in tf_keras's own fit too: leave it out."
            )
        if _is(callback, "UpdateEmbeddingCallback"):
            raise ValueError(
                "callbacks holds an UpdateEmbeddingCallback, which needs the model's own fit."
            )
        if _is(callback, "TensorBoard") and importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "callbacks holds a TensorBoard, which needs: pip install 'fastaccum[tensorboard]'"
            )
    checks.one_of("verbose", verbose, ("auto", 0, 1, 2))


def _is(callback: keras.callbacks.Callback, name: str) -> bool:
    """Tells if a callback is of this class of Keras 3 or tf_keras."""
    return not {f"keras.{name}", f"tf_keras.{name}"}.isdisjoint(kinds(callback))


def take_backed_up_epoch(model: keras.Model, steps_per_epoch: int | None) -> int | None:
    """Returns the epoch at which a BackupAndRestore has this fit begin, which it leaves with the
    model; else None.
    """
    if state := private.training_state(model, None):  # tf_keras's
        epoch, _ = state.maybe_load_initial_counters_from_ckpt(steps_per_epoch, 0, mode="train")
        return int(epoch) or None
    if epoch := private.initial_epoch(model, None):
        private.initial_epoch.set(model, None)
    return epoch


def _overrides(
    callback: keras.callbacks.Callback, kind: Kind, when: Literal["begin", "end"]
) -> bool:
    names = [f"on_{kind}_batch_{when}", *([f"on_batch_{when}"] if kind == "train" else [])]
    # LambdaCallback and its like set hooks on the instance, as plain functions.
    hooks = {name: getattr(getattr(callback, name, None), "__func__", None) for name in names}
    return any(hook is not getattr(keras.callbacks.Callback, name) for name, hook in hooks.items())


def _records(callback: keras.callbacks.Callback) -> bool:
    """Returns False for a TensorBoard in a step that it neither records nor profiles: it would read
    all logs.
    """
    if not _is(callback, "TensorBoard") or private.is_tracing(callback):
        return True
    return (
        callback.update_freq != "epoch"
        and private.global_train_batch(callback) % callback.update_freq == 0
    )
