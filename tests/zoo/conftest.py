"""The zoo's page: `XLA_FLAGS= pytest tests/zoo -m zoo --models-page docs/models.md` trains every
row and writes it.

Without XLA_FLAGS a program is compiled as on a user's machine. With those of tests/conftest.py it
rounds otherwise, and a maximum over points, with batch statistics, has gradients that are NaN, in
Keras's compiled `fit`, too.
"""

import os

# Before TensorFlow is imported: Hugging Face and tensorflow-probability take tf_keras for tf.keras
# only then.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import pathlib

import models_page
import pytest

collect_ignore = ["addons_suite.py", "keras_suite.py"]  # commands


def pytest_addoption(parser):
    parser.addoption("--models-page", metavar="PATH", help="write the page of all rows there")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--models-page")
    if path is None:
        return
    reports = [
        r
        for outcome in ("passed", "failed", "error")
        for r in terminalreporter.stats.get(outcome, [])
    ]
    rows = [
        (dict(r.user_properties), r.outcome) for r in reports if "zoo" in dict(r.user_properties)
    ]
    notes = pathlib.Path(__file__).with_name("notes.md").read_text(encoding="utf-8")
    pathlib.Path(path).write_text(models_page.page(rows, notes), encoding="utf-8")
    terminalreporter.write_line(f"{path}: {len(rows)} results")
