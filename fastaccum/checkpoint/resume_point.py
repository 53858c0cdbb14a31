"""The place where a fit begins: its first epoch, or where a checkpoint leaves off."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from fastaccum.basics.warnings import warn
from fastaccum.checkpoint import settings
from fastaccum.checkpoint.cut import other_pieces
from fastaccum.checkpoint.settings import Change
from fastaccum.checkpoint.state import Training
from fastaccum.checkpoint.store import Checkpoint
from fastaccum.data.stacks import Position
from fastaccum.kernels.devices import has_gpu, has_op_determinism


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The place where a fit begins, and the checkpoint that it goes on from, if there is one.

    Attributes:
        position: the epoch and the step in it.
        checkpoint: None for a fit that begins at its beginning.
        stopped: a callback had ended the training that is resumed.
        pieces: how the rows of an update are cut otherwise than before; "" where they are not.
        changes: the settings that `fit(resume=...)` names and that differ from the saved ones.
        changed_constants: the changes concern constants of programs that were traced before.
    """

    position: Position
    checkpoint: Checkpoint | None = None
    stopped: bool = False
    pieces: str = ""
    changes: Sequence[Change] = ()
    changed_constants: bool = False

    @property
    def is_within_epoch(self) -> bool:
        """True where a checkpoint leaves off between two steps of an epoch."""
        return self.checkpoint is not None and self.position.step > 0

    def is_complete(self, epochs: int) -> bool:
        """Tells if nothing is left to train of so many epochs."""
        return self.stopped or self.position.epoch >= epochs

    def describe(self, epochs: int, resume: Collection[str]) -> str:
        """Writes the line that tells where a fit goes on, which names settings in `resume`."""
        assert self.checkpoint is not None
        path = self.checkpoint.path
        done = f"{self.checkpoint.step:,} train steps"
        if self.is_complete(epochs):
            how = f"{self.position.epoch} epochs, of {epochs} asked for"
            if self.stopped:
                how = "a callback had ended it"
            return f"training was complete in {path}: {done}, {how}"

        text = (
            f"resumed from {path}: {done} done, {self.position.step:,} of them in epoch "
            f"{self.position.epoch + 1} of {epochs}"
        )
        if self.pieces:
            text += f", in other pieces: {self.pieces}"
        for change in self.changes:
            text += f"; {change}"
        unchanged = set(resume).difference(change.name for change in self.changes)
        if unchanged:
            text += f"; as saved: {', '.join(sorted(unchanged))}"
        return text


def place(
    checkpoint: Checkpoint,
    tensors: Mapping[str, tf.Tensor],
    fit: Training,
    epochs: int,
    resume: frozenset[str],
) -> ResumePoint:
    """Returns the point at which a checkpoint leaves off, and finds its place in the data.

    Raises ValueError if the data have no such place.
    """
    manifest = checkpoint.manifest
    progress = manifest["progress"]
    changes = settings.changes(manifest["description"], fit.description, resume)
    point = ResumePoint(
        Position(progress["first_epoch"], progress["epoch"], progress["step_in_epoch"]),
        checkpoint,
        stopped=progress["stopped"],
        pieces=other_pieces(manifest["cut"], fit.cut),
        changes=changes,
        changed_constants=any(change.name not in fit.settings for change in changes),
    )
    if not point.pieces:
        fit.stacks.restore(manifest["data"], group(tensors, "data"))
    elif not point.is_complete(epochs):
        _find_in_other_pieces(point, fit)
    return point


def group(tensors: Mapping[str, tf.Tensor], name: str) -> dict[str, tf.Tensor]:
    """Returns the tensors of a checkpoint's group, by their names in the group."""
    prefix = f"{name}/"
    members = {}
    for full_name, tensor in tensors.items():
        if full_name.startswith(prefix):
            members[full_name.removeprefix(prefix)] = tensor
    return members


def _find_in_other_pieces(point: ResumePoint, fit: Training) -> None:
    """Finds the place in data whose updates are cut otherwise; warns if layers depend on that."""
    assert point.checkpoint is not None
    saved_cut = point.checkpoint.manifest["cut"]
    recut = any(fit.cut[name] != saved_cut[name] for name in fit.cut if name != "replicas")
    fit.stacks.find(point.checkpoint.manifest["data"], point.pieces, recut)
    if fit.split_sensitive_layers:
        warn(
            f"Training goes on in other pieces ({point.pieces}), which "
            f"{', '.join(fit.split_sensitive_layers)} depend on: the numbers will not be "
            "those of the uninterrupted training."
        )


def warn_of_lost_bits(jit_compile: bool, draws: Sequence[str]) -> None:
    """Warns of what makes a resumed fit differ from an uninterrupted one, bit for bit."""
    flag = "--xla_gpu_deterministic_ops=true"
    if jit_compile:
        is_deterministic = flag in os.environ.get("XLA_FLAGS", "")
        remedy = f"XLA_FLAGS={flag}"
    else:
        is_deterministic = has_op_determinism()
        remedy = "tf.config.experimental.enable_op_determinism()"
    if has_gpu() and not is_deterministic:
        warn(
            "This fit is resumed on a GPU without deterministic operations: it goes on from the "
            "state that was saved, but not bit for bit as it would have without the "
            f"interruption. It would with {remedy} in all of a training's processes, which costs "
            "speed."
        )
    if draws:
        warn(
            f"{len(draws)} operations of the model draw from TensorFlow's own random generators "
            f"({draws[0]}, ...), as tf_keras's layers do: no checkpoint has their state, so the "
            "numbers will not be those of the uninterrupted training. Keras 3's layers draw "
            "from seeds that are saved."
        )
