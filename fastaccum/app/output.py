"""Prints to streams that may end at any time, and nothing that moves a terminal's cursor."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from fastaccum import lines


@contextlib.contextmanager
def tolerate_closed_stdout() -> Iterator[None]:
    """Drops output inside the block once stdout or stderr has failed: a full log must not end a training.

    Characters that the stream's encoding lacks are printed as escapes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which no file may get
    with open(os.devnull, "w") as nowhere:
        streams = [_Stream(name, getattr(sys, name) or nowhere) for name in ("stdout", "stderr")]
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):  # type: ignore[type-var]
            formatted, warnings.formatwarning = warnings.formatwarning, _formatted  # type: ignore[assignment]
            try:
                yield
            finally:
                warnings.formatwarning = formatted
                for stream in streams:
                    stream.flush()


def has_ended() -> bool:
    """Returns whether output to stdout is dropped."""
    return getattr(sys.stdout, "ended", False)


def _formatted(message: Warning | str, *_: object) -> str:
    """Formats a warning without the line of fastaccum's source that Python shows."""
    return f"warning: {lines.one_line(str(message))}\n"


class _Stream:
    """A stream that drops its output, after one line on stderr, once a write has failed."""

    def __init__(self, name: str, stream: TextIO):
        self._name, self._stream, self.ended = name, stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._ending():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._ending():
            self._stream.flush()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.ended = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # for what is left in buffers, too
            os.close(nowhere)
            print(f"{self._name} has ended: {error.strerror}", file=sys.stderr)
