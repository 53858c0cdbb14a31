"""Of which package a class is: tf_keras and its kin are imported only by those who use them."""

from __future__ import annotations

from typing import Any


def package(thing: Any) -> str:
    """The package that defines a class or function; empty for what has none."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def of_keras(thing: Any) -> bool:
    """Whether a class or function is Keras's or tf_keras's."""
    return package(thing) in ("keras", "tf_keras")


def kinds(value: Any) -> dict[str, type]:
    """A value's class and its bases, each by its package and name, such as "keras.Optimizer"."""
    return {f"{package(c)}.{c.__name__}": c for c in reversed(type(value).__mro__)}
