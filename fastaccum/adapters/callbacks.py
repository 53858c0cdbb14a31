"""Keras's callbacks for a loop that does not wait: a log is read when a callback asks for it."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.attributes import kinds
from fastaccum.kernels import private

# The progress line is drawn anew after so many seconds at the earliest.
REDRAW_SECONDS = 0.1

Kind = Literal["train", "test"]
# Makes a step's logs, for which it may wait.
ReadLogs = Callable[[], dict[str, float]]


def log_value(tensor: tf.Tensor) -> Any:
    """Returns a log as Keras does: a number, or an array of a metric's values for each class."""
    value = tensor.numpy()
    if value.ndim:
        return value
    return value.item()


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
        # Overridden so that `dict(logs)` asks `__getitem__` for each value. From a subclass of dict
        # with dict's own `__iter__`, Python copies what is stored: the tensors.
        return super().__iter__()


def _fetching(name: str) -> Callable:
    """Returns a method of dict that first fetches the logs from the device."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def fetched(self: LateLogs, *args: object, **kwargs: object) -> object:
        if self._late:
            if self._check is not None:
                self._check()  # waits for the step, and raises what it has to say
            self._late = False
            dict.update(self, {key: log_value(tensor) for key, tensor in dict.items(self)})
        return method(self, *args, **kwargs)

    return fetched


_METHODS_WITH_VALUES = (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__eq__",
    "__ne__",
    "__repr__",
    "__or__",
    "__ror__",
    "__ior__",
    "get",
    "items",
    "values",
    "copy",
    "pop",
    "popitem",
    "setdefault",
    "update",
)
for _name in _METHODS_WITH_VALUES:
    setattr(LateLogs, _name, _fetching(_name))


class _Progress(keras.callbacks.ProgbarLogger):
    """Keras's progress line, the loss first; hides a loss scale of 1 and a 0 of skipped steps."""

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
    """Returns a batch hook of the batch and its logs, called as the callback's Keras calls it."""
    hook = getattr(callback, name)
    # tf_keras calls it with the logs by position, and Keras by the name `logs`.
    if any(kind.startswith("tf_keras.") for kind in kinds(callback)):
        return hook
    return lambda batch, logs: hook(batch, logs=logs)


def _worth_saying(logs: Mapping[str, float] | None) -> dict[str, float]:
    """Returns the logs that tell something, the loss first."""
    if not logs:
        return {}
    says_nothing = {"loss_scale": 1, "skipped_steps": 0}
    shown = {}
    for name in sorted(logs, key=lambda name: name != "loss"):
        value = logs[name]
        if name not in says_nothing or value != says_nothing[name]:
            shown[name] = value
    return shown


def _no_logs() -> dict[str, float]:
    return {}


class _EndHook(NamedTuple):
    """A callback and its hook for the end of a batch."""

    callback: keras.callbacks.Callback
    call: Callable[[int, Mapping[str, float]], None]


class Callbacks:
    """A Keras `CallbackList` whose batch hooks reach only those callbacks that have any.

    They get `LateLogs`.
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
        # True for the validation of a fit: no progress is drawn, as the line counts train steps
        validates: bool = False,
    ):
        require(callbacks, verbose)
        self._validates = validates
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            listed = [] if callbacks is None else tf.nest.flatten(callbacks)
            has_bar = any(_is(callback, "ProgbarLogger") for callback in listed)
            if verbose != 0 and not has_bar:
                listed = [*listed, _Progress()]
            callbacks = keras.callbacks.CallbackList(
                listed, history, model=model, verbose=verbose, epochs=epochs, steps=steps
            )
        self.callback_list = callbacks
        if history and private.train_counter.exists(model):
            private.train_counter(model).assign(0)  # as tf_keras's fit does
        shown = verbose != 0 and keras.config.is_interactive_logging_enabled()
        # `announce` prints parts of a line while a program compiles, also to a file: nothing else
        # tells that the fit goes on. `advise` prints a line of advice, for those who read live.
        # Each is None where it prints nothing.
        self.announce: Callable[[str], None] | None = self._print_part if shown else None
        self.advise = self.announce if _is_read_live() else None
        self._last_draw = 0.0
        self._is_within_line = False  # of an announcement
        self._read_previous: ReadLogs = _no_logs  # no step was run before

    def _print_part(self, part: str) -> None:
        """Prints a part of a line, which begins below the progress line if that was drawn."""
        if self._last_draw and not self._is_within_line and _is_read_live():
            print()
        self._is_within_line = not part.endswith("\n")
        print(part, end="", flush=True)

    def require_none(self, name: str, reason: str) -> None:
        """Raises ValueError if one of the callbacks is of this class."""
        if any(_is(callback, name) for callback in self.callback_list.callbacks):
            raise ValueError(f"callbacks holds a {name}, {reason}.")

    def show_rate(self, rows_per_second: float | None) -> None:
        """Lets the progress line of the epoch that ends tell its rows a second, where known."""
        for callback in self.callback_list.callbacks:
            if isinstance(callback, _Progress):
                callback.rows_per_second = rows_per_second

    def hooks(self, kind: Kind) -> tuple[Callable[[int], None], Callable[[int, ReadLogs], None]]:
        """Returns the hooks `begin(batch)` and `end(batch, read)`; `read` makes the batch's logs.

        It is called if a callback needs them.
        """
        begin_name = f"on_{kind}_batch_begin"
        end_name = f"on_{kind}_batch_end"
        bars = [c for c in self.callback_list.callbacks if _is(c, "ProgbarLogger")]
        callbacks = [c for c in self.callback_list.callbacks if c not in bars]
        if self._validates:
            bars = []
        begins = [_hook(c, begin_name) for c in callbacks if _overrides(c, kind, "begin")]
        ends = [_EndHook(c, _hook(c, end_name)) for c in callbacks if _overrides(c, kind, "end")]
        boards = []
        if kind == "train":
            boards = [c for c in callbacks if "tf_keras.TensorBoard" in kinds(c)]

        def begin(batch: int) -> None:
            if batch == 0:
                self._read_previous = _no_logs  # the epoch before has nothing to say of this one
            for hook in begins:
                hook(batch, {})

        def end(batch: int, read: ReadLogs) -> None:
            # A TensorBoard takes the number of a step from what tf_keras's own loop counts with.
            for board in boards:
                private.train_counter(board.model).assign(private.global_train_batch(board))

            logs: dict[str, float] = {}
            if ends:
                logs = read()
            for hook in ends:
                if _needs_logs(hook.callback):
                    hook.call(batch, logs)
                else:
                    hook.call(batch, {})

            for bar in bars:
                bar.seen = batch + 1  # tf_keras's may count samples, of which a step says nothing
            if bars and time.monotonic() - self._last_draw > REDRAW_SECONDS:
                self._last_draw = time.monotonic()
                # In training, those of the step before: the newest is in flight.
                read_shown = self._read_previous
                if kind == "test":
                    read_shown = read
                for bar in bars:
                    getattr(bar, end_name)(batch, logs=read_shown())
            self._read_previous = read

        return begin, end


def require(callbacks: Any, verbose: Any, kind: str | None = None) -> None:
    """Raises TypeError or ValueError unless these are callbacks, of a `kind`, and a verbosity.

    With `kind=None` the callbacks may be of any kind. Raises ImportError for a TensorBoard without
    its package.
    """
    checks.require_nest("callbacks", callbacks)
    listed = []
    if callbacks is not None:
        listed = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    for callback in listed:
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


def _overrides(
    callback: keras.callbacks.Callback, kind: Kind, when: Literal["begin", "end"]
) -> bool:
    """Tells if a callback has a hook of its own for when a batch begins or ends."""
    names = [f"on_{kind}_batch_{when}"]
    if kind == "train":
        names.append(f"on_batch_{when}")
    for name in names:
        # LambdaCallback and its like set hooks on the instance, as plain functions.
        hook = getattr(getattr(callback, name, None), "__func__", None)
        if hook is not getattr(keras.callbacks.Callback, name):
            return True
    return False


def _needs_logs(callback: keras.callbacks.Callback) -> bool:
    """Tells if a callback needs the logs of a step.

    A TensorBoard would read all logs, also in a step that it neither records nor profiles.
    """
    if not _is(callback, "TensorBoard") or private.is_tracing(callback):
        return True
    if callback.update_freq == "epoch":
        return False
    return private.global_train_batch(callback) % callback.update_freq == 0


def take_backed_up_epoch(model: keras.Model, steps_per_epoch: int | None) -> int | None:
    """Returns the epoch at which a BackupAndRestore has this fit begin, or None.

    The callback leaves it with the model.
    """
    state = private.training_state(model, None)  # tf_keras's
    if state:
        epoch, _ = state.maybe_load_initial_counters_from_ckpt(steps_per_epoch, 0, mode="train")
        return int(epoch) or None
    epoch = private.initial_epoch(model, None)
    if epoch:
        private.initial_epoch.set(model, None)
    return epoch
