"""Folders that others had their hands in: another version's checkpoints, names taken, paths that
cannot be.
"""

import json
import os
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import Interruption, Stateless, StopAfter, bits, edit_manifest, scramble

import fastaccum as fa
from fastaccum.checkpoint import store
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.graphs import jit_choice

X = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
Y = X.sum(1, keepdims=True)


class Run:
    """A trainer, stopped after its fourth step of twelve, and what it ends with."""

    def __init__(self, folder):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.trainer = fa.Trainer(model, keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        self.folder = folder / "stopped"
        with pytest.raises(Interruption):
            self.fit(self.folder, StopAfter(4))
        self.fit(self.begin(folder / "whole"))
        self.end = bits(self.trainer)

    def fit(self, folder, *callbacks, **options):
        options = {"batch_size": 8, "epochs": 4, "verbose": 0, "checkpoint_every": 1, **options}
        return self.trainer.fit(X, Y, checkpoint_dir=folder, callbacks=list(callbacks), **options)

    def begin(self, folder):
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        scramble(self.trainer)
        return folder

    def goes_on(self, folder, *callbacks, **options):
        scramble(self.trainer)
        self.fit(folder, *callbacks, **options)
        assert bits(self.trainer) == self.end


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))


def content(folder):
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }


# Other versions.


@pytest.mark.parametrize("of", ["the newest", "the only one"])
@pytest.mark.parametrize("version", [store.FORMAT - 1, store.FORMAT + 1])
def test_another_versions_checkpoint_is_refused_and_stays(run, tmp_path, of, version):
    run.begin(tmp_path)
    paths = store.paths(tmp_path)
    if of == "the only one":
        for path in paths[1:]:
            shutil.rmtree(path)
    edit_manifest(paths[0], lambda manifest: manifest.update(format=version))
    before, weights = content(tmp_path), bits(run.trainer)
    with pytest.raises(
        IncompatibleCheckpointError,
        match=rf"has format {version}, written by python .*tensorflow {tf.__version__}.*where this version reads {store.FORMAT}",
    ):
        run.fit(tmp_path)
    assert content(tmp_path) == before and bits(run.trainer) == weights


@pytest.mark.parametrize("seal", ["another", "none"])
def test_a_newer_versions_checkpoint_is_known_by_its_format_alone(run, tmp_path, seal):
    """Refuses a checkpoint that may be sealed otherwise. It is not passed over, and stays."""
    run.begin(tmp_path)
    file = store.paths(tmp_path)[0] / "manifest.json"
    manifest = {
        **json.loads(file.read_text()),
        "format": store.FORMAT + 1,
        "sha256": "sealed otherwise",
    }
    if seal == "none":
        del manifest["sha256"]
    file.write_text(json.dumps(manifest))
    before, weights = content(tmp_path), bits(run.trainer)
    with pytest.raises(
        IncompatibleCheckpointError,
        match=rf"has format {store.FORMAT + 1}, written by python .*this version reads {store.FORMAT}",
    ):
        run.fit(tmp_path, keep=1)
    assert content(tmp_path) == before and bits(run.trainer) == weights


def test_a_damaged_checkpoint_of_an_older_version_is_passed_over(run, tmp_path):
    run.begin(tmp_path)
    newest = store.paths(tmp_path)[0]
    edit_manifest(newest, lambda manifest: manifest.update(format=4))
    (newest / "manifest.json").write_text(
        (newest / "manifest.json").read_text().replace('"step": 4', '"step": 5')
    )
    with pytest.warns(RuntimeWarning, match="passed over: manifest.json was changed"):
        run.goes_on(tmp_path)


def test_other_versions_of_packages_are_told(run, tmp_path):
    run.begin(tmp_path)
    for path in store.paths(tmp_path):
        edit_manifest(
            path, lambda manifest: manifest["versions"].update(tensorflow="2.1.0", keras="3.0.0")
        )
    with pytest.warns(
        RuntimeWarning, match=rf"with tensorflow 2.1.0, now {tf.__version__}; keras 3.0.0, now"
    ) as told:
        run.goes_on(tmp_path)
    assert len([each for each in told if "may not be bit-identical" in str(each.message)]) == 1


def test_other_operations_on_a_cpu_are_told(run, tmp_path, monkeypatch):
    before, now = int(jit_choice.ONEDNN), int(not jit_choice.ONEDNN)
    run.begin(tmp_path)
    monkeypatch.setattr(jit_choice, "ONEDNN", not jit_choice.ONEDNN)
    with pytest.warns(
        RuntimeWarning, match=f"written with TF_ENABLE_ONEDNN_OPTS {before}, now {now}"
    ):
        run.goes_on(tmp_path)


# Names.


@pytest.mark.parametrize(
    "name",
    [
        "step-" + "9" * 200,
        "step-٠٠٠٠٠٠٠٩",
        "step-000000009",
        "step-9",
        "step-00000009.old",
        ".step-00000009",
    ],
)
def test_names_that_no_checkpoint_has_are_left_alone(run, tmp_path, name):
    run.begin(tmp_path)
    (tmp_path / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run.goes_on(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_state_that_a_callback_refuses_is_an_error_before_training(run, tmp_path):
    class Picky(Stateless):
        def get_state(self):
            return {"wanted": 1}

        def set_state(self, state):
            raise LookupError("another version of this class wrote it")

    with pytest.raises(Interruption):
        run.fit(tmp_path, Picky(), StopAfter(2))
    before = bits(run.trainer)
    with pytest.raises(
        IncompatibleCheckpointError,
        match=r"Picky.set_state raised LookupError: another .*'wanted': 1",
    ):
        run.fit(tmp_path, Picky())
    assert bits(run.trainer) == before


# Names taken, by links and files of others.


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_hidden_names_that_are_taken_are_no_obstacle(run, tmp_path, kind):
    folder, elsewhere = run.begin(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    for step in range(1, 13):
        for what in ("writing", "removing"):
            taken = folder / f".step-{step:08d}.{what}-{os.getpid()}"
            {
                "folder": lambda at: shutil.copytree(elsewhere, at),
                "file": lambda at: at.write_text("mine"),
                "link": lambda at: at.symlink_to(elsewhere),
            }[kind](taken)
    run.goes_on(folder, keep=1)
    assert [path.name for path in store.paths(folder)] == ["step-00000012"]
    assert content(elsewhere) == {"mine": b"mine"}


def test_a_dangling_link_in_place_of_a_checkpoint(run, tmp_path):
    folder = run.begin(tmp_path / "run")
    (folder / "step-00000006").symlink_to(tmp_path / "nothing")
    with pytest.warns(RuntimeWarning, match="No such file"):
        run.goes_on(folder)
    assert not (tmp_path / "nothing").exists()


def test_a_hard_link_to_a_checkpoints_file_is_as_it_was(run, tmp_path):
    folder = run.begin(tmp_path / "run")
    before = {}
    for file in store.paths(folder)[0].iterdir():
        os.link(file, tmp_path / file.name)
        before[file.name] = file.read_bytes()
    run.goes_on(folder, keep=1)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# Paths.


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a\0b", "embedded null (byte|character)"),
        ("a\ud800", "surrogates not allowed"),
        ("a\udcff", "surrogates not allowed"),
        ("n" * 300, "File name too long"),
        ("/".join(["n" * 200] * 25), "File name too long"),
        # not of the folder, but of what is written there
        ("/".join(["n" * 199] * 20), "File name too long"),
        ("file/below", "Not a directory"),
        ("file", "File exists"),
        ("loop/below", "Too many levels of symbolic links"),
        ("a[0]", r"TensorFlow takes \* \? \["),
        (b"bytes", "must be the path of a folder"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_paths_that_cannot_be(run, tmp_path, monkeypatch, path, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = bits(run.trainer)
    with pytest.raises((TypeError, ValueError), match=f"^checkpoint_dir=.*{reason}"):
        run.fit(path)
    assert bits(run.trainer) == before


@pytest.mark.parametrize("name", ["with space", "~", "%s{x}", "ünïcode 漢字", "-rf", "a'b\"c"])
def test_names_of_folders_are_taken_as_they_are(run, tmp_path, name):
    run.goes_on(run.begin(tmp_path / name))
    assert store.latest(tmp_path / name).step == 12
