"""Faults of disks, files, signals and code: nothing is lost, and the message says what happened.

docs/reliability.md has a row for each test here that injects a fault.
"""

import json
import linecache
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from resuming import Interruption, Stateless, StopAfter, bits, scramble

import fastaccum as fa
from fastaccum.checkpoint import errors, lock, store
from fastaccum.fingerprint.values import plain
from fastaccum.kernels import private

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
EPOCHS, STEPS = 3, 12


def make(units=4, optimizer=None, accumulation=3, activation="relu", loss="mse", **options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(units, activation=activation),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    return fa.Trainer(model, optimizer, loss, gradient_accumulation_steps=accumulation, **options)


def fit(trainer, folder, x=X, y=Y, callbacks=(), every=2, batch_size=8, keep=3, **options):
    options = {"epochs": EPOCHS, "verbose": 0, "batch_size": batch_size, **options}
    folder = {"checkpoint_dir": folder, "checkpoint_every": every, "keep": keep}
    return trainer.fit(x, y, callbacks=list(callbacks), **folder, **options)


class Run:
    """Keeps one trainer for all tests, stopped in its second epoch and trained to the end, so that
    it compiles once.
    """

    def __init__(self, folder):
        self.trainer = make()
        with pytest.raises(Interruption):
            fit(self.trainer, folder / "stopped", callbacks=[StopAfter(7)])
        self.steps = [path.name for path in store.paths(folder / "stopped")]
        self.folder = folder
        shutil.copytree(folder / "stopped", folder / "whole")
        scramble(self.trainer)
        fit(self.trainer, folder / "whole")
        self.end = bits(self.trainer)

    def begin(self, folder):
        """A folder with the checkpoints of the stopped training; the newest one's path."""
        shutil.copytree(self.folder / "stopped", folder, dirs_exist_ok=True)
        scramble(self.trainer)
        return folder / self.steps[0]

    def begin_at(self, folder):
        """The same, of its first checkpoint alone: more than a save is still to come."""
        shutil.copytree(self.folder / "stopped" / self.steps[-1], folder / self.steps[-1])
        scramble(self.trainer)

    def goes_on(self, folder, **options):
        """Resumes and trains to the end, which must be that of a training with no fault."""
        scramble(self.trainer)
        fit(self.trainer, folder, **options)
        assert bits(self.trainer) == self.end


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))


def test_the_trainings_agree_with_one_without_checkpoints(run):
    trainer = make()
    # The seed of the shuffle is the only thing that a fit without checkpoints would draw anew.
    keras.utils.set_random_seed(0)
    np.random.seed(0)
    seed = store.latest(run.folder / "whole").manifest["data"]["seed"]
    original, np.random.randint = np.random.randint, lambda *_: seed
    try:
        trainer.fit(X, Y, batch_size=8, epochs=EPOCHS, verbose=0)
    finally:
        np.random.randint = original
    assert bits(trainer) == run.end


def test_the_document_names_tests_that_exist():
    tests = Path(__file__).parents[1]
    files: dict[str, str] = {}
    for path in tests.rglob("*.py"):  # of which two may have the same name
        files[path.name] = files.get(path.name, "") + path.read_text()
    numbers, faults = (
        re.findall(r"^\|.*", section, re.MULTILINE)[2:]
        for title in ("## Bad numbers", "## Faults injected")
        for section in [
            (tests.parent / "docs" / "reliability.md")
            .read_text()
            .partition(title)[2]
            .partition("\n## ")[0]
        ]
    )
    assert len(faults) >= 20 and len(numbers) >= 10
    for row in faults:
        named = re.findall(r"`(\w+\.py)::(\w+)", row)
        damages = re.findall(r"\[([^\]]+)\]`", row)
        assert named or damages or row.endswith("| the same |"), row
        for file, test in named:
            assert f"def {test}(" in files[file]
        for damage in damages:
            assert damage in DAMAGE or any(f'"{damage}"' in text for text in files.values()), damage
    for test in re.findall(r"`(test_\w+)", "".join(numbers)):
        assert f"def {test}" in files["test_nonfinite.py"], test


# What a folder holds.


def test_the_folder(run):
    assert run.steps == ["step-00000006", "step-00000004", "step-00000002"]
    path = run.folder / "stopped" / run.steps[0]
    assert sorted(f.name for f in path.iterdir()) == [
        "manifest.json",
        "state.data-00000-of-00001",
        "state.index",
    ]
    latest = store.latest(path.parent)
    assert (latest.path, latest.step, latest.epoch) == (path, 6, 1)
    assert list(latest.history) == ["grad_norm", "loss", "loss_scale", "skipped_steps"]
    assert "model/sequential/dense/kernel" in latest.tensors()


def test_nothing_is_unpickled(run, tmp_path):
    """CPython announces every class that a pickle names."""
    seen = []
    watching = [True]
    sys.addaudithook(
        lambda event, _: seen.append(event) if watching and event == "pickle.find_class" else None
    )
    run.begin(tmp_path)
    run.goes_on(tmp_path)
    watching.clear()
    assert not seen


# Damaged checkpoints.


def flip(file, at=-20):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


DATA, INDEX, MANIFEST = "state.data-00000-of-00001", "state.index", "manifest.json"
DAMAGE = {
    "truncated tensors": (lambda p: truncate(p / DATA), "cannot be read"),
    "truncated manifest": (lambda p: truncate(p / MANIFEST), "does not have this format"),
    "empty manifest": (lambda p: (p / MANIFEST).write_text(""), "does not have this format"),
    "flipped bit in tensors": (lambda p: flip(p / DATA), "cannot be read"),
    "flipped bit in index": (lambda p: flip(p / INDEX, 20), "cannot be read"),
    "flipped bit in manifest": (
        lambda p: (p / MANIFEST).write_text(
            (p / MANIFEST).read_text().replace('"epoch": 1', '"epoch": 0', 1)
        ),
        "its checksum differs",
    ),
    "missing tensors": (lambda p: (p / DATA).unlink(), "cannot be read"),
    "missing index": (lambda p: (p / INDEX).unlink(), "cannot be read"),
    "missing manifest": (lambda p: (p / MANIFEST).unlink(), "No such file"),
    "empty folder": (lambda p: [each.unlink() for each in p.iterdir()], "No such file"),
    "manifest of another checkpoint": (
        lambda p: shutil.copy(p.parent / "step-00000004" / MANIFEST, p / MANIFEST),
        "it is of step 4",
    ),
    "another checkpoint under its name": (
        lambda p: (shutil.rmtree(p), shutil.copytree(p.parent / "step-00000004", p)),
        "it is of step 4",
    ),
    "tensors of another checkpoint": (
        lambda p: [
            shutil.copy(p.parent / "step-00000004" / name, p / name) for name in (DATA, INDEX)
        ],
        "its tensors are not those that its manifest.json was written with",
    ),
    "tensors of no format": (
        lambda p: (p / INDEX).write_bytes(b"none"),
        "its tensors cannot be read",
    ),
    "another program's JSON": (
        lambda p: (p / MANIFEST).write_text('{"epoch": 3}'),
        "does not have this format",
    ),
    "JSON that is no object": (
        lambda p: (p / MANIFEST).write_text("[" * 9999 + "]" * 9999),
        "RecursionError",
    ),
    "file in place of the folder": (
        lambda p: (shutil.rmtree(p), p.write_text("")),
        "Not a directory",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_passed_over(run, tmp_path, damage):
    newest = run.begin(tmp_path)
    harm, reason = DAMAGE[damage]
    harm(newest)
    with pytest.warns(RuntimeWarning, match=f"checkpoint {newest} is passed over: .*{reason}"):
        assert store.latest(tmp_path).step == 4
    with pytest.warns(RuntimeWarning, match="is passed over"):
        run.goes_on(tmp_path)
    assert store.latest(tmp_path).step == STEPS


@pytest.mark.slow
def test_every_flipped_byte_and_every_length_is_seen(run, tmp_path):
    """Flips bytes of the tensors and their index.

    A flip that is not noticed changes no tensor: nobody reads those bytes of the index.
    """
    path = run.begin(tmp_path)
    expected = {
        name: tensor.numpy().tobytes() for name, tensor in store.inspect(path).tensors().items()
    }
    for name in (DATA, INDEX):
        whole, unseen = (path / name).read_bytes(), 0
        damaged = [
            whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
            for at in range(len(whole))
        ]
        for content in (*damaged, *(whole[:length] for length in range(0, len(whole), 7))):
            (path / name).write_bytes(content)
            try:
                found = {
                    name: tensor.numpy().tobytes()
                    for name, tensor in store.inspect(path).tensors().items()
                }
            except errors.CorruptCheckpointError:
                continue
            unseen += 1
            assert found == expected
        assert unseen < (1 if name == DATA else 80)
        (path / name).write_bytes(whole)


def test_no_good_checkpoint_is_no_fresh_start(run, tmp_path):
    run.begin(tmp_path)
    for path in store.paths(tmp_path):
        truncate(path / DATA)
    before = bits(run.trainer)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(
            ValueError, match=r"None of the 3 .*step-00000006: .*step-00000004: .*step-00000002: "
        ),
    ):
        fit(run.trainer, tmp_path)
    assert bits(run.trainer) == before


def test_leftovers_of_a_killed_process_are_removed(run, tmp_path):
    run.begin(tmp_path)
    shutil.copytree(tmp_path / run.steps[0], tmp_path / ".step-00000008.writing-123")
    shutil.copytree(tmp_path / run.steps[0], tmp_path / ".step-00000001.removing-123")
    (tmp_path / "notes.txt").write_text("mine")
    run.goes_on(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(lock.NAME, "notes.txt"),
        *("step-00000008", "step-00000010", "step-00000012"),
    ]


# Another training.


def changed(what, model=None, **options):
    return pytest.param(model or make, options, what, id=what)


@pytest.mark.parametrize(
    ("model", "options", "what"),
    [
        changed(
            "model.variables.sequential/dense/kernel: float32[4, 4] was saved, now float32[4, 5]",
            lambda: make(5),
        ),
        changed(
            "model.layers.dense.activation: relu was saved, now tanh",
            lambda: make(activation="tanh"),
        ),
        changed("loss.loss: mse was saved, now mae", lambda: make(loss="mae")),
        changed(
            "batch plan.jit_compile: True was saved, now False", lambda: make(jit_compile=False)
        ),
        changed("optimizer.learning_rate", lambda: make(optimizer=keras.optimizers.Adam(0.02))),
        changed(
            "optimizer.class: Adam was saved, now SGD",
            lambda: make(optimizer=keras.optimizers.SGD(0.01)),
        ),
        changed(
            "loss_scale.class: NoLossScale was saved",
            lambda: make(loss_scale=fa.DynamicLossScale()),
        ),
        changed(
            "must be 24, as saved (8 x 3), and is 8 x 2: batch_size=8 with grad",
            lambda: make(accumulation=2),
        ),
        changed(
            "batch plan.steps_per_execution: 1 was saved, now 2",
            lambda: make(steps_per_execution=2),
        ),
        changed("batch plan.clip_norm: None was saved, now 1.0", lambda: make(clip_norm=1.0)),
        changed("metrics.variables.", lambda: make(metrics=["mae"])),
        changed(
            "checkpoint_dir: batch_size * gradient_accumulation_steps must be 24, as saved (8 x "
            "3), and is 4 x 3: batch_size=4 with gradient_accumulation_steps=6 would do",
            batch_size=4,
        ),
        changed("batch plan.rows: 96 was saved, now 80", x=X[:80], y=Y[:80]),
        changed("batch plan.steps_per_epoch: None was saved, now 2", steps_per_epoch=2),
        changed("batch plan.shuffle: True was saved, now False", shuffle=False),
        changed("batch plan.data: ", x=X.astype("float16")),
    ],
)
def test_another_training_is_refused(run, tmp_path, model, options, what):
    run.begin(tmp_path)
    trainer = model()
    trainer._builder.get_or_build(
        trainer._setup.make_source(X, Y, None, trainer._present_options, batch_size=8).sample,
        trainer._present_options,
    )
    before = bits(trainer)
    with pytest.raises(
        ValueError, match="is of another training, and nothing was changed"
    ) as raised:
        fit(trainer, tmp_path, **options)
    assert what in str(raised.value)
    assert "optimizer.class: " not in what or str(raised.value).count("optimizer.") == 1
    assert bits(trainer) == before


def test_other_rows_are_told(run, tmp_path):
    """Warns, and does not refuse: a row may have been corrected."""
    run.begin(tmp_path)
    with pytest.warns(RuntimeWarning, match="other values than when the checkpoint was saved"):
        fit(run.trainer, tmp_path, x=X + 1)


def test_another_dataset_is_refused(tmp_path):
    import tensorflow as tf

    trainer = make()
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=1)
    with pytest.raises(Interruption):
        fit(trainer, tmp_path, dataset.batch(8), None, callbacks=[StopAfter(3)], batch_size=None)
    before = bits(trainer)
    other = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    with pytest.raises(
        ValueError, match="is another dataset than the one that the checkpoint was made with"
    ):
        fit(trainer, tmp_path, other, None, batch_size=None)
    assert bits(trainer) == before


def test_an_epoch_that_a_backup_left_moves_no_checkpoint(run, tmp_path):
    shutil.copytree(run.folder / "whole", tmp_path, dirs_exist_ok=True)
    private.initial_epoch.set(run.trainer.model, 9)  # as a fit that failed leaves it
    assert fit(run.trainer, tmp_path, epochs=EPOCHS + 1).epoch == list(range(EPOCHS + 1))


class OwnBackup(keras.callbacks.BackupAndRestore):
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_dir": 3}, "checkpoint_dir=3 must be the path"),
        ({"checkpoint_dir": ""}, "checkpoint_dir='' must be the path"),
        ({"checkpoint_every": 5}, "checkpoint_every=5 needs a checkpoint_dir"),
        ({"checkpoint_dir": "c", "checkpoint_every": 0}, "checkpoint_every=0"),
        ({"checkpoint_dir": "c", "checkpoint_every": "epoch"}, "checkpoint_every='epoch'"),
        ({"checkpoint_dir": "c", "keep": 0}, "keep=0"),
        (
            {"checkpoint_dir": "/proc/checkpoints"},
            "checkpoint_dir='/proc/checkpoints' cannot be written to",
        ),
        *[
            (
                {"checkpoint_dir": "c", "callbacks": [backup("b")]},
                f"holds a {backup.__name__}, which resumes by itself",
            )
            for backup in (
                keras.callbacks.BackupAndRestore,
                OwnBackup,
                tf_keras.callbacks.BackupAndRestore,
            )
        ],
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(map(str, value)),
)
def test_bad_arguments(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = bits(run.trainer)
    with pytest.raises((TypeError, ValueError), match=message):
        run.trainer.fit(X, Y, batch_size=8, **arguments)
    assert bits(run.trainer) == before


# Disks.


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; `small_disk(options)` mounts it anew."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system needs to be permitted")
        return path

    yield mount
    subprocess.run(["umount", "-l", str(path)], capture_output=True)


class At(Stateless):
    """Calls something at the end of a train step, counted from 0."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if self.step == 0:
            self.action()
        self.step -= 1


def test_full_disk(run, small_disk):
    disk = small_disk("-o", "size=64k")
    run.begin_at(disk)
    with pytest.raises(
        RuntimeError, match=r"The checkpoint of step \d+ could not be written .*No space left"
    ):
        fit(run.trainer, disk, every=1, keep=9)
    assert all(map(store.inspect, store.paths(disk)))
    assert not list(disk.glob(".step*"))
    for path in store.paths(disk)[1:]:
        shutil.rmtree(path)
    run.goes_on(disk, keep=1)


def test_folder_that_becomes_read_only(run, small_disk):
    disk = small_disk("-o", "size=1m")
    run.begin_at(disk)
    with pytest.raises(RuntimeError, match=r"could not be written .*[Rr]ead-only"):
        fit(run.trainer, disk, every=1, callbacks=[At(3, lambda: small_disk("-o", "remount,ro"))])
    small_disk("-o", "remount,rw")
    assert store.latest(disk).step >= 4
    run.goes_on(disk)


def test_folder_that_is_removed(run, tmp_path):
    folder = tmp_path / "checkpoints"
    run.begin_at(folder)
    with pytest.raises(RuntimeError, match=r"could not be written .*No such file or directory"):
        fit(
            run.trainer,
            folder,
            every=1,
            callbacks=[At(3, lambda: folder.rename(tmp_path / "moved"))],
        )
    assert not folder.exists()
    run.goes_on(tmp_path / "moved")


def test_file_in_place_of_the_folder(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot be written to: File exists"):
        fit(run.trainer, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# Processes: signals and limits.


def in_child(target, *arguments):
    """The exit code of a process of its own that runs a function."""
    child = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    child.start()
    child.join()
    return child.exitcode


def fit_with_small_files(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        fit(make(), folder)
    except RuntimeError as error:
        sys.exit(
            7 if "could not be written" in str(error) and "File too large" in str(error) else 8
        )


@pytest.mark.slow
def test_files_over_the_limit(run, tmp_path):
    run.begin(tmp_path)
    assert in_child(fit_with_small_files, tmp_path) == 7
    assert [path.name for path in store.paths(tmp_path)] == run.steps
    run.goes_on(tmp_path)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def test_sigterm(run, tmp_path):
    previous = signal.getsignal(signal.SIGTERM)
    run.begin_at(tmp_path)
    with pytest.raises(fa.Preempted) as raised:
        fit(run.trainer, tmp_path, every=None, callbacks=[At(2, send(signal.SIGTERM))])
    assert raised.value.code == 143
    assert raised.value.checkpoint == store.latest(tmp_path).path == tmp_path / "step-00000005"
    assert signal.getsignal(signal.SIGTERM) is previous
    run.goes_on(tmp_path, every=None)


def test_sigterm_at_an_epochs_last_step(run, tmp_path):
    run.begin_at(tmp_path)
    with pytest.raises(fa.Preempted):
        fit(run.trainer, tmp_path, callbacks=[At(1, send(signal.SIGTERM))])
    assert store.latest(tmp_path).manifest["history"]["epoch"] == [0]
    run.goes_on(tmp_path)


def terminated(folder, times):
    callbacks = [At(2 + i, send(signal.SIGTERM)) for i in range(times)]
    if times > 1:
        callbacks = [At(2, lambda: [send(signal.SIGTERM)() for _ in range(times)])]
    fit(make(), folder, callbacks=callbacks)


@pytest.mark.slow
def test_sigterm_ends_the_process_with_143(run, tmp_path):
    run.begin(tmp_path)
    assert in_child(terminated, tmp_path, 1) == 143
    run.goes_on(tmp_path)


@pytest.mark.slow
def test_a_second_sigterm_kills_at_once(run, tmp_path):
    run.begin(tmp_path)
    assert in_child(terminated, tmp_path, 2) == -signal.SIGTERM
    run.goes_on(tmp_path)


def test_ctrl_c(run, tmp_path):
    run.begin_at(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(run.trainer, tmp_path, callbacks=[At(5, send(signal.SIGINT))])
    run.goes_on(tmp_path)


def test_fit_outside_the_main_thread(run, tmp_path):
    run.begin(tmp_path)
    thread = threading.Thread(target=fit, args=(run.trainer, tmp_path))
    thread.start()
    thread.join()
    assert bits(run.trainer) == run.end


# Code that raises.


def raises():
    raise Interruption


@pytest.mark.parametrize(
    "hook", ["on_epoch_begin", "on_train_batch_end", "on_test_end", "on_epoch_end", "on_train_end"]
)
def test_callback_that_raises(run, tmp_path, hook):
    run.begin_at(tmp_path)
    raising = keras.callbacks.LambdaCallback()
    setattr(raising, hook, lambda *_, **__: raises())
    with pytest.raises(Interruption):
        fit(run.trainer, tmp_path, callbacks=[raising], validation_data=(X, Y))
    run.goes_on(tmp_path)


class Rows(keras.utils.PyDataset):
    broken = False

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.broken and index == 8:
            raise OSError("the disk is gone")
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def test_iterator_that_raises(run, tmp_path):
    options = {"batch_size": None, "shuffle": False, "epochs": 2}
    scramble(run.trainer)
    fit(run.trainer, tmp_path / "whole", Rows(), None, **options)
    end = bits(run.trainer)
    scramble(run.trainer)
    broken = Rows()
    broken.broken = True
    with pytest.raises(Exception, match="the disk is gone"):
        fit(run.trainer, tmp_path / "broken", broken, None, every=1, **options)
    assert store.latest(tmp_path / "broken").step >= 1
    scramble(run.trainer)
    fit(run.trainer, tmp_path / "broken", Rows(), None, every=1, **options)
    assert bits(run.trainer) == end


def test_labels_out_of_range_are_not_saved(tmp_path):
    """A state that has seen one would refuse every later step: the data can be mended, and training
    goes on.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    trainer = fa.Trainer(model, "sgd", "sparse_categorical_crossentropy")
    labels = np.arange(96) % 3
    expected = trainer.fit(X, labels, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    scramble(trainer)
    keras.utils.set_random_seed(1)
    wrong = np.where(np.arange(96) == 70, 9, labels)
    for variable, value in zip(
        model.variables, keras.models.clone_model(model).get_weights(), strict=True
    ):
        variable.assign(value)
    start = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match="values from 0 to 9"):
        fit(trainer, tmp_path, X, wrong, every=1, shuffle=False, epochs=1)
    assert store.latest(tmp_path).step == 8
    mended = fit(trainer, tmp_path, X, labels, every=1, shuffle=False, epochs=1).history
    after = [np.array(v) for v in model.variables]
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    trainer.optimizer.iterations.assign(0)
    again = trainer.fit(X, labels, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    assert json.dumps(mended) == json.dumps(again) and mended.keys() == expected.keys()
    assert all((a == b).all() for a, b in zip(after, map(np.array, model.variables), strict=True))


def test_a_damaged_newer_checkpoint_does_not_cost_the_one_just_written(run, tmp_path):
    (tmp_path / "step-00000009").mkdir()
    for name in reversed(run.steps):
        good = store.inspect(run.folder / "stopped" / name)
        path = store.write(tmp_path, good.manifest, good.tensors(), keep=1)
    assert [each.name for each in store.paths(tmp_path)] == ["step-00000009", path.name]


def test_a_checkpoint_is_verified_eight_tensors_at_a_time(tmp_path, monkeypatch):
    tensors = {f"model/{i}": np.full(3, i, "float32") for i in range(20)}
    path = store.write(tmp_path, {"progress": {"step": 1}}, tensors, keep=1)
    pieces, restore = [], tf.raw_ops.RestoreV2

    def counted(tensor_names, **given):
        pieces.append(list(tensor_names))
        return restore(tensor_names=tensor_names, **given)

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", counted)
    found = store.inspect(path)
    assert [len(names) for names in pieces] == [8, 8, 5]
    assert sorted(name for names in pieces for name in names) == sorted([*tensors, store.SEAL])
    read = found.tensors()
    assert read.keys() == tensors.keys() and all(
        (read[name].numpy() == tensors[name]).all() for name in tensors
    )


def test_a_checkpoint_is_on_the_disk_before_its_name_is(run, tmp_path, monkeypatch):
    """Checks also that the name is on the disk before an older checkpoint is removed."""
    older, newer = (
        store.inspect(run.folder / "stopped" / name) for name in reversed(run.steps[:2])
    )
    store.write(tmp_path, older.manifest, older.tensors(), keep=1)
    events, rename = [], Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda number: events.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
    )
    monkeypatch.setattr(
        Path, "rename", lambda path, to: events.append(f"-> {to.name}") or rename(path, to)
    )
    path = store.write(tmp_path, newer.manifest, newer.tensors(), keep=1)
    files = sorted(each.name for each in path.iterdir())
    flushed, (named, of_folder, removed) = events[:-3], events[-3:]
    assert sorted(flushed[:-1]) == files and flushed[-1].startswith(f".{path.name}.writing-")
    assert (named, of_folder) == (f"-> {path.name}", tmp_path.name)
    assert removed.startswith(f"-> .{older.path.name}.removing-")


@pytest.mark.parametrize(
    ("directory", "error", "message"),
    [
        (None, TypeError, "directory=None must be a path"),
        (0, TypeError, "directory=0 must be a path"),
        (b"bytes", TypeError, "directory=b'bytes' must be a path"),
        ("a\0b", ValueError, "directory='.*' must be a path"),
        ("\ud800", ValueError, "directory='.*' must be a path"),
        (__file__, ValueError, "directory=.* cannot be read: Not a directory"),
    ],
)
def test_what_is_no_folder_has_no_latest(directory, error, message):
    with pytest.raises(error, match=message):
        store.latest(directory)


class Notes(Stateless):
    """Makes of logs and History what a user may."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.history.history.setdefault("of_batches", []).append(batch)

    def on_epoch_end(self, epoch, logs=None):
        del logs["grad_norm"]
        logs.update(
            text="warm", none=None, flag=True, big=10**30, named={"a": 1}, double=np.float64(epoch)
        )


def test_a_history_of_whatever_callbacks_add_is_saved_and_goes_on(tmp_path):
    trainer = make(jit_compile=False)
    fit(trainer, tmp_path, callbacks=[Notes()], epochs=1)
    saved = store.latest(tmp_path)
    assert "double" in saved.manifest["history"]["history"] and saved.history["of_batches"] == [
        0,
        1,
        2,
        3,
    ]
    history = fit(trainer, tmp_path, callbacks=[Notes()], epochs=2).history
    assert "grad_norm" not in history and history["of_batches"] == [0, 1, 2, 3] * 2
    for name, value in {
        "text": "warm",
        "none": None,
        "flag": True,
        "big": 10**30,
        "named": {"a": 1},
    }.items():
        assert history[name] == [value] * 2, name


def test_a_history_that_is_used_again_is_saved(tmp_path):
    trainer, history = make(jit_compile=False), keras.callbacks.History()
    trainer.fit(X, Y, batch_size=8, epochs=2, callbacks=[history], verbose=0)
    fit(trainer, tmp_path, callbacks=[history], epochs=1)
    assert store.latest(tmp_path).history["loss"] == history.history["loss"]


def test_a_set_is_the_same_in_every_process():
    assert plain({"b", "c", "a"}) == ["a", "b", "c"]


def of_lambdas(file, above, factor):
    """A trainer whose model has lambdas in a file, so many lines down."""
    code = (
        f"layers = [keras.layers.Lambda(lambda x: x * {factor}), keras.layers.Dense(1, lambda x: "
        "x + 1)]"
    )
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n" * above + code)
    linecache.checkcache()
    names = {"keras": keras}
    exec(compile(file.read_text(), file, "exec"), names)
    model = keras.Sequential([keras.Input((4,)), *names["layers"]])
    return fa.Trainer(model, "sgd", "mse", jit_compile=False)


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_lambda_may_move_within_its_file_and_to_another(tmp_path):
    for epochs, file, above in (1, "a/x.py", 0), (2, "a/x.py", 3), (3, "b/x.py", 3):
        history = fit(
            of_lambdas(tmp_path / file, above, 2.0), tmp_path / "run", epochs=epochs
        ).history
        assert len(history["loss"]) == epochs
    with pytest.raises(errors.IncompatibleCheckpointError, match=r"lambda.*was saved, now"):
        fit(of_lambdas(tmp_path / "a/x.py", 0, 3.0), tmp_path / "run", epochs=4)
