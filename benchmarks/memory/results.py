"""Results of a subcommand, kept as JSON and as a Markdown table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.tools.report import RESULTS


@dataclasses.dataclass
class Result:
    """Figures of one subcommand.

    Attributes:
        title: names the figures and the device.
        rows: one dict a row, all with the same keys, the table's headers; strings, numbers, None.
        missed: a sentence for each bar that was not reached: then the command fails.
        notes: Markdown that follows the table.
    """

    title: str
    rows: list[dict[str, Any]]
    missed: list[str] = dataclasses.field(default_factory=list)
    notes: str = ""

    def markdown(self) -> str:
        """Writes the table, and below it the missed bars and the notes.

        >>> rows = [{"model": "nano", "MiB": 12.5}, {"model": "124m", "MiB": None}]
        >>> print(Result("Sizes", rows).markdown())
        # Sizes
        <BLANKLINE>
        | model | MiB |
        | --- | --- |
        | nano | 12.5 |
        | 124m |  |
        """
        lines = []
        if self.rows:
            headers = list(self.rows[0])
            lines += [headers, ["---"] * len(headers)]
        for row in self.rows:
            lines.append([_cell(value) for value in row.values()])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        missed = "\n".join(f"- MISSED: {sentence}" for sentence in self.missed)
        return "\n\n".join(part for part in (f"# {self.title}", table, missed, self.notes) if part)


def write(name: str, result: Result, folder: Path | None = None) -> Path:
    """Writes `NAME.json` and `NAME.md`; returns the path of the latter.

    Args:
        name: the subcommand's.
        result: its figures.
        folder: by default in benchmarks/results/, named after the date.
    """
    folder = folder or RESULTS / f"{datetime.date.today()}-memory"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": f"{datetime.date.today()}", "cores": os.cpu_count()}
    (folder / f"{name}.json").write_text(
        json.dumps(about | dataclasses.asdict(result), indent=1) + "\n"
    )
    path = folder / f"{name}.md"
    path.write_text(result.markdown() + "\n")
    return path


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}"
    return str(value)
