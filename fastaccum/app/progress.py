"""How training is going, on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Notes, above a bar on a terminal; in a file or a pipe where they are rare, the status twice a minute."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total = total
        self._console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=total, status="compiling")
        self._has_bar = self._console.file.isatty()
        self._last = time.monotonic()

    def __enter__(self) -> Display:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._has_bar:
            self._bar.stop()

    def update(self, step: int, status: str) -> None:
        """`step` steps are done; `status` is a short text."""
        if self._has_bar:
            self._bar.update(self._task, completed=step, status=status)
        elif time.monotonic() - self._last > 30:
            self.note(f"step {step:,}/{self.total:,}  {status}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)
        self._last = time.monotonic()
