import csv
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tiny_command

import fastaccum
from fastaccum import cli
from fastaccum.app import options, text, train
from fastaccum.app import run as app_run
from fastaccum.checkpoint import store
from fastaccum.checkpoint.signals import EndRequest
from fastaccum.transformer import PRESETS, gpt

pytestmark = pytest.mark.long

TINY = (tiny_command.__file__,)
TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.txt"
    path.write_bytes(TEXT)
    return path


def start(arguments, cwd, command=("-m", "fastaccum"), **environment):
    environment = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def rows_of(folder):
    if not (folder / "metrics.csv").exists():
        return []
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {key: float(value) for key, value in row.items() if value != ""}
            for row in csv.DictReader(file)
        ]


def held_out_bits(folder):
    """Returns the saved model's bits per byte on the held-out windows, computed with Keras alone."""
    model = keras.models.load_model(folder / "model.keras", compile=False)
    x, y = text.spread_windows(text.split([TEXT])[1], context=128, most=512)
    return float(
        keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x), True))
    ) / math.log(2)


@pytest.mark.slow
def test_a_short_run_leaves_a_folder_that_holds_what_it_printed(tmp_path, source):
    options = ["--steps", "8", "--batch-size", "2", "--accum", "3", "--lr", "0.01", "--seed", "7"]
    process = start(["train", source, *options, "--out", "run"], tmp_path)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.csv",
        "curve.png",
        "model.keras",
        "checkpoints",
    }
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")

    config = json.loads((folder / "config.json").read_text())
    model = keras.models.load_model(folder / "model.keras")
    assert (config["steps"], config["batch_size"], config["accum"], config["seed"]) == (8, 2, 3, 7)
    assert set(config) == {*app_run.OPTIONS, "paths", "text_sha256"}

    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["bits_per_byte"] == pytest.approx(8, abs=0.6)
    assert rows[-1]["bits_per_byte"] < rows[0]["bits_per_byte"] - 1
    assert all(row["grad_norm"] > 0 and row["skipped_steps"] == 0 for row in rows)
    reached = rows[-1]["held_out_bits_per_byte"]
    assert held_out_bits(folder) == pytest.approx(reached, abs=1e-4)

    assert "micro-batch 2 x accumulation 3 = global batch 6" in printed
    assert f"{model.count_params():,} parameters" in printed
    assert f"{reached:.3f} bits per byte after 8 steps" in printed
    assert len(printed.split("sample", 1)[1]) > 400


@pytest.mark.slow
def test_ctrl_c_saves_what_was_learned(tmp_path, source):
    has_addons = importlib.util.find_spec("tensorflow_addons") is not None
    optimizer = "tfa:LAMB" if has_addons else "lamb"
    options = [
        "--steps",
        "20000",
        "--batch-size",
        "1",
        "--accum",
        "2",
        "--precision",
        "mixed_float16",
    ]
    process = start(["train", source, *options, "--optimizer", optimizer], tmp_path, TINY)
    folder = tmp_path / "runs" / f"nano-{optimizer.lower().replace(':', '-')}-seed0"
    deadline = time.monotonic() + 240
    while len(rows_of(folder)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Ctrl-C again" in errors
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.csv",
        "curve.png",
        "model.keras",
        "checkpoints",
    }
    assert json.loads((folder / "config.json").read_text())["precision"] == "mixed_float16"
    first, *_, last = rows_of(folder)
    assert 600 <= last["step"] < 20000
    assert last["loss_scale"] > 1
    assert last["bits_per_byte"] < first["bits_per_byte"]
    (said,) = re.findall(r"held out +([\d.]+) bits per byte after ([\d,]+) steps", printed)
    assert held_out_bits(folder) == pytest.approx(float(said[0]), abs=0.01)
    assert last["step"] <= int(said[1].replace(",", "")) < 20000


def wait_for(path, process):
    deadline = time.monotonic() + 240
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def what_was_learned(folder):
    """Every tensor of the last checkpoint, and the bytes of metrics.csv."""
    tensors = {
        name: tensor.numpy().tobytes()
        for name, tensor in store.latest(folder / "checkpoints").tensors().items()
        if tensor.dtype != "variant"  # an iterator's state, which has no bytes of its own
    }
    return {"tensors": tensors, "rows": (folder / "metrics.csv").read_bytes()}


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--pack"], ["--float8"]])
def test_however_it_ends_it_goes_on_bit_by_bit(tmp_path, source, form):
    """SIGKILL, Ctrl-C, then SIGTERM, each in mid-run; the last row is short. What goes on takes
    compiled programs from the cache, as runs do unless they are told otherwise.
    """
    cache = {"FASTACCUM_COMPILE_CACHE": str(tmp_path / "cache")}
    options = ["--steps", "301", "--batch-size", "1", "--accum", "2", "--checkpoint-every", "20"]
    options += form
    whole = start(["train", source, *options, "--out", "whole"], tmp_path, TINY)  # compiles
    process = start(["train", source, *options, "--out", "ended"], tmp_path, TINY, **cache)
    folder, moved = tmp_path / "ended", tmp_path / "moved"
    ends = [
        (20, signal.SIGKILL, -9),
        (100, signal.SIGINT, 130),
        (180, signal.SIGTERM, 143),
        (301, None, 0),
    ]
    for step, end, code in ends:
        wait_for(folder / "checkpoints" / f"step-{step:08d}", process)
        if end is not None:
            process.send_signal(end)
        printed, errors = process.communicate(timeout=240)
        assert process.returncode == code, errors
        if code in (130, 143):
            assert f"fastaccum train --resume {folder.name}" in printed
        if end is None:
            break
        process = start(["train", "--resume", folder.name], tmp_path, TINY, **cache)
    assert "resumed from" in printed and "after 301 steps" in printed
    _, errors = whole.communicate(timeout=240)
    assert whole.returncode == 0, errors
    expected = what_was_learned(tmp_path / "whole")
    assert what_was_learned(folder) == expected and rows_of(folder)[-1]["step"] == 301

    # Complete: nothing is trained, and what it leaves is written again. It may lie elsewhere by
    # then.
    folder.rename(moved)
    (moved / "model.keras").unlink()
    (moved / "metrics.csv").write_bytes(b"of nobody's")  # which is never read
    done = start(["train", "--resume", moved], tmp_path, TINY, **cache)
    printed, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors
    assert "after 301 steps" in printed and (moved / "model.keras").exists()
    assert what_was_learned(moved) == expected


@pytest.fixture
def began(tmp_path, source, monkeypatch):
    """The folder "run" of a run that has not trained yet, in the working directory."""
    monkeypatch.chdir(tmp_path)
    run = app_run.Run(
        options.parse(["train", str(source), "--batch-size", "2", "--accum", "1", "--steps", "4"])
    )
    return app_run.begin("run", "", run.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: (run / "config.json").unlink(),
            "'run/config.json' is not there: name a folder that",
        ),
        (lambda run: (run / "config.json").write_text("[1]"), "list indices must be integers"),
        (lambda run: (run / "config.json").write_text("{"), "JSONDecodeError"),
        (lambda run: (run / "config.json").write_text('{"a":' * 100_000), "RecursionError"),
        (lambda run: rewrite(run, steps=None), "argument --steps: 'None' must be a whole number"),
        (lambda run: rewrite(run, lr=math.nan), "argument --lr: 'nan' must be a positive number"),
        (lambda run: rewrite(run, paths=None), "NoneType"),
        (lambda run: rewrite(run, paths=["gone.txt"]), "'gone.txt' is no file and no folder"),
        (lambda run: rewrite(run, seed=...), "KeyError: 'seed'"),
        (
            lambda run: (run.parent / "source.txt").write_bytes(TEXT + b"."),
            "the text has changed since the run began: its text_sha256 was",
        ),
        (
            lambda run: (run / "checkpoints" / "step-00000020").mkdir(parents=True),
            "None of the 1 checkpoints in",
        ),
    ],
)
def test_a_folder_that_is_no_runs_is_refused(began, capsys, change, message):
    change(began)
    before = seen(began)
    with pytest.raises(SystemExit) as exit, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checkpoint that is passed over
        cli.main(["train", "--resume", "run"])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and len(error.splitlines()) == 1
    assert seen(began) == before


def said(capsys, *arguments):
    """Returns the output of a command that succeeds."""
    assert cli.main([*arguments]) == 0
    return capsys.readouterr().out


def test_a_run_is_extended_as_fit_with_more_epochs_is(tmp_path, source, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app_run, "ROWS", 7)  # rows of 3 steps: the 20th step ends a shorter one
    monkeypatch.setattr(train.text, "generate", lambda *_, **__: b"")
    began_with = [
        "train",
        str(source),
        "--steps",
        "20",
        "--batch-size",
        "1",
        "--accum",
        "2",
        "--checkpoint-every",
        "4",
    ]
    printed = said(capsys, *began_with, "--out", "run")
    (speed,) = re.findall(r"speed +([\d,]+) tokens \(bytes\) a second", printed)
    assert 128 < int(speed.replace(",", "")) < 10**8
    after_20 = rows_of(tmp_path / "run")
    assert [row["step"] for row in after_20] == [3, 6, 9, 12, 15, 18, 20]

    # A failure on the way: the run goes on to its new end, not to the old one.
    with monkeypatch.context() as failing:
        failing.setattr(
            train.Recorder, "on_epoch_begin", fail_after(26, train.Recorder.on_epoch_begin)
        )
        assert cli.main(["train", "--resume", "run", "--steps", "30"]) == 1
    printed = capsys.readouterr().out
    rule = "which falls to 8e-05 over the first 20 steps, and then stays there"
    assert "30 steps of adamw" in printed and rule in printed
    printed = said(capsys, "train", "--resume", "run")
    assert "26 train steps done" not in printed and "after 30 steps" in printed and rule in printed

    rows = rows_of(tmp_path / "run")
    assert rows[:7] == after_20
    # first the rest of the row that was cut short
    assert [row["step"] for row in rows[7:]] == [21, 24, 27, 30]
    assert rows[-1]["held_out_bits_per_byte"] == pytest.approx(
        held_out_bits(tmp_path / "run"), abs=1e-4
    )
    weights = keras.models.load_model("run/model.keras", compile=False).get_weights()

    # The same Trainer, whose schedule is of 20 steps, in one fit of 30.
    run = app_run.Run(options.parse(began_with))
    run.trainer.fit(run.windows, epochs=1, steps_per_epoch=20, shuffle=False, verbose=0)
    assert not np.array_equal(run.model.get_weights()[0], weights[0])
    run = app_run.Run(options.parse(began_with))
    run.trainer.fit(run.windows, epochs=1, steps_per_epoch=30, shuffle=False, verbose=0)
    assert float(run.trainer.optimizer.learning_rate) == pytest.approx(0.004 / 50)
    for one, other in zip(weights, run.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    # It is as long as it is: a shorter run is refused, and the same length trains nothing.
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--resume", "run", "--steps", "20"])
    assert (
        "--steps 20: the run in run has 30 steps: leave --steps out, or give more"
        in capsys.readouterr().err
    )
    printed = said(capsys, "train", "--resume", "run", "--steps", "30")
    assert "training was complete" in printed and "a second" not in printed
    assert rows_of(tmp_path / "run") == rows
    rewrite(tmp_path / "run", extended_to_steps=19)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--resume", "run"])
    assert (
        "extended_to_steps=19 must be a whole number from 20 to 1000000000"
        in capsys.readouterr().err
    )


def fail_after(steps, method):
    def failing(recorder, *arguments):
        if recorder.steps >= steps:
            raise OSError("the disk is full")
        method(recorder, *arguments)

    return failing


def seen(folder):
    """The files that a user sees."""
    return sorted(path for path in folder.rglob("*") if not path.name.startswith("."))


def rewrite(run, **values):
    config = {**json.loads((run / "config.json").read_text()), **values}
    (run / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.slow
def test_a_run_does_not_continue_with_other_options(began, capsys, monkeypatch):
    """Whatever of them config.json is made to say: the checkpoint knows those that it was made
    with.
    """
    monkeypatch.setitem(PRESETS, "micro", {**PRESETS["nano"], "width": 32})
    monkeypatch.setattr(train.text, "generate", lambda *_, **__: b"")
    assert cli.main(["train", "--resume", "run"]) == 0
    before = what_was_learned(began)
    others = {
        "steps": 5,
        "lr": 0.5,
        "optimizer": "lion",
        "precision": "mixed_bfloat16",
        "preset": "micro",
        "seed": 7,
    }
    for name, value in [*others.items(), ("checkpoint_every", 3), ("batch_size", 1)]:
        shutil.copy(began / "config.json", "kept")
        rewrite(began, **{name: value}, **({"accum": 2} if name == "batch_size" else {}))
        with pytest.raises(SystemExit, match="2"):
            cli.main(["train", "--resume", "run"])
        named = {
            "steps": "learning_rate",
            "lr": "learning_rate",
            "precision": "bfloat16",
            "preset": "layers.",
            "optimizer": "optimizer.class",
            "seed": "seed: ",
        }
        named["batch_size"] = "batch plan.steps_per_pass"
        error = capsys.readouterr().err
        assert named.get(name, name) in error.splitlines()[-1], error
        assert what_was_learned(began) == before
        shutil.copy("kept", began / "config.json")
    assert cli.main(["train", "--resume", "run"]) == 0
    assert what_was_learned(began) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["nosuch"], "invalid choice: 'nosuch' (choose from"),
        (
            ["train", "--resume", "empty"],
            "--resume 'empty': 'empty/config.json' is not there: name a folder that",
        ),
        (
            ["train", "--resume", "/nonexistent"],
            "'/nonexistent/config.json' is not there: name a folder that",
        ),
        (
            ["train", "--resume", "short.txt"],
            "'short.txt/config.json' is not there: name a folder that",
        ),
        (
            ["train", "--resume", "used", "--steps", "3", "--lr=0.004", "SOURCE"],
            "leave out --lr, FILE or FOLDER",
        ),
        (
            ["train", "--checkpoint-every", "0"],
            "--checkpoint-every: '0' must be a whole number from 1 to 1000000000",
        ),
        (["train", "--steps", "0"], r"--steps: '0' must be a whole number from 1 to 1000000000"),
        (
            ["train", "--steps", "1000000001"],
            "--steps: '1000000001' must be a whole number from 1 to 1000000000",
        ),
        (["train", "--steps", "9" * 5000], "must be a whole number from 1 to 1000000000"),
        (["train", "--batch-size", "1000001"], "--batch-size: '1000001' must be"),
        (["train", "SOURCE", "--out", "a\0b"], "--out: "),
        (["train", "SOURCE", "--out", "\ud800"], "--out: "),
        (["train", "SOURCE", "--out", "run[1]"], "--out: "),
        (["train", "--resume", "\ud800"], r"\ud800"),
        (["train", "SOURCE", "--a\nb\x1b[2J"], r"unrecognized arguments: --a b\x1b[2J"),
        (["bench", "--from", "SOURCE"], "cannot be read: Expecting value"),
        (
            ["bench", "--from", "used"],
            "--from used is no file: name the run.json of an earlier run",
        ),
        (
            ["bench", "--from", "nope.json"],
            "--from nope.json is not there: name the run.json of an earlier run",
        ),
        (["bench", "nosuch"], "unknown suite 'nosuch'; the suites are addons"),
        (["bench", "--from", "deep.json"], "maximum recursion depth"),
        (["bench", "--from", "odd.json"], "cannot be written up"),
        (["bench", "--out", "short.txt/below", "fit"], "--out short.txt/below cannot be made"),
        (["train", "--accum", "-2"], r"--accum: '-2' must be"),
        (["train", "--batch-size", "2.5"], r"--batch-size: '2.5' must be"),
        (["train", "--seed", "-1"], r"--seed: '-1' must be a whole number from 0"),
        (["train", "--lr", "0"], r"--lr: '0' must be a positive number"),
        (["train", "--lr", "1e-50"], r"--lr: '1e-50' must be a positive number"),
        (["train", "--lr", "nan"], r"--lr: 'nan' must be a positive number"),
        (["train", "--precision", "float8"], "--precision: invalid choice: 'float8'"),
        (
            ["train", "SOURCE", "--float8", "--precision", "float32"],
            "--float8 is for a model in half precision",
        ),
        (["train", "--preset", "giant"], "--preset: invalid choice: 'giant'"),
        (["train", "SOURCE", "--optimizer", "adamm"], "'adamm' is not a name of keras.optimizers"),
        (["train", "--step", "3"], "unrecognized arguments: --step: did you mean --steps?"),
        (
            ["train", "--batch_size=3"],
            "unrecognized arguments: --batch_size=3: did you mean --batch-size?",
        ),
        (["train", "--epochs", "3"], "unrecognized arguments: --epochs: did you mean --steps?"),
        (
            ["train", "--xyzzy"],
            "unrecognized arguments: --xyzzy; `fastaccum train --help` lists the options",
        ),
        (
            ["devices", "all"],
            "unrecognized arguments: all; `fastaccum devices --help` lists the options",
        ),
        (
            ["generate", "empty", "--temperature", "-1"],
            "--temperature: '-1' must be a number from 0 to 1000",
        ),
        (
            ["generate", "/nonexistent"],
            "'/nonexistent/model.keras' is not there: `fastaccum train` saves it",
        ),
        (["generate", "empty"], "'empty/model.keras' is not there"),
        (["generate", "empty", "--prompt", ""], "--prompt '' is empty"),
        (["train", ""], "'' is no file and no folder"),
        (["train", "missing.txt"], "'missing.txt' is no file and no folder"),
        (["train", "empty"], "no text in 'empty'"),
        (["train", "short.txt"], "held-out text has 10 bytes, but a window takes 129"),
        (["train", "SOURCE", "--out", "used"], "'used' has files in it"),
        (["train", "SOURCE", "--out", "short.txt"], "File exists: 'short.txt'"),
    ],
)
def test_bad_arguments_end_with_one_line_that_names_them(
    tmp_path, source, monkeypatch, capsys, arguments, message
):
    if (
        arguments[:1] == ["bench"]
        and not Path(cli.__file__).parents[1].joinpath("benchmarks").exists()
    ):
        pytest.skip("an installed package has no benchmarks")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_bytes(b"x" * 200)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "odd.json").write_text(
        json.dumps(
            dict.fromkeys(("commit_info", "datetime", "machine_info"), 1) | {"benchmarks": [1]}
        )
    )
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "used" / "config.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        cli.main([str(source) if a == "SOURCE" else a for a in arguments])
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"fastaccum {fastaccum.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "seconds"), [(["-c", "import fastaccum"], 0.2), (["-m", "fastaccum", "-h"], 0.3)]
)
@pytest.mark.slow
def test_what_needs_no_tensorflow_is_quick(arguments, seconds):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    assert min(times) < seconds


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run, with its model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a run"
    path.mkdir()
    keras.utils.set_random_seed(0)
    gpt(256, width=16, layers=1, heads=2, context=8).save(path / "model.keras")
    return path


@pytest.mark.slow
def test_a_model_continues_a_text(run, capsys):
    texts = []
    for _ in range(2):
        assert cli.main(["generate", run.name, "--prompt", "line é", "--length", "30"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("line é") and len(texts[0]) > 20


def test_how_freely_a_text_is_continued(run, capsys):
    def said(*arguments):
        assert (
            cli.main(["generate", run.name, "--prompt", "line", "--length", "12", *arguments]) == 0
        )
        return capsys.readouterr().out

    assert said() == said("--seed", "0", "--temperature", "0.8")
    assert said("--seed", "1") != said()
    likeliest = said("--temperature", "0")
    assert likeliest == said("--temperature", "0", "--seed", "1") != said()
    # The first byte, by Keras alone.
    ids = np.zeros((1, 8), np.int32)
    ids[0, :4] = list(b"line")
    scores = keras.saving.load_model(run / "model.keras", compile=False).predict(ids, verbose=0)[
        0, 3
    ]
    assert likeliest.startswith(text.printable(b"line" + bytes([int(scores.argmax())])))


def test_a_model_that_cannot_continue_a_text(run, capsys):
    def said(*arguments):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["generate", *arguments])
        return capsys.readouterr().err

    weights = [
        weight * math.nan for weight in keras.saving.load_model(run / "model.keras").get_weights()
    ]
    diverged = gpt(256, width=16, layers=1, heads=2, context=8)
    diverged.set_weights(weights)
    diverged.save(run / "model.keras")
    assert "its training has diverged" in said("a run")
    (run / "model.keras").write_bytes(b"PK")
    assert "model.keras" in said("a run")
    (run / "model.keras").unlink()
    assert (
        "'a run/model.keras' is not there: `fastaccum train` saves it when training ends"
        in said("a run")
    )


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_command():
    """Ends with code 1 and no traceback if the reader is gone, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fastaccum", "devices"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (
        ended.returncode == 1
        and "Traceback" not in ended.stderr
        and "Exception" not in ended.stderr
    )


def test_interrupted_before_training_began(monkeypatch, capsys):
    monkeypatch.setattr(train, "_begin", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_help_answers_without_tensorflow():
    program = (
        "import sys\n"
        "from fastaccum.cli import main\n"
        "try: main(['train', '--help'])\n"
        "finally: print('tensorflow' in sys.modules)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == "False"
    assert all(preset in printed for preset in PRESETS)


def test_what_cannot_fit_is_told_in_the_terminal(source, tmp_path, capsys):
    huge = ["--accum", "1000000", "--batch-size", "1000000"]
    assert cli.main(["train", str(source), *huge, "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.startswith(
        "out of memory: halve --batch-size and double --accum"
    )
    assert not (tmp_path / "run").exists()


def test_devices_lists_the_cpu(capsys):
    assert cli.main(["devices"]) == 0
    assert "cores" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("kind", "precision"), [("GPU", "mixed_float16"), ("CPU", "float32")])
def test_auto_precision_follows_the_device(source, monkeypatch, kind, precision):
    monkeypatch.setattr(app_run, "list_devices", lambda: [(kind, "some model")])
    run = app_run.Run(options.parse(["train", str(source)]))
    assert run.config["precision"] == precision
    assert run.model.get_layer("block_0").dtype_policy.name == precision


def test_learning_rate_rises_then_falls():
    rate = app_run.make_schedule(0.01, 200)
    values = [float(rate(step)) for step in (0, 5, 10, 105, 200, 300)]
    assert values == pytest.approx([0.0, 0.005, 0.01, 0.0051, 0.0002, 0.0002], rel=1e-3)


def test_the_first_interrupt_asks_and_the_second_would_end_the_process(capfd):
    before = signal.getsignal(signal.SIGINT)
    with EndRequest(signal.SIGINT, train.INTERRUPTED) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
    assert "Ctrl-C again to abort" in capfd.readouterr().err
