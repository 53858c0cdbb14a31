"""Runs suites, each in a process of its own: programs run slower after many others."""

import ast
import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "suites"
# What `--quick` runs; the others have no small form, or are not about the workloads.
QUICK = ("fit", "memory", "overhead", "steps_per_execution", "train_step")

# `addopts` leaves out the doctests, which are not part of a suite.
PYTEST = [
    "-p",
    "no:cacheprovider",
    "-c",
    str(ROOT / "pyproject.toml"),
    "-o",
    "addopts=--import-mode=importlib",
]
NO_TESTS_RAN = 5  # pytest's exit code, for instance when the whole file is skipped


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one suite.

    Args:
        name: of the suite: `train_step` for `test_train_step.py`.
        seconds: from the start of its process to its end.
        passed: how many tests.
        skipped: `{test: reason}`.
        failed: `{test: message}`; the suite's own name where no test is to blame.
        output: what pytest printed.
        run: pytest-benchmark's JSON, None if nothing was measured.
    """

    name: str
    seconds: float
    passed: int
    skipped: dict
    failed: dict
    output: str
    run: dict | None


def known(folder=FOLDER):
    """Finds `{name: path}` of the suites in `folder`, in the order of their names."""
    return {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("test_*.py"))}


def run(name, path, scratch, quick=False):
    """Runs the suite `path` and returns its `Result`; its files go to the folder `scratch`."""
    timings = scratch / f"{name}.json"
    junit = scratch / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(path), *PYTEST]
    command += [f"--benchmark-json={timings}", f"--junitxml={junit}"]
    if quick:
        command.append("--quick")
    started = time.monotonic()
    pytest = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seconds = time.monotonic() - started
    outcomes = Outcomes()
    if junit.exists():
        outcomes = _read_outcomes(name, junit)
    is_skipped = pytest.returncode == NO_TESTS_RAN and outcomes.skipped
    if pytest.returncode and not outcomes.failed and not is_skipped:
        code = pytest.returncode
        outcomes.failed[name] = f"pytest ended with exit code {code} before it could report"
    measured = None
    # pytest-benchmark leaves the file empty when nothing was measured.
    if timings.exists() and timings.stat().st_size:
        measured = json.loads(timings.read_text())
    return Result(
        name, seconds, outcomes.passed, outcomes.skipped, outcomes.failed, pytest.stdout, measured
    )


def by_reason(tests):
    """Writes `{test: reason}` as a line for each reason.

    >>> by_reason({"test_jax[GPT]": "no jax", "test_jax[MLP 128]": "no jax"})
    ['test_jax[GPT], test_jax[MLP 128]: no jax']
    """
    names = collections.defaultdict(list)
    for test, reason in tests.items():
        names[reason].append(test)
    return [f"{', '.join(tests)}: {reason}" for reason, tests in names.items()]


def merge(results, left_out=(), quick=False):
    """Merges the runs of all suites into one, in the form of pytest-benchmark's JSON.

    Machine, commit and time are those of the first suite that measured something. Every benchmark
    gets its `"suite"`; `"suites"` holds the results, `"left_out"` the names of suites not run.

    Raises:
        ValueError: if no suite measured anything.
    """
    measured = [result for result in results if result.run]
    if not measured:
        raise ValueError("no suite measured anything, so there is nothing to report.")
    benchmarks = []
    for result in measured:
        for benchmark in result.run["benchmarks"]:
            # "data" is every single timing: megabytes, and the statistics are there.
            stats = {key: value for key, value in benchmark["stats"].items() if key != "data"}
            benchmarks.append({"suite": result.name, **benchmark, "stats": stats})
    suites = {}
    for result in results:
        suites[result.name] = {
            "seconds": round(result.seconds, 1),
            "passed": result.passed,
            "skipped": result.skipped,
            "failed": result.failed,
        }
    return {
        **measured[0].run,
        "quick": quick,
        "left_out": list(left_out),
        "suites": suites,
        "benchmarks": benchmarks,
    }


@dataclasses.dataclass
class Outcomes:
    """Tests of a suite: how many passed, and `{test: reason}` of those skipped and failed."""

    passed: int = 0
    skipped: dict = dataclasses.field(default_factory=dict)
    failed: dict = dataclasses.field(default_factory=dict)


def _read_outcomes(suite, path):
    """Reads the `Outcomes` of a suite from pytest's JUnit XML.

    A suite that is skipped, or fails, as a whole is reported as a test of its own name.
    """
    outcomes = Outcomes()
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        test = case.get("name") or suite
        for element in case:
            if element.tag == "skipped":
                outcomes.skipped[test] = _reason(element)
            elif element.tag in ("failure", "error"):
                outcomes.failed[test] = _reason(element)
        if test not in outcomes.skipped and test not in outcomes.failed:
            outcomes.passed += 1
    return outcomes


def _reason(element):
    """Returns the first line of pytest's message."""
    message = element.get("message") or ""
    text = element.text or ""
    if message == "collection skipped":
        _path, _line, reason = ast.literal_eval(text)
        message = reason.removeprefix("Skipped: ")
    elif message == "collection failure":
        errors = (line[2:].strip() for line in text.splitlines() if line.startswith("E "))
        message = next(errors, message)
    return message.splitlines()[0] if message else "no reason given"
