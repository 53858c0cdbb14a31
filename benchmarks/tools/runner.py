"""Runs suites, each in a process of its own: programs run slower late in a process that has run
many.
"""

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

# Without the doctests, which are not part of a suite.
PYTEST = [
    "-p",
    "no:cacheprovider",
    "-c",
    ROOT / "pyproject.toml",
    "-o",
    "addopts=--import-mode=importlib",
]


@dataclasses.dataclass(frozen=True)
class Result:
    """How one suite ended.

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
    """`{name: path}` of the suites in `folder`, in order of their names."""
    return {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("test_*.py"))}


def run(name, path, scratch, quick=False):
    """Runs the suite `path` and returns its `Result`; its files go to the folder `scratch`."""
    timings, outcomes = scratch / f"{name}.json", scratch / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", path, *PYTEST]
    command += [
        f"--benchmark-json={timings}",
        f"--junitxml={outcomes}",
        *(["--quick"] if quick else []),
    ]
    started = time.monotonic()
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seconds = time.monotonic() - started
    passed, skipped, failed = _outcomes(name, outcomes) if outcomes.exists() else (0, {}, {})
    # 5: no test ran, as when the whole file is skipped.
    if not failed and done.returncode and not (done.returncode == 5 and skipped):
        failed = {name: f"pytest ended with exit code {done.returncode} before it could report"}
    # pytest-benchmark leaves the file empty when nothing was measured.
    found = json.loads(timings.read_text()) if timings.exists() and timings.stat().st_size else None
    return Result(name, seconds, passed, skipped, failed, done.stdout, found)


def by_reason(tests):
    """What `{test: reason}` says, a line for each reason.

    >>> by_reason({"test_jax[GPT]": "no jax", "test_jax[MLP 128]": "no jax"})
    ['test_jax[GPT], test_jax[MLP 128]: no jax']
    """
    names = collections.defaultdict(list)
    for test, reason in tests.items():
        names[reason].append(test)
    return [f"{', '.join(tests)}: {reason}" for reason, tests in names.items()]


def merge(results, left_out=(), quick=False):
    """One run out of those of all suites, in the form of pytest-benchmark's JSON.

    Machine, commit and time are those of the first suite that measured something. Every benchmark
    gets its `"suite"`; `"suites"` holds how each ended, `"left_out"` the names of those that were
    not asked for.

    Raises:
        ValueError: if no suite measured anything.
    """
    measured = [result for result in results if result.run]
    if not measured:
        raise ValueError("no suite measured anything, so there is nothing to report.")
    benchmarks = [
        {"suite": result.name, **benchmark}
        for result in measured
        for benchmark in result.run["benchmarks"]
    ]
    for benchmark in benchmarks:
        # Every single timing: megabytes, and the statistics are there.
        benchmark["stats"] = {
            key: value for key, value in benchmark["stats"].items() if key != "data"
        }
    ended = {
        result.name: {
            "seconds": round(result.seconds, 1),
            "passed": result.passed,
            "skipped": result.skipped,
            "failed": result.failed,
        }
        for result in results
    }
    return {
        **measured[0].run,
        "quick": quick,
        "left_out": list(left_out),
        "suites": ended,
        "benchmarks": benchmarks,
    }


def _outcomes(suite, path):
    """The number of tests that passed, and `{test: reason}` of those that were skipped and that
    failed.

    A suite that is skipped, or fails, as a whole is reported as a test of its own name.
    """
    passed, skipped, failed = 0, {}, {}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        test = case.get("name") or suite
        trouble = {kind: case.find(kind) for kind in ("skipped", "failure", "error")}
        if trouble["skipped"] is not None:
            skipped[test] = _reason(trouble["skipped"])
        elif (
            wrong := next(
                (t for t in (trouble["failure"], trouble["error"]) if t is not None), None
            )
        ) is not None:
            failed[test] = _reason(wrong)
        else:
            passed += 1
    return passed, skipped, failed


def _reason(element):
    """The first line of what pytest says."""
    message, text = element.get("message") or "", element.text or ""
    if message == "collection skipped":  # the text is the repr of (path, line, reason)
        message = ast.literal_eval(text)[2].removeprefix("Skipped: ")
    elif message == "collection failure":
        message = next(
            (line[2:].strip() for line in text.splitlines() if line.startswith("E ")), message
        )
    return message.splitlines()[0] if message else "no reason given"
