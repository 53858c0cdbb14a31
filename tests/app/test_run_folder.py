"""The folder of a run, and what of it may come from others."""

import errno
import json
import os
import subprocess
import sys
import threading

import keras
import pytest
from resuming import holding

from fastaccum import cli
from fastaccum.app import options
from fastaccum.app.run import Run, begin, replacing
from fastaccum.basics import warnings

pytestmark = pytest.mark.long

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main([*arguments])
    errors = capsys.readouterr().err
    assert exit.value.code == 2 and errors.endswith("\n") and errors[:-1].isprintable(), errors
    return errors


def test_runs_that_begin_at_once_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(begin(None, "runs/nano", {"seed": n})))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 20
    assert {json.loads((path / "config.json").read_text())["seed"] for path in found} == {
        *range(20)
    }
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        begin(None, "gone/nano", {})


def test_only_one_of_two_runs_gets_a_folder(tmp_path, monkeypatch):
    """Starts two runs that both found the folder empty."""
    monkeypatch.setattr(os, "listdir", lambda _: [])
    begin(str(tmp_path / "run"), "", {"seed": 0})
    with pytest.raises(FileExistsError, match=r"config\.json"):
        begin(str(tmp_path / "run"), "", {"seed": 1})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 0}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("whole")
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*metrics.csv'"),
        replacing(file) as path,
    ):
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert file.read_text() == "whole"
    with replacing(file) as path:
        path.write_text("new")
    assert file.read_text() == "new" and [*tmp_path.iterdir()] == [file]


HOLD = """
import sys
from fastaccum.checkpoint.lock import FolderLock
FolderLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_resumed(tmp_path, monkeypatch, capsys):
    """Refuses a run whose checkpoints' folder `fit` holds, even if it has only begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source.txt").write_bytes(TEXT)
    begin("run", "", Run(options.parse(["train", "source.txt", "--steps", "4"])).config)
    other = subprocess.Popen([sys.executable, "-c", HOLD, "run/checkpoints"], stdin=-1, stdout=-1)
    try:
        assert other.stdout.readline() == b"held\n"
        assert f"is in use by the process {other.pid}" in refusal(
            capsys, "train", "--resume", "run"
        )
    finally:
        other.communicate()
    assert not (tmp_path / "run" / "metrics.csv").exists()
    with holding("run/checkpoints"):
        assert "is in use by another fit of this process" in refusal(
            capsys, "train", "--resume", "run"
        )


def unlisted(path):
    path.mkdir()
    (path / "inner").mkdir(mode=0o000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is no file and no folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is no file and no folder"),
        (lambda path: path.symlink_to(path), "is no file and no folder"),
        (lambda path: path.touch(), "no text in"),
        (lambda path: path.write_bytes(b"x"), "has 1 bytes, but a window takes 129"),
        (unlisted, "Permission denied: 'text/inner'"),
    ],
)
def test_texts_that_cannot_be_read_twice(tmp_path, capsys, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    make(tmp_path / "text")
    try:
        # root may list anything
        os.seteuid(65534 if make is unlisted and os.geteuid() == 0 else os.geteuid())
        errors = refusal(capsys, "train", "text")
    finally:
        os.seteuid(os.getuid())
    assert message in errors


def test_a_model_file_with_code_is_refused_by_keras(tmp_path):
    """Checks SECURITY.md's promise: with its defaults, `load_model` runs no code of the file."""
    inputs = keras.Input((2,))
    keras.Model(inputs, keras.layers.Lambda(lambda x: x + 1)(inputs)).save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_text_of_others_cannot_move_the_cursor():
    assert warnings.one_line("a\x1b[2J\r\n\ud800é│") == "a\\x1b[2J\\r \\ud800é│"
    assert len(warnings.one_line("x" * 10**7)) < 2100
