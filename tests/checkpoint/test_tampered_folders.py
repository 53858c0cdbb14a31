"""Folders that others had their hands in: another version's checkpoints, crafted files, names taken."""

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
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.files import sha256

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
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


# Other versions.


@pytest.mark.parametrize("of", ["the newest", "the oldest", "the only one"])
@pytest.mark.parametrize("version", [2, 4])
def test_another_versions_checkpoint_is_refused_and_stays(run, tmp_path, of, version):
    run.begin(tmp_path)
    paths = store.paths(tmp_path)
    if of == "the only one":
        for path in paths[1:]:
            shutil.rmtree(path)
    edit_manifest(paths[-1 if of == "the oldest" else 0], lambda manifest: manifest.update(format=version))
    before, weights = content(tmp_path), bits(run.trainer)
    with pytest.raises(
        IncompatibleCheckpointError,
        match=rf"has format {version}, written by python .*tensorflow {tf.__version__}.*where this version reads 3",
    ):
        run.fit(tmp_path)
    assert content(tmp_path) == before and bits(run.trainer) == weights


def test_the_first_format_which_had_no_versions_is_refused(run, tmp_path):
    run.begin(tmp_path)

    def change(manifest):
        del manifest["versions"]
        manifest["format"] = 1

    edit_manifest(store.paths(tmp_path)[0], change)
    with pytest.raises(IncompatibleCheckpointError, match="has format 1, written by an earlier fastaccum"):
        run.fit(tmp_path)


@pytest.mark.parametrize("step", [2, 8])
def test_another_versions_checkpoint_that_comes_later_is_not_removed(run, tmp_path, step):
    """Neither by `keep`, nor to take its place."""
    run.begin(tmp_path)
    theirs = tmp_path / f"step-{step:08d}"

    class Comes(Stateless):
        def on_train_batch_end(self, batch, logs=None):
            if not theirs.exists() or store.latest(run.folder).step > 4:
                shutil.copytree(run.folder / "step-00000004", theirs)
                edit_manifest(theirs, lambda manifest: manifest.update(format=4))

    if step == 2:
        shutil.rmtree(theirs)
        run.fit(tmp_path, Comes(), keep=1)
    else:
        with pytest.raises(RuntimeError, match=r"step 8 could not be written .* has format 4, written by python "):
            run.fit(tmp_path, Comes(), keep=1)
    assert json.loads((theirs / "manifest.json").read_text())["format"] == 4


@pytest.mark.parametrize("seal", ["another", "none"])
def test_a_newer_versions_checkpoint_is_known_by_its_format_alone(run, tmp_path, seal):
    """It may be sealed otherwise: it is refused, not passed over, and stays."""
    run.begin(tmp_path)
    file = store.paths(tmp_path)[0] / "manifest.json"
    manifest = {**json.loads(file.read_text()), "format": 4, "sha256": "sealed otherwise"}
    if seal == "none":
        del manifest["sha256"]
    file.write_text(json.dumps(manifest))
    before, weights = content(tmp_path), bits(run.trainer)
    with pytest.raises(IncompatibleCheckpointError, match=r"has format 4, written by python .*this version reads 3"):
        run.fit(tmp_path, keep=1)
    assert content(tmp_path) == before and bits(run.trainer) == weights


def test_a_damaged_checkpoint_of_an_older_version_is_passed_over(run, tmp_path):
    run.begin(tmp_path)
    newest = store.paths(tmp_path)[0]
    edit_manifest(newest, lambda manifest: manifest.update(format=2))
    (newest / "manifest.json").write_text((newest / "manifest.json").read_text().replace('"step": 4', '"step": 5'))
    with pytest.warns(RuntimeWarning, match="passed over: manifest.json was changed"):
        run.goes_on(tmp_path)


def test_other_versions_of_packages_are_told(run, tmp_path):
    run.begin(tmp_path)
    for path in store.paths(tmp_path):
        edit_manifest(path, lambda manifest: manifest["versions"].update(tensorflow="2.1.0", keras="3.0.0"))
    with pytest.warns(RuntimeWarning, match=rf"under tensorflow 2.1.0, now {tf.__version__}; keras 3.0.0, now") as told:
        run.goes_on(tmp_path)
    assert len([each for each in told if "bits may not be" in str(each.message)]) == 1


# Crafted files.


def seal(path, **files):
    """Seals a checkpoint with other files."""
    for name, data in files.items():
        (path / {"data": store.FILES[0], "index": store.FILES[1]}[name]).write_bytes(data)
    written = {}
    for name in store.FILES:
        with (path / name).open("rb") as file:
            written[name] = {"size": (path / name).stat().st_size, "sha256": sha256(file)}
    edit_manifest(path, lambda manifest: manifest.update(files=written))


def huge_manifest(path):
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(10 * 2**30)  # takes no room on the disk


def twice(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 4', '"step": 3, "step": 4', 1))


def to_fifo(file):
    file.unlink()
    os.mkfifo(file)


def claim_terabytes(path):
    """An index, and a manifest, of a tensor that is longer than its file."""
    name = "model/sequential/dense/kernel"
    tensors = store.inspect(path).tensors()
    tensors[name] = np.zeros([999_983, 1], "float32")
    tf.raw_ops.SaveV2(
        prefix=str(path / store.TENSORS),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )

    def change(manifest):
        manifest["tensors"][name]["shape"] = [999_983, 1]
        manifest["description"]["model"]["variables"]["sequential/dense/kernel"] = "float32[999983, 1]"

    edit_manifest(path, change)
    seal(path, data=(path / store.FILES[0]).read_bytes()[:4000])


CRAFTED = {
    "a manifest of 10 GB": (huge_manifest, "is larger than"),
    "a name twice": (twice, "is in it twice"),
    "a FIFO for a manifest": (lambda p: to_fifo(p / "manifest.json"), "is not a regular file"),
    "a FIFO for tensors": (lambda p: to_fifo(p / store.FILES[0]), "is not a regular file"),
    "100,000 levels": (lambda p: (p / "manifest.json").write_text("[" * 10**5 + "]" * 10**5), "is nested too deep"),
    "a number of 5,000 digits": (
        lambda p: (p / "manifest.json").write_text(f'{{"step": {"9" * 5000}}}'),
        "is not JSON: Exceeds the limit",
    ),
    "no UTF-8": (lambda p: (p / "manifest.json").write_bytes(b'{"a": "\xff"}'), "is not JSON"),
    "a tensor longer than its file": (claim_terabytes, "its tensors would be of .* bytes, in a file of 4000"),
    "an index cut short, sealed": (lambda p: seal(p, index=(p / store.FILES[1]).read_bytes()[:50]), "cannot be read"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_files_are_passed_over(run, tmp_path, what):
    run.begin(tmp_path)
    newest = store.paths(tmp_path)[0]
    craft, reason = CRAFTED[what]
    craft(newest)
    with pytest.raises(CorruptCheckpointError, match=reason):
        store.inspect(newest)
    with pytest.warns(RuntimeWarning, match="is passed over"):
        run.goes_on(tmp_path)


@pytest.mark.parametrize(
    "name", ["step-" + "9" * 200, "step-٠٠٠٠٠٠٠٩", "step-000000009", "step-9", "step-00000009.old", ".step-00000009"]
)
def test_names_that_no_checkpoint_has_are_left_alone(run, tmp_path, name):
    run.begin(tmp_path)
    (tmp_path / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run.goes_on(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_state_that_a_callback_refuses_is_an_error_before_anything_moves(run, tmp_path):
    class Picky(Stateless):
        def get_state(self):
            return {"wanted": 1}

        def set_state(self, state):
            raise LookupError("another version of this class wrote it")

    with pytest.raises(Interruption):
        run.fit(tmp_path, Picky(), StopAfter(2))
    before = bits(run.trainer)
    with pytest.raises(IncompatibleCheckpointError, match=r"Picky.set_state raised LookupError: another .*'wanted': 1"):
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
    with pytest.warns(RuntimeWarning, match="it is not a directory"):
        run.goes_on(folder)
    assert not (tmp_path / "nothing").exists()


def test_a_hard_link_to_a_checkpoints_file_is_as_it_was(run, tmp_path):
    folder = run.begin(tmp_path / "run")
    newest = store.paths(folder)[0]
    for name in ("manifest.json", *store.FILES):
        os.link(newest / name, tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in ("manifest.json", *store.FILES)}
    run.goes_on(folder, keep=1)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# Paths.


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a\0b", "embedded null byte"),
        ("a\ud800", "surrogates not allowed"),
        ("a\udcff", "surrogates not allowed"),
        ("n" * 300, "File name too long"),
        ("/".join(["n" * 200] * 25), "File name too long"),
        ("/".join(["n" * 199] * 20), "File name too long"),  # not of the folder, but of what is written there
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
