"""Finds the package that a class is from by its name: tf_keras is imported only where a user has done so."""

from __future__ import annotations


def package(thing: object) -> str:
    """Names the package that defines a class or function; empty for anything else."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def of_keras(thing: object) -> bool:
    """Tells if a class or function is Keras's or tf_keras's."""
    return package(thing) in ("keras", "tf_keras")


def kinds(value: object) -> dict[str, type]:
    """Returns a value's class and its bases by package and name, such as "keras.Optimizer"."""
    return {f"{package(c)}.{c.__name__}": c for c in reversed(type(value).__mro__)}
