"""A run of `fastaccum train` that is extended: its last checkpoint becomes one of the longer run."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from fastaccum.adapters import optimizers
from fastaccum.app.run import Run
from fastaccum.app.run_folder import KEEP
from fastaccum.checkpoint import store


def adopt_last(run: Run, checkpoints: Path) -> None:
    """Writes the last checkpoint anew if it is of a shorter run, at the end of that one or with its learning rate and
    its rows, which `fit` would refuse. All else that a checkpoint says must be as it was, and `fit` sees to it.
    """
    found = store.latest(checkpoints)
    if found is None or (found.manifest["progress"]["stopped"] and found.step >= run.options.steps):
        return
    progress, description, history = (found.manifest[name] for name in ("progress", "description", "history"))
    optimizer = optimizers.get(run.trainer.optimizer).description
    schedule = {name: optimizer[name] for name in ("learning_rate",) if name in optimizer}  # which COCOB has not
    # An epoch of `fit` is a row of metrics.csv, and longer rows are fewer: nobody reads the logs of those that go.
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
