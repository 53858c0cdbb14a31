"""How training is going: a bar on a terminal, plain lines elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def for_stream(total, stream=None):
    """A `Bar` where `stream`, by default standard output, is a terminal, else `Lines`: context managers."""
    stream = stream or sys.stdout
    return Bar(total, stream) if stream.isatty() else Lines(total, stream)


class Lines:
    """Plain lines, for a file or a pipe: the notes, and where they are rare, the status twice a minute.

    Args:
        total: how many steps there will be.
        stream: where to print.
    """

    def __init__(self, total, stream):
        self.total, self.stream = total, stream
        self._last = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, step, status):
        """`step` steps are done; `status` is a short text."""
        if time.monotonic() - self._last > 30:
            self.note(f"step {step:,}/{self.total:,}  {status}")

    def note(self, text):
        """A line that stays."""
        print(text, file=self.stream, flush=True)
        self._last = time.monotonic()


class Bar(Lines):
    """A progress bar below the notes."""

    def __init__(self, total, stream):
        super().__init__(total, stream)
        self._bar = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(file=stream, highlight=False, markup=False),
        )
        self._task = self._bar.add_task("", total=total, status="compiling")

    def __enter__(self):
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        self._bar.__exit__(*error)

    def update(self, step, status):
        self._bar.update(self._task, completed=step, status=status)

    def note(self, text):
        self._bar.console.print(text, soft_wrap=True)
