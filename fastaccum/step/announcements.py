"""Says what is traced and compiled, to whoever listens."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Say = Callable[[str], object]


def say_nothing(part: str) -> None:
    """Takes a part of a line, and does not print it."""


_announcer = contextvars.ContextVar[Say]("announcer", default=say_nothing)


def announcer() -> Say:
    """Returns the function that takes the next part of a line."""
    return _announcer.get()


@contextlib.contextmanager
def announce(say: Say | None) -> Iterator[None]:
    """Passes parts of a line to `say` while programs are traced and compiled inside the block.

    None changes nothing.
    """
    if say is None:
        yield
        return
    line_is_open = False

    def note(part: str) -> None:
        nonlocal line_is_open
        line_is_open = not part.endswith("\n")
        say(part)

    token = _announcer.set(note)
    try:
        yield
    finally:
        _announcer.reset(token)
        if line_is_open:  # an error ended the line
            say("\n")
