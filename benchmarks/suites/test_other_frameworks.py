"""Train step of ours, of JAX and of PyTorch, on the CPU in float32.

Each peer runs in a process of its own, taking turns with ours: in one process, the threads of
PyTorch and TensorFlow fight for the cores, and PyTorch's GPT step took four times as long. Each
peer has its own test, so a framework that is not installed hides no other. A timed block is as in
`test_train_step`.

Keras's Adam adds epsilon before it corrects the bias of the second moment (the "epsilon hat" of
Kingma and Ba 2015), optax's and PyTorch's after, so Keras's epsilon counts up to 32 times as much
in the first steps. All train with one that is too small to matter.
"""

import importlib.util
import os
import shutil

import pytest
import tensorflow as tf

from benchmarks.support import agreement, contestants, models, processes
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

# The packages that each needs, and the module and function of `benchmarks.peers` that make it.
PEERS = {
    "JAX scan": (("jax", "optax"), "jax_accumulation", "make_scan"),
    "JAX optax.MultiSteps": (("jax", "optax"), "jax_accumulation", "make_multi_steps"),
    "ours, run by JAX": (("jax",), "jax_ours", "make"),
    "PyTorch eager": (("torch",), "torch_accumulation", "make"),
    "torch.compile": (("torch",), "torch_accumulation", "make_compiled"),
}
WITHOUT_CONVOLUTIONS = {
    "JAX optax.MultiSteps": "has no place for BatchNorm's statistics",
    "ours, run by JAX": "ours runs convolutions without XLA",
}
EPSILON = 1e-10


@pytest.mark.parametrize(
    "workload", [models.MLP_128, models.GPT, models.CONVNET], ids=lambda w: w.name
)
@pytest.mark.parametrize("name", PEERS)
def test_other_framework(name, workload, benchmark, report):
    if workload is models.CONVNET and name in WITHOUT_CONVOLUTIONS:
        pytest.skip(f"{name}: {WITHOUT_CONVOLUTIONS[name]}")
    workload = workload.with_epsilon(EPSILON)
    ours = contestants.make_train_step(workload)
    updates = 1 if benchmark.disabled else workload.step_updates
    with processes.peer(*module_and_function(name), workload.name, EPSILON) as peer:
        our_outcome = agreement.outcome_of_train_step(ours, workload)
        agreement.assert_agree(our_outcome, peer.outcome(), name)
        peer.prepare(updates)
        times = race(benchmark, ours.block(workload, updates), {name: peer.run}, workload.rounds)
    if times:
        note = (
            f"ours {milliseconds(times['ours'], updates)}, theirs "
            f"{milliseconds(times[name], updates)}"
        )
        report(f"train step: {name} / ours", workload, ratio(times[name], times["ours"]), note)


def module_and_function(name):
    """Returns the module and the function that make the peer; skips the test if it cannot run."""
    packages, module, function = PEERS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{name}: {package} is not installed; "
                'pip install -c constraints.txt -e ".[bench]" adds it'
            )
    if tf.config.list_physical_devices("GPU"):
        pytest.skip(
            f"{name}: on the CPU alone, and TensorFlow would use a GPU here; benchmarks/gpu "
            "compares on one"
        )
    if name == "torch.compile" and not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip(
            "torch.compile: needs a C++ compiler; g++ is not installed, and CXX names no other "
            "compiler"
        )
    return module, function
