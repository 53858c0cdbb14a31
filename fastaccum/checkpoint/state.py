"""Description of a fit for its checkpoints, and the differences between two descriptions."""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.callbacks import Callbacks
from fastaccum.basics.attributes import raw
from fastaccum.data.source import Stacks
from fastaccum.graphs import jit_choice

Json = dict[str, Any]  # an object of JSON
# The numbers by which Keras tells apart what one process made. Another process counts anew.
NUMBER = r"_\d+(?=[_/]|$)"


class WorkerLostError(RuntimeError):
    """Raised where another worker died, failed, stopped answering or did not come."""


class Workers(Protocol):
    """The workers that train together; `Replicas`, of a package above, implements it."""

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
    What a program changes between two fits stays in: that is another training.
    """

    def __init__(self) -> None:
        self._start: Json | None = None
        self._end: Json | None = None

    def begin(self, describe: Callable[[], Json]) -> Json:
        """Returns the description of a fit that begins."""
        self._beginning = _undo(describe(), self._end, self._start)
        self._describe = describe
        return self._beginning

    def end(self) -> None:
        """Notes what the fit that began last has changed."""
        end = self._describe()
        self._start = self._beginning
        self._end = end


def _undo(now: Any, end: Any, start: Any) -> Any:
    """Returns `now` with what `start` has, where `now` is as in `end`."""
    if now == end:
        return start
    if not (isinstance(now, dict) and isinstance(end, dict) and isinstance(start, dict)):
        return now

    undone = {}
    for name in dict.fromkeys([*start, *now]):
        if name in now and name in start:
            undone[name] = _undo(now[name], end.get(name), start[name])
        elif name in end:
            continue  # training added the item, or a program removed it after the fit
        elif name in now:
            undone[name] = now[name]  # a program added it after the fit
        else:
            undone[name] = start[name]  # training removed it
    return undone


def plain(value: object) -> Any:
    """Converts `value` for JSON.

    Numbers become Python's and arrays become lists; the name of its type stands for anything
    unknown.
    """
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):  # whose order is another in each process
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return type(value).__name__


def name_variables(
    groups: Mapping[str, Sequence[tf.Variable | keras.Variable]],
) -> dict[str, dict[str, tf.Variable]]:
    """Names each group's variables, once each, alike in every process."""
    named_groups: dict[str, dict[str, tf.Variable]] = {}
    for group, variables in groups.items():
        named: dict[str, tf.Variable] = {}
        seen = set()
        for variable in variables:
            tf_variable = raw(variable)
            if id(tf_variable) in seen:
                continue
            seen.add(id(tf_variable))
            path = getattr(variable, "path", None) or tf_variable.name
            named[free_name(path.split(":")[0], named)] = tf_variable
        named_groups[group] = named
    return named_groups


def free_name(path: str, taken: Container[str]) -> str:
    """Returns `path` without Keras's numbers; if that is taken, with the first free -2, -3, ..."""
    without_numbers = re.sub(NUMBER, "", path)
    name = without_numbers
    number = 2
    while name in taken:
        name = f"{without_numbers}-{number}"
        number += 1
    return name


def checksums(groups: Mapping[str, Sequence[tf.Variable | keras.Variable]]) -> Json:
    """Returns checksums of the model's and the optimizer's variables, by name.

    A single number stands for itself.
    """
    named_groups = name_variables({"model": groups["model"], "optimizer": groups["optimizer"]})
    sums = {}
    for group, named in named_groups.items():
        for name, variable in named.items():
            array = np.array(variable.read_value())
            if array.size == 1:
                sums[f"{group}/{name}"] = array.item()
            else:
                sums[f"{group}/{name}"] = zlib.crc32(array.tobytes())
    return sums


def versions() -> dict[str, str]:
    """Returns the versions that a training's bits depend on, and if TensorFlow uses oneDNN."""
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
    """Lists the items in which two descriptions differ.

    An item is a line such as "optimizer.learning_rate: 0.1 was saved, now 0.2".
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        return _item_differences(saved, now, path, words)
    if path.endswith(".code"):
        python_then = str(saved).split()[-1]
        python_now = str(now).split()[-1]
        if python_then != python_now:
            return []  # the bytecode of another version of Python says nothing
    if saved == now:
        return []
    return [f"{path}: {words.format(_show(saved), _show(now))}"]


def _item_differences(saved: Json, now: Json, path: str, words: str) -> list[str]:
    """Lists the items in which two dicts of one path differ."""
    names = list(dict.fromkeys([*saved, *now]))
    class_then = saved.get("class", "nothing")
    class_now = now.get("class", "nothing")
    are_named = isinstance(class_then, str) and isinstance(class_now, str)
    if are_named and class_then != class_now:
        names = ["class"]  # the other items say no more

    lines = []
    for name in names:
        item_path = f"{path}.{name}".lstrip(".")
        item_then = saved.get(name, "nothing")
        item_now = now.get(name, "nothing")
        lines += differences(item_then, item_now, item_path, words)
    if lines:
        return lines

    order_counts = path != "batch plan"  # whose entries also come from earlier fits
    if order_counts and list(saved) != list(now):
        return [f"{path}: in another order"]
    return []


def _show(value: object) -> str:
    """Writes a value of a description.

    A number that is a float32, as learning rates are, is written without the digits of its float64.
    """
    if isinstance(value, float) and abs(value) <= np.finfo(np.float32).max:
        single = np.float32(value)
        if value == float(single):
            return str(single)
    if isinstance(value, str):
        return value
    return repr(value)


def other_product(saved: Json, now: Mapping[str, int], wanted: int | None) -> str:
    """Returns what to say of an update with another number of rows of arrays than `wanted`.

    Returns "" where the number is right.
    """
    size = now.get("batch_size")
    steps = now["gradient_accumulation_steps"]
    if wanted is None or size is None:
        return ""

    if wanted % size == 0:
        fitting_size = size
        fitting_steps = wanted // size
    elif wanted % steps == 0:
        fitting_size = wanted // steps
        fitting_steps = steps
    else:
        fitting_size = wanted
        fitting_steps = 1
    before = f"{saved['batch_size']} x {saved['gradient_accumulation_steps']}"
    return (
        f"batch_size * gradient_accumulation_steps must be {wanted}, as saved ({before}), and is "
        f"{size} x {steps}: batch_size={fitting_size} with "
        f"gradient_accumulation_steps={fitting_steps} would do"
    )


def other_pieces(saved: Json, now: Mapping[str, int]) -> str:
    """Returns how two cuts differ, as "batch_size 8 x 4 instead of 16 x 2"."""
    values_then: Json = {name: saved[name] for name in now}
    values_now: Json = dict(now)

    size_then = values_then["batch_size"]
    size_now = values_now["batch_size"]
    steps_then = values_then["gradient_accumulation_steps"]
    steps_now = values_now["gradient_accumulation_steps"]
    have_sizes = size_then is not None and size_now is not None
    if have_sizes and (size_now != size_then or steps_now != steps_then):
        values_then["batch_size"] = f"{size_then} x {steps_then}"
        values_now["batch_size"] = f"{size_now} x {steps_now}"
        del values_now["gradient_accumulation_steps"]  # it is in the product

    lines = []
    for name, value in values_now.items():
        if value != values_then[name]:
            lines.append(f"{name} {value} instead of {values_then[name]}")
    return ", ".join(lines)
