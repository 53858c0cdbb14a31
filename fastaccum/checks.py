"""Argument checks whose errors name the culprit, its value and the remedy."""

from __future__ import annotations

import math
import numbers
from typing import Any


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
    if not math.isfinite(value) or value != int(value) or value < minimum:
        raise ValueError(f"{name}={value} must be a whole number of at least {minimum}.")
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
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}={value} must be positive and finite, or None for none.")
    return float(value)
