"""Injects faults into `fastaccum train` in processes of its own: no traceback, and the run goes on.

docs/reliability.md has a row for each fault here.
"""

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time

import faulty_command
import keras
import pytest
import small_disk

pytestmark = [pytest.mark.long, pytest.mark.slow]

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))
TINY = ("--batch-size", "1", "--accum", "1", "--checkpoint-every", "10")
FILES = {"config.json", "metrics.csv", "curve.png", "model.keras", "checkpoints"}


def start(cwd, arguments, fault="none", environment=(), **options):
    left_out = "TF_CPP_MIN_LOG_LEVEL", "PYTHONUTF8"
    return subprocess.Popen(
        [sys.executable, faulty_command.__file__, fault, *map(str, arguments)],
        cwd=cwd,
        env={
            k: v
            for k, v in {**os.environ, **dict(environment)}.items()
            if v is not None and k not in left_out
        },
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def ended(process, code):
    """Returns the output of a process, which must have ended with this code and without a
    traceback.
    """
    printed, errors = ((text or b"").decode() for text in process.communicate(timeout=240))
    assert process.returncode == code and "Traceback" not in errors, errors
    return printed, errors


def wait_for(path, process):
    deadline = time.monotonic() + 240
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def steps_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "\udcffsource.txt"  # a name that is no UTF-8
    path.write_bytes(TEXT)
    return path


def test_sigterm_and_sigkill_then_a_narrow_terminal(tmp_path, source):
    """Sends one run SIGTERM while it evaluates and SIGKILL while it saves the model, then uses an
    ASCII terminal.
    """
    run = tmp_path / "run"
    first = ["train", source, "--steps", 100, *TINY, "--out", "run"]
    ended(start(tmp_path, first, fault="sigterm_while_evaluating"), 143)
    assert steps_of(run) == [*range(1, 11)]  # evaluated after ten

    killed = start(tmp_path, ["train", "--resume", "run"], fault="sigkill_while_saving_the_model")
    ended(killed, -signal.SIGKILL)
    assert steps_of(run) == [*range(1, 101)] and not (run / "model.keras").exists()
    assert (run / ".partial-model.keras").exists()

    ours, theirs = pty.openpty()
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    bare = {
        "HOME": None,
        "COLUMNS": "20",
        "TERM": "xterm",
        "PYTHONIOENCODING": "ascii",
        "KERAS_BACKEND": "jax",
        **ascii_only,
    }
    process = start(tmp_path, ["train", "--resume", "run"], environment=bare, stdout=theirs)
    os.close(theirs)
    printed = b""
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while block := terminal.read(1000):
                printed += block
        except OSError:  # the other end was closed
            pass
    ended(process, 0)
    assert (
        b"after 100 steps" in printed and b"training was complete" in printed and printed.isascii()
    )
    assert {path.name for path in run.iterdir()} == FILES
    assert keras.models.load_model(run / "model.keras", compile=False).count_params() > 0


def test_a_run_whose_reader_goes_away(tmp_path, source):
    """Ends with code 1 after `| head -1`, and goes on by --resume.

    A second process is refused meanwhile.
    """
    run = tmp_path / "run"
    process = start(tmp_path, ["train", source, *TINY, "--steps", 100_000, "--out", "run"])
    assert process.stdout.readline()
    wait_for(run / "checkpoints" / "step-00000010", process)
    _, errors = ended(start(tmp_path, ["train", "--resume", "run"]), 2)
    assert f"in use by the process {process.pid}" in errors
    process.stdout.close()
    process.stdout = None
    _, errors = ended(process, 1)
    assert "Broken pipe" in errors and "to resume: fastaccum train --resume run" in errors
    process = start(tmp_path, ["train", "--resume", "run"])
    assert any(b"resumed from" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
    assert {path.name for path in run.iterdir()} == FILES
    assert json.loads((run / "config.json").read_text())["steps"] == 100_000


def test_a_run_in_its_own_text(tmp_path):
    """Continues a run by the command that SIGTERM printed, though the run's folder lies in its
    text.
    """
    (tmp_path / "source.txt").write_bytes(TEXT)
    process = start(
        tmp_path, ["train", ".", "--steps", 100, *TINY], fault="sigterm_while_evaluating"
    )
    printed, _ = ended(process, 143)
    (command,) = (
        line.split(maxsplit=2)[2] for line in printed.splitlines() if line.startswith("to resume")
    )
    printed, _ = ended(start(tmp_path, command.split()[1:]), 0)
    assert "resumed from" in printed and "after 100 steps" in printed


def test_ctrl_c_while_it_compiles(tmp_path, source):
    process = start(
        tmp_path,
        ["train", source, "--steps", 100, *TINY, "--out", "run"],
        fault="sigint_while_compiling",
    )
    printed, errors = ended(process, 130)
    assert "Ctrl-C again to abort" in errors
    assert "after 1 steps" in printed and "fastaccum train --resume run" in printed
    assert steps_of(tmp_path / "run") == [1]


@pytest.fixture
def disk(tmp_path):
    """A file system of 6 MiB."""
    with small_disk.mounted(tmp_path / "disk", "6m") as path:
        yield path


def test_a_full_disk_then_files_over_the_limit(disk, source):
    run = disk / "run"
    arguments = ["train", source, "--steps", 100, *TINY, "--checkpoint-every", 75, "--out", "run"]
    _, errors = ended(start(disk, arguments, fault="disk_full_at_step_80"), 1)
    assert errors.endswith(
        "[Errno 28] No space left on device: 'run/metrics.csv'\nto resume: fastaccum train "
        "--resume run\n"
    )
    assert steps_of(run) == [*range(1, 80)]  # as it was before the row that found no room
    (disk / "filler").unlink()
    printed, errors = ended(
        start(disk, ["train", "--resume", "run"], fault="files_limited_at_the_end"), 1
    )
    assert "75 train steps done" in printed
    assert errors.endswith(
        "[Errno 27] File too large: 'run/model.keras'\nto resume: fastaccum train --resume run\n"
    )
    assert steps_of(run) == [*range(1, 101)]
    assert {path.name for path in run.iterdir()} == (FILES | {".partial-model.keras"}) - {
        "curve.png",
        "model.keras",
    }
