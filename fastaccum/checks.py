"""Argument checks, whose errors name the argument, its value and the rule."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from fastaccum.kernels.checks import *  # noqa: F403
from fastaccum.kernels.checks import in_float32, positive, shown


def positive_or_none(name: str, value: object) -> float | None:
    """Returns `value` as a positive, finite float, or None."""
    if value is None:
        return None
    return positive(name, value, ", or None")


def path(name: str, value: object) -> Path:
    """Returns `value`, a str or a path, as a path that a file system can have."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(value)} must be a path.")
    text = os.fspath(value)
    if not isinstance(text, str):  # a path of bytes
        raise TypeError(f"{name}={shown(value)} must be a path.")
    # Surrogates but for those by which Python stands for bytes that are no text.
    has_surrogates = any(
        "\ud800" <= letter < "\udc80" or "\udcff" < letter <= "\udfff" for letter in text
    )
    if "\0" in text or has_surrogates:
        raise ValueError(f"{name}={shown(value)} must be a path: no file system has such letters.")
    return Path(text)


def require_nest(name: str, nest: object) -> None:
    """Raises TypeError for a container that cannot be taken apart and put together again."""
    try:
        tf.nest.map_structure(lambda leaf: leaf, nest)
    except Exception as error:
        raise TypeError(
            f"{name} is a {type(nest).__name__} that cannot be taken apart ({error}): pass "
            "lists, tuples and dicts."
        ) from error


def class_weight(value: object) -> dict[int, float] | None:
    """Returns `value` as a factor for each class index, or None."""
    if value is None:
        return None
    rule = (
        "must map class indices from 0 to factors of at least 0 that are finite in float32 and "
        "are not rounded to 0 there"
    )
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"class_weight={value!r} {rule}, as in {{0: 1.0, 1: 5.0}}.")
    if any(isinstance(factor, Mapping) for factor in value.values()):
        raise TypeError(
            f"class_weight={value!r} has weights for several outputs, and it can weight only one: "
            f"pass sample_weight, by output, as in sample_weight={{'a': weights_a[labels_a], 'b': "
            f"weights_b[labels_b]}}."
        )
    for index, factor in value.items():
        message = f"class_weight={value} {rule}; {index!r}: {factor!r} does not."
        is_of_type = isinstance(index, numbers.Integral) and isinstance(factor, numbers.Real)
        if not is_of_type:
            raise TypeError(message)
        if not (0 <= index <= sys.maxsize and factor >= 0 and in_float32(factor)):
            raise ValueError(message)
    return {int(index): float(factor) for index, factor in value.items()}
