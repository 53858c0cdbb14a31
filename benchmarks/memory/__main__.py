"""What fits and what it costs: `python -m benchmarks.memory SUBCOMMAND [--quick] [--out FOLDER]`.

A subcommand is a module of this package with `run(options) -> results.Result`. It is imported when
it is asked for: what it needs need not be installed for the others. It may have
`add_options(parser)` for options of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.memory import results

SUBCOMMANDS = {
    "plan": "the planner's choices over models and limits, each confirmed by the next larger size",
    "peak": "predicted memory beside what was measured",
    "remat": "recomputation: temp memory, gradients, and time of a step",
    "warm": "a second process's first step beside the first's",
    "shares": (
        "what a device holds that shares the optimizer's slots with others, by XLA's plan for an "
        "H200"
    ),
    "formula": "the formula of docs/memory.md beside XLA's plan for an H200",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns 1 where a bar was missed.

    Raises:
        SystemExit: with code 0 for --help, 2 for bad arguments.
    """
    options = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
    try:
        result = importlib.import_module(_module(options.subcommand)).run(options)
    except pytest.skip.Exception as missing:  # what compiles for an H200 says so as to a test
        print(missing.msg, file=sys.stderr)
        return 1
    print(result.markdown())
    print(f"\nwritten: {results.write(options.subcommand, result, options.out)}")
    return 1 if result.missed else 0


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(required=True, dest="subcommand", metavar="SUBCOMMAND")
    for name, what in SUBCOMMANDS.items():
        if importlib.util.find_spec(_module(name)) is None:
            continue
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--quick", action="store_true", help="the smallest cases alone")
        command.add_argument(
            "--out", type=Path, metavar="FOLDER", help="(benchmarks/results/, by date)"
        )
        if name in argv[:1]:
            getattr(importlib.import_module(_module(name)), "add_options", lambda command: None)(
                command
            )
    return parser


def _module(name: str) -> str:
    return f"benchmarks.memory.{name}"


if __name__ == "__main__":
    sys.exit(main())
