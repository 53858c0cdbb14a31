"""The train step: ours in TensorFlow, and gradient accumulation in JAX and in PyTorch, on the CPU in float32.

Each peer has its test, so that one that is not installed hides no other. A timed block is as in `test_train_step`.

Keras's Adam adds epsilon before it corrects the bias of the second moment (the "epsilon hat" of Kingma and Ba 2015),
optax's and PyTorch's after, so that Keras's counts up to 32 times as much in the first steps. All train with one that
is too small to matter.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
import shutil

import pytest
import tensorflow as tf

from benchmarks import agreement, contestants, models
from benchmarks.race import race
from benchmarks.scores import milliseconds, ratio

# The packages that each needs, and the function of `benchmarks.peers` that makes it.
PEERS = {
    "JAX scan": (("jax", "optax"), "jax_accumulation", "make_scan"),
    "JAX optax.MultiSteps": (("jax", "optax"), "jax_accumulation", "make_multi_steps"),
    "PyTorch eager": (("torch",), "torch_accumulation", "make"),
    "torch.compile": (("torch",), "torch_accumulation", "make_compiled"),
}
EPSILON = 1e-10


@pytest.mark.parametrize("workload", [models.MLP_128, models.GPT], ids=lambda w: w.name)
@pytest.mark.parametrize("name", PEERS)
def test_other_framework(name, workload, benchmark, report):
    workload = dataclasses.replace(workload, optimizer=functools.partial(workload.optimizer, epsilon=EPSILON))
    peer = make(name, workload)
    ours = contestants.make_train_step(workload)
    our_outcome = agreement.outcome_of_train_step(ours, workload)
    agreement.assert_agree(our_outcome, agreement.outcome_of_train_step(peer, workload), name)

    updates = 1 if benchmark.disabled else workload.step_updates
    times = race(benchmark, ours.block(workload, updates), {name: peer.block(workload, updates)}, workload.rounds)
    if times:
        note = f"ours {milliseconds(times['ours'], updates)}, theirs {milliseconds(times[name], updates)}"
        report(f"train step: {name} / ours", workload, ratio(times[name], times["ours"]), note)


def make(name, workload):
    """The contestant of that name, or a skip that says what it lacks."""
    packages, module, function = PEERS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{name}: {package} is not installed; pip install -c constraints.txt -e ".[bench]" adds it')
    if tf.config.list_physical_devices("GPU"):
        pytest.skip(f"{name}: on the CPU alone, and TensorFlow would use a GPU here; benchmarks/gpu compares on one")
    if name == "torch.compile" and not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile: needs a C++ compiler; there is no g++, and CXX names no other")
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)(workload)
