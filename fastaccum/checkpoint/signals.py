"""Signals as a request to end, not an exception at any line."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import ClassVar


class EndRequest:
    """Scope in which a first signal `number` is a request to end, and a second ends the process.

    The first prints `notice` and sets `requested`. Only the main thread can handle signals: in
    another thread, and in a forked child, they stay as they were.
    """

    entered: ClassVar[dict[int, EndRequest]] = {}  # now, by number

    def __init__(self, number: signal.Signals, notice: str):
        self.requested = False
        self._number = number
        self._notice = notice

    def __enter__(self) -> EndRequest:
        self.entered[self._number] = self
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(self._number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.pop(self._number, None)
        if self._main:
            signal.signal(self._number, self._previous or signal.SIG_DFL)

    def _on_signal(self, *_: object) -> None:
        self.requested = True
        # The default action needs no Python, which a second signal could find inside a long
        # compilation.
        signal.signal(self._number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # a terminal that is gone
            os.write(2, f"\n{self._notice}\n".encode())


def _restore_in_child() -> None:
    """Restores the handlers in a forked child: a data loader's process ends at the first signal."""
    for request in tuple(EndRequest.entered.values()):
        request.__exit__()


os.register_at_fork(after_in_child=_restore_in_child)


class Preempted(SystemExit):
    """Exit that `fit` raises after SIGTERM, once the state is saved.

    Uncaught, it ends the process with code 143.

    Attributes:
        checkpoint: the folder that it was saved to.
    """

    code: int

    def __init__(self, checkpoint: Path):
        super().__init__(143)  # 128 + SIGTERM, as shells report it
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"ended by SIGTERM; the training state is in {self.checkpoint}"
