"""The plan of a micro-batch that fits a device, and its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from fastaccum.memory.errors import in_units

Policy = str | Sequence[str] | None  # of `fastaccum.remat`


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
        rows = format_rows(self.batch_size * self.accumulation_steps)

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


def format_rows(rows: int) -> str:
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
