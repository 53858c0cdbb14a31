"""The check that a checkpoint is of the training that a fit is to go on with."""

from __future__ import annotations

from fastaccum.checkpoint import cut, settings
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.checkpoint.state import Training
from fastaccum.checkpoint.store import Checkpoint
from fastaccum.fingerprint.differences import differences
from fastaccum.fingerprint.values import Json


def require(found: Checkpoint, fit: Training, resume: frozenset[str]) -> None:
    """Raises IncompatibleCheckpointError, with all that differs, if a checkpoint is of another
    training than a fit.

    The settings that `resume` names may differ. Where others are all that differs, the error tells
    how to take them.
    """
    saved, now = found.manifest["description"], fit.description
    different = _differences(
        settings.without(saved, resume), settings.without(now, resume), found, fit
    )
    if not different:
        return
    message = (
        f"{found.path} is of another training, and nothing was changed. Make these as they were, "
        f"or name another checkpoint_dir: {'; '.join(different)}"
    )
    known = frozenset(settings.known(now))
    changed = {change.name for change in settings.changes(saved, now, known)}
    named = resume | changed
    if not _differences(settings.without(saved, named), settings.without(now, named), found, fit):
        message += f". To go on with what they are now: fit(..., resume={settings.show(named)})"
    raise IncompatibleCheckpointError(message)


def _differences(saved: Json, now: Json, found: Checkpoint, fit: Training) -> list[str]:
    """Lists the items in which two descriptions differ, with what to do where that is known."""
    different = differences(saved, now)
    plans = saved["batch plan"], now["batch plan"]
    if plans[0].get("global_batch") != plans[1].get("global_batch"):
        product = cut.other_product(found.manifest["cut"], fit.cut, plans[0].get("global_batch"))
        if product:  # says the same, with what to do
            different = [
                *(each for each in different if not each.startswith("batch plan.global_batch: ")),
                product,
            ]
    if plans[0].get("jit_compile") != plans[1]["jit_compile"]:  # which "auto" may have chosen
        different = [f"pass jit_compile={plans[0].get('jit_compile')} to the Trainer", *different]
    return different
