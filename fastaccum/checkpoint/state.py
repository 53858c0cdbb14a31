"""Description of a fit for its checkpoints, and the differences between two descriptions."""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
import re
import sys
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters import jit_choice
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.callbacks import Callbacks
from fastaccum.data.source import Stacks

Json = dict[str, Any]  # an object of JSON
# By which Keras tells apart what one process made: another process counts anew.
NUMBER = r"_\d+(?=[_/]|$)"


class WorkerLostError(RuntimeError):
    """Raised where another worker died, failed, stopped answering or did not come."""


class Workers(Protocol):
    """The workers that train together: `Replicas`, of a room above."""

    worker: int
    workers: int

    @property
    def is_chief(self) -> bool: ...
    def gather(self, numbers: Sequence[float]) -> list[list[float]]: ...
    def require_same(self, advice: str, **numbers: float) -> None: ...
    def tell(self, about: str) -> None: ...
    def hear(self, about: str, worker: int) -> str: ...
    def forget(self, about: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Training:
    """The parts of a fit that a checkpoint needs."""

    model: keras.Model  # the user's, for its `history` and `stop_training`
    # All that training changes, by the groups "model", "optimizer", "loss_scale" and "step".
    variables: Mapping[str, Sequence[tf.Variable | keras.Variable]]
    description: Json  # what must be the same for a checkpoint to fit
    # Of a step's rows, which may be otherwise when a checkpoint is taken up: "batch_size" (or the
    # "batches" of a dataset), "gradient_accumulation_steps" and "replicas".
    cut: Mapping[str, int]
    # by name: they compute other numbers if the cut is another
    split_sensitive_layers: Sequence[str]
    unsaved_draws: Sequence[str]  # operations whose random numbers no checkpoint can bring back
    stacks: Stacks
    callbacks: Callbacks
    # Returns False while steps are skipped until an error that is still to be read, and raises
    # ValueError if indices out of range were seen: neither leaves a state to go on from.
    require_savable: Callable[[], bool]
    # as the fit ends, to tell what training changed from what is changed after it
    note_changes: Callable[[], None]
    workers: Workers | None
    holders: Mapping[int, int]  # the worker of each variable that one worker alone has, by its id
    settings: Mapping[str, Sequence[tf.Variable]]  # the optimizer's that variables hold, by name


class ChangesOfTraining:
    """Takes out of a description what the earlier fits of this process changed themselves.

    A loss may append to a list of its own, and a callback may anneal an attribute of a layer. A
    checkpoint holds the description without such changes, as a new process begins without them.
    What a program changes between two fits
    stays in: that is another training.
    """

    def __init__(self) -> None:
        self._start: Json | None = None
        self._end: Json | None = None

    def begin(self, describe: Callable[[], Json]) -> Json:
        """Returns the description of a fit that begins."""
        self._describe, self._beginning = describe, _undo(describe(), self._end, self._start)
        return self._beginning

    def end(self) -> None:
        """Notes what the fit that began last has changed."""
        self._start, self._end = self._beginning, self._describe()


def _undo(now: Any, end: Any, start: Any) -> Any:
    """Returns `now` with what `start` has, where `now` is as in `end`."""
    if now == end:
        return start
    if not all(isinstance(each, dict) for each in (now, end, start)):
        return now
    both = now.keys() & start.keys()
    return {
        name: _undo(now[name], end.get(name), start[name])
        if name in both
        else {**now, **start}[name]
        for name in dict.fromkeys([*start, *now])
        if name in both or name not in end
    }


def plain(value: object) -> Any:
    """Converts `value` for JSON: numbers to Python's, arrays to lists, anything unknown to its
    type's name.
    """
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):  # whose order is another in each process
        return sorted((plain(each) for each in value), key=repr)
    return (
        [plain(each) for each in value]
        if isinstance(value, (list, tuple))
        else type(value).__name__
    )


def name_variables(
    groups: Mapping[str, Sequence[tf.Variable | keras.Variable]],
) -> dict[str, dict[str, tf.Variable]]:
    """Names each group's variables, once each, alike in every process."""
    found: dict[str, dict[str, tf.Variable]] = {group: {} for group in groups}
    for group, variables in groups.items():
        seen = set()
        for variable in variables:
            own = raw(variable)
            if id(own) not in seen:
                seen.add(id(own))
                path = getattr(variable, "path", None) or own.name
                found[group][free_name(path.split(":")[0], found[group])] = own
    return found


def free_name(path: str, taken: Container[str]) -> str:
    """Returns `path` without numbers, or with the first of -2, -3, ... that makes it another than
    those taken.
    """
    same = re.sub(NUMBER, "", path)
    names = itertools.chain([same], (f"{same}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def checksums(groups: Mapping[str, Sequence[tf.Variable | keras.Variable]]) -> Json:
    """Returns checksums of the model's and the optimizer's variables, by name; a single number
    stands for itself.
    """
    read = {
        f"{group}/{name}": np.array(variable.read_value())
        for group, named in name_variables(
            {group: groups[group] for group in ("model", "optimizer")}
        ).items()
        for name, variable in named.items()
    }
    return {
        name: own.item() if own.size == 1 else zlib.crc32(own.tobytes())
        for name, own in read.items()
    }


def versions() -> dict[str, str]:
    """Returns what a training's bits depend on: the versions of packages, and whether TensorFlow
    uses oneDNN.
    """
    packages = {
        name: sys.modules[name].__version__
        for name in ("tensorflow", "keras", "numpy", "fastaccum")
    }
    return {
        "python": platform.python_version(),
        **packages,
        "TF_ENABLE_ONEDNN_OPTS": str(int(jit_choice.ONEDNN)),
    }


def differences(
    saved: object, now: object, path: str = "", words: str = "{} was saved, now {}"
) -> list[str]:
    """Lists the items in which two descriptions differ, as "optimizer.learning_rate: 0.1 was saved,
    now 0.2".
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        pairs = {
            name: (saved.get(name, "nothing"), now.get(name, "nothing"))
            for name in dict.fromkeys([*saved, *now])
        }
        before, after = pairs.get("class", (None, None))
        if isinstance(before, str) and isinstance(after, str) and before != after:
            pairs = {"class": (before, after)}  # whose other items say no more
        found = [
            line
            for key, pair in pairs.items()
            for line in differences(*pair, f"{path}.{key}".lstrip("."), words)
        ]
        ordered = path != "batch plan"  # whose entries also come from earlier fits
        return found or (
            [f"{path}: in another order"] if ordered and list(saved) != list(now) else []
        )
    if path.endswith(".code") and str(saved).split()[-1] != str(now).split()[-1]:
        return []  # of another version of Python, whose bytecode says nothing
    return [] if saved == now else [f"{path}: {words.format(_show(saved), _show(now))}"]


def _show(value: object) -> str:
    """Writes a value of a description; a float32, as learning rates are, without the digits of its
    float64.
    """
    if (
        isinstance(value, float)
        and abs(value) <= np.finfo(np.float32).max
        and value == float(np.float32(value))
    ):
        return str(np.float32(value))
    return value if isinstance(value, str) else repr(value)


def other_product(saved: Json, now: Mapping[str, int], wanted: int | None) -> str:
    """Returns what to say of an update with another number of rows of arrays; "" where the number
    is right.
    """
    size, steps = now.get("batch_size"), now["gradient_accumulation_steps"]
    if wanted is None or size is None:
        return ""
    before = f"{saved['batch_size']} x {saved['gradient_accumulation_steps']}"
    fitting = (size, wanted // size) if wanted % size == 0 else (wanted // steps, steps)
    if math.prod(fitting) != wanted:
        fitting = wanted, 1
    return (
        f"batch_size * gradient_accumulation_steps must be {wanted}, as saved ({before}), and is "
        f"{size} x {steps}: batch_size={fitting[0]} with "
        f"gradient_accumulation_steps={fitting[1]} would do"
    )


def other_pieces(saved: Json, now: Mapping[str, int]) -> str:
    """Returns how two cuts differ, as "batch_size 8 x 4 instead of 16 x 2"."""
    pairs = {name: (now[name], saved[name]) for name in now}
    size, steps = pairs["batch_size"], pairs["gradient_accumulation_steps"]
    if None not in size and (size[0] != size[1] or steps[0] != steps[1]):
        del pairs["gradient_accumulation_steps"]
        pairs["batch_size"] = tuple(f"{a} x {b}" for a, b in zip(size, steps, strict=True))  # type: ignore[assignment]
    return ", ".join(
        f"{name} {new} instead of {old}" for name, (new, old) in pairs.items() if new != old
    )
