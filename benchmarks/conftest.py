"""What the suites share: figures and series kept in pytest-benchmark's JSON, and the trim that
`--quick` makes.
"""

import dataclasses
import gc
import importlib.metadata
import importlib.util
import os

import keras
import pytest
import tensorflow as tf

import fastaccum
from benchmarks import scores

PEERS = ("tf-keras", "tensorflow-addons", "gradient-accumulator", "jax", "optax", "torch")
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

_SCORES = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=QUICK)


def pytest_configure(config):
    if config.getoption("benchmark_disable"):
        os.environ["FASTACCUM_SMALL_BENCHMARKS"] = "1"  # before a suite imports `benchmarks.models`
    config.stash[_SCORES] = []


def pytest_collection_modifyitems(config, items):
    if not config.getoption("quick"):
        return
    from benchmarks import models

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


@pytest.fixture(autouse=True)
def fresh_memory():
    """Contestants of earlier tests hold gigabytes of weights, slots and programs."""
    yield
    keras.backend.clear_session()
    gc.collect()


@pytest.fixture
def report(request, benchmark):
    """`report(measure, workload, value, note="")` adds a row to the table."""

    def add(measure, workload, value, note=""):
        score = scores.Score(measure, workload.name, value, note)
        request.config.stash[_SCORES].append(score)
        benchmark.extra_info.setdefault("scores", []).append(dataclasses.asdict(score))

    return add


@pytest.fixture
def series(benchmark):
    """`series(chart, line, x, y, x_label, y_label)` adds a line to the chart of that name.

    The labels are those of the axes, with their units, and the same for all lines of a chart.
    """

    def add(chart, line, x, y, x_label, y_label):
        if len(x) != len(y):
            raise ValueError(
                f"{chart!r}, line {line!r} has {len(x)} x and {len(y)} y; each point needs both."
            )
        points = {"x": [float(value) for value in x], "y": [float(value) for value in y]}
        drawn = {"chart": chart, "line": line, **points, "x_label": x_label, "y_label": y_label}
        benchmark.extra_info.setdefault("series", []).append(drawn)

    return add


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[_SCORES]:
        terminalreporter.section("ratios, medians of interleaved rounds")
        terminalreporter.write_line(scores.markdown(config.stash[_SCORES]))


def pytest_benchmark_update_machine_info(config, machine_info):
    gpus = tf.config.list_physical_devices("GPU")
    machine_info["gpus"] = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus
    ]
    machine_info["cores"] = len(os.sched_getaffinity(0))
    machine_info["versions"] = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "fastaccum": fastaccum.__version__,
        **_versions_of_peers(),
    }
    # The host's name says nothing about the hardware, and reports are published.
    machine_info.pop("node", None)


def _versions_of_peers():
    versions = {}
    for package in PEERS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
