"""A run of `fastaccum train` that is extended: its last checkpoint becomes one of the longer run."""

from __future__ import annotations

from pathlib import Path

from fastaccum.adapters import optimizers
from fastaccum.app.run import Run
from fastaccum.checkpoint import state, store


def adopt_last(run: Run, checkpoints: Path) -> None:
    """Writes the last checkpoint anew where it says that the run is at its end, or has the learning rate's schedule of
    the shorter run, which `fit` would refuse. All else that a checkpoint says must be as it was, and `fit` sees to it.
    """
    found = store.latest(checkpoints)
    if found is None:
        return
    progress, description = found.manifest["progress"], found.manifest["description"]
    optimizer = state.plain(optimizers.get(run.trainer.optimizer).config)
    schedule = {name: value for name, value in optimizer.items() if name == "learning_rate"}  # which COCOB has not
    manifest = {
        **found.manifest,
        "progress": {**progress, "stopped": progress["stopped"] and found.step >= run.options.steps},
        "description": {**description, "optimizer": {**description["optimizer"], **schedule}},
    }
    if manifest != found.manifest:
        store.write(checkpoints, manifest, found.tensors(), keep=3)
