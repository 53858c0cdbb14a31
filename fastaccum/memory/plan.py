"""The result of `fastaccum.plan`: the micro-batch, and those considered, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from fastaccum.memory.tables import in_units, render

Policy = str | Sequence[str] | None  # of `fastaccum.remat`


class Considered(NamedTuple):
    """A micro-batch that was compiled for a plan.

    Attributes:
        batch_size: its rows, on all replicas together.
        accumulation_steps: micro-batches that make the global batch.
        recompute: the policy of `fastaccum.remat`; None for the model as it is.
        peak_bytes: the most that each device would hold.
        fits: whether the peak is within the limit.
        flops: floating point operations of a train step's matrix products and convolutions.
    """

    batch_size: int
    accumulation_steps: int
    recompute: Policy
    peak_bytes: int
    fits: bool
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The micro-batch that `fastaccum.plan` chose. `print(plan)` shows a table of those considered.

    Attributes:
        batch_size: rows of a micro-batch, as `fit` takes it: on all replicas together.
        accumulation_steps: micro-batches in an update; times `batch_size` the global batch.
        recompute: the policy to pass to `fastaccum.remat`; None where nothing need be recomputed.
        peak_bytes: the most that each device will hold, as XLA planned it.
        extra_flops: the share of arithmetic that `recompute` adds to a train step: 0.3 for 30% more.
        memory_limit: bytes that each device was allowed.
        compilations: programs that were compiled for the plan.
        seconds: time that the plan took.
        considered: the micro-batches that were compiled, in this order.
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
        programs = f"{self.compilations} program{'s' * (self.compilations != 1)} compiled, {self.seconds:.0f} s"
        recompute = f", recompute={self.recompute!r} ({self.extra_flops:+.0%} arithmetic)" if self.recompute else ""
        micro_batches = f"{self.accumulation_steps} micro-batch{'es' * (self.accumulation_steps > 1)}"
        return (
            f"batch_size={self.batch_size} x {micro_batches} = {global_batch:,} rows"
            f"{recompute}: {in_units(self.peak_bytes)} of {in_units(self.memory_limit)} ({programs})"
        )

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        recomputed = any(c.recompute for c in self.considered)
        for column in ("batch_size", "micro-batches", "peak", "of the limit"):
            table.add_column(column, justify="right")
        table.add_column("")
        for each in sorted(self.considered, key=lambda c: (bool(c.recompute), str(c.recompute), c.batch_size)):
            chosen = (each.batch_size, each.recompute) == (self.batch_size, self.recompute)
            said = "chosen" if chosen else "" if each.fits else "does not fit"
            said += f"  {each.recompute or 'as it is'}" * recomputed
            figures = f"{each.batch_size:,}", f"{each.accumulation_steps:,}", in_units(each.peak_bytes)
            table.add_row(*figures, f"{each.peak_bytes / self.memory_limit:.0%}", said)
        return f"{render(table)}\n{self.summary}"
