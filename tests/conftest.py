"""The order of the files, and what one test must not leave behind for the next."""

import gc
import importlib
import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import fastaccum  # noqa: F401  # before TensorFlow, as in users' programs: it turns oneDNN on

# Most tests wait for XLA to make machine code: for MLIR's emitters of fusions, and for LLVM, which
# optimises a program in up to 32 modules. Without them operations and buffers are the same. An
# XLA_FLAGS that is set is kept, also an empty one: with it README and CI run test_exactness.py on
# the code that users run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

import keras
import pytest
import tensorflow as tf

# The benchmarks are not installed. At the end of the path, where kernels/ shadows no other package.
sys.path.append(str(Path(__file__).parents[1]))
os.environ["FASTACCUM_COMPILE_CACHE"] = ""  # nothing is read that another run left behind

PASSED = "fastaccum/passed"  # in pytest's cache: the tests that passed in a run of this checkout
# Slow files of which CI runs the first case of each test at every commit, but for tests that are
# marked as slow themselves.
SAMPLED_FILES = {
    "adapters/test_label_metrics.py",
    "adapters/test_metrics.py",
    "adapters/test_own_methods.py",
    "adapters/test_scalar_losses.py",
    "adapters/test_stock_callbacks.py",
    "checkpoint/test_resume_in_other_pieces.py",
    "checkpoint/test_resume_settings.py",
    "graphs/test_row_mixing.py",
    "layers/test_attention.py",
    "step/test_varied_lengths.py",
    "training/test_calls_beside_keras.py",
}
SAMPLED = pytest.StashKey[set]()  # tests, and files of tf_keras's models, that have a sample


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")
    parser.addoption(
        "--unpassed",
        action="store_true",
        help="leave out the tests that passed in an earlier run here",
    )


def pytest_configure(config):
    # pytest asks addons.py for names such as pytest_plugins, and any name imports
    # tensorflow-addons.
    if PathFinder.find_spec("tensorflow_addons") is None:
        config.option.ignore_glob = [*(config.option.ignore_glob or []), "/*/fastaccum/addons.py"]
    # With pytest-xdist this process hears of every test, and its workers only of their own.
    if not hasattr(config, "workerinput") and hasattr(config, "cache"):
        config.pluginmanager.register(PassedTests(config))


class PassedTests:
    """Remembers which tests have passed, for `--unpassed`."""

    def __init__(self, config):
        self._cache = config.cache
        self._passed = set(config.cache.get(PASSED, []))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)

    def pytest_sessionfinish(self):
        self._cache.set(PASSED, sorted(self._passed))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and item.config.getoption("no_skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


def is_in_sampled_file(item):
    return f"{item.path.parent.name}/{item.path.name}" in SAMPLED_FILES


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    """Marks the tests of tf_keras's models as slow where Keras 3's models are tested alike.

    CI runs the first of each file at every commit, and in `SAMPLED_FILES` that of each test.
    """
    sampled = item.session.stash.setdefault(SAMPLED, set())
    test = None
    if hasattr(item, "callspec") and item.callspec.params.get("K") == "tf_keras":
        item.add_marker("slow")
        test = item.path
    elif is_in_sampled_file(item) and "slow" not in {mark.name for mark in item.own_markers}:
        test = (item.path, item.originalname)
    if test is not None and test not in sampled:
        sampled.add(test)
        item.add_marker("sample")


def pytest_collection_modifyitems(config, items):
    """Begins with the files that take longest, so that no worker is left with one while the others
    have nothing.
    """
    if config.getoption("unpassed"):
        passed = set(config.cache.get(PASSED, []))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Spares the garbage collector the packages, whose objects are as many as those of all tests
    and never freed.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips tests of tensorflow-addons where it cannot be installed: its wheels end at Python 3.11."""
    try:
        return (yield)
    except ImportError as error:
        # Not `importlib.util`, where fastaccum.addons raises the same error again.
        if "tensorflow-addons" not in str(error) or PathFinder.find_spec("tensorflow_addons"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """A shell has its background jobs and their children ignore SIGINT: tests send it to themselves
    and to others.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def untuned_datasets():
    """TensorFlow tunes a dataset's parallelism in a thread, which an iterator waits for when it is
    let go: up to a minute, where the thread does not hear of it before it sleeps again.
    """
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    iterate = tf.data.Dataset.__iter__
    tf.data.Dataset.__iter__ = lambda dataset: iterate(dataset.with_options(untuned))
    yield
    tf.data.Dataset.__iter__ = iterate


@pytest.fixture(scope="module", autouse=True)
def graphs_as_traced(request):
    """Keeps TensorFlow from rewriting graphs before their first run, which takes a third of the
    time of most tests without XLA. Tests of a Trainer and of exactness wait for that, and all in
    processes of their own.
    """
    rewritten = request.path.stem in ("test_trainer", "test_exactness")
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not rewritten})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture(autouse=True)
def clean_keras():
    """Every test starts from the same seeds and from float32, whichever ran before it."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(params=["keras", "tf_keras"], scope="session")
def K(request):
    """Keras 3, then tf_keras: what holds for the models of both."""
    return importlib.import_module(request.param)
