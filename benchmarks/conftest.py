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

# Modules of a framework: where it is missing, pytest cannot import them to look for doctests.
collect_ignore_glob = []
if not importlib.util.find_spec("jax"):
    collect_ignore_glob += ["*/jax_*.py", "gpu/run.py"]
if not importlib.util.find_spec("torch"):
    collect_ignore_glob += ["*/torch_*.py"]


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=QUICK)


def pytest_configure(config):
    if config.getoption("benchmark_disable"):
        # Before any module imports benchmarks.support.models.
        os.environ["FASTACCUM_SMALL_BENCHMARKS"] = "1"
        # Nothing is timed, so XLA need not optimise machine code: as in tests/conftest.py.
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
            " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("quick"):
        return
    from benchmarks.support import models

    if config.getoption("benchmark_disable"):
        items[:] = _with_first_workload(items, models.Workload)
        return
    left_out = pytest.mark.skip(reason=f"--quick runs {models.MLP_128.name} only")
    for item in items:
        parameters = _parameters(item)
        for name, value in parameters.items():
            if value is models.MLP_128:
                parameters[name] = dataclasses.replace(value, rounds=QUICK_ROUNDS)
            elif isinstance(value, models.Workload):
                item.add_marker(left_out)


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _with_first_workload(items, workload_class):
    """Returns the benchmarks, each with the first of its workloads alone."""
    kept = []
    seen = set()
    for item in items:
        values = _parameters(item).values()
        if not any(isinstance(value, workload_class) for value in values):
            kept.append(item)
            continue
        settings = [repr(value) for value in values if not isinstance(value, workload_class)]
        benchmark = (item.path, item.originalname, *settings)
        if benchmark not in seen:
            seen.add(benchmark)
            kept.append(item)
    return kept
