"""Argument checks whose errors name the argument, its value and what it must be."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

from fastaccum.kernels.checks import fraction, in_float32, one_of, positive, true_or_false, whole_number  # noqa: F401


def positive_or_none(name: str, value: Any) -> float | None:
    """`value` as a positive, finite float, or None."""
    return None if value is None else positive(name, value, ", or None")


def class_weight(value: Any) -> dict[int, float] | None:
    """A factor for each class index, or None."""
    if value is None:
        return None
    rule = "must map class indices from 0 to factors of at least 0, finite in float32 and none 0 there that is not 0"
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"class_weight={value!r} {rule}, as in {{0: 1.0, 1: 5.0}}.")
    for index, factor in value.items():
        of_type = isinstance(index, numbers.Integral) and isinstance(factor, numbers.Real)
        if not (of_type and 0 <= index <= sys.maxsize and factor >= 0 and in_float32(factor)):
            error = ValueError if of_type else TypeError
            raise error(f"class_weight={value} {rule}; {index!r}: {factor!r} does not.")
    return {int(index): float(factor) for index, factor in value.items()}
