"""Argument checks whose errors name the culprit, its value and the remedy."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)  # what the compiled step computes with


def whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int of at least `minimum`.

    Raises:
        TypeError: not a number (a bool is none).
        ValueError: fractional, or below `minimum`.

    >>> whole_number("batch_size", 8.0)
    8
    >>> whole_number("batch_size", 0)
    Traceback (most recent call last):
    ValueError: batch_size=0 must be a whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a whole number of at least {minimum}.")
    if isinstance(value, numbers.Integral):
        value = int(value)  # of any size, where a float would overflow
    if value in (math.inf, -math.inf) or value != value or value != int(value) or value < minimum:
        raise ValueError(f"{name}={value} must be a whole number of at least {minimum}.")
    if value > sys.maxsize:
        raise ValueError(f"{name} must be a whole number of at least {minimum} and at most {sys.maxsize}.")
    return int(value)


def positive_or_none(name: str, value: Any) -> float | None:
    """`value` as a positive, finite float, or None.

    >>> positive_or_none("clip_norm", -1.0)
    Traceback (most recent call last):
    ValueError: clip_norm=-1.0 must be positive and finite, or None for none.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a positive number, or None for none.")
    if not 0 < value <= LARGEST:
        raise ValueError(f"{name}={value} must be positive and finite, or None for none.")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """`value` as a float of at least 0 and below 1.

    >>> fraction("validation_split", 1.5)
    Traceback (most recent call last):
    ValueError: validation_split=1.5 must lie between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number between 0 and 1.")
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1.")
    return float(value)


def true_or_false(name: str, value: Any) -> bool:
    """`value`, a bool.

    >>> true_or_false("shuffle", "batch")
    Traceback (most recent call last):
    TypeError: shuffle='batch' must be True or False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be True or False.")
    return bool(value)


def one_of(name: str, value: Any, choices: tuple) -> Any:
    """`value`, one of `choices`.

    >>> one_of("on_nonfinite", "stop", ("skip", "raise"))
    Traceback (most recent call last):
    ValueError: on_nonfinite='stop' must be 'skip' or 'raise'.
    """
    if not isinstance(value, (str, numbers.Integral, np.bool_)) or value not in choices:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")
    return value


def class_weight(value: Any) -> dict[int, float] | None:
    """A factor for each class index, or None.

    >>> class_weight({0: 1.0, 1: -5.0})
    Traceback (most recent call last):
    ValueError: class_weight={0: 1.0, 1: -5.0} must map class indices from 0 to finite factors of at least 0; \
1: -5.0 does not.
    """
    if value is None:
        return None
    rule = "must map class indices from 0 to finite factors of at least 0"
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"class_weight={value!r} {rule}, as in {{0: 1.0, 1: 5.0}}.")
    for index, factor in value.items():
        if not isinstance(index, numbers.Integral) or not isinstance(factor, numbers.Real):
            raise TypeError(f"class_weight={value} {rule}; {index!r}: {factor!r} does not.")
        if not 0 <= index <= sys.maxsize or not 0 <= factor <= LARGEST:
            raise ValueError(f"class_weight={value} {rule}; {index!r}: {factor!r} does not.")
    return {int(index): float(factor) for index, factor in value.items()}
