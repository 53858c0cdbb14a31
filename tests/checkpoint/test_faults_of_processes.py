"""Processes that are killed, stopped and forked, whatever their data: another goes on
bit-identically, or says why not.

docs/reliability.md has a row for each test here that injects a fault.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import killed
import pytest
import tensorflow as tf

from fastaccum.checkpoint import store

pytestmark = [pytest.mark.long, pytest.mark.slow]

EPOCHS = 2
STARTING, ENDING = 200, 100  # seconds, on a machine that has much else to do


def start(context, target, *arguments, **options):
    begun = context.Event()
    child = context.Process(target=target, args=(*arguments, begun), kwargs=options)
    child.start()
    return child, begun


def train(context, folder, kind, epochs=EPOCHS, **options):
    return start(context, killed.train, folder, kind, epochs=epochs, **options)


def outcome(file):
    return json.loads(Path(file).read_text())


def train_all(folder, cases, begun):
    for kind, per_execution in cases:
        result = folder / f"{kind}-{per_execution}"
        killed.train(
            None, kind, begun, result=result, epochs=EPOCHS, steps_per_execution=per_execution
        )
    killed.train(None, "PyDataset", begun, result=folder / "PyDataset in processes-1", epochs=1)


# Data and steps per execution. The batches of a PyDataset are the same, whoever makes them.
IN_PROCESSES = ("PyDataset in processes", 1)
CASES = [
    (kind, 1)
    for kind in killed.DATA
    if kind not in ("arrays", "dataset", "shares", "cache in a file", IN_PROCESSES[0])
]
CASES += [("PyDataset", 2), ("endless", 2)]


@pytest.fixture(scope="module")
def uninterrupted(context, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    child, _ = start(context, train_all, folder, CASES)
    child.join(STARTING)
    assert child.exitcode == 0
    return folder


@pytest.mark.parametrize(("kind", "per_execution"), [*CASES, IN_PROCESSES])
@pytest.mark.filterwarnings("ignore")
def test_kill_with_data_of_every_kind(context, uninterrupted, tmp_path, kind, per_execution):
    """Killed at a random moment after a random step, some kinds twice, and trained to the end by
    another process.
    """
    moments, folder = random.Random(f"{kind} {per_execution}"), tmp_path / "checkpoints"
    kills = 2 if kind in ("endless", "callbacks") else 1  # test_kill.py kills five times
    options = {"steps_per_execution": per_execution}
    # of which Keras makes new ones for each pass, in seconds
    if (kind, per_execution) == IN_PROCESSES:
        options["epochs"] = 1
    steps = []
    for _ in range(kills):
        child, begun = train(
            context, folder, kind, after=moments.randint(6, 12) // per_execution, **options
        )
        assert begun.wait(STARTING)
        child.join(moments.uniform(0, 0.02))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        steps.append(store.latest(folder).step)  # with no warning: a kill damages nothing
    child, _ = train(context, folder, kind, result=tmp_path / "result", **options)
    child.join(ENDING)
    assert child.exitcode == 0
    assert outcome(tmp_path / "result") == outcome(uninterrupted / f"{kind}-{per_execution}")
    assert steps == sorted(steps) and steps[0] > 0
    if kind == "callbacks":
        whole, resumed = ((f"{at}.csv") for at in (uninterrupted / "callbacks-1", folder))
        lines = Path(resumed).read_text().splitlines()
        assert list(dict.fromkeys(lines)) == Path(whole).read_text().splitlines()


def refused(folder, begun, result):
    try:
        killed.train(folder, "cache in a file", begun, result=result, epochs=EPOCHS)
    except tf.errors.AlreadyExistsError as error:
        result.write_text(str(error))
    else:
        raise AssertionError("half a cache was taken for a whole one")


@pytest.mark.parametrize("after", [5, 25], ids=["while it is written", "once it is written"])
def test_kill_with_a_cache_in_a_file(context, tmp_path, after):
    """Half a cache is refused, with what to do; then, and with a whole one, training goes on
    bit-identically.
    """
    child, _ = train(context, None, "cache in a file", result=tmp_path / "whole")
    child.join(STARTING)
    folder, result = tmp_path / "checkpoints", tmp_path / "result"
    child, begun = train(context, folder, "cache in a file", after=after)
    assert begun.wait(STARTING)
    child.kill()
    child.join()
    assert bool(list(tmp_path.glob("checkpoints-cache*lockfile"))) == (after == 5)
    if after == 5:
        child, _ = start(context, refused, folder, result=result)
        child.join(ENDING)
        assert child.exitcode == 0
        message = result.read_text()
        assert f"('{folder}-cache_0.lockfile')" in message and "delete the lockfile" in message
        for file in tmp_path.glob("checkpoints-cache*"):
            file.unlink()
    child, _ = train(context, folder, "cache in a file", result=result)
    child.join(ENDING)
    assert outcome(result) == outcome(tmp_path / "whole")


def state_of(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def stops_in_writes(folder, begun, result):
    # In the second checkpoint: in the first, it might stop while it tells that it has begun.
    killed.kill_self_at("open", 12, folder, signal.SIGSTOP, ".writing-")
    killed.train(folder, "arrays", begun, result=result, epochs=EPOCHS)


def test_stopped_and_continued(context, tmp_path):
    """Stopped by itself within a write of a checkpoint, and then by others at random moments:
    nothing changes.
    """
    moments, folder = random.Random(0), tmp_path / "checkpoints"
    child, _ = train(context, None, "arrays", result=tmp_path / "whole")
    child.join(STARTING)
    child, _ = start(context, stops_in_writes, folder, result=tmp_path / "result")
    deadline = time.monotonic() + STARTING
    while state_of(child) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each.name for each in folder.iterdir() if ".writing-" in each.name]
    time.sleep(0.2)
    assert state_of(child) == "T"
    os.kill(child.pid, signal.SIGCONT)
    for _ in range(8):
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child.pid, signal.SIGCONT)
    child.join(ENDING)
    assert outcome(tmp_path / "result") == outcome(tmp_path / "whole")
