"""Extends a run of `fastaccum train`: rewrites its last checkpoint as one of the longer run."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from fastaccum.adapters import optimizers
from fastaccum.app.run import Run
from fastaccum.app.run_folder import KEEP
from fastaccum.checkpoint import store


def adopt_last(run: Run, checkpoints: Path) -> None:
    """Rewrites the last checkpoint where it is of a shorter run, whose end, learning rate and rows `fit` would refuse.

    All else in the checkpoint stays, and `fit` checks it.
    """
    found = store.latest(checkpoints)
    if found is None or (found.manifest["progress"]["stopped"] and found.step >= run.options.steps):
        return
    progress, description, history = (found.manifest[name] for name in ("progress", "description", "history"))
    optimizer = optimizers.get(run.trainer.optimizer).description
    schedule = {name: optimizer[name] for name in ("learning_rate",) if name in optimizer}  # which COCOB has not
    # An epoch of `fit` is a row of metrics.csv. Longer rows are fewer, and nobody reads the logs of the dropped ones.
    epoch, step = divmod(found.step, run.steps_per_row)
    manifest = {
        **found.manifest,
        "progress": {**progress, "epoch": epoch, "step_in_epoch": step, "stopped": False},
        "history": {
            **history,
            "epoch": history["epoch"][:epoch],
            "history": {name: values[:epoch] for name, values in history["history"].items() if epoch},
        },
        "description": {
            **description,
            "optimizer": {**description["optimizer"], **schedule},
            "batch plan": {**description["batch plan"], "steps_per_epoch": run.steps_per_row},
        },
    }
    if manifest == found.manifest:
        return
    tensors = found.tensors()
    if not progress["step_in_epoch"]:  # the row before has ended, and the next begins with no sums
        sums = [name for name in tensors if name.startswith(("step/mean/", "step/skipped_steps"))]
        tensors |= {name: tf.zeros_like(tensors[name]) for name in sums}
    store.write(checkpoints, manifest, tensors, KEEP)
