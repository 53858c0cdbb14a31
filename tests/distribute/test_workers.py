"""Several worker processes on loopback ports: the same training as on one device, and an end when
one of them ends.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import worker

import fastaccum as fa
from fastaccum.checkpoint import store
from fastaccum.checkpoint.errors import CorruptCheckpointError

pytestmark = [pytest.mark.long, pytest.mark.slow]

BOUND = 60  # seconds in which the others end; 1 measured for a killed process


@contextlib.contextmanager
def workers(mode, folder, count=2, **settings):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = ",".join(str(each.getsockname()[1]) for each in sockets)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **settings}
    processes = []
    try:
        for index in range(count):
            with open(folder / f"log{index}", "w") as log:
                command = [sys.executable, worker.__file__, ports, str(index), mode, str(folder)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def log(folder, index):
    return (folder / f"log{index}").read_text()


def outcomes_of(mode, folder):
    """Returns the outcome that each of two workers wrote, once both have ended well."""
    with workers(mode, folder) as processes:
        for index, process in enumerate(processes):
            assert process.wait(300) == 0, log(folder, index)[-4000:]
    return [json.loads((folder / f"outcome{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Returns the files of two workers after training."""
    folder = tmp_path_factory.mktemp("workers")
    outcomes = outcomes_of("train", folder)
    arrays = [list(np.load(folder / f"weights{i}.npz").values()) for i in range(2)]
    return outcomes, [each[:-1] for each in arrays], [each[-1] for each in arrays]


def test_two_workers_equal_one_device(two):
    """20 steps of 10 or 5 rows, which do not divide, shuffled. The largest difference between
    weights, relative to the largest weight of the variable, was 3.8e-7; losses, evaluation and
    predictions agree as well.
    """
    outcomes, weights, predicted = two
    x, y = worker.data()
    model = worker.make(keras, seed=0)
    trainer, losses = worker.trained(model, keras.optimizers.Adam(0.01), fa, x, y)
    assert int(trainer.optimizer.iterations.numpy()) == worker.STEPS
    relative = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(weights[0], model.get_weights(), strict=True)
    ]
    assert max(relative) < 5e-6
    np.testing.assert_allclose(outcomes[0]["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(
        outcomes[0]["evaluated"], trainer.evaluate(x, y, batch_size=6, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(predicted[0], trainer.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_workers_stay_equal(two):
    outcomes, weights, predicted = two
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(*predicted)
    assert outcomes[0]["losses"] == outcomes[1]["losses"]
    assert [each["chief"] for each in outcomes] == [True, False]
    assert [each["broadcast"] for each in outcomes] == [[7], [7]]


def test_a_plan_is_for_the_worker_with_the_least_room(two):
    (outcome, other), *_ = two
    assert outcome["planned"] == other["planned"] and outcome["planned"][:2] == [2, 2**20]
    assert (
        "memory_limit: 1048576 on" in outcome["plans differ"]
        or "2097152 on" in outcome["plans differ"]
    )


@pytest.mark.parametrize(
    ("name", "says", "steps"),
    [("apart", "ended at different steps", 2), ("shuffled", "differ in data", 0)],
)
def test_data_that_differ_are_an_error_on_all(two, name, says, steps):
    for outcome in two[0]:
        message, applied, moved = outcome["refused"][name]
        assert says in message
        assert applied == steps and moved == (steps > 0)


def test_file_sharding_is_refused(two):
    for outcome in two[0]:
        message, applied, moved = outcome["refused"]["by_file"]
        assert "auto_shard_policy=FILE" in message and "OFF" in message
        assert not applied and not moved


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    """Returns the outcomes of each of `worker.DIFFERENT` on both workers, in one cluster."""
    return outcomes_of("differ", tmp_path_factory.mktemp("different"))


@pytest.mark.parametrize("name", worker.DIFFERENT)
def test_workers_that_differ_are_an_error_on_all_before_a_step(different, name):
    _, values, words = worker.DIFFERENT[name]
    for index, outcome in enumerate(different):
        error, moved = outcome[name]
        assert error is not None and not moved
        assert error.startswith("WorkersDifferError: ")
        assert words.format(values[1 - index]) in error
        if "differ in" not in words:
            assert "nothing was trained" in error and f"this one, worker {index}" in error


def test_workers_that_were_alike_again_train(different):
    for outcome in different:
        assert outcome["nothing"] == [None, True]


def until_saved(folder, step, processes):
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / f"step-{step:08d}").exists():
        assert time.monotonic() < deadline and processes[0].poll() is None, log(folder, 0)[-4000:]
        time.sleep(0.01)


def saved(folder, *ends, mode="saved"):
    """Trains two workers with checkpoints, ends them by each of `ends` in turn, starts them again,
    and returns their files.
    """
    for step, end in [*ends, (None, None)]:
        with workers(mode, folder) as processes:
            if end is not None:
                until_saved(folder, step, processes)
                end(processes)
            codes = [process.wait(BOUND + 60) for process in processes]
        yield codes, log(folder, 0) + log(folder, 1)


def test_workers_go_on_bit_by_bit(tmp_path):
    """A worker killed, then SIGTERM to both, in mid-epoch: weights, slots and masks are as if
    nothing had happened.
    """

    def kill(processes):
        processes[1].send_signal(signal.SIGKILL)

    def terminate(processes):
        for process in processes:
            process.send_signal(signal.SIGTERM)

    for name, ends in (("whole", []), ("ended", [(14, kill), (28, terminate)])):
        (tmp_path / name).mkdir()
        runs = list(saved(tmp_path / name, *ends))
    (killed, _), (terminated, _), (last, said) = runs
    assert killed[1] == -9 and killed[0] not in (0, None)
    assert terminated == [143, 143], said[-4000:]
    assert last == [0, 0], said[-4000:]
    assert said.count("resumed from ") == 2
    for index in range(2):
        whole, ended = (
            np.load(tmp_path / name / f"weights{index}.npz") for name in ("whole", "ended")
        )
        assert len(whole.files) == len(ended.files) > 8
        for name in whole.files:
            np.testing.assert_array_equal(whole[name], ended[name])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_others(tmp_path, victim):
    with workers("forever", tmp_path) as processes:
        survivor = processes[1 - victim]
        deadline = time.monotonic() + 120
        while not all(log(tmp_path, i).count("step\n") >= 3 for i in range(2)):
            assert time.monotonic() < deadline and survivor.poll() is None, log(
                tmp_path, 1 - victim
            )[-4000:]
            time.sleep(0.1)
        processes[victim].send_signal(signal.SIGKILL)
        code = survivor.wait(BOUND)
    said = log(tmp_path, 1 - victim)
    assert code not in (0, None)
    assert f"WorkerLostError: Worker {1 - victim} of 2 lost another one after" in said
    assert "restart all of them, from the last checkpoint" in said


def stop_then_kill(folder, processes):
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(3)
    processes[1].send_signal(signal.SIGCONT)
    until_saved(folder, 21, processes)  # they have gone on
    processes[1].send_signal(signal.SIGKILL)


@pytest.mark.parametrize("mode", ["plain", "packed"])
def test_workers_stopped_for_a_while_and_killed_equal_one_device(tmp_path, mode):
    """Stops a worker for 3 s (SIGSTOP, SIGCONT), then kills it. A new pair trains the rest."""
    end = functools.partial(stop_then_kill, tmp_path / "ended")
    for name, ends in (("whole", []), ("ended", [(7, end)])):
        (tmp_path / name).mkdir()
        runs = list(saved(tmp_path / name, *ends, mode=mode))
    (killed, _), (last, said) = runs
    assert killed[1] == -9 and killed[0] not in (0, None)
    assert last == [0, 0], said[-4000:]
    assert said.count("resumed from ") == 2
    x, y = worker.data()
    data = {"x": x, "y": y, "batch_size": 5}
    alone = worker.make(keras, seed=0)
    loss = "mse"
    if mode == "packed":
        data = {"x": worker.packed(fa)}
        alone = worker.language_model(keras, seed=0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(
        alone, keras.optimizers.Adam(0.01), loss, gradient_accumulation_steps=2, jit_compile=False
    )
    history = trainer.fit(**data, epochs=worker.EPOCHS, verbose=0).history
    if mode == "packed":
        # Each worker logs the shares of all rows.
        for name in ("real_tokens", "tokens_of_low"):
            assert f"{name}: {history[name][-1]:.4f}" in said
    for index in range(2):
        whole, ended = (
            np.load(tmp_path / name / f"weights{index}.npz") for name in ("whole", "ended")
        )
        for name in whole.files:
            np.testing.assert_array_equal(whole[name], ended[name])
        for own, theirs in zip(alone.get_weights(), ended.values(), strict=False):
            assert np.abs(own - theirs).max() < 2e-5 * np.abs(own).max()


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("absent", "After 6 s worker 1 has not reached the point where this one waits"),
        ("stuck", "After 6 s workers [1] have not come to the step that worker 0 is in"),
    ],
)
def test_a_worker_that_does_not_come_is_waited_for_with_a_bound(tmp_path, mode, says):
    with workers(mode, tmp_path, FASTACCUM_WORKER_TIMEOUT="6") as processes:
        code = processes[0].wait(120)
    said = log(tmp_path, 0)
    assert code not in (0, None)
    assert (
        "WorkerLostError: " in said and says in said and "FASTACCUM_WORKER_TIMEOUT=SECONDS" in said
    )
    assert said.count("step\n") == (4 if mode == "stuck" else 0)


def test_a_step_that_takes_longer_than_the_bound_on_all_is_waited_for(tmp_path):
    with workers("slow", tmp_path, FASTACCUM_WORKER_TIMEOUT="6") as processes:
        for index, process in enumerate(processes):
            assert process.wait(120) == 0, log(tmp_path, index)[-4000:]


def test_another_workers_label_out_of_range_is_an_error_on_all(tmp_path):
    with workers("other's label", tmp_path) as processes:
        for index, process in enumerate(processes):
            assert process.wait(120) == 0, log(tmp_path, index)[-4000:]
    chief, other = (json.loads((tmp_path / f"outcome{i}.json").read_text()) for i in range(2))
    assert "Another worker has seen labels or ids that are out of range" in chief[0]
    assert "values from 0 to 5 were seen, but only 0 to 2 exist" in other[0]
    assert chief[1:] == other[1:] == [0, False]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """Returns the outcomes of `worker.shares` on both workers, and the models that they saved."""
    folder = tmp_path_factory.mktemp("shares")
    return outcomes_of("shares", folder), [folder / f"model{i}.keras" for i in range(2)]


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd", "adafactor"])
def test_slots_shared_by_workers_equal_slots_on_all(sharing, name):
    """Equal bit for bit after 20 steps, 5 of them skipped: weights, logs, and the slots, of which
    each has its own.
    """
    for outcome in sharing[0]:
        assert outcome["steps"][name] == [15, [1.0] * 5]
        assert len(outcome["differences"][name]) > 6 and set(outcome["differences"][name]) == {0.0}
    here = [each["here"][name] for each in sharing[0]]
    held = [sum(pair) for pair in zip(*here, strict=True)]
    # each slot once, but iterations and learning rate
    assert set(held[2:]) == {1} and held[:2] == [2, 2]
    assert all(False in each for each in here)


def test_what_workers_cannot_share_is_refused(sharing):
    for outcome in sharing[0]:
        assert "use_ema=True" in outcome["averages"]
        assert "need data of known length" in outcome["length"]
        assert "start all workers anew with shard_optimizer=False" in outcome["taken back"]


def test_a_model_is_saved_without_the_slots_of_others(sharing):
    for outcome, path in zip(*sharing, strict=True):
        assert any("Adafactor is saved without its slots" in each for each in outcome["warned"])
        with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adafactor"):
            loaded = keras.saving.load_model(path)
        assert loaded.count_params() == worker.make(keras, seed=0).count_params()


@pytest.fixture(scope="module")
def saved_shares(tmp_path_factory):
    """The folder of two workers that trained to the end, with shares."""
    folder = tmp_path_factory.mktemp("whole")
    ((codes, said),) = saved(folder, mode="saved shares")
    assert codes == [0, 0], said[-4000:]
    return folder


def assert_same_end(folder, whole):
    for index in range(2):
        ours, theirs = (dict(np.load(each / f"weights{index}.npz")) for each in (folder, whole))
        assert len(ours) == len(theirs) > 6
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_workers_with_shares_go_on_bit_by_bit(saved_shares, tmp_path):
    """A worker killed, then SIGTERM to one that is not the chief: both save their shares after the
    same step.
    """

    def kill(processes):
        processes[1].send_signal(signal.SIGKILL)

    def terminate(processes):
        processes[1].send_signal(signal.SIGTERM)

    (killed, _), (terminated, told), (last, said) = saved(
        tmp_path, (14, kill), (28, terminate), mode="saved shares"
    )
    assert killed[1] == -9 and killed[0] not in (0, None)
    assert terminated == [143, 143] and told.count("the same fit goes on from there") == 2, told[
        -4000:
    ]
    assert last == [0, 0], said[-4000:]
    assert said.count("resumed from ") == 2
    assert_same_end(tmp_path, saved_shares)


def test_workers_with_shares_stopped_for_a_while_and_killed(saved_shares, tmp_path):
    end = functools.partial(stop_then_kill, tmp_path)
    (killed, _), (last, said) = saved(tmp_path, (7, end), mode="saved shares")
    assert killed[1] == -9 and killed[0] not in (0, None)
    assert last == [0, 0], said[-4000:]
    assert said.count("resumed from ") == 2
    assert_same_end(tmp_path, saved_shares)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_while_it_writes_its_share(saved_shares, tmp_path, victim):
    """The checkpoint before is taken, and the training ends as if nothing had happened."""
    with workers(f"killed in share {victim}", tmp_path) as processes:
        codes = [process.wait(BOUND + 60) for process in processes]
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, None)
    left = [each.name for each in (tmp_path / "checkpoints").iterdir()]
    assert store.latest(tmp_path / "checkpoints").step == 7 and "step-00000014" not in left
    ((codes, said),) = saved(tmp_path, mode="saved shares")
    assert codes == [0, 0] and said.count("step-00000007: 7 train steps") == 2, said[-4000:]
    assert not [
        each for each in (tmp_path / "checkpoints").iterdir() if each.name.startswith(".step")
    ]
    assert_same_end(tmp_path, saved_shares)


def alone(folder, epochs=worker.EPOCHS):
    """Trains on one device, from the checkpoints in the folder."""
    model = worker.make(keras, seed=0)
    trainer = worker.with_shares(model, worker.adamw(keras), fa, shard="auto")
    x, y = worker.data()
    trainer.fit(
        x, y, batch_size=5, epochs=epochs, verbose=0, checkpoint_dir=folder, checkpoint_every=7
    )
    return [*model.get_weights(), *(v.numpy() for v in trainer.optimizer.variables)]


def assert_close(ours, theirs):
    """To the rounding of a sum over two workers or one, after 60 steps of Adam. The largest
    difference, relative to the largest number of a variable, was 4.3e-7.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.shape]
    found = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs]
    print("largest difference", max(found))
    assert max(found) < 1e-6, found


@pytest.fixture
def broken_off(saved_shares, tmp_path):
    """A copy of the checkpoints of two workers with shares, of which the newest is in mid-epoch."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved_shares / "checkpoints", folder)
    for path in store.paths(folder):
        if int(path.name[-8:]) % 5 == 0:
            shutil.rmtree(path)
    return folder


def test_one_device_goes_on_from_shares(saved_shares, broken_off, tmp_path):
    whole = alone(tmp_path / "whole")
    assert_close(alone(broken_off), whole)


def test_workers_with_shares_go_on_from_one_device(saved_shares, tmp_path):
    alone(tmp_path / "checkpoints", epochs=5)
    ((codes, said),) = saved(tmp_path, mode="saved shares")
    assert codes == [0, 0] and said.count("resumed from ") == 2, said[-4000:]
    for index in range(2):
        resumed, whole = (
            np.load(folder / f"weights{index}.npz") for folder in (tmp_path, saved_shares)
        )
        assert_close(list(resumed.values()), list(whole.values()))


def test_a_checkpoint_of_shares_names_its_files(broken_off):
    newest = store.latest(broken_off)
    assert newest.manifest["shares"] == [f"state.data-0000{i}-of-00002" for i in range(2)]
    assert {each.name for each in newest.path.iterdir()} == {
        "manifest.json",
        "state.index",
        *newest.manifest["shares"],
    }


def remove(share, older):
    share.unlink()


def damage(share, older):
    held = bytearray(share.read_bytes())
    held[len(held) // 2] ^= 1
    share.write_bytes(held)


def exchange(share, older):
    shutil.copy(older / share.name, share)


@pytest.mark.parametrize(
    ("harm", "says"),
    [(remove, "missing"), (damage, "shard {}.*Checksum"), (exchange, "shard {}.*Checksum")],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_share_that_is_missing_damaged_or_of_another_step(broken_off, harm, says, number):
    newest, older, *_ = store.paths(broken_off)
    harm(newest / f"state.data-0000{number}-of-00002", older)
    says = says.format(number)
    with pytest.warns(RuntimeWarning, match=f"{newest.name} is passed over: .*{says}"):
        assert store.latest(broken_off).path == older
    for each in store.paths(broken_off):
        if each != newest:
            shutil.rmtree(each)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CorruptCheckpointError, match=f"None of the 1 .*{says}"),
    ):
        alone(broken_off)
