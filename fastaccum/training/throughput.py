"""The speed of an epoch: train steps and rows a second, without the time to compile."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from fastaccum.data.stacks import Dispatch
from fastaccum.step.program import Program


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Train steps and rows of an epoch, and the seconds that they took.

    Calls that compiled a program are left out, with their steps, and so is validation.

    Attributes:
        steps: updates.
        rows: rows of data, without padding; of this worker's data, where several train together.
        seconds: time from the start of the epoch's steps to the end of the last one.
    """

    steps: int
    rows: int
    seconds: float

    @property
    def steps_per_second(self) -> float:
        """Updates a second.

        Times the `flops` of `Trainer.summary`, it is what each device computes in a second.
        """
        return self.steps / self.seconds

    @property
    def rows_per_second(self) -> float:
        """Rows a second; times the tokens of a row it is tokens a second."""
        return self.rows / self.seconds


class Stopwatch:
    """Times the dispatches of an epoch, from its making on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._compiling = 0.0  # seconds of the calls that compiled
        self._steps = 0
        self._rows = 0

    @contextlib.contextmanager
    def timing(self, dispatch: Dispatch, programs: Mapping[str, Program]) -> Iterator[None]:
        """Counts the dispatch that the block executes, unless it compiles one of the programs."""
        before = _seconds_compiling(programs)
        start = time.perf_counter()
        yield
        if _seconds_compiling(programs) != before:
            self._compiling += time.perf_counter() - start
            return
        self._steps += dispatch.steps
        self._rows += dispatch.rows

    def read(self) -> Throughput | None:
        """Returns the speed, after the last step is done; None where each call compiled."""
        seconds = time.perf_counter() - self._start - self._compiling
        if not self._steps:
            return None
        return Throughput(self._steps, self._rows, seconds)


def _seconds_compiling(programs: Mapping[str, Program]) -> float:
    return sum(sum(program.seconds.values()) for program in programs.values())
