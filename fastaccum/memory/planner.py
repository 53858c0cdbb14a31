"""Plans the largest micro-batch that fits a device, by compiling a few; nothing is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
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
from fastaccum.step.engine import Engine

Policy = str | Sequence[str] | None  # of `fastaccum.remat`

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


class Considered(NamedTuple):
    """A micro-batch that was compiled for a plan, or that plainly fits without."""

    batch_size: int  # rows, on all replicas together
    accumulation_steps: int  # micro-batches that make the global batch
    recompute: Policy  # of `fastaccum.remat`; None for the model as it is
    peak_bytes: int  # the most that each device would hold
    fits: bool  # whether the peak is within the limit
    flops: int = 0  # floating point operations of a train step's matrix products and convolutions
    # If false, the peak is a bound: what a step would hold if no result were ever freed.
    compiled: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """The micro-batch that `fastaccum.plan` chose. As text it is a table of those considered.

    Attributes:
        batch_size: rows of a micro-batch, as `fit` takes it: on all replicas together.
        accumulation_steps: micro-batches in an update; times `batch_size` the global batch.
        recompute: the policy to pass to `fastaccum.remat`; None where nothing need be recomputed.
        peak_bytes: the most that each device will hold, as XLA planned it; a bound where nothing
            was compiled.
        extra_flops: the share of arithmetic that `recompute` adds to a train step: 0.3 for 30%
            more.
        memory_limit: bytes that each device was allowed.
        compilations: programs that were compiled for the plan.
        seconds: time that the plan took.
        considered: the micro-batches that were looked at, in this order.
    """

    batch_size: int
    accumulation_steps: int
    recompute: Policy
    peak_bytes: int
    extra_flops: float
    memory_limit: int
    compilations: int
    seconds: float
    considered: tuple[Considered, ...]

    @property
    def summary(self) -> str:
        """The choice, in one line."""
        micro_batches = f"{self.accumulation_steps} micro-batch"
        if self.accumulation_steps > 1:
            micro_batches += "es"
        rows = _format_rows(self.batch_size * self.accumulation_steps)

        recompute = ""
        if self.recompute:
            recompute = f", recompute={self.recompute!r} ({self.extra_flops:+.0%} arithmetic)"

        peak = in_units(self.peak_bytes)
        if self.compilations == 0:
            peak = f"at most {peak}"

        programs = f"{self.compilations} program"
        if self.compilations != 1:
            programs += "s"

        return (
            f"batch_size={self.batch_size} x {micro_batches} = {rows}{recompute}: "
            f"{peak} of {in_units(self.memory_limit)} "
            f"({programs} compiled, {self.seconds:.0f} s)"
        )

    def __repr__(self) -> str:
        """Returns the table: notebooks show it for a plan on a cell's last line."""
        return str(self)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        for column in ("batch_size", "micro-batches", "peak", "of the limit"):
            table.add_column(column, justify="right")
        table.add_column("")

        # A column of policies would say nothing in a plan that recomputes nothing.
        shows_policies = any(considered.recompute for considered in self.considered)
        for considered in sorted(self.considered, key=_place_in_table):
            note = self._verdict(considered)
            if shows_policies:
                note += f"  {considered.recompute or 'as it is'}"
            table.add_row(
                f"{considered.batch_size:,}",
                f"{considered.accumulation_steps:,}",
                in_units(considered.peak_bytes),
                f"{considered.peak_bytes / self.memory_limit:.0%}",
                note,
            )
        return f"{render(table)}\n{self.summary}"

    def _verdict(self, considered: Considered) -> str:
        """Tells what came of a micro-batch: chosen, too large, or "" for one that fits too."""
        has_chosen_size = considered.batch_size == self.batch_size
        if has_chosen_size and considered.recompute == self.recompute:
            return "chosen"
        if considered.fits:
            return ""
        return "does not fit"


def _place_in_table(considered: Considered) -> tuple[bool, str, int]:
    """Returns what a plan's table is sorted by: models as they are come before recomputed ones."""
    return bool(considered.recompute), str(considered.recompute), considered.batch_size


def _format_rows(rows: int) -> str:
    if rows == 1:
        return "1 row"
    return f"{rows:,} rows"


def render(table: Table) -> str:
    """Renders a table as plain text of 100 columns."""
    console = Console(
        width=100, force_terminal=False, force_jupyter=False, markup=False, emoji=False
    )
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


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
        step: compiled for each size that is tried.
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
        step: Engine,
        sample: Batch,
        global_batch_size: int,
        *,
        replicas: Replicas | None = None,
        dispatched: int = 1,
        verbose: Literal["auto", 0, 1, 2] = "auto",
        bound_suffices: bool = False,
    ):
        self._bound_suffices = bound_suffices and not has_gpu()
        self._step = step
        self._sample = sample
        self._global_batch = global_batch_size
        self._replicas = replicas
        self._dispatched = dispatched
        self._verbose = bool(verbose)
        self._stacks = [
            layer for layer in step.objective.model.layers if isinstance(layer, LayerStack)
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
                    scope.enter_context(self._step.temporary_retrace())
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
        model = self._step.objective.model.model
        uses_xla = self._step.objective.options.uses_xla
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
        limit = min(limit_of(self._step, memory) for memory in memories)
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
        return self._step.trace(dispatch_of(self._sample, rows, micro_batches))

    def _bound(self, rows: int) -> int | None:
        """Bounds what a device would hold if no result were ever freed; None if it is not known.

        Nothing is compiled.
        """
        # Workers exchange numbers only. The smallest that does not fit stands for an unknown bound.
        unknown = self._limit + 1
        bytes_of_dispatch = unknown
        bytes_of_step = bytes_at_most(self._step, self._trace(rows))
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
                f"plan: compiling program {number}, micro-batches of {_format_rows(rows)}",
                file=sys.stderr,
                flush=True,
            )

        programs = compile_programs(self._trace(rows))
        memory = measure(self._step, programs)
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
        advice += self._step.advice
        outputs = self._step.objective.losses.outputs
        return explain(message, memory, self._limit, outputs, more=advice)
