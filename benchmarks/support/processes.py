"""Runs train steps in processes of their own, each with its contestant alone.

A process that has done other work can measure neither its peak memory nor its first step, and
steps run slower in a process that has run many programs.
"""

import collections
import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.managers import BaseManager

import numpy as np
import tensorflow as tf

from benchmarks.support import agreement, contestants, limits, models

_ROOT = str(pathlib.Path(__file__).parents[2])
# A fork would bring this process's memory and programs along.
_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Cost of a workload's train step.

    Args:
        first_step: seconds to trace, compile and run it once, in a process that has compiled
            nothing before.
        temp_bytes: what XLA plans beside arguments and results.
        process_bytes: the most memory that the process held, data and TensorFlow included.
        flops: floating-point operations of one update that no implementation avoids.
    """

    first_step: float
    temp_bytes: int
    process_bytes: int
    flops: int


class Contestant:
    """fastaccum's train step on the workload `make(*arguments)`, in the process of this object."""

    def __init__(self, make, *arguments):
        self.workload = make(*arguments)
        self.trainer = contestants.trainer(self.workload)
        self.train_step = contestants.as_train_step(self.trainer)
        self.batch = self.train_step.feed(self.workload.stacks(1)[0])

    def footprint(self):
        """Measures the process's first step, then restores weights and optimizer."""
        restore = agreement.snapshot(self.trainer)
        first_step = self.seconds()
        process_bytes = limits.peak_resident_bytes()
        restore()
        compiled = contestants.trainer(self.workload, jit_compile=True)
        temp_bytes = compiled.memory_analysis(self.batch).temp_bytes
        example = self.batch[0].shape[2:]
        flops = self.workload.update_size * limits.train_flops(self.trainer.model, example)
        return Footprint(first_step, temp_bytes, process_bytes, flops)

    def outcome(self):
        """Trains from the initial weights and returns the `Outcome`; call it before `seconds`."""
        return agreement.outcome_of_train_step(self.train_step, self.workload)

    def seconds(self, updates=1):
        """Times `updates` updates until the last loss is read."""
        started = time.perf_counter()
        for _ in range(updates):
            loss = self.train_step.update(self.batch)
        loss = float(loss)
        elapsed = time.perf_counter() - started
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"the loss of {self.workload.name} is {loss}: what was timed is not training."
            )
        return elapsed


class Peer:
    """Train step of `benchmarks.peers.<module>.<function>`, in the process of this object.

    Args:
        module, function: by name, so that the suite's own process need not import the peer's
            framework.
        workload: the name of one of `models.ALL`.
        epsilon: of the optimizer.
    """

    def __init__(self, module, function, workload, epsilon):
        self.workload = models.named(workload).with_epsilon(epsilon)
        make = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        self.train_step = make(self.workload)

    def outcome(self):
        """Trains from the initial weights and returns the `Outcome`."""
        return agreement.outcome_of_train_step(self.train_step, self.workload)

    def prepare(self, updates):
        """Feeds the data of a block of `updates` updates."""
        self.block = self.train_step.block(self.workload, updates)

    def run(self):
        """Runs the block; returns its last loss."""
        return self.block()


class FitPeer:
    """`Fit` of `benchmarks.peers.<module>.<function>`, in the process of this object.

    Args:
        module, function: by name, so that the suite's own process need not import the peer's
            framework.
        workload: its name.
        weights: the initial weights as NumPy arrays. From one seed, each backend of Keras draws
            other ones.
    """

    def __init__(self, module, function, workload, weights):
        self.workload = models.named(workload)
        make = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        self.fit = make(self.workload)
        self.fit.model.set_weights(weights)

    def outcome(self):
        """Trains from the initial weights and returns the `Outcome`."""
        return agreement.outcome_of_fit(self.fit, self.workload)

    def prepare(self, updates):
        """Draws the data of an epoch of `updates` updates."""
        self.arrays = self.workload.arrays(updates)

    def run(self):
        """Trains for an epoch; returns its loss."""
        return self.fit.epoch(*self.arrays)


class Replicas:
    """fastaccum's train steps under MirroredStrategy: one with slots on each device, one sharded.

    Args:
        workload: the name of one of `models.ALL`; it is trained by AdamW.
        devices: how many logical CPU devices the process, this object's own, gets.
    """

    def __init__(self, workload, devices):
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
        self.workload = dataclasses.replace(models.named(workload), optimizer=models.adamw)
        names = [f"CPU:{i}" for i in range(devices)]
        self.train_steps = {}
        for shard_optimizer in (False, True):
            with tf.distribute.MirroredStrategy(names).scope():
                trainer = contestants.trainer(self.workload, shard_optimizer=shard_optimizer)
            self.train_steps[shard_optimizer] = contestants.as_train_step(trainer)

    def outcome(self, shard_optimizer):
        """Trains from the initial weights and returns the `Outcome`."""
        return agreement.outcome_of_train_step(self.train_steps[shard_optimizer], self.workload)

    def prepare(self, updates):
        """Feeds the data of a block of `updates` updates."""
        self.blocks = {
            shard_optimizer: step.block(self.workload, updates)
            for shard_optimizer, step in self.train_steps.items()
        }

    def run(self, shard_optimizer):
        """Runs the block; returns its last loss."""
        return self.blocks[shard_optimizer]()


class _Process(BaseManager):
    """Server process that holds one contestant, or all of those that need the same devices."""


_Process.register("Contestant", Contestant)
_Process.register("Peer", Peer)
_Process.register("FitPeer", FitPeer)
_Process.register("Replicas", Replicas)


def _start_process():
    process = _Process(ctx=_SPAWN)
    process.start(_end_with_parent)
    return process


def _end_with_parent():
    """Ends this process when its parent has ended, for instance a suite that was killed."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _importable():
    """Lets new processes import `benchmarks`: they take over this process's path."""
    # Last, so that no folder of the root hides an installed package.
    sys.path.append(_ROOT)
    try:
        yield
    finally:
        sys.path.pop()


@contextlib.contextmanager
def contestants_of(points):
    """Starts a process for each contestant of an axis.

    Args:
        points: `{place: (make, *arguments)}`; the function is one of `benchmarks.support.models`,
            known by its name there.

    Yields:
        `{place: contestant}`; all processes end with the scope.
    """
    with contextlib.ExitStack() as scope:
        with _importable():
            servers = {place: scope.enter_context(_start_process()) for place in points}
        yield {place: servers[place].Contestant(*call) for place, call in points.items()}


@contextlib.contextmanager
def _alone(kind, *arguments):
    """Makes a registered object in a process of its own, which ends with the scope."""
    with _importable():
        process = _start_process()
    with process:
        yield getattr(process, kind)(*arguments)


def peer(*arguments):
    """Makes a `Peer` in a process of its own, whose cores its framework's threads have alone."""
    return _alone("Peer", *arguments)


def fit_peer(*arguments):
    """Makes a `FitPeer` in a process of its own, which takes over the environment."""
    return _alone("FitPeer", *arguments)


def replicas(*arguments):
    """Makes `Replicas` in a process of their own."""
    return _alone("Replicas", *arguments)


def in_new_process(function, *arguments):
    """Calls `function(*arguments)` in a process of its own and returns the result."""
    with _importable(), ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
        return pool.submit(function, *arguments).result()


def take_turns(benchmark, contestants, rounds, updates=1):
    """Times every contestant and a matmul once a round, in an order that rotates.

    Returns:
        `{place: [seconds an update, one per round]}`, and the best FLOP/s of a matmul; with
        `--benchmark-disable` there is one round.
    """
    order = collections.deque(contestants)
    times = {place: [] for place in contestants}
    rates = []

    def run_round():
        order.rotate(-1)
        for place in order:
            times[place].append(contestants[place].seconds(updates) / updates)
        rates.append(limits.matmul_rate())

    if benchmark.disabled:
        rounds = 1
    benchmark.pedantic(run_round, rounds=rounds)
    return times, max(rates)
