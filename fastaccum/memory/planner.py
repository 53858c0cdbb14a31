"""Plans the largest micro-batch that fits a device, by compiling a few; nothing is trained."""

from __future__ import annotations

import contextlib
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.attributes import replaced
from fastaccum.basics.warnings import without_arguments
from fastaccum.data.stacks import Batch
from fastaccum.distribute.replicas import Replicas
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.layers.remat import recomputing
from fastaccum.memory import cost, device
from fastaccum.memory.analysis import (
    bytes_at_most,
    compile_programs,
    dispatch_of,
    limit_of,
    measure,
)
from fastaccum.memory.buffers import StepMemory
from fastaccum.memory.errors import OutOfMemoryError, explain, in_units
from fastaccum.memory.plan import Considered, Plan, Policy, format_rows
from fastaccum.step.engine import Engine

# The policies of recomputation that a plan tries, the cheapest first: none; all but products with
# weights; all but attention; everything.
RECOMPUTED: tuple[Policy, ...] = (
    None,
    ["projection", "attention"],
    ["attention"],
    "nothing_saveable",
)

# Without a limit of the user's, a plan fills at most this share of a device's memory, since
# allocators leave gaps.
SHARE_TO_FILL = 0.95


def divisors(number: int, multiple_of: int = 1, at_most: int | None = None) -> list[int]:
    """Returns a number's divisors in rising order: multiples of `multiple_of`, up to `at_most`."""
    all_divisors = set()
    for low in range(1, int(number**0.5) + 1):
        if number % low == 0:
            all_divisors.add(low)
            all_divisors.add(number // low)

    multiples = [divisor for divisor in sorted(all_divisors) if divisor % multiple_of == 0]
    if at_most is None:
        return multiples
    return [divisor for divisor in multiples if divisor <= at_most]


def largest_that_fits(
    peak: Callable[[int], float], candidates: Sequence[int], limit: float
) -> int | None:
    """Bisects rising `candidates` for the largest whose peak is at most `limit`; None if none fits.

    `peak`, which must not fall as the rows grow, is called, once each, for the candidate that is
    returned and for the next larger one, and for `log2(len(candidates) + 1)` candidates at most.
    """
    fitting = bisect_right(candidates, limit, key=peak)
    if fitting == 0:
        return None
    return candidates[fitting - 1]


def candidates(global_batch_size: int, replicas: int = 1, at_most: int | None = None) -> list[int]:
    """Lists the sizes of micro-batches that make a global batch; always at least the smallest.

    Raises:
        ValueError: raised if the replicas cannot share the global batch equally.
    """
    if global_batch_size % replicas:
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be shared equally by {replicas} "
            f"replicas: pass a multiple of {replicas}, such as "
            f"{(global_batch_size // replicas + 1) * replicas}."
        )
    small_enough = divisors(global_batch_size, replicas, at_most)
    if small_enough:
        return small_enough
    return divisors(global_batch_size, replicas)[:1]


class Planner:
    """Plans the micro-batches of one step, and notes what each program would take.

    Args:
        engine: its step is compiled for each size that is tried.
        sample: specs of a micro-batch.
        global_batch_size: rows of an update.
        replicas: share each micro-batch; None for one device.
        dispatched: train steps whose data a dispatch holds.
        verbose: prints what is compiled.
        bound_suffices: takes a bound of the peak for the peak where even the bound is within the
            limit, and compiles nothing. This holds on CPUs alone: a GPU's convolutions work in
            memory of no graph, which a bound does not count.
    """

    def __init__(
        self,
        engine: Engine,
        sample: Batch,
        global_batch_size: int,
        *,
        replicas: Replicas | None = None,
        dispatched: int = 1,
        verbose: Literal["auto", 0, 1, 2] = "auto",
        bound_suffices: bool = False,
    ):
        self._bound_suffices = bound_suffices and not has_gpu()
        self._engine = engine
        self._sample = sample
        self._global_batch = global_batch_size
        self._replicas = replicas
        self._dispatched = dispatched
        self._verbose = bool(verbose)
        self._stacks = [
            layer for layer in engine.objective.model.layers if isinstance(layer, LayerStack)
        ]
        self._started = time.monotonic()
        self._limit = 0
        self._memory: dict[tuple[str, int], StepMemory] = {}  # by the policy's repr and the rows
        self._considered: list[Considered] = []

    def plan(
        self, sizes: Sequence[int], memory_limit: int | str | None, policies: Sequence[Policy]
    ) -> Plan:
        """Plans with the first policy under which a micro-batch fits.

        Args:
            sizes: the sizes of micro-batches to choose among, in rising order.
            memory_limit: as for `fastaccum.plan`.
            policies: of recomputation, in the order in which they are tried.
        """
        self._limit = self._agreed(min, self._limit_of(memory_limit))
        smallest = sizes[0]
        for number, policy in enumerate(policies):
            with contextlib.ExitStack() as scope:
                try:
                    scope.enter_context(self._recomputing(policy))
                    scope.enter_context(self._engine.temporary_retrace())
                    # Nothing fitted under the policies before this one. Under it even the smallest
                    # micro-batch may be too large, and then so are all others.
                    may_fit = number == 0 or self._peak(policy, smallest) <= self._limit
                except ValueError as error:
                    # Nothing could be computed again, or not all that was found.
                    tried = policies[:number]
                    reason = without_arguments(error)
                    raise self._nothing_fits(smallest, tried, [reason]) from error
                if not may_fit:
                    continue
                chosen = self._largest(policy, sizes)
                if chosen is not None:
                    return self._planned(policy, chosen)
        raise self._nothing_fits(smallest, policies)

    def _recomputing(self, policy: Policy) -> contextlib.AbstractContextManager[None]:
        """Applies a policy to the model's LayerStacks, or to its blocks if it has none.

        Raises:
            ValueError: raised if the policy would do nothing.
        """
        model = self._engine.objective.model.model
        uses_xla = self._engine.objective.options.uses_xla
        if policy and not self._stacks and not uses_xla:
            raise ValueError(
                "The step runs without XLA, where no block is computed again: try jit_compile=True."
            )
        if policy is None or not self._stacks:
            return recomputing(model, policy)

        attributes: list[tuple[object, str, object]] = []
        for stack in self._stacks:
            attributes.append((stack, "policy", policy))
            attributes.append((stack, "unroll", False))
        return replaced(attributes)

    def _limit_of(self, memory_limit: int | str | None) -> int:
        """Returns the bytes that a plan may fill of each of this process's devices."""
        if memory_limit is not None:
            return device.parse_size(memory_limit)

        devices: Sequence[str | None] = [None]
        if self._replicas is not None:
            devices = self._replicas.devices
        memories = [device.available(name) for name in devices]
        limit = min(limit_of(self._engine, memory) for memory in memories)
        if memories[0].source == device.LIMIT:  # the user's own, which is meant as it is
            return limit
        return int(SHARE_TO_FILL * limit)

    def _agreed(self, which: Callable[[Iterable[int]], int], value: int) -> int:
        """Returns the value that all workers go by: the least with `min`, the most with `max`."""
        if self._replicas is None:
            return value
        return which(int(number) for (number,) in self._replicas.gather([value]))

    def _largest(self, policy: Policy, sizes: Sequence[int]) -> int | None:
        """Finds the largest size that fits under a policy, which is already applied."""
        peaks: dict[int, int] = {}
        for considered in self._considered:
            if considered.recompute == policy:
                peaks[considered.batch_size] = considered.peak_bytes

        # The largest micro-batch comes first: where there is plainly room, it is the only one.
        if not peaks:
            most = sizes[-1]
            bound = self._bound(most)
            if bound is not None and bound <= self._limit:
                if self._bound_suffices:
                    self._consider_by_bound(policy, most, bound)
                    return most
                # The caller wants the peak itself, or the bound leaves out what a GPU takes.
                peaks[most] = self._peak(policy, most)
                if peaks[most] <= self._limit:
                    return most

        def peak(batch_size: int) -> int:
            return peaks.get(batch_size) or self._peak(policy, batch_size)

        return largest_that_fits(peak, sizes, self._limit)

    def _consider_by_bound(self, policy: Policy, rows: int, bound: int) -> None:
        """Notes a micro-batch that fits by its bound, and is not compiled."""
        micro_batches = self._global_batch // rows
        self._considered.append(
            Considered(rows, micro_batches, policy, bound, fits=True, compiled=False)
        )

    def _trace(self, rows: int) -> list[ConcreteFunction]:
        micro_batches = self._global_batch // rows
        return self._engine.trace(dispatch_of(self._sample, rows, micro_batches))

    def _bound(self, rows: int) -> int | None:
        """Bounds what a device would hold if no result were ever freed; None if it is not known.

        Nothing is compiled.
        """
        # Workers exchange numbers only. The smallest that does not fit stands for an unknown bound.
        unknown = self._limit + 1
        bytes_of_dispatch = unknown
        bytes_of_step = bytes_at_most(self._engine, self._trace(rows))
        if bytes_of_step is not None:
            bytes_of_dispatch = self._dispatched * bytes_of_step

        bound = self._agreed(max, bytes_of_dispatch)
        if bound == unknown:
            return None
        return bound

    def _peak(self, policy: Policy, rows: int) -> int:
        """Compiles the step for micro-batches of so many rows, and returns the peak."""
        if self._verbose:
            number = len(self._considered) + 1
            print(
                f"plan: compiling program {number}, micro-batches of {format_rows(rows)}",
                file=sys.stderr,
                flush=True,
            )

        programs = compile_programs(self._trace(rows))
        memory = measure(self._engine, programs)
        flops = cost.count(proto for _, proto in programs).flops

        # A dispatch of several train steps holds the data of all of them.
        data_of_other_steps = (self._dispatched - 1) * memory.by_kind["data"]
        peak = self._agreed(max, memory.peak_bytes + data_of_other_steps)

        micro_batches = self._global_batch // rows
        fits = peak <= self._limit
        self._considered.append(Considered(rows, micro_batches, policy, peak, fits, flops))
        self._memory[repr(policy), rows] = memory
        return peak

    def _planned(self, policy: Policy, rows: int) -> Plan:
        """Makes the plan that has chosen micro-batches of so many rows under a policy."""
        (chosen,) = (
            considered
            for considered in self._considered
            if considered.batch_size == rows and considered.recompute == policy
        )
        extra_flops = self._extra_flops(policy)
        return Plan(
            batch_size=chosen.batch_size,
            accumulation_steps=chosen.accumulation_steps,
            recompute=chosen.recompute,
            peak_bytes=chosen.peak_bytes,
            extra_flops=extra_flops,
            memory_limit=self._limit,
            compilations=sum(considered.compiled for considered in self._considered),
            seconds=time.monotonic() - self._started,
            considered=tuple(self._considered),
        )

    def _extra_flops(self, policy: Policy) -> float:
        """Returns the share of arithmetic that a policy adds to the smallest micro-batches.

        These were compiled with the policy and without; larger ones may compute less.
        """
        if not policy:
            return 0.0

        flops_as_it_is = self._smallest_considered(None).flops
        if not flops_as_it_is:
            return 0.0
        return self._smallest_considered(policy).flops / flops_as_it_is - 1

    def _smallest_considered(self, policy: Policy) -> Considered:
        """Returns the smallest micro-batch that was considered under a policy."""
        under_policy = [c for c in self._considered if c.recompute == policy]
        return min(under_policy, key=lambda considered: considered.batch_size)

    def _nothing_fits(
        self, rows: int, tried: Sequence[Policy], reasons: Sequence[str] = ()
    ) -> OutOfMemoryError:
        """Makes the error of a plan whose smallest micro-batch does not fit under a tried policy.

        Args:
            rows: of the smallest micro-batch.
            tried: the policies under which it was compiled, of which the first is None.
            reasons: why no other policy was tried.
        """
        last_policy = tried[-1]
        memory = self._memory[repr(last_policy), rows]
        size = f"{rows} row"
        if rows > 1:
            size += "s"
        without_success = ""
        recomputed = tried[1:]  # the first policy leaves the model as it is
        if recomputed:
            policies = " or ".join(map(repr, recomputed))
            without_success = f", nor does it with recompute={policies}"
        message = (
            f"Not even a micro-batch of {size} fits{without_success}: it takes "
            f"{in_units(memory.peak_bytes)} of a device, and {in_units(self._limit)} are there. "
            "Nothing was changed."
        )

        advice = list(reasons)
        # On a CPU, XLA saves nothing if blocks are computed again; a LayerStack saves anywhere.
        saves_memory = has_gpu() or self._stacks
        has_tried = recomputed or reasons
        if saves_memory and not has_tried and memory.by_kind["activations"]:
            advice.append(
                "recompute='auto' looks for the activations that it is enough to compute again."
            )
        advice += self._engine.advice
        outputs = self._engine.objective.losses.outputs
        return explain(message, memory, self._limit, outputs, more=advice)
