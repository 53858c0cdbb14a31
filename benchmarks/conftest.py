"""The small forms of the benchmarks, and the modules left out where a framework is missing."""

import dataclasses
import importlib.util
import os

import pytest

QUICK_ROUNDS = 3
QUICK = (
    f"of the workloads only MLP 128, {QUICK_ROUNDS} rounds each; with --benchmark-disable the "
    "first of each benchmark"
)

# Modules whose doctests cannot be looked for where the framework that they are written in is
# missing.
_WRITTEN_IN = {"jax": ["*/jax_*.py", "gpu/run.py"], "torch": ["*/torch_*.py"]}
collect_ignore_glob = [
    each
    for package, patterns in _WRITTEN_IN.items()
    if not importlib.util.find_spec(package)
    for each in patterns
]


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=QUICK)


def pytest_configure(config):
    if config.getoption("benchmark_disable"):
        # Before any module imports benchmarks.support.models.
        os.environ["FASTACCUM_SMALL_BENCHMARKS"] = "1"


def pytest_collection_modifyitems(config, items):
    if not config.getoption("quick"):
        return
    from benchmarks.support import models

    if config.getoption("benchmark_disable"):
        items[:] = _with_first_workload(items, models.Workload)
        return
    left_out = pytest.mark.skip(reason=f"--quick runs {models.MLP_128.name} only")
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for name, value in parameters.items():
            if value is models.MLP_128:
                parameters[name] = dataclasses.replace(value, rounds=QUICK_ROUNDS)
            elif isinstance(value, models.Workload):
                item.add_marker(left_out)


def _with_first_workload(items, workload):
    """Returns the benchmarks, each with the first of its workloads alone."""
    kept = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        others = tuple(
            repr(value) for value in parameters.values() if not isinstance(value, workload)
        )
        kept.setdefault(
            (item.path, item.originalname, others) if len(others) < len(parameters) else item, item
        )
    return list(kept.values())
