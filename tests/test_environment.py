"""The environment that `import fastaccum` sets for TensorFlow, and TensorFlow's log on standard
error.
"""

import os
import platform
import re
import subprocess
import sys

import pytest

import fastaccum

LEVEL, ONEDNN = "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"
PRINT = f"import fastaccum, os; print(os.environ.get({LEVEL!r}), os.environ.get({ONEDNN!r}))"
PRINT_USED = (
    "from tensorflow.python.util import _pywrap_util_port as port; print(port.IsMklEnabled())"
)
XLA_ERROR = """
import fastaccum as fa, tensorflow as tf
print("imported", file=sys.stderr)
tf.function(tf.strings.length, jit_compile=True)(tf.constant("text"))
"""


def run(code, **environment):
    path = os.pathsep.join(
        p for p in (os.path.dirname(fastaccum.__path__[0]), os.environ.get("PYTHONPATH")) if p
    )
    environment = (
        {k: v for k, v in os.environ.items() if k not in (LEVEL, ONEDNN)}
        | {"PYTHONPATH": path}
        | environment
    )
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        capture_output=True,
        text=True,
        env=environment,
    )


def test_what_the_user_has_set_stays():
    assert run(PRINT, **{LEVEL: "0", ONEDNN: "0"}).stdout == "0 0\n"
    onednn = 1 if platform.machine() in ("x86_64", "AMD64") else None
    assert run(PRINT).stdout in {f"{level} {onednn}\n" for level in (1, 3)}


def test_nothing_is_set_once_tensorflow_is_imported():
    imported = "import types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
    assert run(imported + PRINT).stdout == "None None\n"


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="TensorFlow's default is left as it is"
)
def test_onednn_is_on_unless_the_user_turned_it_off():
    assert run("import fastaccum\n" + PRINT_USED).stdout == "True\n"
    assert run("import fastaccum\n" + PRINT_USED, **{ONEDNN: "0"}).stdout == "False\n"


@pytest.mark.sample
@pytest.mark.slow
def test_errors_are_raised_and_log_lines_of_tensorflow_are_hidden():
    ended = run(XLA_ERROR)
    shown = ended.stderr.partition("imported\n")[2]
    assert ended.returncode == 1 and "Detected unsupported operations" in shown, ended.stderr
    if not os.path.exists("/proc/driver/nvidia/version"):
        assert not re.findall(r"(?m)^[IWE]\d{4} .*", shown)
