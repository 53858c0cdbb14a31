"""Type checkers see the installed package from outside the checkout: it is annotated, and wrong
calls are errors.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastaccum as fa

SCRIPTS = Path(__file__).parent
# Keras and TensorFlow have no types of their own.
MYPY = ["mypy", "--ignore-missing-imports", "--no-error-summary"]
PYRIGHT = ["pyright", "--pythonpath", sys.executable]


def check(command, folder):
    """Returns a checker's output in a folder from which only the installation leads to fastaccum."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PATH": path
    }
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [MYPY, PYRIGHT], ids=["mypy", "pyright"])
def test_right_calls_pass_and_wrong_ones_are_reported(command, tmp_path):
    printed = check([*command, SCRIPTS / "correct.py", SCRIPTS / "wrong.py"], tmp_path)
    reported = re.findall(r"(\w+)\.py:(\d+)\b.*? error:", printed)
    assert not [line for name, line in reported if name != "wrong"], printed
    marked = {
        i
        for i, line in enumerate((SCRIPTS / "wrong.py").read_text().splitlines(), 1)
        if "# error" in line
    }
    assert {int(line) for _, line in reported} == marked, printed


def public():
    """Returns the module in which each public class and function is defined."""
    for module in (fa, fa.kernels, fa.checkpoint):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name, None) if name != "addons" else None
            if (inspect.isclass(value) or inspect.isfunction(value)) and not name.startswith("_"):
                yield f"{value.__module__}.{value.__qualname__}"


@pytest.mark.slow
@pytest.mark.sample
def test_the_public_api_is_annotated(tmp_path):
    printed = check(
        ["pyright", "--verifytypes", "fastaccum", "--ignoreexternal", "--outputjson"], tmp_path
    )
    symbols = {
        symbol["name"]: symbol for symbol in json.loads(printed)["typeCompleteness"]["symbols"]
    }
    unknown = []
    for name in public():
        assert name in symbols, name
        for member, symbol in symbols.items():
            if (member == name or member.startswith(f"{name}.")) and not (
                symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
            ):
                unknown += [f"{member}: {each['message']}" for each in symbol["diagnostics"]]
    assert not unknown, "\n" + "\n".join(unknown)
