"""The shell commands that the documentation prints: programs, options, paths and extras that there
are.
"""

import importlib.metadata
import importlib.util
import itertools
import re
import shlex

import pytest
from run_page import PAGES, ROOT

from benchmarks import __main__ as benchmarks
from benchmarks.tools import runner
from fastaccum import cli
from fastaccum.app import options

FENCE = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS = r"fastaccum|pytest|pip|python -m|python3\.11 -m|\.ci/\w+"
INLINE = re.compile(rf"`((?:\.venv/bin/)?(?:{PROGRAMS})\b[^`]*)`")
PLACEHOLDER = re.compile(r"\b(FOLDER|RUN|FILE)\b|<[a-z]+>")


def commands(text):
    """Every command of a page, split into words, without what the environment is given for it."""
    blocks = [
        line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in blocks + INLINE.findall(text):
        words = shlex.split(line.replace("\n", " "), comments=True)
        command = []
        for word in [*words, "&&"]:
            if word in ("&&", "|", ";"):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word.removeprefix(".venv/bin/"))


FOUND = sorted(
    {
        (str(page.relative_to(ROOT)), *command)
        for page in PAGES
        for command in commands(page.read_text())
    }
)


def check_fastaccum(words):
    if not words:
        return  # `fastaccum` alone is the name of the program
    try:
        if words[0] == "bench":
            benchmarks._parser("fastaccum bench", runner.known(runner.FOLDER)).parse_args(words[1:])
        else:
            options.make_parser().parse_args(words)
    except SystemExit as end:  # after --help and --version
        assert not end.code


def check_pip(words):
    for word in words:
        name, extras = re.fullmatch(r"([^\[]*)(?:\[(.*)\])?", word).groups()
        if extras and name in (".", "fastaccum"):
            assert set(extras.split(",")) <= set(
                importlib.metadata.metadata("fastaccum").get_all("Provides-Extra")
            ), extras


def check_pytest(words, markers):
    for word in words:
        path = word.removeprefix("--ignore=").partition("::")[0]
        if "/" in path or path.endswith(".py"):
            assert (ROOT / path).exists(), word
    for flag, value in itertools.pairwise(words):
        if flag == "-m":
            assert set(re.findall(r"\w+", value)) - {"or", "and", "not"} <= markers, value


def check_python(words):
    if words[:1] == ["-m"]:
        assert importlib.util.find_spec(words[1]), words[1]
        if words[1] == "fastaccum":
            check_fastaccum(words[2:])


CHECKS = {
    "fastaccum": check_fastaccum,
    "pip": check_pip,
    "python": check_python,
    "python3.11": check_python,
}


@pytest.mark.docs
@pytest.mark.parametrize("command", FOUND, ids=lambda command: " ".join(command)[:100])
def test_a_command_names_what_there_is(command, pytestconfig):
    _, program, *words = command
    words = [PLACEHOLDER.sub("folder", word) for word in words]
    if program == "pytest":
        check_pytest(words, {line.partition(":")[0] for line in pytestconfig.getini("markers")})
    elif program in CHECKS:
        CHECKS[program](words)
    elif program.startswith((".ci/", "./")):
        assert (ROOT / program).exists()


CONVOLUTIONAL = {"ConvNet", "Conv1D", "ResNet20", "MobileNet", "U-Net"}


@pytest.mark.docs
def test_the_ranges_that_readme_names_are_those_of_its_table():
    text = (ROOT / "README.md").read_text()
    sentence = " ".join(text.split())  # wherever its lines break
    named = re.search(
        r"(\S+) to (\S+) times as fast as\D+Keras's own\D+convolutional\D+(\S+) to (\S+) times"
        r"\D+(\S+) to (\S+) times as fast as\D+JAX",
        sentence,
    ).groups()
    table = text.partition("<!-- measured -->")[2].partition("<!-- end -->")[0]
    header, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.split("\n\n")[1].splitlines()
    ]
    fits = [row for row in rows if row[0].startswith("`fit`: Keras 3's accumulation")]
    on_jax = [row for row in fits if "JAX" in row[0]]
    on_tensorflow = [row for row in fits if row not in on_jax]
    convolutional = [i for i, name in enumerate(header) if name in CONVOLUTIONAL]
    others = [i for i, name in enumerate(header) if name and name not in CONVOLUTIONAL]
    ranges = [
        (on_tensorflow, others, named[0:2]),
        (on_tensorflow, convolutional, named[2:4]),
        (on_jax, convolutional + others, named[4:6]),
    ]
    for peers, columns, ends in ranges:
        figures = [float(row[i]) for row in peers for i in columns if row[i]]
        for end, figure in zip(ends, (min(figures), max(figures)), strict=True):
            assert abs(float(end) - figure) <= (0.05 if "." in end else 0.5), f"{end} for {figure}"


@pytest.mark.docs
def test_the_smallest_command_runs(capsys):
    assert cli.main(["devices"]) == 0
    assert capsys.readouterr().out


@pytest.mark.docs
@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda page: page.stem
)
def test_examples_import_fastaccum_before_tensorflow_so_that_onednn_is_on(page):
    for block in re.findall(r"(?s)```python\n(.*?)```", page.read_text()):
        imported = re.findall(
            r"(?m)^(?:import|from) (fastaccum|keras|keras_hub|tensorflow|tf_keras)\b", block
        )
        assert "fastaccum" not in imported or imported[0] == "fastaccum", block
