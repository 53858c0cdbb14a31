"""Lists where two descriptions differ, in lines for people."""

from __future__ import annotations

import numpy as np

from fastaccum.fingerprint.values import Json

# Stands, in the lines too, for an item that one of two descriptions lacks.
_MISSING = "nothing"


def differences(
    saved: object, now: object, path: str = "", words: str = "{} was saved, now {}"
) -> list[str]:
    """Lists the items in which two descriptions differ.

    An item is a line such as "optimizer.learning_rate: 0.1 was saved, now 0.2".
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        return _item_differences(saved, now, path, words)
    if path.endswith(".code") and _python_of(saved) != _python_of(now):
        return []  # bytecode is comparable within one version of Python alone
    if saved == now:
        return []
    return [f"{path}: {words.format(_show(saved), _show(now))}"]


def _python_of(checksum: object) -> str:
    """Returns the version of Python, the last word of what `bytecode.checksum` returns."""
    return str(checksum).split()[-1]


def _item_differences(saved: Json, now: Json, path: str, words: str) -> list[str]:
    """Lists the items in which two dicts of one path differ.

    Two objects of different classes differ in their class alone: the other items say no more.
    """
    names = list(dict.fromkeys([*saved, *now]))
    class_then = saved.get("class", _MISSING)
    class_now = now.get("class", _MISSING)
    # A dict of arguments or variables may have an item of that name that is no class.
    are_names = isinstance(class_then, str) and isinstance(class_now, str)
    if are_names and class_then != class_now:
        names = ["class"]

    lines = []
    for name in names:
        item_path = f"{path}.{name}".lstrip(".")
        item_then = saved.get(name, _MISSING)
        item_now = now.get(name, _MISSING)
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
