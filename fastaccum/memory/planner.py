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

from fastaccum.adapters.attributes import replaced
from fastaccum.adapters.remat import recomputing
from fastaccum.data.stacks import Batch
from fastaccum.distribute.replicas import Replicas
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.lines import without_arguments
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
from fastaccum.step.step import Step

Policy = str | Sequence[str] | None  # of `fastaccum.remat`
# Policies of recomputation, the cheapest first: none; all but products with weights; all but
# attention; everything.
RECOMPUTED: tuple[Policy, ...] = (
    None,
    ["projection", "attention"],
    ["attention"],
    "nothing_saveable",
)
# of a device's memory, planned to be filled where no limit is given: allocators leave gaps
SHARE = 0.95


class Considered(NamedTuple):
    """A micro-batch that was compiled for a plan, or that plainly fits without."""

    batch_size: int  # rows, on all replicas together
    accumulation_steps: int  # micro-batches that make the global batch
    recompute: Policy  # of `fastaccum.remat`; None for the model as it is
    peak_bytes: int  # the most that each device would hold
    fits: bool  # whether the peak is within the limit
    flops: int = 0  # floating point operations of a train step's matrix products and convolutions
    # if not, the peak is a bound: what a step would hold if no result were ever freed
    compiled: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """The micro-batch that `fastaccum.plan` chose. As text it is a table of those considered.

    Attributes: batch_size: rows of a micro-batch, as `fit` takes it: on all replicas together.
        accumulation_steps: micro-batches in an update; times `batch_size` the global batch.
        recompute: the policy to pass to `fastaccum.remat`; None where nothing need be recomputed.
        peak_bytes: the most that each device will hold, as XLA planned it; a bound where nothing
        was compiled. extra_flops: the share of arithmetic that `recompute` adds to a train step:
        0.3 for 30% more. memory_limit: bytes that each device was allowed. compilations: programs
        that were compiled for the plan. seconds: time that the plan took. considered: the
        micro-batches that were looked at, in this order.
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
        global_batch = self.batch_size * self.accumulation_steps
        programs = (
            f"{self.compilations} program{'s' * (self.compilations != 1)} compiled, "
            f"{self.seconds:.0f} s"
        )
        at_most = "" if self.compilations else "at most "
        recompute = (
            f", recompute={self.recompute!r} ({self.extra_flops:+.0%} arithmetic)"
            if self.recompute
            else ""
        )
        micro_batches = (
            f"{self.accumulation_steps} micro-batch{'es' * (self.accumulation_steps > 1)}"
        )
        rows = "1 row" if global_batch == 1 else f"{global_batch:,} rows"
        return (
            f"batch_size={self.batch_size} x {micro_batches} = {rows}{recompute}: "
            f"{at_most}{in_units(self.peak_bytes)} of {in_units(self.memory_limit)} ({programs})"
        )

    def __repr__(self) -> str:
        """Returns the table: notebooks show it for a plan on a cell's last line."""
        return str(self)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        recomputed = any(c.recompute for c in self.considered)
        for column in ("batch_size", "micro-batches", "peak", "of the limit"):
            table.add_column(column, justify="right")
        table.add_column("")
        for each in sorted(
            self.considered, key=lambda c: (bool(c.recompute), str(c.recompute), c.batch_size)
        ):
            chosen = (each.batch_size, each.recompute) == (self.batch_size, self.recompute)
            said = "chosen" if chosen else "" if each.fits else "does not fit"
            said += f"  {each.recompute or 'as it is'}" * recomputed
            figures = (
                f"{each.batch_size:,}",
                f"{each.accumulation_steps:,}",
                in_units(each.peak_bytes),
            )
            table.add_row(*figures, f"{each.peak_bytes / self.memory_limit:.0%}", said)
        return f"{render(table)}\n{self.summary}"


def render(table: Table) -> str:
    """Renders a table as plain text of 100 columns."""
    console = Console(
        width=100, force_terminal=False, force_jupyter=False, markup=False, emoji=False
    )
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def divisors(number: int, multiple_of: int = 1, at_most: int | None = None) -> list[int]:
    """Returns the divisors of a number that are multiples of another, in rising order, none above
    `at_most`.
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*low, *(number // d for d in low)})
    return [d for d in found if d % multiple_of == 0 and (at_most is None or d <= at_most)]


def largest_that_fits(
    peak: Callable[[int], float], candidates: Sequence[int], limit: float
) -> int | None:
    """Bisects rising `candidates` for the largest whose peak is at most `limit`; returns None where
    none fits.

    `peak`, which must not fall as the rows grow, is called, once each, for the candidate that is
    returned and for the next larger one, and for `log2(len(candidates) + 1)` candidates at most.
    """
    fitting = bisect_right(candidates, limit, key=peak)
    return candidates[fitting - 1] if fitting else None


def candidates(global_batch_size: int, replicas: int = 1, at_most: int | None = None) -> list[int]:
    """Lists the micro-batches that make a global batch; raises ValueError if replicas do not divide
    it.
    """
    if global_batch_size % replicas:
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be shared equally by {replicas} "
            f"replicas: pass a multiple of {replicas}, such as "
            f"{(global_batch_size // replicas + 1) * replicas}."
        )
    return (
        divisors(global_batch_size, replicas, at_most) or divisors(global_batch_size, replicas)[:1]
    )


class Planner:
    """Plans the micro-batches of one step, and notes what each program would take."""

    def __init__(
        self,
        step: Step,
        sample: Batch,
        global_batch_size: int,
        *,
        replicas: Replicas | None = None,
        dispatched: int = 1,
        verbose: Literal["auto", 0, 1, 2] = "auto",
        bound_suffices: bool = False,
    ):
        # whose convolutions work in memory of no graph
        self._bound_suffices = bound_suffices and not has_gpu()
        self._step, self._sample, self._global_batch, self._replicas = (
            step,
            sample,
            global_batch_size,
            replicas,
        )
        # train steps whose data a dispatch holds
        self._dispatched, self._verbose = dispatched, bool(verbose)
        self._stacks = [
            layer for layer in step.objective.model.layers if isinstance(layer, LayerStack)
        ]
        self._started, self._limit = time.monotonic(), 0
        self._memory: dict[tuple[str, int], StepMemory] = {}
        self._considered: list[Considered] = []

    def plan(
        self, rows: Sequence[int], memory_limit: int | str | None, policies: Sequence[Policy]
    ) -> Plan:
        """Plans among micro-batches of `rows`, rising, with the first policy under which one of
        them fits.
        """
        self._limit = self._agreed(min, self._limit_of(memory_limit))
        for number, policy in enumerate(policies):
            with contextlib.ExitStack() as scope:
                try:
                    scope.enter_context(self._recomputing(policy))
                    scope.enter_context(self._step.temporary_retrace())
                    # Where even the smallest may be too large, it comes first: the others are
                    # larger still.
                    if number and self._peak(policy, rows[0]) > self._limit:
                        continue
                except ValueError as error:
                    # nothing could be computed again, or not all that was found
                    raise self._nothing_fits(
                        rows[0], policies[:number], [without_arguments(error)]
                    ) from error
                chosen = self._largest(policy, rows)
                if chosen is not None:
                    return self._planned(policy, chosen)
        raise self._nothing_fits(rows[0], policies)

    def _recomputing(self, policy: Policy) -> contextlib.AbstractContextManager[None]:
        """Applies a policy to the model's LayerStacks, or else its blocks; raises ValueError if it
        would do nothing.
        """
        if policy and not (self._stacks or self._step.objective.options.uses_xla):
            raise ValueError(
                "The step runs without XLA, where no block is computed again: try jit_compile=True."
            )
        if not self._stacks or policy is None:
            return recomputing(self._step.objective.model.model, policy)
        return replaced(
            [each for s in self._stacks for each in ((s, "policy", policy), (s, "unroll", False))]
        )

    def _limit_of(self, given: int | str | None) -> int:
        if given is not None:
            return device.parse_size(given)
        devices = [None] if self._replicas is None else self._replicas.devices
        found = [device.available(each) for each in devices]
        limit = min(limit_of(self._step, memory) for memory in found)
        return limit if found[0].source == device.LIMIT else int(SHARE * limit)

    def _agreed(self, which: Callable[[Iterable[int]], int], value: int) -> int:
        """Returns the least or the most that any worker says."""
        return (
            value
            if self._replicas is None
            else which(int(said) for (said,) in self._replicas.gather([value]))
        )

    def _largest(self, policy: Policy, rows: Sequence[int]) -> int | None:
        known = {c.batch_size: c.peak_bytes for c in self._considered if c.recompute == policy}
        if not known:
            most = rows[-1]
            bound = self._bound(most)
            if bound is not None and bound <= self._limit:
                if self._bound_suffices:
                    steps = self._global_batch // most
                    self._considered.append(
                        Considered(most, steps, policy, bound, fits=True, compiled=False)
                    )
                    return most
                known[most] = self._peak(policy, most)
                if known[most] <= self._limit:  # what a GPU's convolutions work in is in no graph
                    return most
        return largest_that_fits(lambda n: known.get(n) or self._peak(policy, n), rows, self._limit)

    def _trace(self, rows: int) -> list[ConcreteFunction]:
        return self._step.trace(dispatch_of(self._sample, rows, self._global_batch // rows))

    def _bound(self, rows: int) -> int | None:
        """Returns, without compiling, what a device would hold if no result were ever freed; None
        if not known.
        """
        bound = bytes_at_most(self._step, self._trace(rows))
        unknown = self._limit + 1
        bound = self._agreed(max, unknown if bound is None else self._dispatched * bound)
        return None if bound == unknown else bound

    def _peak(self, policy: Policy, rows: int) -> int:
        """Compiles the step for micro-batches of so many rows, and returns the peak."""
        steps, number = self._global_batch // rows, len(self._considered) + 1
        if self._verbose:
            size = "1 row" if rows == 1 else f"{rows:,} rows"
            print(
                f"plan: compiling program {number}, micro-batches of {size}",
                file=sys.stderr,
                flush=True,
            )
        programs = compile_programs(self._trace(rows))
        memory, flops = (
            measure(self._step, programs),
            cost.count(proto for _, proto in programs).flops,
        )
        # A dispatch of several train steps holds the data of all of them.
        peak = self._agreed(
            max, memory.peak_bytes + (self._dispatched - 1) * memory.by_kind["data"]
        )
        self._considered.append(Considered(rows, steps, policy, peak, peak <= self._limit, flops))
        self._memory[repr(policy), rows] = memory
        return peak

    def _planned(self, policy: Policy, chosen: int) -> Plan:
        (found,) = (c for c in self._considered if (c.batch_size, c.recompute) == (chosen, policy))
        smallest = {
            repr(c.recompute): c.flops
            for c in sorted(self._considered, key=lambda c: -c.batch_size)
        }
        extra = (
            smallest[repr(policy)] / smallest["None"] - 1 if policy and smallest["None"] else 0.0
        )
        considered, seconds = tuple(self._considered), time.monotonic() - self._started
        compilations = sum(each.compiled for each in considered)
        return Plan(*found[:4], extra, self._limit, compilations, seconds, considered)

    def _nothing_fits(
        self, rows: int, policies: Sequence[Policy], more: Sequence[str] = ()
    ) -> OutOfMemoryError:
        memory = self._memory[repr(policies[-1]), rows]
        tried = (
            f", nor does it with recompute={' or '.join(map(repr, policies[1:]))}"
            if policies[1:]
            else ""
        )
        message = (
            f"Not even a micro-batch of {rows} row{'s' * (rows > 1)} fits{tried}: it takes "
            f"{in_units(memory.peak_bytes)} of a device, and {in_units(self._limit)} are there. "
            "Nothing was changed."
        )
        if (has_gpu() or self._stacks) and not (more or tried) and memory.by_kind["activations"]:
            more = [
                "recompute='auto' looks for the activations that it is enough to compute again."
            ]
        more = [*more, *self._step.advice]
        return explain(message, memory, self._limit, self._step.objective.losses.outputs, more=more)
