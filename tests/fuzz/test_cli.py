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
from unittest import mock

import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st
from random_calls import Argument, fuzz

from fastaccum import cli, transformer
from fastaccum.app import options, train
from fastaccum.app import run as app_run

pytestmark = pytest.mark.slow

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))


def whole(low, high):
    def accepts(text):
        with contextlib.suppress(ValueError):
            return low <= int(text) <= high
        return False

    return Argument(st.integers(low, 300).map(str), accepts)


def one_of(*texts):
    return Argument(st.sampled_from(texts), lambda text: text in texts)


def is_rate(text):
    with contextlib.suppress(ValueError):
        return 2.0**-126 <= float(text) <= 2.0**127
    return False


# Of each option the values that are taken, and whether another text may be.
OPTIONS = {
    "--steps": whole(1, 10**9),
    "--batch-size": whole(1, 10**6),
    "--accum": whole(1, 10**6),
    "--seed": whole(0, 2**32 - 1),
    "--checkpoint-every": whole(1, 10**9),
    "--lr": Argument(st.floats(1e-30, 1e30).map(str), is_rate),
    "--precision": one_of("auto", "float32", "mixed_bfloat16"),
    "--preset": one_of("nano"),
    "--optimizer": one_of("adamw", "SGD", "lamb", "lion", "muon", "adafactor"),
    "--out": one_of("new", "nothing", "new/below", "missing"),
    "text": one_of("source.txt", "./source.txt", "texts", "link.txt"),
}
PATHS = st.sampled_from(
    ["", "missing", "empty.txt", "pipe", "/dev/null", "loop", "source.txt/below"]
)
# No larger micro-batches, which might not fit in memory.
INTEGERS = st.integers().filter(lambda number: not 300 < number <= 10**6)
NUMBERS = INTEGERS | st.floats() | st.sampled_from([0, -1, 2**32, 2**63])
SPOILED = NUMBERS.map(str) | st.sampled_from(
    ["1" * 5000, "\0", "\ud800", "x" * 10**5, "\x1b[2J", "tfa:nope"]
)


@pytest.fixture(scope="module")
def run_config(tmp_path_factory):
    """The config of a run in the folder where each command is given."""
    work = tmp_path_factory.mktemp("work")
    small = {"width": 16, "layers": 1, "heads": 2}
    sizes = transformer.PRESETS["nano"] | small
    with contextlib.chdir(work), mock.patch.dict(transformer.PRESETS, nano=sizes):
        (work / "source.txt").write_bytes(TEXT)
        run = app_run.Run(options.parse(["train", "source.txt", "--steps", "9"]))
        app_run.begin("run", "", run.config)
        yield run.config


@functools.cache
def cached_model(vocabulary_size, preset, dtype):
    """One model for all commands: none is trained."""
    return transformer.gpt(vocabulary_size, preset=preset, dtype=dtype)


def make_files():
    """Makes the files that arguments name anew."""
    here = pathlib.Path.cwd()
    for path in here.iterdir():
        if path.is_dir() and path.name != "run":
            shutil.rmtree(path)
        elif path.name not in ("source.txt", "run"):
            path.unlink()
    for folder in ("texts", "nothing"):
        (here / folder).mkdir()
    (here / "texts" / "a.txt").write_bytes(TEXT)
    os.mkfifo(here / "pipe")
    (here / "empty.txt").touch()
    (here / "link.txt").symlink_to("source.txt")
    (here / "loop").symlink_to("loop")
    shutil.copytree(here / "run", here / "spoilt")


def list_files():
    """Lists what a command that is refused must leave as it is."""
    files = []
    for path in sorted(pathlib.Path.cwd().rglob("*")):
        if not path.is_dir():
            status = path.lstat()
            files.append((str(path), status.st_size, status.st_mtime_ns))
    return files


class Refused(Exception):
    """A command that ended with code 2, in the line of this message."""


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
    event("taken" if code == 0 else "refused")
    if code == 0:
        return runs[0]
    assert code == 2, f"exit code {code!r}: {line[:500]}"
    is_one_line = line.endswith("\n") and line[:-1].isprintable() and len(line) <= 2500
    assert is_one_line, f"not one short line: {line[:500]!r}"
    assert list_files() == before, f"it wrote something, and was refused: {line[:500]}"
    raise Refused(line)


@st.composite
def commands(draw):
    """Draws a command line, and the names of its options whose values must be refused."""
    chosen = draw(st.sets(st.sampled_from(list(OPTIONS)), max_size=5)) | {"text"}
    wrong = draw(st.sets(st.sampled_from(sorted(chosen)), max_size=3))
    argv = ["train"]
    refused = []
    for name in [name for name in OPTIONS if name in chosen]:
        value = draw(OPTIONS[name].valid)
        if name in wrong:
            value = draw(PATHS if name in ("text", "--out") else SPOILED | st.text())
            if not OPTIONS[name].accepts(value):
                refused.append(name)
        argv.append(value if name == "text" else f"{name}={value}")
    return argv, refused


@fuzz(250)
@given(command=commands())
def test_train(command, run_config):
    argv, refused = command
    make_files()
    try:
        give(argv)
    except Refused as error:
        assert refused, f"refused what is valid: {str(error)[:500]}"
        names = [*(name.lstrip("-") for name in refused), "FILE or FOLDER"]
        assert any(name in str(error) for name in names), f"names none of {names}: {error}"
    else:
        assert not refused, f"taken in silence: {refused}"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.just(10**4000),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(), values, max_size=2),
)


@st.composite
def spoilt_configs(draw, text):
    """Draws a changed config.json: another value, a few other bytes, or an end too early."""
    kind = draw(st.sampled_from(["value", "bytes", "cut"]))
    place = draw(st.integers(0, len(text) - 1))
    if kind == "cut":
        return text[:place]
    if kind == "bytes":
        return text[:place] + draw(st.binary(max_size=3)) + text[place + 1 :]
    config = json.loads(text)
    config[draw(st.sampled_from([*config, "another"]))] = draw(JSON)
    try:
        return json.dumps(config).encode()
    except ValueError:  # a number that is too long to be written
        return text


@fuzz(80)
@given(data=st.data())
def test_resume(data, run_config):
    make_files()
    file = pathlib.Path("spoilt/config.json")
    file.write_bytes(data.draw(spoilt_configs(file.read_bytes())))
    names = ["--resume", "spoilt", *app_run.OPTIONS, *(f"--{name}" for name in app_run.OPTIONS)]
    try:
        run = give(["train", "--resume", "spoilt"])
    except Refused as refused:
        assert any(name in str(refused) for name in names), str(refused)[:500]
    else:
        assert run.text.sha256 == run_config["text_sha256"], "resumed with another text"
