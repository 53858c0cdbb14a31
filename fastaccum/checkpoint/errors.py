"""Errors of reading and writing checkpoints."""

from __future__ import annotations

from fastaccum.basics.warnings import one_line


class _CheckpointError(ValueError):
    """Error that quotes a checkpoint, which others may have written: in one line, with escapes."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


class CorruptCheckpointError(_CheckpointError):
    """A checkpoint that is not as it was written; the message says in what."""


class IncompatibleCheckpointError(_CheckpointError):
    """A good checkpoint that this fit cannot go on from: of another training or another format."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the message says why, and that earlier ones are good."""
