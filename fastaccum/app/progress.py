"""Shows the progress of a training, on a terminal or in a log."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class Display:
    """A table of progress: lines above a bar on a terminal; in a file or a pipe at least two lines a minute."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total = total
        self._console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            BarColumn(12, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            _Status(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=total, status="")
        self._has_bar = self._console.file.isatty()
        self._last = time.monotonic()
        self._heard, self._headed, self._scaled = "", False, False

    def __enter__(self) -> Display:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_bar:
            self._bar.stop()

    def hear(self, part: str) -> None:
        """Shows a part of a line about tracing and compiling, as soon as it comes."""
        if self._has_bar:
            self._heard += part
            self.status(self._heard.rpartition(". ")[2].rstrip(": "))
            if part.endswith("\n"):
                self._print(self._heard.rstrip())
        else:
            self._console.out(part, end="")
            self._console.file.flush()

    def status(self, text: str, step: int | None = None) -> None:
        """Shows beside the bar what is being done, and moves the bar to `step`."""
        self._bar.update(self._task, completed=step, status=text)

    def update(self, step: int, bits: float, rate: float, scale: float = 1, skipped: int = 0) -> None:
        """Shows bits per byte and tokens a second (or NaN) after `step` steps. A loss scale of 1 is not shown."""
        speed = "" if math.isnan(rate) else f"  {rate:,.0f} tokens/s"
        more = f"  loss scale {scale:,.0f}" * (scale != 1) + f"  {skipped} skipped" * bool(skipped)
        self._bar.update(self._task, completed=step, status=f"{bits:.3f} bits/byte{speed}{more}")
        if not self._has_bar and time.monotonic() - self._last > 30:
            self.row(step, bits, math.nan, rate, scale, skipped)

    def row(self, step: int, bits: float, held_out: float, rate: float, scale: float = 1, skipped: int = 0) -> None:
        """Prints a line of the table: the figures of `update`, and the bits per byte of held-out text, or NaN."""
        width = max(4, len(f"{self.total:,}"))
        if not self._headed:
            self._scaled, self._headed = scale != 1, True
            self._print(f"{'step':>{width}}  bits/byte  held out  tokens/s{'  loss scale' * self._scaled}")
        known, speed = ("" if math.isnan(x) else f"{x:,.{digits}f}" for x, digits in ((held_out, 3), (rate, 0)))
        more = f"  {scale:10,.0f}" * self._scaled + f"  {skipped} skipped" * bool(skipped)
        self._print(f"{step:>{width},}  {bits:9.3f}  {known:>8}  {speed:>8}{more}")
        self.update(step, bits, rate, scale, skipped)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=not self._has_bar)
        self._last = time.monotonic()


class _Status(ProgressColumn):
    """The one column that shrinks on a narrow terminal."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"], no_wrap=True, overflow="ellipsis")
