"""TensorFlow's log on standard error: what `import fastaccum` sets, leaves as it is, and lets through."""

import os
import re
import subprocess
import sys

import pytest

import fastaccum

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
PRINT_LEVEL = f"import fastaccum, os; print(os.environ.get({LEVEL!r}))"
XLA_ERROR = """
import fastaccum as fa, tensorflow as tf
print("imported", file=sys.stderr)
tf.function(tf.strings.length, jit_compile=True)(tf.constant("text"))
"""


def run(code, **environment):
    path = os.pathsep.join(p for p in (os.path.dirname(fastaccum.__path__[0]), os.environ.get("PYTHONPATH")) if p)
    environment = {k: v for k, v in os.environ.items() if k != LEVEL} | {"PYTHONPATH": path} | environment
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, env=environment
    )


def test_what_the_user_has_set_stays():
    assert run(PRINT_LEVEL, **{LEVEL: "0"}).stdout == "0\n"
    assert run(PRINT_LEVEL).stdout in ("1\n", "3\n")


def test_nothing_is_set_once_tensorflow_is_imported():
    imported = "import types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
    assert run(imported + PRINT_LEVEL).stdout == "None\n"


@pytest.mark.sample
@pytest.mark.faults
def test_an_error_is_raised_and_no_other_line_of_tensorflow_is_shown_once_it_is_imported():
    ended = run(XLA_ERROR)
    shown = ended.stderr.partition("imported\n")[2]
    assert ended.returncode == 1 and "Detected unsupported operations" in shown, ended.stderr
    if not os.path.exists("/proc/driver/nvidia/version"):
        assert not re.findall(r"(?m)^[IWE]\d{4} .*", shown)
