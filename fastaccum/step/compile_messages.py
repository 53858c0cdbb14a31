"""Messages about compilation: a line that grows while a program compiles, and a warning of too many programs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator

from fastaccum.lines import warn


class Retraces:
    """Warns, once for all programs that share the object, of a program that is compiled for many shapes."""

    MANY = 32  # more than the lengths that anyone buckets by, and short last stacks beside them

    def __init__(self) -> None:
        self._warned = False

    def note(self, signatures: Iterable[tuple], seconds: float) -> None:
        """Counts the signatures of a program's calls after a new one; `seconds` is what their first calls took."""
        shapes = [[shape for _, shape, _ in leaves] for _, *leaves in signatures]
        if self._warned or len(shapes) <= self.MANY:
            return
        self._warned = True
        most = max(({str(shape): None for shape in column} for column in zip(*shapes, strict=False)), key=len)
        first, last = list(most)[:3], list(most)[-1]
        warn(
            f"{len(shapes)} programs were made so far, one for each kind of stack, which took {seconds:.0f} s; all "
            f"stay in memory. One tensor came in {len(most)} shapes, [micro-batches, rows, ...]: {', '.join(first)}, "
            f"..., {last}. Pad to a few lengths: dataset.padded_batch(batch_size, padded_shapes), or "
            "dataset.bucket_by_sequence_length(..., pad_to_bucket_boundary=True) with batches that fill a stack each."
        )


def say_nothing(part: str) -> None:
    """Drops a message."""


_announcer = contextvars.ContextVar[Callable[[str], object]]("announcer", default=say_nothing)


@contextlib.contextmanager
def announce(say: Callable[[str], object] | None) -> Iterator[None]:
    """Passes parts of a line to `say` while programs are traced and compiled inside the block; None changes nothing."""
    if say is None:
        yield
        return
    begun = False

    def note(part: str) -> None:
        nonlocal begun
        begun = not part.endswith("\n")
        say(part)

    token = _announcer.set(note)
    try:
        yield
    finally:
        _announcer.reset(token)
        if begun:  # an error ended the line
            say("\n")


def announcer() -> Callable[[str], object]:
    """Returns the function that is told of compilation; `say_nothing` outside of `announce`."""
    return _announcer.get()
