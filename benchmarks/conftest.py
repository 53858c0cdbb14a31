"""Collects the scores of all suites, prints them at the end, and keeps them in pytest-benchmark's JSON."""

import dataclasses
import gc
import os

import keras
import pytest
import tensorflow as tf

import fastaccum
from benchmarks import scores

_SCORES = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[_SCORES] = []


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


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[_SCORES]:
        terminalreporter.section("ratios, medians of interleaved rounds")
        terminalreporter.write_line(scores.markdown(config.stash[_SCORES]))


def pytest_benchmark_update_machine_info(config, machine_info):
    gpus = tf.config.list_physical_devices("GPU")
    machine_info["gpus"] = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
    machine_info["cores"] = len(os.sched_getaffinity(0))
    machine_info["versions"] = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "fastaccum": fastaccum.__version__,
    }
