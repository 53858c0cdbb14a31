"""Plans the micro-batch that fits a device and is fastest, by compiling a few; nothing is trained."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import tensorflow as tf
from rich.console import Console

from fastaccum.adapters.attributes import replaced, restored
from fastaccum.adapters.remat import recomputing
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.distribute.replicas import Replicas
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.memory import cost, device
from fastaccum.memory.analysis import compile_programs, dispatch_of, limit_of, measure, resident_bytes
from fastaccum.memory.buffers import StepMemory
from fastaccum.memory.errors import OutOfMemoryError, explain
from fastaccum.memory.plan import Considered, Plan, Policy
from fastaccum.memory.search import divisors, largest_that_fits
from fastaccum.memory.tables import in_units
from fastaccum.step.step import Step

# Policies of recomputation, the cheapest first: none; all but products with weights; everything.
RECOMPUTED: tuple[Policy, ...] = (None, ["projection", "attention"], "nothing_saveable")
TIMED = 3  # the largest micro-batches that fit are timed, on a GPU
FASTER = 0.97  # of a larger micro-batch's time; a smaller one that gains less gains noise
SHARE = 0.95  # of a device's memory, planned to be filled where no limit is given: allocators leave gaps


def candidates(global_batch_size: int, replicas: int = 1, at_most: int | None = None) -> list[int]:
    """Lists the micro-batches that make a global batch: its divisors that are multiples of the replicas.

    Raises:
        ValueError: raised if the replicas do not divide the global batch.
    """
    if global_batch_size % replicas:
        down = global_batch_size // replicas * replicas
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be shared equally by {replicas} replicas: pass a multiple "
            f"of {replicas}, such as {down + replicas}."
        )
    return divisors(global_batch_size, replicas, at_most) or divisors(global_batch_size, replicas)[:1]


class Planner:
    """Plans the micro-batches of one step, and keeps what it compiled.

    Args:
        dispatched: train steps whose data a dispatch holds.
        timed: whether steps whose rows all only pad may be timed.
    """

    def __init__(
        self,
        step: Step,
        sample: Batch,
        global_batch_size: int,
        *,
        replicas: Replicas | None = None,
        dispatched: int = 1,
        timed: bool = False,
        verbose: Literal["auto", 0, 1, 2] = "auto",
    ):
        self._step, self._sample, self._global_batch, self._replicas = step, sample, global_batch_size, replicas
        self._dispatched, self._timed = dispatched, timed
        # In a notebook rich would ask for a package of widgets: the spinner's lines are printed there.
        self._prints = bool(verbose) and "ipykernel" in sys.modules
        spins = bool(verbose) and not self._prints and sys.stderr.isatty()
        self._console = Console(
            stderr=True, highlight=False, quiet=not spins, force_terminal=spins, force_jupyter=False
        )
        self._started = time.monotonic()
        self._memory: dict[tuple[str, int], StepMemory] = {}
        self._considered: list[Considered] = []
        self._limit, self._status = 0, self._console.status("plan: tracing")

    def plan(self, rows: Sequence[int], memory_limit: int | str | None, policies: Sequence[Policy]) -> Plan:
        """Plans among micro-batches of `rows`, rising, with the first policy under which one of them fits."""
        self._limit = self._agreed(min, self._limit_of(memory_limit))
        with self._status:
            for number, policy in enumerate(policies):
                with contextlib.ExitStack() as scope:
                    try:
                        scope.enter_context(self._recomputing(policy))
                        scope.enter_context(self._step.temporary_retrace())
                        # Where even the smallest may be too large, it comes first: the others are larger still.
                        if number and self._peak(policy, rows[0]) > self._limit:
                            continue
                    except ValueError as error:  # nothing could be computed again, or not all that was found
                        raise self._nothing_fits(rows[0], policies[:number], [_reason(error)]) from error
                    chosen = self._largest(policy, rows)
                    if chosen is not None:
                        return self._planned(policy, self._fastest(policy, chosen))
        raise self._nothing_fits(rows[0], policies)

    def _recomputing(self, policy: Policy) -> contextlib.AbstractContextManager[None]:
        """Applies a policy inside the block to the model's LayerStacks, or else to its blocks; None leaves it be.

        Raises:
            ValueError: raised if the model has neither.
        """
        stacks = [layer for layer in self._step.objective.model.layers if isinstance(layer, LayerStack)]
        if not stacks or policy is None:
            return recomputing(self._step.objective.model.model, policy)
        return replaced([each for stack in stacks for each in ((stack, "policy", policy), (stack, "unroll", False))])

    def _say(self, text: str) -> None:
        self._status.update(text)
        if self._prints:
            print(text, flush=True)

    def _limit_of(self, given: int | str | None) -> int:
        if given is not None:
            return device.parse_size(given)
        devices = [None] if self._replicas is None else self._replicas.devices
        found = [device.available(each and each.rpartition("device:")[2]) for each in devices]
        limit = min(limit_of(self._step, memory) for memory in found)
        return limit if found[0].source == device.LIMIT else int(SHARE * limit)

    def _agreed(self, which: Callable[[Iterable[int]], int], value: int) -> int:
        """Returns the least or the most that any worker says."""
        return value if self._replicas is None else which(int(said) for (said,) in self._replicas.gather([value]))

    def _largest(self, policy: Policy, rows: Sequence[int]) -> int | None:
        known = {c.batch_size: c.peak_bytes for c in self._considered if c.recompute == policy}
        chosen = largest_that_fits(lambda n: known.get(n) or self._peak(policy, n), rows, self._limit)
        return rows[-1] if chosen != rows[-1] and self._fits_whole(policy, rows[-1]) else chosen

    def _fits_whole(self, policy: Policy, rows: int) -> bool:
        """Returns whether one micro-batch of all rows, which needs no accumulators, fits where smaller ones do not.

        Compiles it only if a line through the two largest known peaks, less the accumulators, stays below the limit.
        """
        points = sorted((c.batch_size, c.peak_bytes) for c in self._considered if c.recompute == policy)
        (before, below), (last, top) = points[-2:] if len(points) > 1 else [(0, resident_bytes(self._step)), *points]
        if last == rows:
            return top <= self._limit
        accumulators = self._memory[repr(policy), last].by_kind["accumulators"]
        at_least = top - accumulators + (top - below) / (last - before) * (rows - last)
        return at_least <= self._limit and self._peak(policy, rows) <= self._limit

    def _peak(self, policy: Policy, rows: int) -> int:
        """Compiles the step for micro-batches of so many rows, and returns the peak."""
        steps, number = self._global_batch // rows, len(self._considered) + 1
        self._say(f"plan: compiling program {number}, micro-batches of {rows:,} rows")
        programs = compile_programs(self._step.trace(dispatch_of(self._sample, rows, steps)))
        memory, flops = measure(self._step, programs), cost.count(proto for _, proto in programs).flops
        # A dispatch of several train steps holds the data of all of them.
        more = (self._dispatched - 1) * memory.by_kind["data"]
        peak = self._agreed(max, memory.peak_bytes + more)
        self._considered.append(Considered(rows, steps, policy, peak, peak <= self._limit, flops))
        self._memory[repr(policy), rows] = memory
        return peak

    def _fastest(self, policy: Policy, chosen: int) -> int:
        """Returns the fastest of the largest micro-batches that fit, where steps may be timed; else `chosen`."""
        fit = [c for c in self._considered if c.recompute == policy and c.fits and self._timed]
        shortest: float | None = None
        for each in sorted(fit, key=lambda c: -c.batch_size)[:TIMED]:
            self._say(f"plan: timing micro-batches of {each.batch_size:,} rows")
            try:
                seconds = self._seconds(each)
            except (tf.errors.ResourceExhaustedError, OutOfMemoryError):  # the limit is above what there is
                continue
            self._considered[self._considered.index(each)] = each._replace(seconds=seconds)
            if shortest is None or seconds < FASTER * shortest:
                chosen, shortest = each.batch_size, seconds
        return chosen

    def _seconds(self, each: Considered) -> float:
        """Times a train step whose rows are all padding: no weight and no state moves, and its logs are undone."""
        dispatch = dispatch_of(self._sample, each.batch_size, each.accumulation_steps)
        stacks = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), dispatch.stacks)
        times = []
        variables = [*self._step.running.variables, *self._step.objective.model.metric_variables]
        measured = self._memory[repr(each.recompute), each.batch_size]
        # The guard protects the variables if memory runs out, and need not compile the step once more.
        with restored(variables), replaced([(self._step.guard, "measure", lambda run: measured)]):
            for _ in range(3):  # of which the first compiles
                start = time.perf_counter()
                bool(self._step.dispatch(Dispatch(stacks)).fine)  # waits
                times.append(time.perf_counter() - start)
        return min(times[1:])

    def _planned(self, policy: Policy, chosen: int) -> Plan:
        (found,) = (c for c in self._considered if (c.batch_size, c.recompute) == (chosen, policy))
        smallest = {repr(c.recompute): c.flops for c in sorted(self._considered, key=lambda c: -c.batch_size)}
        extra = smallest[repr(policy)] / smallest["None"] - 1 if policy and smallest["None"] else 0.0
        considered, seconds = tuple(self._considered), time.monotonic() - self._started
        return Plan(*found[:4], extra, self._limit, len(considered), seconds, considered)

    def _nothing_fits(self, rows: int, policies: Sequence[Policy], more: Sequence[str] = ()) -> OutOfMemoryError:
        memory = self._memory[repr(policies[-1]), rows]
        tried = f", nor does it with recompute={' or '.join(map(repr, policies[1:]))}" if policies[1:] else ""
        message = (
            f"Not even a micro-batch of {rows} row{'s' * (rows > 1)} fits{tried}: it takes "
            f"{in_units(memory.peak_bytes)} of a device, and {in_units(self._limit)} are there. Nothing was changed."
        )
        objective = self._step.objective
        saves = has_gpu() or any(isinstance(layer, LayerStack) for layer in objective.model.layers)  # as XLA compiles
        if saves and not (more or tried) and memory.by_kind["activations"]:
            more = ["recompute='auto' looks for the activations that it is enough to compute again."]
        return explain(message, memory, self._limit, objective.losses.outputs, more=more)


def _reason(error: ValueError) -> str:
    """Returns an error's message without the arguments of the layer's call that Keras adds."""
    parts = re.sub(r"\x1b\[\d+m", "", str(error)).split("\n\n")
    return parts[1] if "Exception encountered when calling" in parts[0] and parts[1:] else parts[0]
