"""Lines for people: text of unknown origin made safe to print, and warnings at the line that caused them."""

from __future__ import annotations

import inspect
import warnings

LONGEST = 2000  # characters
_INNER = ("fastaccum", "keras", "tf_keras", "tensorflow", "contextlib", "functools")


def one_line(text: str) -> str:
    """Makes `text` one line that is safe to print: line breaks and a terminal's commands are escaped."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text.replace("\n", " "))


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line that called this package, however deep inside the package the reason was found."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
