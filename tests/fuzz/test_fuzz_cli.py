"""The command line, called at random, with run folders that others spoilt.

What is valid is taken, and stops before it trains (one in a few hundred trains); what is not ends
with code 2, in one line that names the culprit, and leaves everything as it was. A run that is
resumed has the text that it began with.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import shutil
import socket

import pytest
from fuzzing import Call, Wrong

from fastaccum import cli, transformer
from fastaccum.app import options, train
from fastaccum.app import run as app_run
from fastaccum.app.run import OPTIONS, Run, begin

pytestmark = pytest.mark.fuzz

TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(400))
CALLS = 200
TRAINED = 0.003  # of those that are valid

NUMBERS = (
    "0",
    "-1",
    "-0",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "",
    " ",
    "ten",
    "0x10",
    "1" * 5000,
    "9" * 30,
    "\0",
    "\ud800",
)
NUMBERS += ("--steps", "1,000", "None", "[]", "\x1b[2J", "1\n2x", "x" * 100_000)
WHOLE = (*NUMBERS, "1000000001", str(2**63))
TABLE = {
    "--steps": (["1", "3", "300", "1000000000", " 7 ", "1_0"], WHOLE),
    "--batch-size": (["1", "8", "33"], [*WHOLE, "1000001"]),
    "--accum": (["1", "4", "5"], [*WHOLE, "1000001"]),
    "--seed": (
        ["0", "7", str(2**32 - 1)],
        [n for n in WHOLE if n not in ("0", "-0", "1000000001")] + [str(2**32)],
    ),
    "--checkpoint-every": (["1", "50", "1000000000"], WHOLE),
    "--lr": (
        ["0.004", "1e-30", "1e38", "1_0.5"],
        [n for n in NUMBERS if n not in ("1.5", "1e3", "9" * 30)] + ["1e-39", "4e38"],
    ),
    "--precision": (
        ["auto", "float32", "mixed_bfloat16"],
        ["", "float64", "auto ", "\0", "\ud800", "None", "x" * 100_000],
    ),
    "--preset": (["nano"], ["", "NANO", "nano\n", "../nano", "\ud800", "\0", "x" * 100_000]),
    "--optimizer": (
        ["adamw", "SGD", "lamb", "lion", "muon", "adafactor"],
        [
            "",
            "adamm",
            "../adamw",
            "optimizer",
            "lossscaleoptimizer",
            "multioptimizer",
            "tfa:",
            "tfa:nope",
            "tfa:SWA",
            "tfa:Lookahead",
            "tfa:MultiOptimizer",
            "x" * 100000,
            "\x00",
            "�",
            "__class__",
            "keras.optimizers.Adam",
        ],
    ),
}
PATHS = {
    True: ["source.txt", "./source.txt", "texts", "binary", "link.txt", "\udcff.txt"],
    False: [
        "",
        "missing",
        "empty.txt",
        "one",
        "nothing",
        "pipe",
        "socket",
        "/dev/null",
        "/dev/zero",
        "loop",
        "a\x00b",
        "�",
        "x" * 5000,
        "source.txt/below",
        "linked-pipe",
        "texts\n",
        "\x1b[2J",
    ],
}
OUTS = {
    True: ["new", "new/below", "nothing", "a b\n", "-"],
    False: [
        "",
        "\udcff",
        "source.txt",
        "used",
        "pipe",
        "a\0b",
        "\ud800",
        "x" * 300,
        "source.txt/below",
        "dangling",
        "loop",
        "/proc/x",
    ],
}
STRANGE = (
    "--bogus",
    "--step=3",
    "-x",
    "--steps",
    "--no-steps",
    "--resume",
    "--lr",
    "--\n",
    "--\ud800=1",
    "-\0",
)


class Reached(Exception):
    """The run that would train."""


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """config.json of a run of the text in the folder where each call is made."""
    sizes = dict(transformer.PRESETS["nano"])
    transformer.PRESETS["nano"] |= {"width": 16, "layers": 1, "heads": 2}
    home = pathlib.Path.cwd()
    work = tmp_path_factory.mktemp("work")
    os.chdir(work)
    (work / "source.txt").write_bytes(TEXT)
    run = Run(options.parse(["train", "source.txt", "--steps", "9"]))
    begin("run", "", run.config)
    yield run.config, work / "run"
    os.chdir(home)
    transformer.PRESETS["nano"] = sizes


@functools.cache
def a_model(vocabulary_size, preset, dtype):
    """One for all calls that do not train."""
    return transformer.gpt(vocabulary_size, preset=preset, dtype=dtype)


def places(began):
    """The files that arguments name, made anew."""
    here = pathlib.Path.cwd()
    for path in here.iterdir():
        if path.is_dir() and not path.is_symlink() and path != began[1]:
            shutil.rmtree(path)
        elif path.name not in ("source.txt", "run"):
            path.unlink()
    for folder in ("texts", "nothing", "used"):
        (here / folder).mkdir()
    (here / "texts" / "a.txt").write_bytes(TEXT)
    os.mkfifo(here / "texts" / "pipe")
    (here / "binary").write_bytes(bytes(range(256)) * 100)
    (here / os.fsdecode(b"\xff.txt")).write_bytes(TEXT)
    (here / "empty.txt").touch()
    (here / "one").write_bytes(b"x")
    (here / "used" / "file").touch()
    os.mkfifo(here / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    with open(here / "huge", "wb") as file:
        file.truncate(2**42)
    for name, to in {
        "link.txt": "source.txt",
        "loop": "loop",
        "linked-pipe": "pipe",
        "dangling": "gone",
    }.items():
        (here / name).symlink_to(to)
    (here / "outside").write_text("theirs")
    shutil.copytree(began[1], here / "spoilt")


def pick(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def command(rng):
    """A command line, and what is wrong with it: names, of which the error must have one."""
    argv, wrong = [], []
    bad = set(
        rng.choice(
            [*TABLE, "path", "--out", "strange"],
            int(pick(rng, (0, 1, 1, 1, 1, 1, 2, 3))),
            replace=False,
        ).tolist()
    )
    for name, values in TABLE.items():
        if name in bad or rng.random() < 0.3:
            value = pick(rng, values[name in bad])
            argv += (
                [f"{name}={value}"]
                if rng.random() < 0.5 or value.startswith("-")
                else [name, value]
            )
            wrong += [name, repr(value)[1:-1]] if name in bad else []
    if "--out" in bad or rng.random() < 0.3:
        value = pick(rng, OUTS["--out" not in bad])
        argv += [f"--out={value}"]
        wrong += ["--out", repr(value)] if "--out" in bad else []
    value = pick(rng, PATHS["path" not in bad])
    argv.insert(0, value)
    wrong += [repr(value), "text", "FILE or FOLDER"] if "path" in bad else []
    if "strange" in bad:
        argv.insert(
            int(rng.integers(len(argv))) if rng.random() < 0.5 else len(argv), pick(rng, STRANGE)
        )
        wrong += ["argument", "--resume"]
    return ["train", *argv], wrong


def other_command(rng):
    """Not of training."""
    return pick(
        rng,
        [
            ([], ["COMMAND"]),
            (["devices"], []),
            (["generate", "nothing"], ["nothing/model.keras"]),
            (["generate", "spoilt"], ["spoilt/model.keras"]),
            (["generate", "spoilt", "--length", "0"], ["--length"]),
            (["generate", "spoilt", "--prompt="], ["--prompt"]),
            (["--help"], []),
            (["train", "--help"], []),
            (["devices", "x\ny"], ["arguments"]),
            (["trian"], ["COMMAND"]),
            (["\ud800"], ["COMMAND"]),
            (["bench", "nope"], ["suite"]),
            (["bench", "--from", "pipe"], ["--from"]),
            (["bench", "--from", "spoilt/config.json"], ["--from"]),
            (["bench", "--from", "huge"], ["--from"]),
            (["bench", "--from", "a\0b"], ["--from"]),
            (["bench", "--out", "source.txt"], ["--out"]),
            (["bench", "--steps", "3"], ["arguments"]),
            (["bench", "--readme", "fit"], ["--readme"]),
        ],
    )


def leaf(rng, original):
    """Another value for an entry of a config."""
    odd = [
        None,
        True,
        -1,
        0,
        1,
        10**20,
        10**4000,
        1.5,
        1e308,
        float("nan"),
        float("-inf"),
        "",
        "x",
        "\0",
        "\ud800",
        "9" * 5000,
    ]
    odd += [
        "\x1b[2J\n",
        "x" * 10**6,
        [],
        {},
        [1],
        ["source.txt"],
        {"a": 1},
        {"a": {"b": []}},
        [[]],
        str(original),
        [original],
    ]
    return pick(rng, odd)


def spoil(rng, run):
    """Changes config.json of a run in one way or two, and says how."""
    how = []
    file = run / "config.json"
    for _ in range(int(pick(rng, (1, 1, 2)))):
        kind = pick(
            rng,
            ("bytes", "bytes", "value", "value", "value", "value", "cut", "gone", "folder", "deep"),
        )
        how.append(kind)
        if not file.is_file():
            continue  # spoilt before
        text = file.read_bytes()
        if kind == "value":
            try:
                config = json.loads(text)
                name = pick(rng, [*config, "another"])
                value = leaf(rng, config.get(name))
                how[-1] += f": {name}={repr(value)[:60]}"
                file.write_text(json.dumps({**config, name: value}))
            except (ValueError, TypeError, AttributeError, OSError):
                how[-1] += ", not done"
        elif kind == "bytes" and text:
            at = int(rng.integers(len(text)))
            file.write_bytes(
                text[:at]
                + rng.integers(0, 256, int(pick(rng, (0, 1, 1, 3))), "uint8").tobytes()
                + text[at + 1 :]
            )
        elif kind == "cut" and text:
            file.write_bytes(text[: int(rng.integers(len(text)))])
        elif kind == "deep":
            file.write_bytes(pick(rng, (b"[", b'{"a":')) * int(pick(rng, (10, 900, 100_000))))
        elif kind in ("gone", "folder"):
            file.unlink()
            if kind == "folder":
                file.mkdir()
    return how


def listing():
    """All that a call that is refused must leave as it is."""
    return [
        (str(p), p.lstat().st_size, p.lstat().st_mtime_ns)
        for p in sorted(pathlib.Path.cwd().rglob("*"))
        if not p.is_dir()
    ]


def outcome(argv, wrong, monkeypatch, trains, resumed=None):
    """Makes the call; raises Wrong unless it ends as it should, or returns how it did."""
    reached = []

    def stop(run, folder):
        reached.append(run)
        if resumed is None and trains and run.options.steps <= 3:
            return whole(run, folder)
        return 0

    whole = train._train
    before, printed, errors = listing(), io.StringIO(), io.StringIO()
    with (
        monkeypatch.context() as patched,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        patched.setattr(train, "_train", stop)
        if not trains:
            patched.setattr(app_run, "gpt", a_model)
        try:
            code = cli.main(argv)
        except SystemExit as exit:
            code = exit.code
    line = errors.getvalue()
    if code == 0:
        if wrong:
            raise Wrong(f"taken in silence: {wrong}")
        if resumed is not None and reached[0].text.sha256 != resumed["text_sha256"]:
            raise Wrong("resumed with another text")
        return "taken"
    if code != 2:
        raise Wrong(f"exit code {code!r}: {line[:500]}")
    if not line.endswith("\n") or not line[:-1].isprintable() or len(line) > 2500:
        raise Wrong(f"not one short line: {line[:500]!r}")
    if resumed is None and not wrong:
        raise Wrong(f"refused what is valid: {line[:500]}")
    if not any(name[:500] in line for name in wrong):
        raise Wrong(f"the error names none of {[name[:80] for name in wrong]}: {line[:500]}")
    if listing() != before or pathlib.Path("outside").read_text() != "theirs":
        raise Wrong(f"it wrote something, and was refused: {line[:500]}")
    return "refused"


def test_fuzz_cli(fuzzed, began, monkeypatch):
    """Command lines, and run folders that were spoilt."""
    counts = {"taken": 0, "refused": 0}

    def make(rng):
        kind = rng.random()
        resumed, how = None, []
        if kind < 0.05:
            argv, wrong = other_command(rng)
        elif kind < 0.6:
            argv, wrong = command(rng)
        else:
            resumed = began[0]
            argv, wrong = (
                ["train", "--resume", "spoilt"],
                ["--resume", "spoilt", *OPTIONS, *(f"--{o}" for o in OPTIONS)],
            )
        trains = rng.random() < TRAINED

        def run():
            places(began)
            if resumed is not None:
                how.extend(spoil(rng, pathlib.Path("spoilt")))
            try:
                if resumed is not None:
                    counts[resume(argv, wrong, trains)] += 1
                else:
                    counts[outcome(argv, wrong, monkeypatch, trains)] += 1
            except Wrong as why:
                raise Wrong(f"{why} {how}") from why.__cause__
            return 0

        def resume(argv, wrong, trains):
            try:
                return outcome(argv, [], monkeypatch, trains, resumed)
            except Wrong as why:
                if "names none of" in str(why) and any(name in str(why) for name in wrong):
                    return "refused"
                raise

        shown = repr([a if len(a) < 80 else f"{a[:40]}..." for a in argv])
        return Call("cli.main", {"argv": shown}), run, lambda: 0, lambda result: None

    fuzzed(make, CALLS)
    assert counts["refused"] > 3 * counts["taken"] > 0 or sum(counts.values()) < 100
