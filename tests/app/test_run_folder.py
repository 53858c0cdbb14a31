"""A run folder that others made or spoilt: refused in one line, and nothing is read or written through a link."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import warnings

import keras
import pytest

from fastaccum import cli, lines
from fastaccum.app import options, output, run_folder, train
from fastaccum.app.run import Run, resume
from fastaccum.app.run_folder import RunFolder
from fastaccum.checkpoint import store
from fastaccum.checkpoint.lock import FolderLock
from fastaccum.transformer import gpt

pytestmark = pytest.mark.long

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))
HEADER = ",".join(run_folder.COLUMNS)
ROW = "{step},1.0,100,8.0,,1.0,1.0,0"


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """What config.json of a run holds, whose text stays where it is."""
    source = tmp_path_factory.mktemp("text") / "source.txt"
    source.write_bytes(TEXT)
    return Run(options.make_parser().parse_args(["train", str(source), "--steps", "9"])).config


@pytest.fixture
def run(tmp_path, monkeypatch, began):
    """The folder of a run that has begun, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    with RunFolder(path, began).held:
        return path


def names_in(folder):
    """The names that a user sees."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main([*arguments])
    errors = capsys.readouterr().err
    assert exit.value.code == 2 and errors.endswith("\n") and errors[:-1].isprintable(), errors
    return errors


def changed(**values):
    return lambda config: json.dumps({**config, **values})


def without(*names):
    return lambda config: json.dumps({k: v for k, v in config.items() if k not in names})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda c: "", "Expecting value"),
        (lambda c: "{", "Expecting property name"),
        (lambda c: "[" * 100_000, "maximum recursion depth"),
        (lambda c: '{"a":' * 100_000, "maximum recursion depth"),
        (lambda c: json.dumps(c)[:-1] + ', "versions": ' + "[" * 500 + "]" * 500 + "}", "'versions' is in it twice"),
        (changed(versions=json.loads("[" * 100 + "]" * 100)), "'versions' is nested"),
        (changed(steps={"a": {"b": 1}}), "'steps' is nested"),
        (lambda c: "null", "holds a NoneType"),
        (lambda c: '"\\ud800"', "holds a str"),
        (lambda c: json.dumps(c)[:-1] + ', "seed": 1}', "'seed' is in it twice"),
        (changed(lr=math.nan), "NaN is no number"),
        (changed(lr=-math.inf), "-Infinity is no number"),
        (lambda c: json.dumps(c).replace('"lr": 0.004', '"lr": 1e999'), "--lr: 'inf' must be a positive number"),
        (lambda c: json.dumps(c).replace('"steps": 9', '"steps": ' + "9" * 5000), "4300 digits"),
        (changed(steps=10**4000), "from 1 to 1000000000"),
        (changed(steps=-1), "--steps: '-1' must be"),
        (changed(steps=9.0), "--steps: '9.0' must be"),
        (changed(steps=True), "--steps: 'True' must be"),
        (changed(steps=[9]), "--steps: '[9]' must be"),
        (changed(steps="9"), "was edited"),
        (changed(batch_size=10**7), "--batch-size: '10000000' must be"),
        (changed(seed=-1), "--seed: '-1' must be"),
        (changed(checkpoint_every=0), "--checkpoint-every: '0' must be"),
        (changed(precision="\ud800"), r"--precision: invalid choice: '\ud800'"),
        (changed(precision=None), "--precision: invalid choice: 'None'"),
        (changed(preset="\x1b[2J"), r"--preset: invalid choice: '\x1b[2j'"),
        (changed(optimizer="../../outside"), "'../../outside' is not a Keras optimizer"),
        (changed(optimizer="x" * 100_000), "is not a Keras optimizer"),
        (changed(optimizer={"a": 1}), "is not a Keras optimizer"),
        (changed(paths=None), "paths=None is not a list of names"),
        (changed(paths=[1]), "paths=[1] is not a list of names"),
        (changed(paths=["a\0b"]), r"'a\x00b' is not a path"),
        (changed(paths=["\ud800"]), r"'\ud800' is not a path"),
        (changed(paths=[""]), "'' is not a path"),
        (changed(paths=["--out=elsewhere"]), "'--out=elsewhere' does not exist"),
        (changed(text_sha256=None), "text_sha256 was None"),
        (changed(parameters="7"), "parameters was '7'"),
        (changed(options_sha256={"a": 1}), "was edited"),
        (changed(warmup=3), "is of another version of fastaccum, which cannot continue it: warmup"),
        (without("seed"), "lacks seed: the run cannot be resumed. The file is of another version of fastaccum, or was"),
        (without("paths", "text_sha256"), "lacks paths, text_sha256"),
        (without("versions"), "which cannot continue it: versions"),
    ],
)
def test_a_config_that_no_run_writes(run, began, capsys, write, message):
    (run / "config.json").write_text(write(began))
    before = sorted(run.rglob("*"))
    errors = refusal(capsys, "train", "--resume", "run")
    assert message in errors
    assert any(name in errors for name in ("run/config.json", "--resume run", "--preset", "optimizer=", "--out=else"))
    assert len(errors) < 3000
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (b"step,pickle\n1,2\n", "its columns are ['step', 'pickle']"),
        ((HEADER + ",step\n").encode(), "its columns are"),
        (b"\xff\xfe\n", "can't decode byte 0xff"),
        (b"\0\n", "its columns are"),
        (b"x" * 200_000 + b"\n", "field larger than field limit"),
        (f"{HEADER}\n{ROW.format(step=1)},9\n".encode(), "is not what a run writes"),
        (f"{HEADER}\n1,1.0\n".encode(), "is not what a run writes"),
        (f"{HEADER}\n{ROW.format(step='')}\n".encode(), "is not what a run writes"),
        *(
            (f"{HEADER}\n{ROW.format(step=step)}\n".encode(), "is not what a run writes")
            for step in ("0", "-1", "1.5", "nan", "inf", "10", "9" * 400, "9" * 5000, "[1]")
        ),
        (f"{HEADER}\n{ROW.format(step=2)}\n{ROW.format(step=2)}\n".encode(), "after step 2"),
        (f"{HEADER}\n{ROW.format(step=3)}\n{ROW.format(step=2)}\n".encode(), "after step 3"),
        (f"{HEADER}\n1,nan,100,8.0,,1.0,1.0,0\n".encode(), "after step 0"),
        (f"{HEADER}\n1,-1,100,8.0,,1.0,1.0,0\n".encode(), "after step 0"),
        (f"{HEADER}\n1,1.0,100,1e300,,1.0,1.0,0\n".encode(), "after step 0"),
        (f"{HEADER}\n1,1.0,100,8.0,,1.0,1.0,2\n".encode(), "after step 0"),
        (f"{HEADER}\n1,1.0,100,8.0,,1.0,1.0,\n".encode(), "after step 0"),
    ],
)
def test_rows_that_no_run_writes(run, capsys, write, message):
    (run / "metrics.csv").write_bytes(write)
    errors = refusal(capsys, "train", "--resume", "run")
    assert "'run/metrics.csv'" in errors and message in errors and len(errors) < 3000
    assert (run / "metrics.csv").read_bytes() == write


def test_rows_are_read_as_they_were_written(run, began):
    rows = [
        {"step": 1, "seconds": 0.5, "bits_per_byte": 8.0, "loss_scale": 1.0, "grad_norm": math.inf, "skipped_steps": 0},
        {"step": 4, "seconds": 1.5, "tokens_per_second": 9, "bits_per_byte": 7.0, "held_out_bits_per_byte": 1e38}
        | {"loss_scale": 1.0, "grad_norm": 0.1, "skipped_steps": 3},
    ]
    with (folder := RunFolder(run, began)).held:
        for row in rows:
            folder.add_row(row)
    assert run_folder.read_rows(run, 9) == rows
    assert run_folder.read_config(run) == began


@pytest.mark.parametrize("name", [*run_folder.FILES, run_folder.CHECKPOINTS])
@pytest.mark.parametrize("kind", ["link out", "link to nowhere", "pipe", "socket", "other"])
def test_what_is_not_the_runs_own_is_refused(run, tmp_path, capsys, name, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    file = run / name
    file.unlink(missing_ok=True)
    if kind == "link out":
        file.symlink_to(outside if name == run_folder.CHECKPOINTS else outside / "file")
    elif kind == "link to nowhere":
        file.symlink_to(outside / "new")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(file.relative_to(tmp_path)))
    elif name == run_folder.CHECKPOINTS:
        file.touch()
    else:
        file.mkdir()
    errors = refusal(capsys, "train", "--resume", "run")
    assert f"'run/{name}' is not a " in errors and "of this run's own" in errors
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "theirs"


@pytest.mark.parametrize("state", [{}, {"steps": 7, "row_began": 6, "run": "another", "rows": []}])
def test_a_checkpoint_of_another_version_or_run(run, capsys, monkeypatch, state):
    found = store.Checkpoint(run / "checkpoints" / "step-00000007", {"callbacks": {"Recorder": {"state": state}}})
    monkeypatch.setattr(store, "latest", lambda _: found)
    before = (run / "config.json").read_bytes()
    errors = refusal(capsys, "train", "--resume", "run", "--steps", "20")
    assert "step-00000007 is another run's, or is of another version of fastaccum" in errors
    assert (run / "config.json").read_bytes() == before


def test_a_text_that_has_changed_is_named_by_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(9):
        (tmp_path / f"{number}.txt").write_bytes(TEXT)
    began = Run(options.make_parser().parse_args(["train", ".", "--steps", "9"])).config
    RunFolder(tmp_path / "run", began).held.release()
    (tmp_path / "0.txt").write_bytes(TEXT[1:])
    (tmp_path / "1.txt").unlink()
    (tmp_path / "log").write_bytes(b"step 1")
    errors = refusal(capsys, "train", "--resume", "run")
    for name, change in (("0.txt", "has changed"), ("1.txt", "is gone"), ("log", "is new")):
        assert f"{str(tmp_path / name)!r} {change}" in errors
    assert "2.txt" not in errors and "more" not in errors
    for number in range(9):
        (tmp_path / f"{number}.txt").write_bytes(TEXT[2:])
    assert "'4.txt" not in (errors := refusal(capsys, "train", "--resume", "run")) and "and 5 more" in errors


@pytest.mark.parametrize(("name", "below"), [("r\udcffun", ""), ("run[1]", "below")])
def test_folders_that_tensorflow_cannot_write_to(tmp_path, monkeypatch, capsys, began, name, below):
    """As the folder of a run, or as one above it, nothing is made; a text may be there, and a model be read there."""
    monkeypatch.chdir(tmp_path)
    path = os.path.join(name, below)
    errors = refusal(capsys, "train", *began["paths"], "--steps", "1", "--accum", "1", "--out", path)
    assert "no run can be in" in errors and not [*tmp_path.iterdir()]
    os.mkdir(name)
    monkeypatch.chdir(name)
    assert "no run can be in" in refusal(capsys, "train", *began["paths"], "--steps", "1", "--accum", "1")
    assert not os.listdir()
    with RunFolder("run", began).held:
        pass
    assert "no run can be in" in refusal(capsys, "train", "--resume", "run")
    gpt(256, width=16, layers=1, heads=2, context=8).save("model.keras")
    assert cli.main(["generate", "../" + name, "--length", "3"]) == 0
    with open("text.txt", "wb") as file:
        file.write(TEXT)
    assert len(Run(options.make_parser().parse_args(["train", "../" + name])).config["files"]) == 1


def test_rows_of_another_run(run, began, capsys, monkeypatch):
    """Its own are known by the checkpoint, whether the last is cut short or was written after it; others are not."""
    own, others = [
        [{n: of(1) for n, of in run_folder.COLUMNS.items()} | {"step": step, "seconds": seconds} for step in (1, 2)]
        for seconds in (1.0, 2.0)
    ]
    state = {"steps": 1, "row_began": 1, "run": began["run"], "rows": [str(sorted(own[0].items()))]}
    found = store.Checkpoint(
        run / "checkpoints" / "step-00000001", {"callbacks": {"Recorder": {"state": state}}, "progress": {"step": 1}}
    )
    monkeypatch.setattr(store, "latest", lambda _: found)
    for rows, is_own in ((own, True), (own[:1], True), ([], True), (others, False), ([others[0], own[1]], False)):
        (run / "metrics.csv").unlink(missing_ok=True)
        with (folder := RunFolder(run, began)).held:
            for row in rows:
                folder.add_row(row)
        parsed = options.make_parser().parse_args(["train", "--resume", "run"])
        if is_own:
            assert resume(parsed).rows == rows
        else:
            errors = refusal(capsys, "train", "--resume", "run")
            assert "run/metrics.csv': this run wrote no row {'step': 1, 'seconds': 2.0, " in errors


@pytest.mark.parametrize("name", ["config.json", "metrics.csv"])
def test_a_file_of_gigabytes_is_not_read(run, capsys, name):
    with open(run / name, "wb") as file:
        file.truncate(2**34)
    assert "is larger than 67108864 bytes" in refusal(capsys, "train", "--resume", "run")


def test_nothing_is_written_through_links_that_are_planted(tmp_path, began):
    """Under the names of what is written, of what is being written, and while the run goes on."""
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    run = tmp_path / "run"
    run.mkdir()
    names = [*run_folder.FILES[1:], *(f".partial-{name}" for name in run_folder.FILES)]
    for name in names:
        (run / name).symlink_to(outside)

    class Model:
        def save(self, path):
            path.write_text("model")

    with (folder := RunFolder(run, began)).held:
        assert not [*run.glob(".partial-*")]
        folder.add_row({"step": 1, "bits_per_byte": 8.0})
        (run / "metrics.csv").unlink()
        (run / "metrics.csv").symlink_to(outside)
        folder.add_row({"step": 2, "bits_per_byte": 7.0})
        folder.keep_rows(1)
        folder.save_model(Model())
        assert folder.draw_curve()
    assert outside.read_text() == "theirs"
    assert names_in(run) == sorted(run_folder.FILES)
    assert not any(path.is_symlink() for path in run.iterdir())
    assert (run / "model.keras").read_text() == "model"


def test_what_a_killed_process_was_writing_is_removed(run, began):
    (run / ".partial-abcdefgh").mkdir()
    (run / ".partial-abcdefgh" / "model.keras").touch()
    (run / "mine").touch()
    with RunFolder(run, began).held:
        pass
    assert names_in(run) == ["config.json", "mine"]


def test_a_write_that_fails_leaves_the_file_as_it_was(run, began):
    class Model:
        def save(self, path):
            path.write_text("half")
            raise OSError(28, "No space left on device")

    (run / "model.keras").write_text("whole")
    with (
        (folder := RunFolder(run, began)).held,
        pytest.raises(OSError, match=r"No space left on device: '.*model.keras'"),
    ):
        folder.save_model(Model())
    assert (run / "model.keras").read_text() == "whole"
    assert names_in(run) == ["config.json", "model.keras"]


def test_a_folder_that_is_removed_is_made_anew(run, began):
    with (folder := RunFolder(run, began)).held:
        folder.add_row({"step": 1, "bits_per_byte": 8.0})
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
        folder.add_row({"step": 2, "bits_per_byte": 7.0})
        assert run_folder.read_config(run) == began
        assert len((run / "metrics.csv").read_text().splitlines()) == 3
        # Not where another run has taken its place.
        (run / "config.json").write_text(json.dumps({**began, "seed": 7}))
        with pytest.raises(FileExistsError, match="another run has taken this folder"):
            folder.add_row({"step": 3, "bits_per_byte": 7.0})


def test_two_runs_that_begin_at_once_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(run_folder.new_path("runs/nano"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 20 and all(path.is_dir() for path in found)
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        run_folder.new_path("gone/nano")


HOLD = """
import sys
from fastaccum.checkpoint import store
from fastaccum.checkpoint.lock import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.faults
def test_a_run_that_goes_on_is_not_resumed(run, capsys):
    other = subprocess.Popen([sys.executable, "-c", HOLD, run], stdin=-1, stdout=-1)
    try:
        assert other.stdout.readline() == b"held\n"
        errors = refusal(capsys, "train", "--resume", "run")
        assert f"'run' is in use by the process {other.pid} on {socket.gethostname()}" in errors
    finally:
        other.communicate()


def test_a_folder_that_another_process_takes_first(tmp_path, monkeypatch, capsys, began):
    """Both found it empty; one holds it by the time that the other wants to write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with FolderLock("run"):
        errors = refusal(capsys, "train", *began["paths"], "--steps", "1", "--accum", "1", "--out", "run")
    assert "--out: 'run' is in use by another fit of this process" in errors
    assert names_in(tmp_path / "run") == []


def pipe(path):
    os.mkfifo(path)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(2**42)


def unlisted(path):
    path.mkdir()
    (path / "inner").mkdir(mode=0o000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipe, "is a pipe or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device"),
        (lambda path: path.symlink_to(path), "does not exist"),
        (sparse, "has 4,398,046,511,104 bytes"),
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
        os.seteuid(65534 if make is unlisted and os.geteuid() == 0 else os.geteuid())  # root may list anything
        errors = refusal(capsys, "train", "text")
    finally:
        os.seteuid(os.getuid())
    assert message in errors


def test_a_model_file_with_code_is_refused_by_keras(tmp_path):
    """As SECURITY.md says: with its defaults, `load_model` runs no code of the file."""
    inputs = keras.Input((2,))
    keras.Model(inputs, keras.layers.Lambda(lambda x: x + 1)(inputs)).save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_a_whole_run_writes_through_no_link(run, tmp_path, capsys, monkeypatch):
    """`fastaccum train --resume`, to its end."""
    links = {run / ".partial-metrics.csv": tmp_path / "rows", run / ".partial-model.keras": tmp_path / "model"}
    for link, outside in links.items():
        outside.write_text("theirs")
        link.symlink_to(outside)
    monkeypatch.setattr(train, "_train", lambda run, folder: folder.keep_rows(0) or folder.save_model(run.model) or 0)
    assert cli.main(["train", "--resume", "run"]) == 0
    for link, outside in links.items():
        assert outside.read_text() == "theirs" and not link.exists()


@pytest.mark.parametrize(("stdout", "said"), [("/dev/full", "stdout has ended: No space left on device\n"), (None, "")])
def test_output_that_cannot_be_written_is_dropped(stdout, said):
    """With TensorFlow's start-up left out: `test_cli_faults.py` trains so."""
    with open(stdout or os.devnull, "wb") as full:
        close = None if stdout else lambda: [os.close(n) for n in (0, 1)]
        command = [sys.executable, "-m", "fastaccum", "train", "--help"]
        ended = subprocess.run(command, stdout=full, stderr=-1, preexec_fn=close, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, said)


def test_what_others_wrote_cannot_move_the_cursor():
    assert lines.one_line("a\x1b[2J\r\n\ud800é│") == "a\\x1b[2J\\r \\ud800é│"
    assert len(lines.one_line("x" * 10**7)) < 2100
    before = warnings.formatwarning
    with output.tolerate_closed_stdout():
        assert warnings.formatwarning(Warning("a\x1b[2J\nb"), Warning, "run.py", 3, "found = ...") == (
            "warning: a\\x1b[2J b\n"
        )
    assert warnings.formatwarning is before
