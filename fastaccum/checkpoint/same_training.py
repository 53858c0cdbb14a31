"""The check that a checkpoint is of the training that a fit is to go on with."""

from __future__ import annotations

from fastaccum.checkpoint import settings
from fastaccum.checkpoint.cut import other_product
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.checkpoint.state import Training
from fastaccum.checkpoint.store import Checkpoint
from fastaccum.fingerprint.differences import differences


def require(checkpoint: Checkpoint, fit: Training, resume: frozenset[str]) -> None:
    """Raises IncompatibleCheckpointError if a checkpoint is of another training than a fit.

    The error lists all that differs, but for the settings that `resume` names. Where other settings
    are all that differs, the error tells how to take them.
    """
    different = _differences(checkpoint, fit, resume)
    if not different:
        return
    message = (
        f"{checkpoint.path} is of another training, and nothing was changed. Make these as they "
        f"were, or name another checkpoint_dir: {'; '.join(different)}"
    )
    known = frozenset(settings.known(fit.description))
    changes = settings.changes(checkpoint.manifest["description"], fit.description, known)
    with_changes = resume | {change.name for change in changes}
    if not _differences(checkpoint, fit, with_changes):
        message += (
            f". To go on with what they are now: fit(..., resume={settings.show(with_changes)})"
        )
    raise IncompatibleCheckpointError(message)


def _differences(checkpoint: Checkpoint, fit: Training, resume: frozenset[str]) -> list[str]:
    """Lists the items that differ beside the named settings, with what to do where it is known."""
    saved = settings.without(checkpoint.manifest["description"], resume)
    now = settings.without(fit.description, resume)
    different = differences(saved, now)
    plan_then = saved["batch plan"]
    plan_now = now["batch plan"]

    rows = plan_then.get("global_batch")  # a dataset's plan has none
    if rows != plan_now.get("global_batch"):
        product = other_product(checkpoint.manifest["cut"], fit.cut, rows)
        if product:  # says the same, with what to do
            prefix = "batch plan.global_batch: "
            different = [line for line in different if not line.startswith(prefix)]
            different.append(product)
    if plan_then["jit_compile"] != plan_now["jit_compile"]:  # which "auto" may have chosen
        advice = f"pass jit_compile={plan_then['jit_compile']} to the Trainer"
        different = [advice, *different]
    return different
