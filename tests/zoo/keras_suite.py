"""Keras's own trainer tests with `fastaccum.Trainer` behind `fit`, `evaluate` and `predict`.

    .venv/bin/python tests/zoo/keras_suite.py [pytest's arguments]

They come with Keras's wheel, and need jax, torch and grain. Cases that fail for a reason stand in
notes.md, under "Keras's own trainer tests", by name (a `*` stands for any ending); all others must
pass.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import inspect
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

import fastaccum as fa
from fastaccum import families
from fastaccum.adapters.models import Model

NOTES = pathlib.Path(__file__).with_name("notes.md")
HEADING = "## Keras's own trainer tests"
OURS = ("fit", "evaluate", "predict")


class Behind:
    """Puts a `fastaccum.Trainer`, made of what `compile` was given, behind a model's methods."""

    def __init__(self) -> None:
        self._original = {name: getattr(TensorFlowTrainer, name) for name in (*OURS, "compile")}
        self._signature = inspect.signature(self._original["compile"])
        self._inside = False

    def __enter__(self) -> None:
        TensorFlowTrainer.compile = self._compiling()
        for name in OURS:
            setattr(TensorFlowTrainer, name, self._behind(name))
        # Keras's tests mix a layer with its trainer, where users write a keras.Model.
        known = families.adapt_model
        families.adapt_model = lambda model: (
            Model(model) if isinstance(model, TensorFlowTrainer) else known(model)
        )

    def __exit__(self, *error: object) -> None:
        for name, method in self._original.items():
            setattr(TensorFlowTrainer, name, method)

    @contextlib.contextmanager
    def _as_keras(self) -> Iterator[None]:
        """Within the scope, what our Trainer calls of the model is Keras's own."""
        self._inside, before = True, self._inside
        try:
            yield
        finally:
            self._inside = before

    def _compiling(self) -> Callable:
        original = self._original["compile"]

        @functools.wraps(original)
        def compile(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            if not self._inside:
                given = self._signature.bind(model, *args, **kwargs)
                given.apply_defaults()
                object.__setattr__(model, "_compiled_with", given.arguments)
                object.__setattr__(model, "_fastaccum", None)

        return compile

    def _behind(self, name: str) -> Callable:
        original = self._original[name]

        @functools.wraps(original)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or "_compiled_with" not in vars(model):
                return original(model, *args, **kwargs)
            with self._as_keras():
                if vars(model)["_fastaccum"] is None:
                    object.__setattr__(
                        model, "_fastaccum", trainer_of(model, vars(model)["_compiled_with"])
                    )
                return getattr(vars(model)["_fastaccum"], name)(*args, **kwargs)

        return method


def trainer_of(model: Any, given: dict[str, Any]) -> fa.Trainer:
    """A Trainer of the arguments of `compile`."""
    return fa.Trainer(
        model,
        given["optimizer"],
        given["loss"],
        given["metrics"] or (),
        loss_weights=given["loss_weights"],
        weighted_metrics=given["weighted_metrics"] or (),
        loss_scale="auto" if given["auto_scale_loss"] else None,
        jit_compile=model.jit_compile and not given["run_eagerly"],
        steps_per_execution=given["steps_per_execution"],
    )


class Outcomes:
    """What became of each test: a pytest plugin."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.others: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
            self.failed.setdefault(
                report.nodeid.rpartition("::")[2], errors[0] if errors else lines[-1]
            )
        elif report.when == "call" or report.skipped:
            self.others[report.outcome] += 1


def listed(heading: str) -> list[str]:
    """The patterns of the tests that notes.md lists under a heading."""
    _, _, section = NOTES.read_text().partition(heading)
    section = section.partition("\n## ")[0]
    return [
        name
        for row in re.findall(r"^\| (`test_.*?) \|", section, re.M)
        for name in re.findall(r"`(.+?)`", row)
    ]


def report(suite: str, outcomes: Outcomes, known: list[str]) -> int:
    """Prints what failed, by reason; 1 if something did that is not listed."""
    reasons = collections.defaultdict(list)
    for test, error in outcomes.failed.items():
        pattern = next((p for p in known if fnmatch.fnmatch(test, p)), None)
        reasons[f"listed: {pattern}" if pattern else f"NOT LISTED: {error}"].append(test)
    print(f"\n{suite}: {dict(outcomes.others)}, failed {len(outcomes.failed)}\n")
    print("| tests | reason | names |\n| ---: | --- | --- |")
    for reason, tests in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"| {len(tests)} | {reason} | {', '.join(tests)} |")
    return int(any(reason.startswith("NOT") for reason in reasons))


def main() -> int:
    original = pathlib.Path(keras.__file__).parent / "src" / "trainers" / "trainer_test.py"
    outcomes = Outcomes()
    # A copy: where it lies, what the tests define would be taken for Keras's own.
    with tempfile.TemporaryDirectory() as folder, Behind():
        path = shutil.copy(original, folder)
        pytest.main(
            ["-q", "--no-header", "--tb=short", "-c", "/dev/null", *sys.argv[1:], path],
            plugins=[outcomes],
        )
    return report(f"Keras {keras.__version__}", outcomes, listed(HEADING))


if __name__ == "__main__":
    sys.exit(main())
