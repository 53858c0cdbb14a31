"""Tests that a folder belongs to one process at a time, for as long as it lives."""

import ctypes
import errno
import multiprocessing
import os
import platform
import re
import signal
import socket
import struct
import threading
import time
import warnings

import keras
import numpy as np
import pytest
from resuming import Stateless, holding

import fastaccum as fa
from fastaccum.checkpoint import lock, store
from fastaccum.checkpoint.lock import FolderInUseError, FolderLock

X = np.ones((12, 2), "float32")


@pytest.fixture(scope="module")
def trainer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return fa.Trainer(model, "sgd", "mse", jit_compile=False)


class At(Stateless):
    """Calls something in a train step."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_train_batch_end(self, batch, logs=None):
        self.action()


def fit(trainer, folder, *callbacks, **options):
    options = {"batch_size": 4, "epochs": 1, "verbose": 0, **options}
    return trainer.fit(X, X[:, :1], checkpoint_dir=folder, callbacks=list(callbacks), **options)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_the_lock_file_stays_and_holds_nobody_back(tmp_path):
    with holding(tmp_path) as held:
        held.acquire()
        inode = (tmp_path / lock.NAME).stat().st_ino
        assert (tmp_path / lock.NAME).read_text() == f"{os.getpid()} {socket.gethostname()}"
    with holding(tmp_path), pytest.raises(FolderInUseError):
        FolderLock(tmp_path).acquire()
    assert (tmp_path / lock.NAME).stat().st_ino == inode


def test_the_folder_is_held_for_a_fit_and_free_after_it(trainer, tmp_path):
    seen = []
    fit(trainer, tmp_path, At(lambda: seen.append(names(tmp_path))))
    assert seen[0] == [lock.NAME]
    with holding(tmp_path):
        pass
    assert names(tmp_path) == [lock.NAME, "step-00000003"]


def test_a_fit_that_fails_gives_the_folder_back(trainer, tmp_path):
    def fail():
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        fit(trainer, tmp_path, At(fail))
    with holding(tmp_path):
        pass


@pytest.mark.parametrize("where", ["callback", "thread"])
def test_a_second_fit_of_the_same_process_is_refused(trainer, tmp_path, where):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    other, raised = fa.Trainer(model, "sgd", "mse", jit_compile=False), []
    before = [v.numpy() for v in model.variables]

    def second():
        try:
            fit(other, tmp_path)
        except FolderInUseError as error:
            raised.append(str(error))

    def start():
        if not raised:
            thread = threading.Thread(target=second)
            thread.run() if where == "callback" else (thread.start(), thread.join())

    fit(trainer, tmp_path, At(start))
    assert f"{str(tmp_path)!r} is in use by another fit of this process" in raised[0]
    assert all((a == b.numpy()).all() for a, b in zip(before, model.variables, strict=True))
    assert names(tmp_path) == [lock.NAME, "step-00000003"]


def hold(path, ready, fork):
    with holding(path):
        # a data loader's worker, say, which outlives a parent that is killed
        child = os.fork() if fork else None
        if child != 0:
            ready.put(child)
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked child"])
def test_another_process_is_named_and_its_death_frees_the_folder(trainer, tmp_path, fork):
    context = multiprocessing.get_context("forkserver")
    ready = context.Queue()
    other = context.Process(target=hold, args=(tmp_path, ready, fork))
    other.start()
    child = ready.get(timeout=60)
    weights = trainer.model.get_weights()
    with pytest.raises(
        FolderInUseError, match=f"by the process {other.pid} on {re.escape(socket.gethostname())}, "
    ):
        fit(trainer, tmp_path)
    assert all((a == b).all() for a, b in zip(weights, trainer.model.get_weights(), strict=True))
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    fit(trainer, tmp_path)
    assert names(tmp_path) == [lock.NAME, "step-00000003"]
    if fork:
        os.kill(child, signal.SIGKILL)  # it was there all along


def plant(kind, path, elsewhere):
    elsewhere.write_text("mine")
    {
        "link": lambda: path.symlink_to(elsewhere),
        "dangling link": lambda: path.symlink_to(elsewhere.with_name("nothing")),
        "folder": path.mkdir,
    }[kind]()


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_what_is_planted_in_place_of_the_lock_is_refused(trainer, tmp_path, kind):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    plant(kind, folder / lock.NAME, elsewhere)
    with pytest.raises(OSError, match=lock.NAME):
        fit(trainer, folder)
    assert elsewhere.read_text() == "mine" and names(tmp_path) == ["elsewhere", "run"]


def refuse_system_call(number, error):
    """Makes the kernel answer a system call of this process with an error, as another file system
    would.
    """
    program = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x00050000 | error),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None).prctl
    return prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, header, 0, 0) == 0


def without_locks(folder, answers):
    if not refuse_system_call(
        {"x86_64": 73, "aarch64": 32}.get(platform.machine(), -1), errno.ENOLCK
    ):
        return answers.put(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with holding(folder), holding(folder):
            pass
    answers.put([str(each.message) for each in caught])


@pytest.mark.slow
def test_a_file_system_without_locks_is_told(tmp_path):
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    child = context.Process(target=without_locks, args=(tmp_path, answers))
    child.start()
    said = answers.get(timeout=60)
    child.join()
    if said is None:
        pytest.skip("the kernel takes no filter of system calls")
    assert len(said) == 2 and "has no locks (No locks available)" in said[0]


def test_readers_need_no_lock(trainer, tmp_path):
    fit(trainer, tmp_path)
    with holding(tmp_path):
        assert store.latest(tmp_path).step == 3
