"""Figures for people: numbers of bytes in units, and tables as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def in_units(size: float) -> str:
    """Formats a number of bytes: "3.2 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"


def render(table: Table) -> str:
    """Renders a table as plain text of 100 columns."""
    console = Console(width=100, force_terminal=False, force_jupyter=False, markup=False, emoji=False)
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
