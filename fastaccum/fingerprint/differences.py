"""Lists where two descriptions differ, in lines for people."""

from __future__ import annotations

import numpy as np

from fastaccum.fingerprint.values import Json


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
