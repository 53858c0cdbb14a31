"""Warnings and errors at the user's line that caused them, and text that is safe to print."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
import types
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# The most characters that are printed of a text. A user's repr may have millions.
LONGEST = 2000
# Packages and modules whose lines are not the user's: decorators and context managers put those of
# the standard library in between.
_INNER = ("fastaccum", "keras", "tf_keras", "tensorflow", "contextlib", "functools")


def one_line(text: str) -> str:
    """Makes `text` one line that is safe to print: a terminal's commands are escaped."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    printable = []
    for character in text.replace("\n", " "):
        if not character.isprintable():
            character = ascii(character)[1:-1]  # without the quotes
        printable.append(character)
    return "".join(printable)


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the user's line that called this package."""
    frame = inspect.currentframe()
    level = 1
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def short_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function so that its errors show the caller's lines, as Keras's do.

    Only a TypeError or ValueError is shortened: an error of another kind may be a fault of this
    package. After `keras.config.disable_traceback_filtering()` no error is shortened.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            import keras  # which `fastaccum --help` does without

            if keras.config.is_traceback_filtering_enabled():
                _shorten(error)
            raise error  # in Python 3.10, a bare `raise` would restore the lines

    return call


def _shorten(error: BaseException | None) -> None:
    """Drops the lines of packages from the tracebacks of an error and its causes.

    The line at which an error was raised stays.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = list(traceback.walk_tb(error.__traceback__))
        # Links the traceback anew, from the line that raised the error outwards.
        shortened: types.TracebackType | None = None
        for frame, number in reversed(lines):
            raised_error = shortened is None
            if raised_error or not _is_inner(frame):
                shortened = types.TracebackType(shortened, frame, frame.f_lasti, number)
        error.__traceback__ = shortened
        error = error.__cause__ or error.__context__


def _is_inner(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _INNER


def without_arguments(error: Exception) -> str:
    """Returns an error's message without the arguments of a layer's call, which Keras adds."""
    plain = re.sub(r"\x1b\[\d+m", "", str(error))  # Keras prints in bold
    added = r"Exception encountered when calling (.+?)\.\n\n(.*?)\n\nArguments received by .*"
    match = re.fullmatch(added, plain, re.DOTALL)
    if match is None:
        return plain
    call, message = match.groups()
    return f"{call}: {message}"
