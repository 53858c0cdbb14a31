"""Argument checks whose errors name the argument, its value and what it must be."""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

# The range of float32 in a compiled program, which takes anything nearer to 0 for 0.
SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)

# Characters of a value that an error shows: more would hide what the error says.
_MOST_CHARACTERS = 200

Choice = TypeVar("Choice")


def shown(value: object) -> str:
    """Formats a value for an error: at most 200 characters, or its type if it has no `repr`."""
    try:
        if isinstance(value, np.generic):
            value = value.item()
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    if len(text) > _MOST_CHARACTERS:
        return f"{text[:_MOST_CHARACTERS]}..."
    return text


def as_tensor(name: str, value: object) -> tf.Tensor:
    """Converts `value` to a dense tensor that the current graph may use."""
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            raise TypeError(
                f"{name} is a masked array, and a tensor has no masked elements: fill them."
            )
        if not value.dtype.isnative:
            # a graph would read the bytes in the other order
            value = value.astype(value.dtype.newbyteorder("="))
    try:
        converted = tf.convert_to_tensor(value)
    except Exception as error:
        raise TypeError(
            f"{name}={shown(value)} must be a tensor, or an array, a variable or lists of "
            "numbers that make one."
        ) from error
    if tf.is_symbolic_tensor(converted) and not _reachable(converted.graph):
        raise ValueError(
            f"{name}={shown(converted)} is a tensor of a graph that is no longer being built: "
            "return it from there."
        )
    return converted


def _reachable(graph: tf.Graph) -> bool:
    """Returns whether the graph that is being traced, if any, may use the tensors of `graph`."""
    if tf.executing_eagerly():
        return False
    current = tf.compat.v1.get_default_graph()
    while current not in (None, graph):
        current = getattr(current, "outer_graph", None)
    return current is graph


@contextlib.contextmanager
def naming(culprit: str, *more: type[Exception]) -> Iterator[None]:
    """Puts the argument's name in front of an error that is raised inside the block.

    A TypeError stays one. A ValueError, or one of `more`, becomes a ValueError.
    """
    value_errors: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{culprit}: {error}") from error
    except value_errors as error:
        raise ValueError(f"{culprit}: {error}") from error


def object_name(value: object) -> str | None:
    """Checks the name of a layer, a model or a loss, or None."""
    if value is None:
        return None
    message = f"name={shown(value)} must be a printable string without '/'."
    if not isinstance(value, str):
        raise TypeError(message)
    if not value or not value.isprintable() or "/" in value:
        raise ValueError(message)
    return value


def number(name: str, value: object, rule: str, accepts: Callable[[Any], bool]) -> float:
    """Returns `value` as a float, if it is a real number (a bool is not) that `accepts(value)`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={shown(value)} must be {rule}.")
    exact: Any = value
    if isinstance(value, np.floating):
        exact = float(value)  # a float16 would be compared with bounds that float16 makes infinite
    if not accepts(exact):
        raise ValueError(f"{name}={shown(value)} must be {rule}.")
    if 0 < abs(float(value)) < SMALLEST:
        raise ValueError(f"{name}={value} must be {rule}: in float32 it is 0.")
    return float(value)


def in_float32(value: float) -> bool:
    """Returns whether a real number is finite in float32, and 0 there only if it is 0."""
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def positive(name: str, value: object, or_else: str = "") -> float:
    """Returns `value` as a positive, finite float; `or_else` says what else the argument may be."""
    return number(name, value, f"a positive, finite number{or_else}", lambda v: 0 < v <= LARGEST)


def fraction(name: str, value: object) -> float:
    """Returns `value` as a float of at least 0 and below 1."""

    def accepts(v):
        return 0 <= v < 1 and bool(np.float32(v) < 1)

    return number(name, value, "a number of at least 0 and below 1", accepts)


def whole_number(name: str, value: Any, minimum: int | None = 1) -> int:
    """Returns `value` as an int of at least `minimum` (None for no bound)."""
    if minimum is None:
        rule = "a whole number"
        least = -sys.maxsize
    else:
        rule = f"a whole number of at least {minimum}"
        least = minimum
    if isinstance(value, numbers.Integral) and int(value) > sys.maxsize:
        # of any length, so not shown
        raise ValueError(f"{name} must be {rule} and at most {sys.maxsize}.")
    number(name, value, rule, lambda v: least <= v <= sys.maxsize and v == int(v))
    return int(value)


def true_or_false(name: str, value: object) -> bool:
    """Returns `value` as a bool, if it is one."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={shown(value)} must be True or False.")
    return bool(value)


def one_of(name: str, value: Any, choices: tuple[Choice, ...]) -> Choice:
    """Returns the one of `choices` that equals `value`."""
    comparable = isinstance(value, (str, numbers.Integral, np.bool_))  # an array is not
    if not comparable or value not in choices:
        raise ValueError(f"{name}={shown(value)} must be {' or '.join(map(repr, choices))}.")
    return choices[choices.index(value)]
