import csv
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import keras
import pytest
import tiny_command

import fastaccum
from fastaccum import cli
from fastaccum.app import generate, options, progress, recorder, text, train
from fastaccum.app import plan as app_plan
from fastaccum.app import run as app_run
from fastaccum.app.run_folder import RunFolder
from fastaccum.checkpoint import store
from fastaccum.checkpoint.signals import EndRequest
from fastaccum.memory.errors import OutOfMemoryError
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
    asked = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1"}  # for log lines, which there must not be
    environment = {**os.environ, **asked, **environment}
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
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: float(value) for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def held_out_bits(folder):
    """What the saved model reaches on the held-out windows, computed with Keras alone."""
    model = keras.models.load_model(folder / "model.keras", compile=False)
    x, y = text.spread_windows(text.split([TEXT])[1], context=128, most=512)
    return float(keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x), True))) / math.log(2)


@pytest.mark.faults
def test_a_short_run_leaves_a_folder_that_holds_what_it_printed(tmp_path, source):
    options = ["--steps", "8", "--batch-size", "2", "--accum", "3", "--lr", "0.01", "--seed", "7"]
    process = start(["train", source, *options, "--out", "run"], tmp_path)
    printed, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.csv",
        "curve.png",
        "model.keras",
        "checkpoints",
        ".fastaccum-lock",
    }
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")

    config = json.loads((folder / "config.json").read_text())
    model = keras.models.load_model(folder / "model.keras")
    assert config["parameters"] == model.count_params()
    assert (config["steps"], config["batch_size"], config["accum"], config["seed"]) == (8, 2, 3, 7)
    assert config["train_bytes"] + config["held_out_bytes"] == len(TEXT)

    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["bits_per_byte"] == pytest.approx(8, abs=0.6)
    assert rows[-1]["bits_per_byte"] < rows[0]["bits_per_byte"] - 1
    assert all(row["grad_norm"] > 0 and row["skipped_steps"] == 0 for row in rows)
    reached = rows[-1]["held_out_bits_per_byte"]
    assert held_out_bits(folder) == pytest.approx(reached, abs=1e-4)

    assert "micro-batch 2 x accumulation 3 = global batch 6" in printed
    assert f"{config['parameters']:,} parameters" in printed
    assert f"{reached:.3f} bits per byte after 8 steps" in printed
    assert len(printed.split("sample", 1)[1]) > 400


@pytest.mark.faults
def test_ctrl_c_saves_what_was_learned(tmp_path, source):
    has_addons = importlib.util.find_spec("tensorflow_addons") is not None
    optimizer = "tfa:LAMB" if has_addons else "lamb"
    options = ["--steps", "20000", "--batch-size", "1", "--accum", "2", "--precision", "mixed_float16"]
    process = start(["train", source, *options, "--optimizer", optimizer], tmp_path, TINY)
    folder = tmp_path / "runs" / f"nano-{optimizer.lower().replace(':', '-')}-seed0"
    deadline = time.monotonic() + 240
    while not (folder / "metrics.csv").exists() and process.poll() is None and time.monotonic() < deadline:
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
        ".fastaccum-lock",
    }
    assert json.loads((folder / "config.json").read_text())["precision"] == "mixed_float16"
    last = rows_of(folder)[-1]
    assert 200 <= last["step"] < 20000
    assert last["loss_scale"] > 1
    assert last["bits_per_byte"] < 7
    assert held_out_bits(folder) == pytest.approx(last["held_out_bits_per_byte"], abs=0.01)
    assert f"after {last['step']:,.0f} steps" in printed


def wait_for(path, process):
    deadline = time.monotonic() + 240
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def what_was_learned(folder):
    """Every tensor of the last checkpoint, and what metrics.csv says of training but for times."""
    left_out = "seconds", "tokens_per_second", "held_out_bits_per_byte"  # Ctrl-C evaluates once more
    tensors = {
        name: tensor.numpy().tobytes() for name, tensor in store.latest(folder / "checkpoints").tensors().items()
    }
    rows = [{k: v for k, v in row.items() if k not in left_out} for row in rows_of(folder)]
    return {"tensors": tensors, "rows": rows}


@pytest.mark.faults
def test_however_it_ends_it_goes_on_bit_by_bit(tmp_path, source):
    """SIGKILL, Ctrl-C, then SIGTERM, each in mid-run; the last row is short. What goes on takes compiled programs from
    the cache, as runs do unless they are told otherwise.
    """
    cache = {"FASTACCUM_COMPILE_CACHE": str(tmp_path / "cache")}
    options = ["--steps", "301", "--batch-size", "1", "--accum", "2", "--checkpoint-every", "20"]
    whole = start(["train", source, *options, "--out", "whole"], tmp_path, TINY)  # compiles
    process = start(["train", source, *options, "--out", "ended"], tmp_path, TINY, **cache)
    folder, moved = tmp_path / "ended", tmp_path / "moved"
    ends = [(20, signal.SIGKILL, -9), (100, signal.SIGINT, 130), (180, signal.SIGTERM, 143), (301, None, 0)]
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
    assert "steps are done" in printed and "after 301 steps" in printed
    _, errors = whole.communicate(timeout=240)
    assert whole.returncode == 0, errors
    expected = what_was_learned(tmp_path / "whole")
    assert what_was_learned(folder) == expected and expected["rows"][-1]["step"] == 301

    # Complete: nothing is trained, and what it leaves is written again. It may lie elsewhere by then.
    folder.rename(moved)
    (moved / "model.keras").unlink()
    with open(moved / "metrics.csv", "rb+") as file:
        file.truncate((moved / "metrics.csv").stat().st_size - 3)  # as a full disk would cut it short
    done = start(["train", "--resume", moved], tmp_path, TINY, **cache)
    printed, errors = done.communicate(timeout=240)
    assert (done.returncode, errors) == (0, "")
    assert "after 301 steps" in printed and (moved / "model.keras").exists()
    assert what_was_learned(moved)["tensors"] == expected["tensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "config.json").unlink(), "'run/config.json' cannot be read, so 'run' is not a run folder"),
        (lambda run: (run / "config.json").write_text("[1]"), "'run/config.json' holds a list"),
        (lambda run: rewrite(run, steps=None), "'run/config.json': argument --steps: 'None' must be a whole number"),
        (lambda run: rewrite(run, steps="__import__('os')"), "must be a whole number from 1 to 1000000000"),
        (lambda run: rewrite(run, paths="source.txt"), "paths='source.txt' is not a list of names"),
        (lambda run: rewrite(run, seed=...), "lacks seed: the run cannot be resumed"),
        (lambda run: rewrite(run, parameters=7), "parameters was 7, is"),
        (lambda run: rewrite(run, lr=0.5), "'run/config.json' was edited"),
        (
            lambda run: (run.parent / "source.txt").write_bytes(TEXT + b"."),
            "continue as it began: text_sha256 was",
        ),
        (lambda run: (run / "metrics.csv").write_text("step,pickle\n1,2\n"), "its columns are ['step', 'pickle']"),
        (lambda run: (run / "checkpoints" / "step-00000020").mkdir(parents=True), "None of the 1 checkpoints in"),
    ],
)
def test_a_folder_that_is_no_runs_is_refused(tmp_path, source, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    run = app_run.Run(options.make_parser().parse_args(["train", str(source), "--out", "run"]))
    with RunFolder("run", run.config).held:
        pass
    change(tmp_path / "run")
    with pytest.raises(SystemExit) as exit, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checkpoint that is passed over
        cli.main(["train", "--resume", "run"])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def rewrite(run, **values):
    config = {**json.loads((run / "config.json").read_text()), **values}
    (run / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train", "--resume", "empty"], "'empty/config.json' cannot be read"),
        (["train", "--resume", "used", "--steps", "3", "--lr=0.004", "SOURCE"], "leave out --lr, FILE or FOLDER"),
        (["train", "--checkpoint-every", "0"], "--checkpoint-every: '0' must be a whole number from 1 to 1000000000"),
        (["train", "--steps", "0"], r"--steps: '0' must be a whole number from 1 to 1000000000"),
        (["train", "--steps", "1000000001"], "--steps: '1000000001' must be a whole number from 1 to 1000000000"),
        (["train", "--steps", "9" * 5000], "must be a whole number from 1 to 1000000000"),
        (["train", "--batch-size", "1000001"], "--batch-size: '1000001' must be"),
        (["train", "--accum", "1000000", "--batch-size", "1000000", "SOURCE"], "out of memory at --batch-size 1000000"),
        (["train", ""], "'' is not a path"),
        (["train", "SOURCE", "--out", "a\0b"], r"--out: 'a\x00b' is not a path"),
        (["train", "SOURCE", "--out", ""], "--out: '' is not a path"),
        (["train", "--resume", "\ud800"], r"--resume: '\ud800' is not a path"),
        (["train", "SOURCE", "--a\nb\x1b[2J"], r"unrecognized arguments: --a b\x1b[2J"),
        (["bench", "--from", "SOURCE"], "cannot be read: Expecting value"),
        (["bench", "--from", "used"], "it must be a file"),
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
        (["train", "--preset", "giant"], "--preset: invalid choice: 'giant'"),
        (["train", "SOURCE", "--optimizer", "adamm"], "'adamm' is not a Keras optimizer"),
        (["train", "--step", "3"], "unrecognized arguments: --step: did you mean --steps?"),
        (["train", "--batch_size=3", "nofile"], "unrecognized arguments: --batch_size=3: did you mean --batch-size?"),
        (["train", "--learning-rate", "0.1"], "unrecognized arguments: --learning-rate: did you mean --lr?"),
        (["plan", "--model", "nano"], "unrecognized arguments: --model nano: did you mean --preset?"),
        (["train", "--size=nano", "SOURCE"], "unrecognized arguments: --size=nano: did you mean --preset?"),
        (["generate", "empty"], "'empty/config.json' cannot be read"),
        (["generate", "empty", "--temperature", "-1"], "--temperature: '-1' must be a number from 0, such as 0.8"),
        (["generate", "empty", "--prompt", ""], "--prompt '' is empty"),
        (["train", "missing.txt"], "'missing.txt' does not exist"),
        (["train", "empty"], "no text in 'empty'"),
        (["train", "short.txt"], "held-out text has 10 bytes, but a window takes 129"),
        (["train", "SOURCE", "--out", "used"], "'used' has files in it"),
        (["train", "SOURCE", "--out", "short.txt"], "Not a directory: 'short.txt'"),
    ],
)
def test_bad_arguments_end_with_one_line_that_names_them(tmp_path, source, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_bytes(b"x" * 200)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "odd.json").write_text(
        json.dumps(dict.fromkeys(("commit_info", "datetime", "machine_info"), 1) | {"benchmarks": [1]})
    )
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        cli.main([str(source) if a == "SOURCE" else a for a in arguments])
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", [[], ["train"]])
def test_versions(capsys, monkeypatch, command):
    found = importlib.metadata.packages_distributions()
    for of in (found, {"tensorflow": ["tf_keras"]}):  # as tensorflow-cpu and tf-nightly have another name
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda of=of: of)
        with pytest.raises(SystemExit, match="0"):
            cli.main([*command, "--version"])
        number = r"[\d.]+" if of is found else "not installed"
        assert re.fullmatch(
            rf"fastaccum {fastaccum.__version__} \(TensorFlow [\d.]+, Keras {number}, Python [\d.]+\)\n",
            capsys.readouterr().out,
        )


@pytest.mark.parametrize(
    ("arguments", "seconds"), [(["-c", "import fastaccum"], 0.2), (["-m", "fastaccum", "-h"], 0.3)]
)
@pytest.mark.faults
def test_what_needs_no_tensorflow_is_quick(arguments, seconds):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    assert min(times) < seconds


@pytest.mark.faults
def test_the_first_line_comes_at_once_and_log_lines_when_they_are_asked_for(tmp_path):
    begun = time.monotonic()
    process = start(["train", "--tensorflow-log", "--optimizer", "none", __file__], tmp_path)
    assert process.stdout.readline() == "loading   TensorFlow\n" and time.monotonic() - begun < 2
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "cpu_feature_guard" in errors


def train_here(*arguments):
    tiny = ["--batch-size", "1", "--accum", "1", "--optimizer", "sgd"]
    assert cli.main(["train", *arguments, *([] if "--resume" in arguments else tiny)]) == 0


@pytest.mark.faults
def test_a_run_that_is_extended_is_the_longer_run(tmp_path, source, monkeypatch, capsys):
    """With a schedule that is another for each number of steps, and the same rate at each step: bit by bit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "nano", {"width": 16, "layers": 1, "heads": 2, "context": 8})
    cosine = keras.optimizers.schedules.CosineDecay
    monkeypatch.setattr(app_run, "make_schedule", lambda highest, steps: cosine(highest, 10**9 + steps))
    monkeypatch.setattr(train.text, "generate", lambda *_, **__: b"")
    monkeypatch.setattr(app_run, "ROWS", 20)
    train_here(str(source), "--steps", "20", "--out", "whole", "--preset", "Nano")
    monkeypatch.setattr(app_run, "ROWS", 2)
    train_here(str(source), "--steps", "7", "--out", "run")
    train_here("--resume", "run", "--steps", "13")
    end = recorder.Recorder.on_train_batch_end

    def interrupted(self, batch, logs=None):
        end(self, batch, logs)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(recorder.Recorder, "on_train_batch_end", interrupted)
        assert cli.main(["train", "--resume", "run", "--steps", "20"]) == 130
    assert not (tmp_path / "run" / "model.keras").exists()  # it was that of 13 steps
    for _ in range(2):
        train_here("--resume", "run")
    printed = capsys.readouterr().out
    assert "from 7 to 13 steps" in printed and "20 steps are done" in printed
    runs = [what_was_learned(tmp_path / name) for name in ("whole", "run")]
    tensors = [{k: v for k, v in run["tensors"].items() if not k.startswith("step/mean/")} for run in runs]  # of a row
    assert tensors[0] == tensors[1] and len(tensors[0]) > 10
    optimizer = store.latest(tmp_path / "run" / "checkpoints").manifest["description"]["optimizer"]
    assert optimizer["learning_rate"]["decay_steps"] == 10**9 + 20
    # About as many rows for each length, each the mean of the steps since the one before.
    assert [row["step"] for row in runs[1]["rows"]] == [4, 7, 13, 20]
    losses = [row["bits_per_byte"] for row in runs[0]["rows"]]
    for row, first in zip(runs[1]["rows"], (0, 4, 7, 13), strict=True):
        last = int(row["step"])
        assert row["bits_per_byte"] == pytest.approx(sum(losses[first:last]) / (last - first), rel=1e-5)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 20
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--resume", "run", "--steps", "19"])
    assert "the run in run is one of 20: leave --steps out, or give more" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{}, {"steps": 4, "row_began": 0}, {"steps": 2, "row_began": 3}])
def test_a_state_that_no_run_is_in(state):
    with pytest.raises(ValueError, match="no run of 3 steps is at"):
        recorder.Recorder.set_state(mock.Mock(total=3), state)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run, with its model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a run"
    path.mkdir()
    keras.utils.set_random_seed(0)
    gpt(256, width=16, layers=1, heads=2, context=8).save(path / "model.keras")
    return path


@pytest.mark.faults
def test_a_model_continues_a_text(run, capsys):
    texts = []
    for seed, *more in (("0",), ("0",), ("1",), ("0", "--temperature", "0"), ("1", "--temperature", "0")):
        assert cli.main(["generate", run.name, "--prompt", "line é", "--length", "30", "--seed", seed, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("line é") and len(texts[0]) > 20
    assert texts[3] == texts[4] != texts[0]


def test_a_model_that_cannot_continue_a_text(run, capsys, monkeypatch):
    def said(*arguments):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["generate", *arguments])
        return capsys.readouterr().err

    assert "'a run/model.keras' is a file: name the folder of a run, such as 'a run'" in said("a run/model.keras")
    (run / "model.keras").write_bytes(b"PK")
    assert "'a run/model.keras' cannot be loaded" in said("a run")
    (run / "model.keras").unlink()
    (run / "config.json").write_text("{}")
    assert "is saved when training ends: `fastaccum train --resume 'a run'` trains" in said("a run")
    # Nor one that has diverged, or that is not waited for.
    failing = mock.Mock(side_effect=[ValueError("not finite"), KeyboardInterrupt])
    monkeypatch.setattr(generate.text, "draw", lambda *_, **__: iter(failing, None))
    monkeypatch.setattr(generate, "_load", lambda _: (None, 8))
    for code, message in ((1, "not finite"), (130, "interrupted")):
        assert cli.main(["generate", "a run"]) == code
        assert capsys.readouterr().err == f"\n{message}\n"


def test_generating_ends_with_its_reader(monkeypatch, capsys):
    """As after `| head`."""
    drawn = itertools.count(65)
    monkeypatch.setattr(generate, "_load", lambda _: (None, None))
    monkeypatch.setattr(generate.text, "draw", lambda *_, **__: drawn)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["generate", "run", "--prompt", "a"]) == 0
    assert next(drawn) == 65 and "stdout has ended: Broken pipe" in capsys.readouterr().err


def test_a_binary_file_that_is_named_is_taken_with_a_warning(tmp_path, source, capsys):
    file = tmp_path / "text.gz"
    file.write_bytes(TEXT + b"\0")
    app_run.Run(options.parse(["train", str(file), str(source)])).announce()
    assert f"warning   {file}: holds NUL bytes, so this may be no text" in capsys.readouterr().out


def test_help_answers_without_tensorflow():
    program = (
        "import sys\n"
        "from fastaccum.cli import main\n"
        "try: main(['train', '--help'])\n"
        "finally: print('tensorflow' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "False"
    assert all(preset in printed for preset in PRESETS)


def test_plan_says_what_train_takes(monkeypatch, capsys):
    sizes = {"width": 16, "layers": 1, "heads": 2, "context": 8}
    monkeypatch.setitem(PRESETS, "nano", sizes)
    arguments = ["plan", "--global-batch", "2", "--optimizer", "sgd", "--memory-limit"]
    assert cli.main([*arguments, "1GiB"]) == 0
    *_, chosen, train = capsys.readouterr().out.splitlines()
    assert chosen.startswith("batch_size=2 x 1 micro-batch = 2 rows: ") and "of 1.0 GiB" in chosen
    assert train == "to train  fastaccum train --optimizer sgd --batch-size 2 --accum 1"
    monkeypatch.setattr(app_plan.planning, "plan", mock.Mock(side_effect=MemoryError("Not even 1 row fits")))
    assert cli.main([*arguments, "4 KiB"]) == 1
    assert capsys.readouterr().err == "--preset nano: Not even 1 row fits\n"
    for wrong in (["--preset", "no"], ["--memory-limit", "much"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["plan", *wrong])
        error = capsys.readouterr().err
        assert error.startswith("fastaccum plan: error: ") and wrong[0] in error


def test_what_cannot_fit_is_told_in_the_terminal(monkeypatch, capsys):
    fits = "{} fits: as many rows an update."
    told = "A train step takes 2 GiB.\nThe largest: the logits\n  - " + fits
    error = OutOfMemoryError(told.format("batch_size=2 with gradient_accumulation_steps=16"))
    monkeypatch.setattr(train, "_begin", lambda *_: (None, None))
    monkeypatch.setattr(train, "_train", mock.Mock(side_effect=error))
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == told.format("--batch-size 2 --accum 16") + "\n"


def test_devices_lists_the_cpu(capsys):
    assert cli.main(["devices"]) == 0
    assert "cores" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("kind", "precision"), [("GPU", "mixed_float16"), ("CPU", "float32")])
def test_auto_precision_follows_the_device(source, monkeypatch, kind, precision):
    monkeypatch.setattr(app_run, "list_devices", lambda: [(kind, "some model")])
    run = app_run.Run(options.make_parser().parse_args(["train", str(source)]))
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        with progress.Display(10, stream) as shown:
            shown.hear("Tracing: 1.0 s. Compiling it: ")
            shown.hear("2.0 s.\n")
            shown.update(4, 2.0, 9000.0)
            shown.row(10, 1.5, 2.5, 8000.0)
        printed = stream.getvalue()
        rows = ["step  bits/byte  held out  tokens/s", "  10      1.500     2.500     8,000", "Compiling it: 2.0 s."]
        assert all(line in printed for line in rows) and "loss scale" not in printed and "skipped" not in printed
        assert ("10/10" in printed and "1.500 bits/byte  8,000 tokens/s" in printed) == stream.isatty()


def test_half_precision_has_a_column_for_its_loss_scale(capsys):
    with progress.Display(10) as shown:
        shown.row(1, 8.0, math.nan, math.nan, 32768.0)
        shown.row(2, 8.0, math.nan, 7.0, 16384.0, 1)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("tokens/s  loss scale")
    assert [row.split() for row in rows] == [["1", "8.000", "32,768"], ["2", "8.000", "7", "16,384", "1", "skipped"]]


def test_a_narrow_terminal_has_the_count_and_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    with progress.Display(300, Terminal()) as shown:
        shown.update(150, 2.0, 123_456.0, 32768.0, 3)
        (line,) = shown._console.render_lines(shown._bar.get_renderable(), pad=False)
    text = "".join(segment.text for segment in line)
    assert "150/300 --:-- 2.000 bits/byte" in text and len(text) <= 50


def test_a_line_that_is_not_to_be_copied_is_wrapped_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    for terminal, wraps in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        app_run.say("text", "one two three four five", wraps=wraps)
    wrapped = ["text      one two three four", "          five"]
    assert capsys.readouterr().out.splitlines() == [*wrapped, *["text      one two three four five"] * 2]


def test_without_matplotlib_there_is_no_curve(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", {})
    folder.add_row({"step": 1, "bits_per_byte": 8.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not folder.draw_curve()
    assert not (folder.path / "curve.png").exists()
