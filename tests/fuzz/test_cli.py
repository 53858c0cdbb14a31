"""Random command lines, and run folders that were spoilt.

What is valid is taken, and stops before it trains. What is not ends with code 2, in one line that
names the culprit, and leaves every file as it was. A resumed run has the text that it began with.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import shutil
import socket
from unittest import mock

import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st
from random_calls import fuzz

from fastaccum import cli, transformer
from fastaccum.app import options, train
from fastaccum.app import run as app_run

pytestmark = pytest.mark.slow

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))
LONG = "x" * 100_000

NOT_NUMBERS = (
    *("-1", "nan", "inf", "-inf", "", " ", "ten", "0x10", "1" * 5000, "\0", "\ud800", "--steps"),
    *("1,000", "None", "[]", "\x1b[2J", "1\n2x", LONG),
)
NOT_WHOLE = (*NOT_NUMBERS, "0", "-0", "1.5", "1e3", "9" * 30, "1000000001", str(2**63))
NOT_SEEDS = [value for value in NOT_WHOLE if value not in ("0", "-0", "1000000001")]
NOT_OPTIMIZERS = (
    *("", "adamm", "../adamw", "optimizer", "lossscaleoptimizer", "multioptimizer", "tfa:", LONG),
    *("tfa:nope", "tfa:SWA", "tfa:Lookahead", "tfa:MultiOptimizer", "\0", "\ud800", "__class__"),
    "keras.optimizers.Adam",
)
# Of each option the values that are taken, and those that are refused.
OPTIONS = {
    "--steps": (("1", "3", "300", "1000000000", " 7 ", "1_0"), NOT_WHOLE),
    "--batch-size": (("1", "8", "33"), (*NOT_WHOLE, "1000001")),
    "--accum": (("1", "4", "5"), (*NOT_WHOLE, "1000001")),
    "--seed": (("0", "7", str(2**32 - 1)), (*NOT_SEEDS, str(2**32))),
    "--checkpoint-every": (("1", "50", "1000000000"), NOT_WHOLE),
    "--lr": (("0.004", "1e-30", "1e38", "1_0.5"), (*NOT_NUMBERS, "0", "-0", "1e-39", "4e38")),
    "--precision": (
        ("auto", "float32", "mixed_bfloat16"),
        ("", "float64", "auto ", "\0", "\ud800", "None", LONG),
    ),
    "--preset": (("nano",), ("", "NANO", "nano\n", "../nano", "\ud800", "\0", LONG)),
    "--optimizer": (("adamw", "SGD", "lamb", "lion", "muon", "adafactor"), NOT_OPTIMIZERS),
    "--out": (
        ("new", "new/below", "nothing", "a b\n", "-"),
        (
            *("", "\udcff", "source.txt", "used", "pipe", "a\0b", "\ud800", "x" * 300, "dangling"),
            *("source.txt/below", "loop", "/proc/x"),
        ),
    ),
}
TEXTS = (
    ("source.txt", "./source.txt", "texts", "binary", "link.txt", "\udcff.txt"),
    (
        *("", "missing", "empty.txt", "one", "nothing", "pipe", "socket", "/dev/null", "/dev/zero"),
        *("loop", "a\0b", "\ud800", "x" * 5000, "source.txt/below", "linked-pipe", "texts\n"),
        "\x1b[2J",
    ),
)
UNKNOWN = (
    *("--bogus", "--step=3", "-x", "--steps", "--no-steps", "--resume", "--lr", "--\n", "-\0"),
    "--\ud800=1",
)
# Other commands, and what an error of theirs may name.
OTHERS = (
    ([], "COMMAND"),
    (["devices"], ""),
    (["--help"], ""),
    (["train", "--help"], ""),
    (["generate", "nothing"], "nothing/model.keras"),
    (["generate", "spoilt"], "spoilt/model.keras"),
    (["generate", "spoilt", "--length", "0"], "--length"),
    (["generate", "spoilt", "--prompt="], "--prompt"),
    (["devices", "x\ny"], "arguments"),
    (["trian"], "COMMAND"),
    (["\ud800"], "COMMAND"),
    (["bench", "nope"], "suite"),
    (["bench", "--from", "pipe"], "--from"),
    (["bench", "--from", "spoilt/config.json"], "--from"),
    (["bench", "--from", "huge"], "--from"),
    (["bench", "--from", "a\0b"], "--from"),
    (["bench", "--out", "source.txt"], "--out"),
    (["bench", "--steps", "3"], "arguments"),
    (["bench", "--readme", "fit"], "--readme"),
)


@pytest.fixture(scope="module")
def run_config(tmp_path_factory):
    """The config of a run in the folder where each command is given."""
    work = tmp_path_factory.mktemp("work")
    small = {"width": 16, "layers": 1, "heads": 2}
    sizes = transformer.PRESETS["nano"] | small
    home = pathlib.Path.cwd()
    os.chdir(work)
    with mock.patch.dict(transformer.PRESETS, nano=sizes):
        (work / "source.txt").write_bytes(TEXT)
        run = app_run.Run(options.parse(["train", "source.txt", "--steps", "9"]))
        app_run.begin("run", "", run.config)
        yield run.config
    os.chdir(home)


@functools.cache
def cached_model(vocabulary_size, preset, dtype):
    """One model for all commands: none is trained."""
    return transformer.gpt(vocabulary_size, preset=preset, dtype=dtype)


def make_files():
    """Makes the files that arguments name anew."""
    here = pathlib.Path.cwd()
    for path in here.iterdir():
        if path.name in ("source.txt", "run"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in ("texts", "nothing", "used"):
        (here / folder).mkdir()
    (here / "texts" / "a.txt").write_bytes(TEXT)
    os.mkfifo(here / "texts" / "pipe")
    os.mkfifo(here / "pipe")
    (here / "binary").write_bytes(bytes(range(256)) * 100)
    (here / os.fsdecode(b"\xff.txt")).write_bytes(TEXT)
    (here / "empty.txt").touch()
    (here / "one").write_bytes(b"x")
    (here / "used" / "file").touch()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    with open(here / "huge", "wb") as file:
        file.truncate(2**42)
    links = {"link.txt": "source.txt", "loop": "loop", "linked-pipe": "pipe", "dangling": "gone"}
    for name, target in links.items():
        (here / name).symlink_to(target)
    (here / "outside").write_text("theirs")
    shutil.copytree(here / "run", here / "spoilt")


@st.composite
def train_commands(draw):
    """Draws a command line, and what is wrong with it: names, of which the error must have one."""
    strange = ["text", "unknown", *OPTIONS]
    wrong = draw(st.sets(st.sampled_from(strange), max_size=3))
    chosen = draw(st.sets(st.sampled_from(list(OPTIONS)), max_size=5))
    text = draw(st.sampled_from(TEXTS["text" in wrong]))
    names = []
    if "text" in wrong:
        names += [repr(text), "text", "FILE or FOLDER"]
    argv = [text]
    for name, values in OPTIONS.items():
        if name not in chosen and name not in wrong:
            continue
        value = draw(st.sampled_from(values[name in wrong]))
        if name == "--out" or value.startswith("-") or draw(st.booleans()):
            argv.append(f"{name}={value}")
        else:
            argv += [name, value]
        if name in wrong:
            names += [name, repr(value)[1:-1]]
    if "unknown" in wrong:
        argv.insert(draw(st.integers(0, len(argv))), draw(st.sampled_from(UNKNOWN)))
        names += ["argument", "--resume"]
    return ["train", *argv], names


class Refused(Exception):
    """A command that ended with code 2, in the line of this message."""


def list_files():
    """Lists what a command that is refused must leave as it is."""
    files = []
    for path in sorted(pathlib.Path.cwd().rglob("*")):
        if not path.is_dir():
            status = path.lstat()
            files.append((str(path), status.st_size, status.st_mtime_ns))
    return files


def give(argv):
    """Gives the command, without its training; returns the run that would train.

    Raises:
        Refused: in the way that a user should meet: any other way fails.
    """
    runs = []

    def stop(run, folder):
        runs.append(run)
        return 0

    note(repr([argument[:80] for argument in argv]))
    before = list_files()
    errors = io.StringIO()
    with (
        mock.patch.object(train, "_train", stop),
        mock.patch.object(app_run, "gpt", cached_model),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = cli.main(argv)
        except SystemExit as exit:
            code = exit.code
    line = errors.getvalue()
    if code == 0:
        event("taken")
        return runs[0] if runs else None
    event("refused")
    assert code == 2, f"exit code {code!r}: {line[:500]}"
    is_one_line = line.endswith("\n") and line[:-1].isprintable() and len(line) <= 2500
    assert is_one_line, f"not one short line: {line[:500]!r}"
    assert list_files() == before, f"it wrote something, and was refused: {line[:500]}"
    raise Refused(line)


def check_command(argv, names):
    """Gives a command that must be refused if there are names, and taken otherwise."""
    make_files()
    try:
        give(argv)
    except Refused as refused:
        line = str(refused)
        assert names, f"refused what is valid: {line[:500]}"
        assert any(name[:500] in line for name in names), f"names none of {names}: {line[:500]}"
    else:
        assert not names, f"taken in silence: {names}"


@fuzz(150)
@given(command=train_commands())
def test_train(command, run_config):
    check_command(*command)


@fuzz(100)
@given(command=st.sampled_from(OTHERS))
def test_other_commands(command, run_config):
    argv, name = command
    check_command(argv, [name] if name else [])


# Runs that were spoilt

LEAVES = (
    *(None, True, -1, 0, 1, 10**20, 10**4000, 1.5, 1e308, float("nan"), float("-inf"), "", "x"),
    *("\0", "\ud800", "9" * 5000, "\x1b[2J\n", "x" * 10**6, [], {}, [1], ["source.txt"]),
    *({"a": 1}, {"a": {"b": []}}, [[]]),
)


@st.composite
def spoilt_configs(draw, config_text):
    """Draws a changed config.json: bytes, or None for a folder in its place or for no file."""
    text = config_text
    kind = draw(
        st.sampled_from(["value"] * 4 + ["bytes", "bytes", "cut", "deep", "gone", "folder"])
    )
    if kind == "value":
        config = json.loads(text)
        name = draw(st.sampled_from([*config, "another"]))
        value = config.get(name)
        try:
            text = json.dumps(
                {**config, name: draw(st.sampled_from([*LEAVES, str(value), [value]]))}
            )
        except (ValueError, TypeError):
            return kind, config_text
        return kind, text.encode()
    if kind == "bytes":
        index = draw(st.integers(0, len(text) - 1))
        return kind, text[:index] + draw(st.binary(max_size=3)) + text[index + 1 :]
    if kind == "cut":
        return kind, text[: draw(st.integers(0, len(text) - 1))]
    if kind == "deep":
        return kind, draw(st.sampled_from([b"[", b'{"a":'])) * draw(
            st.sampled_from([10, 900, 10**5])
        )
    return kind, None


@fuzz(80)
@given(data=st.data())
def test_resume(data, run_config):
    make_files()
    file = pathlib.Path("spoilt/config.json")
    kind, text = data.draw(spoilt_configs(file.read_bytes()))
    file.unlink()
    if text is not None:
        file.write_bytes(text)
    elif kind == "folder":
        file.mkdir()
    names = ["--resume", "spoilt", *app_run.OPTIONS, *(f"--{name}" for name in app_run.OPTIONS)]
    try:
        run = give(["train", "--resume", "spoilt"])
    except Refused as refused:
        assert any(name in str(refused) for name in names), str(refused)[:500]
    else:
        assert run.text.sha256 == run_config["text_sha256"], "resumed with another text"
    assert pathlib.Path("outside").read_text() == "theirs"
