"""Attributes of objects that are not ours, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within the scope, these (object, name, value) stand in for the objects' own attributes; scopes may be nested."""
    attributes = list(attributes)
    before = [(vars(owner), name, name in vars(owner), vars(owner).get(name)) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            vars(owner)[name] = value
        yield
    finally:
        for own, name, had, value in before:
            if had:
                own[name] = value
            else:
                own.pop(name, None)
