"""Measures memory and its cost: `python -m benchmarks.memory SUBCOMMAND [--quick] [--out FOLDER]`.

A subcommand is a module of this package with `run(options) -> results.Result`, and perhaps
`add_options(parser)` for options of its own. Only the chosen module is imported, because others may
need packages that are not installed.
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
    "storage": (
        "what slots and weights in fewer bytes take, and a Llama of 7 billion on one card, by "
        "XLA's plan for an H200"
    ),
    "formula": "the formula of docs/memory.md beside XLA's plan for an H200",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns 1 if a bar was missed.

    Raises:
        SystemExit: with code 0 for --help, 2 for bad arguments.
    """
    if argv is None:
        argv = sys.argv[1:]
    options = _parser(argv).parse_args(argv)
    try:
        result = importlib.import_module(_module(options.subcommand)).run(options)
    except pytest.skip.Exception as missing:  # the helpers of tests skip without a compiler
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
    for name, description in SUBCOMMANDS.items():
        if importlib.util.find_spec(_module(name)) is None:
            continue
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("--quick", action="store_true", help="the smallest cases alone")
        command.add_argument(
            "--out", type=Path, metavar="FOLDER", help="(benchmarks/results/, by date)"
        )
        if name in argv[:1]:
            module = importlib.import_module(_module(name))
            if hasattr(module, "add_options"):
                module.add_options(command)
    return parser


def _module(name: str) -> str:
    return f"benchmarks.memory.{name}"


if __name__ == "__main__":
    sys.exit(main())
