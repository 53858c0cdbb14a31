"""Lines for people: text of unknown origin made safe to print, and warnings and errors at the line
that caused them.
"""

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
LONGEST = 2000  # characters
_INNER = ("fastaccum", "keras", "tf_keras", "tensorflow", "contextlib", "functools")


def one_line(text: str) -> str:
    """Makes `text` one line that is safe to print: line breaks and a terminal's commands are
    escaped.
    """
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text.replace("\n", " "))


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line that called this package, however deep inside the package the reason was
    found.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_inner(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def short_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: what it refuses shows the caller's own lines, as Keras's errors
    do.

    An error of any other kind than TypeError and ValueError keeps its lines, since it may be a
    fault of this package. `keras.config.disable_traceback_filtering()` shows the lines of
    fastaccum, Keras and TensorFlow, too.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            import keras  # which `fastaccum --help` does without

            if keras.config.is_traceback_filtering_enabled():
                _shorten(error)
            raise error

    return call


def _shorten(error: BaseException | None) -> None:
    """Drops the lines of this and other packages from an error and those that led to it, all but
    where each arose.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = list(traceback.walk_tb(error.__traceback__))
        kept: types.TracebackType | None = None
        for frame, number in reversed(lines):
            if kept is None or not _is_inner(frame):
                kept = types.TracebackType(kept, frame, frame.f_lasti, number)
        error.__traceback__ = kept
        error = error.__cause__ or error.__context__


def _is_inner(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _INNER


def without_arguments(error: Exception) -> str:
    """Returns an error's message without the arguments of a layer's call, which Keras adds in lines
    of their own.
    """
    plain = re.sub(r"\x1b\[\d+m", "", str(error))  # Keras prints in bold
    added = r"Exception encountered when calling (.+?)\.\n\n(.*?)\n\nArguments received by .*"
    found = re.fullmatch(added, plain, re.DOTALL)
    if found is None:
        return plain
    call, message = found.groups()
    return f"{call}: {message}"
