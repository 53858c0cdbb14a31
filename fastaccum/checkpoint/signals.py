"""Signals as a request to end, not an exception at any line."""

from __future__ import annotations

import os
import signal
import threading


class Interrupt:
    """While entered, the first Ctrl-C sets `requested`; a second one ends the process at once.

    >>> with Interrupt() as interrupt:
    ...     interrupt.requested
    False
    """

    requested = False

    def __enter__(self):
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, *_):
        self.requested = True
        # The default action needs no Python, which a second Ctrl-C could find inside a long compilation.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, b"\nending after this step, to save what was learned; Ctrl-C again to abort\n")


class Preempted(SystemExit):
    """Raised by `fit` after SIGTERM, once the state is saved; uncaught, it ends the process with code 143.

    Attributes:
        checkpoint: the folder that it was saved to.
    """

    code: int

    def __init__(self, checkpoint: object):
        super().__init__(143)  # 128 + SIGTERM, as shells report it
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"ended by SIGTERM; the training state is in {self.checkpoint}"


class Preemption:
    """While entered, the first SIGTERM sets `requested`; a second one ends the process at once.

    Only the main thread can do so: in another it stays as it was.

    >>> with Preemption() as preemption:
    ...     Preemption.entered.requested = True  # as SIGTERM would
    ...     preemption.requested
    True
    """

    requested = False
    entered: Preemption | None = None

    def __enter__(self):
        Preemption.entered = self
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_):
        Preemption.entered = None
        if self._main:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _on_signal(self, *_):
        self.requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(2, b"\nSIGTERM: ending after this step, to save the training state\n")
