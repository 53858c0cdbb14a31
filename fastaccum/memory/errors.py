"""The error of a step that does not fit: where the bytes are, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fastaccum.adapters.head import replacement
from fastaccum.adapters.losses import OutputLoss
from fastaccum.adapters.storage import MIN_CODED
from fastaccum.kernels.devices import has_gpu
from fastaccum.memory.buffers import Buffer, Kind, StepMemory

# The number of the largest buffers that an error lists.
SHOWN = 5

# From so many classes on it pays not to hold the logits.
_VOCABULARY = 4096

# The advice where there is no other.
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
        self.memory = memory
        self.limit = limit
        self.fits = fits

    @property
    def largest(self) -> list[Buffer]:
        """The buffers by size, the largest first."""
        if self.memory is None:
            return []
        return self.memory.largest

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes of each kind."""
        if self.memory is None:
            return {}
        return self.memory.by_kind


def in_units(size: float) -> str:
    """Formats a number of bytes: "3.2 GiB"."""
    if size >= 2**30:
        return f"{size / 2**30:,.1f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:,.1f} MiB"
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
    """Makes the error that tells where the bytes are, and what to change.

    Args:
        message: the error's first sentences.
        memory: of the program, or of what is held where no program is known.
        limit: bytes that the program may take.
        outputs: the model's outputs that have a loss.
        batch_size: rows of a micro-batch that fits, and how many of them make the same update.
        more: advice after that of `advice`.
        note: a last remark.
        training: False for an evaluation, which has advice of its own.
    """
    changes = ["Evaluate with a smaller batch_size."]
    if training:
        changes = advice(memory, batch_size, outputs, limit)
    changes += more
    if not changes:
        changes.append(_ELSE)
    if note:
        changes.append(note)
    lines = [message, *_shares(memory), "What to change:"]
    lines += [f"  - {change}" for change in changes]

    rows = None
    if batch_size is not None:
        rows, _ = batch_size
    return OutOfMemoryError("\n".join(lines), memory, limit, rows)


def _shares(memory: StepMemory) -> list[str]:
    """Lists the bytes of each kind and the largest buffers, a line each."""
    lines = []
    for kind, size in memory.by_kind.items():
        lines.append(f"  {kind:<16}{in_units(size):>11}{size / memory.peak_bytes:>6.0%}")
    lines.append("The largest:")
    for buffer in memory.largest[:SHOWN]:
        place = [buffer.layer, buffer.operation]
        if buffer.shape:
            place.append(str(list(buffer.shape)))
        description = " ".join(part for part in place if part)
        lines.append(f"  {in_units(buffer.bytes):>11}  {buffer.kind}: {description}")
    return lines


def head_advice(memory: StepMemory, outputs: Sequence[OutputLoss]) -> list[str]:
    """Writes the argument that saves the logits of an output, for each with large ones."""
    largest = memory.largest[:SHOWN]
    last_axes = {buffer.shape[-1] for buffer in largest if len(buffer.shape) > 1}
    lines = []
    for output in outputs:
        classes = output.classes or 0
        if classes >= _VOCABULARY and classes in last_axes:
            line = replacement(output.loss)
            if line is not None:
                lines.append(line)
    return lines


def state_advice(memory: StepMemory) -> list[str]:
    """Writes the argument that stores large slots in fewer bytes, if it saves much on a GPU.

    A program for a CPU holds float32 copies of the slots while it updates them.
    """
    if not has_gpu():
        return []
    saved = {"int8": 0, "bfloat16": 0}
    for bytes_of_number, numbers in _large_matrices(memory, "optimizer slots"):
        saved["int8"] += (bytes_of_number - 1) * numbers
        saved["bfloat16"] += (bytes_of_number - 2) * numbers
    if saved["int8"] <= memory.peak_bytes / 8:
        return []
    line = f"Trainer(optimizer_state_dtype='int8') takes {in_units(saved['int8'])} off"
    if saved["bfloat16"]:
        line += f", and 'bfloat16' {in_units(saved['bfloat16'])}"
    return [f"{line}, with AdamW and other elementwise optimizers of Keras 3."]


def _large_matrices(memory: StepMemory, kind: Kind) -> Iterator[tuple[int, int]]:
    """Yields the bytes of a number, 2 or more, and the numbers of the large matrices of a kind."""
    for buffer in memory.buffers:
        numbers = math.prod(buffer.shape)
        if buffer.kind != kind or len(buffer.shape) < 2 or numbers < MIN_CODED:
            continue
        bytes_of_number = buffer.bytes // numbers
        if bytes_of_number >= 2:
            yield bytes_of_number, numbers


def advice(
    memory: StepMemory,
    batch_size: tuple[int, int] | None,
    outputs: Sequence[OutputLoss] = (),
    limit: int = 0,
) -> list[str]:
    """Lists changes that save memory, a sentence each, the one that helps most first.

    `batch_size` is that of `explain`.
    """
    kinds = memory.by_kind
    peak = memory.peak_bytes
    # A peak far beyond the device's memory has many parts that are too large.
    much = min(peak, limit or peak) / 4
    changes = []
    if batch_size is not None:
        rows, steps = batch_size
        changes.append(
            f"batch_size={rows} with gradient_accumulation_steps={steps} fits: as many rows an "
            "update."
        )
    for line in head_advice(memory, outputs):
        changes.append(f"{line} holds a part of the logits at a time.")
    if kinds["activations"] > peak / 4 and has_gpu():  # on a CPU XLA does not save by it
        changes.append(
            "fastaccum.remat(model) computes activations again in the backward pass instead of "
            "holding them."
        )
    if kinds["optimizer slots"] > much:
        changes.append(
            "An optimizer with smaller slots (Lion has one a weight, Adafactor less, SGD "
            f"without momentum none) takes up to {in_units(kinds['optimizer slots'])} off."
        )
        changes += state_advice(memory)
    halved = 0
    for bytes_of_number, numbers in _large_matrices(memory, "weights"):
        if bytes_of_number == 4:
            halved += 2 * numbers
    if has_gpu() and halved > much / 2:
        changes.append(
            "A model made under keras.config.set_dtype_policy('bfloat16') has weights of half the "
            f"size, {in_units(halved)} less; their updates are rounded stochastically."
        )
    if kinds["data"] > much:
        changes.append(
            "Fewer rows an update, or a smaller steps_per_execution, take less data at once."
        )
    return changes
