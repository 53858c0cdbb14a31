"""The error of a step that does not fit: where the bytes are, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from fastaccum.adapters.head import replacement
from fastaccum.adapters.losses import OutputLoss
from fastaccum.kernels.devices import has_gpu
from fastaccum.memory.buffers import Buffer, Kind, StepMemory

SHOWN = 5
_VOCABULARY = 4096  # classes from which on it pays not to hold the logits
_ELSE = "Take a smaller model, or a device with more memory."


class OutOfMemoryError(MemoryError):
    """A train step needs more memory than the device has.

    Raised before the step runs if its compiled program cannot fit, or when TensorFlow runs out of
    memory.

    Attributes:
        memory: the `StepMemory` of the program; None where it is not known.
        limit: bytes that the program may take.
        fits: the largest `batch_size` found that fits with the same rows an update; None where none
            was.
    """

    def __init__(
        self,
        message: str,
        memory: StepMemory | None = None,
        limit: int = 0,
        fits: int | None = None,
    ):
        super().__init__(message)
        self.memory, self.limit, self.fits = memory, limit, fits

    @property
    def largest(self) -> list[Buffer]:
        """The buffers by size, the largest first."""
        return [] if self.memory is None else self.memory.largest

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes of each kind."""
        return {} if self.memory is None else self.memory.by_kind


def in_units(size: float) -> str:
    """Formats a number of bytes: "3.2 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"


def explain(
    message: str,
    memory: StepMemory,
    limit: int,
    outputs: Sequence[OutputLoss],
    batch_size: tuple[int, int] | None = None,
    more: Sequence[str] = (),
    note: str = "",
    training: bool = True,
) -> OutOfMemoryError:
    """Makes the error that says after `message` where the bytes are, and what to change: `advice`,
    and `more`.
    """
    found = (
        advice(memory, batch_size, outputs, limit)
        if training
        else ["Evaluate with a smaller batch_size."]
    )
    changes = [*([*found, *more] or [_ELSE]), *[note] * bool(note)]
    lines = [message, *_shares(memory), "What to change:", *(f"  - {change}" for change in changes)]
    return OutOfMemoryError("\n".join(lines), memory, limit, batch_size and batch_size[0])


def _shares(memory: StepMemory) -> list[str]:
    """Lists the bytes of each kind and the largest buffers, a line each."""
    lines = [
        f"  {kind:<16}{in_units(size):>11}{size / memory.peak_bytes:>6.0%}"
        for kind, size in memory.by_kind.items()
    ]
    lines.append("The largest:")
    for buffer in memory.largest[:SHOWN]:
        place = " ".join(
            filter(
                None, (buffer.layer, buffer.operation, str([*buffer.shape]) * bool(buffer.shape))
            )
        )
        lines.append(f"  {in_units(buffer.bytes):>11}  {buffer.kind}: {place}")
    return lines


def head_advice(memory: StepMemory, outputs: Sequence[OutputLoss]) -> list[str]:
    """Writes the argument that saves a large table of scores, for each output that has one and
    could do without.
    """
    wide = {buffer.shape[-1] for buffer in memory.largest[:SHOWN] if len(buffer.shape) > 1}
    found = [
        replacement(o.loss)
        for o in outputs
        if (o.classes or 0) >= _VOCABULARY and o.classes in wide
    ]
    return [line for line in found if line is not None]


def advice(
    memory: StepMemory,
    batch_size: tuple[int, int] | None,
    outputs: Sequence[OutputLoss] = (),
    limit: int = 0,
) -> list[str]:
    """Lists changes that save memory, a sentence each, the one that helps most first; `batch_size`
    is one that fits.
    """
    kinds, peak = memory.by_kind, memory.peak_bytes
    # a peak far beyond the device's memory has many parts that are too large
    much = min(peak, limit or peak) / 4
    found = []
    if batch_size is not None:
        rows, steps = batch_size
        found.append(
            f"batch_size={rows} with gradient_accumulation_steps={steps} fits: as many rows an "
            "update."
        )
    found += [
        f"{line} holds a part of the logits at a time." for line in head_advice(memory, outputs)
    ]
    if kinds["activations"] > peak / 4 and has_gpu():  # on a CPU XLA does not save by it
        found.append(
            "fastaccum.remat(model) computes activations again in the backward pass instead of "
            "holding them."
        )
    if kinds["optimizer slots"] > much:
        found.append(
            "An optimizer with smaller slots (Lion has one a weight, Adafactor less, SGD "
            f"without momentum none) takes up to {in_units(kinds['optimizer slots'])} off."
        )
    if kinds["data"] > much:
        found.append(
            "Fewer rows an update, or a smaller steps_per_execution, take less data at once."
        )
    return found
