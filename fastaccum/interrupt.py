"""Ctrl-C as a request to end, not an exception at any line."""

import os
import signal


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
