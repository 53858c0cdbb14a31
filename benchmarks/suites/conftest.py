"""Fixtures that keep figures and series in pytest-benchmark's JSON, and the machine it names."""

import dataclasses
import gc
import importlib.metadata
import os

import keras
import pytest
import tensorflow as tf

import fastaccum
from benchmarks.support import scores

PEERS = ("tf-keras", "tensorflow-addons", "gradient-accumulator", "jax", "optax", "torch")

_SCORES = pytest.StashKey[list]()


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
        request.config.stash.setdefault(_SCORES, []).append(score)
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
    reported = config.stash.get(_SCORES, [])
    if reported:
        terminalreporter.section("ratios, medians of interleaved rounds")
        terminalreporter.write_line(scores.markdown(reported))


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
