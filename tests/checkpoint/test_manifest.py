"""Manifests with other values than were written: a checksum tells."""

import contextlib
import copy
import json
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import Interruption, Stateless, StopAfter, edit_manifest

import fastaccum as fa
from fastaccum.checkpoint import store
from fastaccum.checkpoint.errors import CorruptCheckpointError

X = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
Y = X.sum(1, keepdims=True)


class Seen(Stateless):
    """A callback of a user's, with a state."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


class Run:
    """A trainer, and a checkpoint of it from the middle of its third epoch."""

    def __init__(self, folder, kind):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        options = {"gradient_accumulation_steps": 2, "metrics": ["mae"], "jit_compile": False}
        self.trainer = fa.Trainer(model, keras.optimizers.Adam(0.01), "mse", **options)
        self.folder, self.kind = folder, kind
        with contextlib.suppress(Interruption):
            self.fit(folder / "stopped", StopAfter(7), checkpoint_every=1)
        self.path = store.latest(folder / "stopped").path
        self.manifest = json.loads((self.path / store.MANIFEST).read_text())

    def fit(self, folder, *callbacks, **options):
        x, y = X, Y
        if self.kind == "dataset":
            x, y = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=1).batch(4), None
        stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        options = {"batch_size": 4, "epochs": 4, "verbose": 0, **options}
        return self.trainer.fit(
            x, y, checkpoint_dir=folder, callbacks=[stopping, Seen(), *callbacks], **options
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"), "arrays")


@pytest.fixture(scope="module")
def run_of_batches(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"), "dataset")


# Another value at any key, as an editor or a bad disk leaves it.


def places(value, path=()):
    """The paths of all values, of long lists those of the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, (*path, name))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[i], (*path, i))


def changed(manifest, path, value=None):
    """A manifest with another value at a path, or without it."""
    manifest = copy.deepcopy(manifest)
    holder = manifest
    for name in path[:-1]:
        holder = holder[name]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return manifest


@pytest.mark.parametrize("kind", ["run", "run_of_batches"])
def test_another_value_at_any_key_is_seen(request, tmp_path, kind):
    run = request.getfixturevalue(kind)
    path = tmp_path / run.path.name
    shutil.copytree(run.path, path)
    paths = list(places(run.manifest))
    for at in paths:
        for value in ("other", -1.5, None):
            (path / store.MANIFEST).write_text(json.dumps(changed(run.manifest, at, value)))
            with pytest.raises(CorruptCheckpointError, match=r"checksum differs|have this format"):
                store.inspect(path)
    assert len(paths) > 150


@pytest.mark.parametrize(
    "path",
    [
        ("versions", "python"),
        ("versions", "keras"),
        ("description", "optimizer", "class"),
        ("description", "optimizer", "\x1b[2J\n"),
        ("description", "loss", "\x1b[2J\n"),
    ],
)
def test_quotes_from_a_manifest_cannot_move_the_cursor(run, tmp_path, path):
    folder = tmp_path / run.path.name
    shutil.copytree(run.path, folder)

    def change(manifest):
        manifest.update(changed(manifest, path, "\x1b[2J\n" + "a" * 10**5))
        if path[-1] == "python":
            manifest["format"] = 5

    edit_manifest(folder, change)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(tmp_path)
        except ValueError as error:
            said.append(str(error))
    said += [str(each.message) for each in caught]
    assert said and all(each.isprintable() and len(each) < 5000 for each in said)
