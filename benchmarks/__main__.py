"""Runs the benchmarks and writes them up: `python -m benchmarks`, or `fastaccum bench`.

Each suite (benchmarks/suites/test_SUITE.py) runs in a process of its own. The report, its charts
and the whole run as one JSON go to a folder in benchmarks/results/.
"""

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.support import scores
from benchmarks.tools import readme, report, runner
from fastaccum.basics.warnings import one_line

NEEDED = {"pytest": "pytest", "pytest_benchmark": "pytest-benchmark", "matplotlib": "matplotlib"}
# Keys of a run that its report reads.
REQUIRED_KEYS = {"benchmarks", "commit_info", "datetime", "machine_info"}
# The largest run.json that is read, in bytes: a whole run has less than one MB.
MAX_RUN_BYTES = 2**28
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
EPILOG = """\
exit codes: 0 done; 1 a suite failed, or nothing was measured; 2 bad arguments, nothing started;
130 ended by Ctrl-C, with a report of the suites that were done. A missed bar is not a failure.
"""


def main(argv=None, folder=runner.FOLDER, prog="python -m benchmarks"):
    """Runs the command line `argv` on the suites in `folder`, and returns the exit code.

    Raises:
        SystemExit: with code 0 for --help, 2 for bad arguments.
    """
    known = runner.known(folder)
    parser = _parser(prog, known)
    options = parser.parse_args(argv)
    console = Console(highlight=False, markup=False)
    try:
        if options.out and options.out.exists() and not options.out.is_dir():
            raise BadArgument(f"--out {options.out} is a file: name a folder.")
        if options.from_run:
            return _write_up_again(_read(options), options, console)
        chosen = _choose_suites(options, known)
        _check_out(options)
        return _run_suites(chosen, known, options, console)
    except BadArgument as error:
        parser.error(str(error))


class BadArgument(Exception):
    """Error in the arguments: one line that names the value and the remedy."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def _parser(prog, known):
    parser = _Parser(
        prog=prog,
        description=__doc__.partition("\n\n")[2],
        epilog=f"suites: {', '.join(known)}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help="which suites to run (all)")
    add(
        "--quick",
        action="store_true",
        help=f"the smallest workload and few rounds of {', '.join(runner.QUICK)}",
    )
    add(
        "--readme",
        action="store_true",
        help="rewrite the measured tables of README.md and docs/ too",
    )
    add(
        "--from",
        dest="from_run",
        type=pathlib.Path,
        metavar="RUN.JSON",
        help="write up an earlier run; run nothing",
    )
    add(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="for the report (benchmarks/results/DATE-DEVICE)",
    )
    return parser


def _read(options):
    """Reads the run that `--from` names."""
    path = options.from_run
    if options.suites or options.quick:
        raise BadArgument("--from runs nothing: leave out --quick and the names of suites.")
    try:
        if not path.exists():
            raise BadArgument(f"--from {path} is not there: name the run.json of an earlier run.")
        if not path.is_file():
            raise BadArgument(f"--from {path} is no file: name the run.json of an earlier run.")
        if path.stat().st_size > MAX_RUN_BYTES:
            raise ValueError(f"it has more than {MAX_RUN_BYTES:,} bytes, as no run.json has")
        run = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadArgument(f"--from {path} cannot be read: {error}") from error
    is_run = isinstance(run, dict) and run.keys() >= REQUIRED_KEYS
    if not is_run or not isinstance(run["benchmarks"], list):
        raise BadArgument(
            f"--from {path} is not a run of these benchmarks: it must be a run.json, "
            "or what `pytest -n 0 benchmarks --benchmark-json` wrote."
        )
    left_out = runner.known().keys() - run.get("suites", {})
    _check_readme(options, left_out, run.get("quick"))
    return run


def _write_up_again(run, options, console):
    _check_out(options)
    try:
        return _write_up(run, options, console)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise BadArgument(f"--from {options.from_run} cannot be written up: {error!r}") from error


def _check_out(options):
    """Checks that the folder of the report can be made, before an hour of measuring."""
    try:
        if options.out and not options.out.exists():
            options.out.mkdir(parents=True)
            options.out.rmdir()  # until there is something for it
    except (OSError, ValueError) as error:
        raise BadArgument(f"--out {options.out} cannot be made: {error}") from error


def _choose_suites(options, known):
    """Returns the names of the suites to run."""
    for name in options.suites:
        if name not in known:
            raise BadArgument(f"unknown suite {name!r}; the suites are {', '.join(known)}.")
    missing = [
        package for module, package in NEEDED.items() if not importlib.util.find_spec(module)
    ]
    if missing:
        raise BadArgument(
            f'{", ".join(missing)} must be installed: pip install -c constraints.txt -e ".[test]"'
        )
    wanted = known
    if options.suites:
        wanted = options.suites
    elif options.quick:
        wanted = runner.QUICK
    chosen = [name for name in known if name in wanted]
    _check_readme(options, known.keys() - chosen, options.quick)
    return chosen


def _check_readme(options, left_out, quick):
    if options.readme and (left_out or quick):
        raise BadArgument(
            "--readme needs a run of all suites: the tables would lose their other rows."
        )


def _run_suites(chosen, known, options, console):
    left_out = [name for name in known if name not in chosen]
    if left_out:
        console.print(f"left out: {', '.join(left_out)}", soft_wrap=True)
    results = []
    interrupted = False
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(chosen))
        try:
            for name in chosen:
                bar.update(task, description=name)
                result = runner.run(name, known[name], pathlib.Path(scratch), options.quick)
                results.append(result)
                _print_result(result, console)
                bar.advance(task)
            bar.update(task, description="done")
        except KeyboardInterrupt:
            interrupted = True
            left_out += chosen[len(results) :]
            console.print(
                f"\ninterrupted; left out: {', '.join(left_out)}", style="red", soft_wrap=True
            )
    if interrupted:
        options.readme = False  # the tables need a run of all suites
    try:
        run = runner.merge(results, left_out, options.quick)
    except ValueError as error:
        console.print(error, style="red")
        code = 1
    else:
        code = _write_up(run, options, console)
    return INTERRUPTED if interrupted else code


def _print_result(result, console):
    """Prints a line for a suite, the output of a failure, and the reasons of failures and skips."""
    counts = {"passed": result.passed, "skipped": len(result.skipped), "failed": len(result.failed)}
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    style = "red" if result.failed else ""
    console.print(f"{result.name}: {summary}, {result.seconds:.0f} s", style=style)
    if result.failed:
        console.print(result.output, soft_wrap=True)
    for line in runner.by_reason(result.skipped):
        console.print(f"  skipped: {line}", soft_wrap=True)
    for line in runner.by_reason(result.failed):
        console.print(f"  failed: {line}", soft_wrap=True)


def _write_up(run, options, console):
    """Prints the scores of a run, writes its report, and returns the exit code."""
    run_scores = scores.of_run(run)
    device, _ = report.device(run)
    console.print(_table(run_scores, device))
    console.print(f"report: {report.write(run, options.out) / 'README.md'}", soft_wrap=True)
    failed = [name for name, result in run.get("suites", {}).items() if result["failed"]]
    if failed:
        kept = "; the measured tables stay as they were" if options.readme else ""
        console.print(f"failed: {', '.join(failed)}{kept}", style="red")
        return 1
    if options.readme:
        for measure in readme.update(run_scores):
            console.print(f"no figure in this run, hence no row: {measure}", soft_wrap=True)
    return 0


def _table(run_scores, device):
    """Makes a table of the scores, coloured where there is a bar."""
    table = Table("measure", "workload", title=f"medians of interleaved rounds, {device}")
    for header in ("figure", "bar"):
        table.add_column(header, justify="right")
    table.add_column("")
    styles = {"reached": "green", "MISSED": "red", "": ""}
    for score in run_scores:
        table.add_row(
            score.measure,
            score.workload,
            scores.number(score.value),
            score.bar_text,
            score.verdict,
            style=styles[score.verdict],
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
