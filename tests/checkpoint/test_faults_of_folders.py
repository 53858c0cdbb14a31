"""Faults of disks, folders, clocks, signals and code around a fit: nothing is lost, and the message
says what happened.

docs/reliability.md has a row for each test here that injects a fault.
"""

import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from resuming import Interruption, Stateless, StopAfter, bits, scramble

import fastaccum as fa
from fastaccum.checkpoint import lock, store

pytestmark = [pytest.mark.long, pytest.mark.slow]

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
STEPS = 12


def make(jit_compile=False):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(4, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    return fa.Trainer(
        model,
        keras.optimizers.Adam(0.01),
        "mse",
        gradient_accumulation_steps=3,
        jit_compile=jit_compile,
    )


def fit(trainer, folder, callbacks=(), every=2, keep=3, **options):
    folder = {"checkpoint_dir": folder, "checkpoint_every": every, "keep": keep}
    return trainer.fit(
        X, Y, batch_size=8, epochs=3, verbose=0, callbacks=list(callbacks), **folder, **options
    )


class At(Stateless):
    """Calls something in the hook of a name, at its count-th call, from 0."""

    def __init__(self, hook, count, action):
        super().__init__()
        self.left, self.action = count, action
        setattr(self, hook, self.called)

    def called(self, *_, **__):
        self.left -= 1
        if self.left == -1:
            self.action()


def send(number):
    return lambda: os.kill(os.getpid(), number)


def names(folder):
    return sorted(each.name for each in folder.iterdir() if each.name != lock.NAME)


class Run:
    """Keeps one trainer for all tests, stopped in its first epoch and trained to the end."""

    def __init__(self, folder):
        self.trainer, self.folder = make(), folder
        with pytest.raises(Interruption):
            fit(self.trainer, folder / "stopped", [StopAfter(2)])
        scramble(self.trainer)
        shutil.copytree(folder / "stopped", folder / "whole")
        self.history = fit(self.trainer, folder / "whole").history
        self.end = bits(self.trainer)

    def begin(self, folder):
        shutil.copytree(self.folder / "stopped", folder, dirs_exist_ok=True)
        scramble(self.trainer)

    def goes_on(self, folder, **options):
        """Trains to the end, which must be that of a training with no fault."""
        scramble(self.trainer)
        history = fit(self.trainer, folder, **options)
        assert bits(self.trainer) == self.end
        assert history.history == self.history
        assert not [name for name in names(folder) if name.startswith(".")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))


def in_child(target, *arguments):
    """The exit code of a process of its own that runs a function."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed", "fastaccum.trainer"])
    child = context.Process(target=target, args=arguments)
    child.start()
    child.join(200)
    return child.exitcode


# Disks.


@pytest.fixture
def disk(tmp_path):
    """A file system of its own; `disk(options)` mounts it anew."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system needs to be permitted")
        return path

    yield mount
    while subprocess.run(["umount", "-l", str(path)], capture_output=True).returncode == 0:
        pass


@pytest.mark.sample
def test_a_disk_that_is_full_at_every_point_of_a_save(run, disk):
    """Makes the disk a few KiB larger each time, so that it fills up in the tensors, their index
    and the manifest. Then makes room and repeats the call.
    """
    failed_in = set()
    for size in range(20, 48, 4):
        folder = disk(f"size={size}k") / "checkpoints"
        run.begin(folder)
        with pytest.raises(
            RuntimeError, match=r"The checkpoint of step \d+ could not be written .*No space left"
        ) as e:
            fit(run.trainer, folder, every=1, keep=9)
        failed_in.add("tensors" if "SaveV2" in str(e.value) else "manifest")
        checkpoints = store.paths(folder)
        assert names(folder) == sorted(path.name for path in checkpoints)
        assert all(map(store.inspect, checkpoints))
        disk("remount,size=1m")
        run.goes_on(folder)
    assert failed_in == {"tensors", "manifest"}


def test_a_disk_without_inodes(run, disk):
    for inodes in range(9, 15):
        folder = disk(f"nr_inodes={inodes}") / "checkpoints"
        run.begin(folder)
        with pytest.raises(RuntimeError, match=r"could not be written .*No space left"):
            fit(run.trainer, folder, every=1, keep=9)
        assert names(folder) == sorted(path.name for path in store.paths(folder))
        disk("remount,nr_inodes=100")
        run.goes_on(folder)


def test_no_descriptors_left(run, tmp_path):
    folder = tmp_path / "checkpoints"
    run.begin(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up():
        time.sleep(0.3)  # a write on its way would hold some
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))

    try:
        with pytest.raises(RuntimeError, match=r"could not be written .*Too many open files"):
            fit(run.trainer, folder, [At("on_train_batch_end", 4, use_up)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(map(store.inspect, store.paths(folder)))
    run.goes_on(folder)


def test_a_clock_that_jumps(run, tmp_path):
    """The newest is that of the most steps, whatever the time of its files; leftovers have no
    age.
    """
    scramble(run.trainer)
    shutil.copytree(run.folder / "stopped", tmp_path, dirs_exist_ok=True)
    with pytest.raises(Interruption):
        fit(run.trainer, tmp_path, [StopAfter(4)])
    left = [tmp_path / f".step-00000009.writing-{number}" for number in (1, 2)]
    for folder in left:
        folder.mkdir()
    (tmp_path / lock.NAME).write_text("1 elsewhere")
    dated = zip(
        (*store.paths(tmp_path), *left, tmp_path / lock.NAME),
        itertools.cycle((1970, 2100)),
        strict=False,
    )
    for path, year in dated:
        for each in (*(path.iterdir() if path.is_dir() else ()), path):
            os.utime(each, ((year - 1970) * 365 * 24 * 3600,) * 2)
    assert store.latest(tmp_path).step == 6
    run.goes_on(tmp_path, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000012"]


# Folders.


def test_a_working_directory_that_is_removed(run, tmp_path, monkeypatch):
    run.begin(tmp_path / "here" / "checkpoints")
    monkeypatch.chdir(tmp_path / "here")

    def remove():
        time.sleep(0.3)  # a write that is on its way would be an error
        shutil.rmtree(tmp_path / "here")

    with pytest.raises(RuntimeError, match=r"could not be written .*No such file or directory"):
        fit(run.trainer, "checkpoints", [At("on_train_batch_end", 4, remove)])
    with pytest.raises(ValueError, match="checkpoint_dir='checkpoints' cannot be written to"):
        fit(run.trainer, "checkpoints")


def test_a_file_that_takes_the_folders_place(run, tmp_path):
    folder = tmp_path / "checkpoints"
    run.begin(folder)

    def swap():
        time.sleep(0.3)
        folder.rename(tmp_path / "moved")
        folder.write_text("mine")

    with pytest.raises(RuntimeError, match=r"could not be written .*Not a directory"):
        fit(run.trainer, folder, [At("on_train_batch_end", 4, swap)])
    assert folder.read_text() == "mine"
    run.goes_on(tmp_path / "moved")


def test_a_folder_that_may_not_be_entered(run, tmp_path):
    """Takes the folder's permissions away, and root's rights from the process that trains."""
    folder, user = tmp_path / "checkpoints", os.geteuid()
    run.begin(folder)

    def forbid():
        time.sleep(0.3)
        folder.chmod(0)
        os.seteuid(user or 65534)

    try:
        with pytest.raises(RuntimeError, match=r"could not be written .*Permission denied"):
            fit(run.trainer, folder, [At("on_train_batch_end", 4, forbid)])
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
    assert all(map(store.inspect, store.paths(folder)))
    run.goes_on(folder)


def test_a_link_to_a_folder(run, tmp_path):
    """Follows a link to a folder, and refuses one that leads nowhere."""
    run.begin(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    run.goes_on(tmp_path / "link")
    assert store.latest(tmp_path / "elsewhere").step == STEPS
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"astray' cannot be written to"):
        fit(run.trainer, tmp_path / "astray")


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000], ids=oct)
def test_modes_follow_the_umask(run, tmp_path, mask):
    folder, previous = tmp_path / "checkpoints", os.umask(mask)
    try:
        fit(run.trainer, folder, every=None)
    finally:
        os.umask(previous)
    for each in (folder, *folder.rglob("*")):
        assert each.stat().st_mode & 0o777 == (0o777 if each.is_dir() else 0o666) & ~mask


# Signals.


HOOKS = [
    ("on_train_begin", 0, 1),
    ("on_epoch_begin", 1, 5),
    ("on_test_batch_begin", 0, 4),
    ("on_epoch_end", 0, 4),
    ("on_train_end", 0, STEPS),
]


@pytest.mark.parametrize(("hook", "count", "step"), HOOKS)
def test_sigterm_around_the_steps(run, tmp_path, hook, count, step):
    """Sends SIGTERM before the first step, between epochs, in validation and after the last step.

    All is saved; nothing is lost or done twice.
    """
    fit(run.trainer, tmp_path / "whole", every=9, validation_data=(X, Y))
    with pytest.raises(fa.Preempted) as raised:
        fit(
            run.trainer,
            tmp_path,
            [At(hook, count, send(signal.SIGTERM))],
            every=9,
            validation_data=(X, Y),
        )
    assert raised.value.checkpoint == store.latest(tmp_path).path == tmp_path / f"step-{step:08d}"


@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"]
)
def test_ctrl_c_in_a_callback(run, tmp_path, hook):
    """The next fit of the same process goes on."""
    run.begin(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(run.trainer, tmp_path, [At(hook, 0, send(signal.SIGINT))])
    run.goes_on(tmp_path)


def compiling(folder, number):
    """A signal within the compilation of the first step."""
    trainer = make(jit_compile=True)
    later = threading.Timer(0.2, send(number))
    try:
        fit(trainer, folder, [At("on_train_begin", 0, later.start)])
    except fa.Preempted as preempted:
        assert number == signal.SIGTERM and preempted.checkpoint == folder / "step-00000001"
    except KeyboardInterrupt:
        assert number == signal.SIGINT and not names(folder)
    else:
        raise AssertionError("no signal came")
    history = fit(trainer, folder)
    assert len(history.epoch) == 3 and store.latest(folder).step == STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_compiling(tmp_path, number):
    assert in_child(compiling, tmp_path, number) == 0


def without_memory(folder):
    """Lets a thread run out of memory at its first large allocation, after a callback has what it
    needs.
    """
    trainer = make()

    def limit():
        time.sleep(0.3)  # a write that is on its way has its memory
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, resource.RLIM_INFINITY)
        )

    try:
        fit(trainer, folder, [At("on_train_batch_end", 7, limit)])
    except RuntimeError as error:
        assert "could not be written" in str(error) and "MemoryError" in str(error), error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fit(trainer, folder)


def test_no_memory_left(tmp_path):
    """Named, if Python sees it; a process that dies of it (TensorFlow aborts) leaves the last
    checkpoint.
    """
    if in_child(without_memory, tmp_path) != 0:
        assert in_child(train_on, tmp_path) == 0
    assert store.latest(tmp_path).step == STEPS


def train_on(folder):
    fit(make(), folder)


def hung_up(folder):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has its children ignore it
    fit(make(), folder, [At("on_train_batch_end", 7, send(signal.SIGHUP))])


def in_a_thread(folder):
    """A fit outside the main thread, ended by SIGTERM."""
    ends = [
        At("on_train_batch_end", 7, send(signal.SIGTERM)),
        At("on_train_batch_end", 7, lambda: time.sleep(9)),
    ]
    thread = threading.Thread(target=fit, args=(make(), folder, ends))
    thread.start()
    thread.join()


def exits(folder):
    fit(make(), folder, [At("on_train_batch_end", 7, lambda: os._exit(5))])


@pytest.mark.parametrize(
    ("target", "code"), [(hung_up, -signal.SIGHUP), (in_a_thread, -signal.SIGTERM), (exits, 5)]
)
def test_ends_that_leave_no_time(run, tmp_path, target, code):
    """A closed terminal, SIGTERM where only a thread trains (of which `fit` warns), and
    os._exit.
    """
    assert in_child(target, tmp_path) == code
    assert store.latest(tmp_path).step >= 4
    scramble(run.trainer)
    fit(run.trainer, tmp_path)
    assert store.latest(tmp_path).step == STEPS


def impatient(folder):
    """Ctrl-C, once more, and once more while a save is slow."""
    trainer, slow = make(), [True]
    sys.addaudithook(
        lambda event, values: (
            slow and event == "open" and "manifest" in str(values[0]) and time.sleep(0.3)
        )
    )

    def interrupt():
        for delay in (0.1, 0.3):
            threading.Timer(delay, send(signal.SIGINT)).start()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, folder, [At("on_train_batch_end", 3, interrupt)], every=1)
    slow.clear()
    assert signal.getsignal(signal.SIGTERM) is before
    fit(trainer, folder)


def test_ctrl_c_three_times(tmp_path):
    """Interrupts a slow save.

    The folder and the signal are given back, and the same process may go on.
    """
    assert in_child(impatient, tmp_path) == 0
    assert store.latest(tmp_path).step == STEPS


# Forked processes.


def forks(folder):
    """A child that a callback forks, as a data loader does."""
    children = []

    def fork():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM

    history = fit(make(), folder, [At("on_train_batch_end", 5, fork)])
    assert len(children) == 1 and len(history.epoch) == 3


def test_sigterm_to_a_forked_child(tmp_path):
    """Ends the child, as without a fit, while the fit goes on."""
    started = time.monotonic()
    assert in_child(forks, tmp_path) == 0
    assert time.monotonic() - started < 50
    assert store.latest(tmp_path).step == STEPS


def forks_and_leaves(folder):
    """A child that leaves through fit, while the parent writes."""
    trained, children = os.getpid(), []

    def fork():
        child = os.fork()
        if child == 0:
            raise SystemExit(3)
        children.append(child)

    try:
        fit(make(), folder, [At("on_train_batch_end", 6, fork)], every=1)
    except SystemExit:
        os._exit(3 if os.getpid() != trained else 4)
    deadline = time.monotonic() + 30
    ended = (0, 0)
    while not ended[0] and time.monotonic() < deadline:
        ended = os.waitpid(children[0], os.WNOHANG)
        time.sleep(0.05)
    if not ended[0]:
        os.kill(children[0], signal.SIGKILL)
    assert os.waitstatus_to_exitcode(ended[1]) == 3 and ended[0]


def test_a_forked_child_that_leaves(tmp_path):
    """Lets a child exit without waiting for the parent's write or removing a file."""
    assert in_child(forks_and_leaves, tmp_path) == 0
    assert store.latest(tmp_path).step == STEPS


# Code.


class Faulty(Stateless):
    def __init__(self, get=dict, put=lambda state: None):
        super().__init__()
        self.get_state, self.set_state = get, put


@pytest.mark.parametrize(
    ("get", "error"),
    [
        (lambda: {"a": object()}, TypeError),
        (lambda: [1], TypeError),
        (lambda: 1 / 0, ZeroDivisionError),
    ],
)
def test_a_callbacks_state_that_cannot_be_saved(run, tmp_path, get, error):
    """Raised before the first step, rather than at the first save."""
    scramble(run.trainer)
    before = bits(run.trainer)
    with pytest.raises(error):
        fit(run.trainer, tmp_path, [Faulty(get)], every=None)
    assert bits(run.trainer) == before
    assert names(tmp_path) == []


def test_a_callbacks_state_that_cannot_be_taken_up(run, tmp_path):
    run.begin(tmp_path)
    with pytest.raises(Interruption):
        fit(run.trainer, tmp_path, [Faulty(), StopAfter(3)])
    before = bits(run.trainer)
    with pytest.raises(
        ValueError, match=r"set_state raised ZeroDivisionError.* No variable was changed"
    ):
        fit(run.trainer, tmp_path, [Faulty(put=lambda state: 1 / 0)])
    assert bits(run.trainer) == before
    run.goes_on(tmp_path)


def test_exit_in_a_callback(run, tmp_path):
    run.begin(tmp_path)
    with pytest.raises(SystemExit):
        fit(run.trainer, tmp_path, [At("on_train_batch_end", 4, lambda: sys.exit(6))])
    run.goes_on(tmp_path)


def test_two_fits_in_two_threads(run, tmp_path):
    trainers = {folder: make() for folder in ("a", "b")}
    for folder in trainers:
        run.begin(tmp_path / folder)
    threads = [
        threading.Thread(target=fit, args=(each, tmp_path / name))
        for name, each in trainers.items()
    ]
    with pytest.warns(RuntimeWarning, match="outside the main thread, where SIGTERM is not caught"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [bits(trainer) for trainer in trainers.values()] == [run.end, run.end]


def ends_with_rows_on_their_way():
    from fastaccum.data import arrays

    def rows():
        while True:
            time.sleep(0.3)
            yield 1

    ahead = arrays._ahead(rows())
    next(ahead)
    thread = next(each for each in threading.enumerate() if each.name.startswith("fastaccum-data"))
    threading._shutdown()  # as the interpreter's end does
    assert not thread.is_alive()


def test_the_interpreter_ends_after_its_threads():
    """A thread that is still in TensorFlow when that is taken down ends the process with
    SIGABRT.
    """
    assert in_child(ends_with_rows_on_their_way) == 0
