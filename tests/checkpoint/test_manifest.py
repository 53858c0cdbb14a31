"""Manifests with a right checksum and wrong values: none is taken up with another meaning. Each ends in one of the two
errors of a checkpoint, in a warning, or as if nothing was changed.
"""

import contextlib
import copy
import json
import random
import re
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import Interruption, Stateless, StopAfter, bits, scramble

import fastaccum as fa
from fastaccum.checkpoint import manifest as manifests
from fastaccum.checkpoint import state, store
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError

X = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
Y = X.sum(1, keepdims=True)
IN_THE_DEFAULT_RUN = 400


class Seen(Stateless):
    """A callback of a user's, with a state that it checks."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        if set(state) != {"steps"} or type(state["steps"]) is not int or not 0 <= state["steps"] < 100:
            raise LookupError(f"no such state: {state}")
        self.steps = state["steps"]


class Run:
    """A trainer, what it ends with, and a checkpoint of it from the middle of its third epoch."""

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
        shutil.copytree(self.path, folder / "whole" / self.path.name)
        self.end = self.resume(folder / "whole")

    def fit(self, folder, *callbacks, **options):
        x, y = X, Y
        if self.kind == "dataset":
            x, y = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=1).batch(4), None
        stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        options = {"batch_size": 4, "epochs": 4, "verbose": 0, **options}
        return self.trainer.fit(x, y, checkpoint_dir=folder, callbacks=[stopping, Seen(), *callbacks], **options)

    def resume(self, folder):
        """All that a resumed training ends with."""
        scramble(self.trainer)
        history = self.fit(folder)
        return bits(self.trainer), json.dumps([history.epoch, history.history], default=repr)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"), "arrays")


@pytest.fixture(scope="module")
def run_of_batches(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"), "dataset")


# What is wrong, at every key.


def wrong(value):
    """Values that cannot be meant where `value` was, by type."""
    nested = [[value], {"a": value}, deep(150)]
    if value is None or isinstance(value, bool):
        others = ["no", -1.5, -7, 10**30, 7]
    elif isinstance(value, int):
        others = [None, True, -7, value + 0.5, 10**30, -(10**30), float("nan"), float("inf"), str(value), "\ud800"]
    elif isinstance(value, float):
        others, nested = [None, True, 10**30, "0.5", "\ud800"], [{"a": value}, [[value], [value, value]], deep(150)]
    elif isinstance(value, str):
        others = [None, True, 7, 0.5, "", "\ud800", value + "\ud800", value + "\n"]
    elif isinstance(value, dict):
        others = [None, True, 7, "", [], {**value, "more": -7}, {**value, "\ud800": 0}]
    else:
        others = [None, True, 7, "", {}, value[:-1], [*value, *value[-1:]], [*value, None]]
    return [*others, *nested]


def deep(levels):
    return json.loads("[" * levels + "]" * levels)


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


def changes(manifest):
    """Each way to change one value: (path, what it becomes, or `changes` for nothing at all)."""
    for path in places({name: value for name, value in manifest.items() if name != "sha256"}):
        before = manifest
        for name in path:
            before = before[name]
        for value in wrong(before):
            if json.dumps(value) != json.dumps(before):
                yield path, value
        if isinstance(path[-1], str):
            yield path, changes


def changed(manifest, path, value):
    manifest = copy.deepcopy(manifest)
    holder = manifest
    for name in path[:-1]:
        holder = holder[name]
    if value is changes:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    manifest.pop("sha256")
    return {**manifest, "sha256": manifests.digest(manifest)}


def outcome(run, folder, manifest, thorough):
    """How a checkpoint with this manifest is taken: by an error's name, "told", "as it was", or what else happened.

    Of another training, which is told by its description, a fit is asked only if `thorough`.
    """
    path = folder / run.path.name
    shutil.copytree(run.path, path)
    (path / store.MANIFEST).write_text(json.dumps(manifest))
    try:
        described = store.inspect(path).manifest["description"]
        if not thorough and state.differences(described, run.manifest["description"]):
            return "IncompatibleCheckpointError"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            end = run.resume(folder)
    except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
        assert len(str(error)) > 20
        return type(error).__name__
    except Exception as error:
        return f"raised {error!r}"
    finally:
        shutil.rmtree(folder)
    told = any(re.search("starts afresh|other values|values for", str(each.message)) for each in caught)
    return "as it was" if end == run.end else "told" if told else "in silence"


def outcomes(run, folder, count=None):
    chosen = list(changes(run.manifest))
    if count is not None:
        chosen = random.Random(0).sample(chosen, count)
    for i, (path, value) in enumerate(chosen):
        thorough = count is None and i % 20 == 0
        found = outcome(run, folder / "changed", changed(run.manifest, path, value), thorough)
        yield ".".join(map(str, path)), value, found


def require_none_wrong(found):
    found = list(found)
    bad = [each for each in found if each[2].startswith(("raised", "in silence"))]
    assert not bad, "\n".join(f"{path} = {value!r:.60}: {what}" for path, value, what in bad)
    assert len([each for each in found if each[2].endswith("Error")]) >= 300


def test_wrong_values_are_refused(run, tmp_path):
    require_none_wrong(outcomes(run, tmp_path, IN_THE_DEFAULT_RUN))


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["run", "run_of_batches"])
def test_every_wrong_value_is_refused(request, tmp_path, kind):
    require_none_wrong(outcomes(request.getfixturevalue(kind), tmp_path))


@pytest.mark.parametrize(
    "path",
    [
        ("versions", "python"),  # of another format, whose values have no rules here
        ("description", "optimizer", "class"),
        ("description", "optimizer", "\x1b[2J\n"),
        ("description", "loss", "\x1b[2J\n"),
        ("tensors", "\x1b[2J\n"),
        ("\x1b[2J\n",),
    ],
)
def test_what_is_quoted_of_a_manifest_cannot_move_a_cursor(run, tmp_path, path):
    manifest = changed(run.manifest, ("format",), 4) if path[0] == "versions" else run.manifest
    folder = tmp_path / run.path.name
    shutil.copytree(run.path, folder)
    (folder / store.MANIFEST).write_text(json.dumps(changed(manifest, path, "\x1b[2J\n" + "a" * 10**5)))
    with warnings.catch_warnings(record=True) as caught, pytest.raises(ValueError) as raised:
        warnings.simplefilter("always")
        run.fit(tmp_path)
    for said in (str(raised.value), *(str(each.message) for each in caught)):
        assert said.isprintable() and len(said) < 5000
