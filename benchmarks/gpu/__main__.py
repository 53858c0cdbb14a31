"""Runs every contestant on this machine's GPU: `python -m benchmarks.gpu FOLDER`.

`benchmarks.gpu.export` writes FOLDER. Each contestant has a process of its own, so that its peak
memory and its autotuning are its own. The command prints one Markdown table, and writes
results.json and results.md. It needs JAX, optax and PyTorch.
"""

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import manifest, measure

MINUTES = 8  # for all contestants together
NEEDS = {"run": ("jax",), "jax_peer": ("jax", "optax"), "torch_peer": ("torch",)}
ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """Run of a contestant on a program.

    Args:
        contestant: its name.
        program: the program's name.
        module: of benchmarks.gpu, which runs it.
        options: further arguments of the module.
    """

    contestant: str
    program: str
    module: str
    options: tuple = ()


def runs(programs):
    """Yields the runs, the most important first.

    Args:
        programs: by name.
    """
    by_purpose = {"check": [], "time": [], "memory": []}
    for program in programs.values():
        by_purpose[program["purpose"]].append(program)

    for program in by_purpose["check"]:
        yield _ours(program)
    for dtype in ("bfloat16", "float16"):
        for preset in ("124m", "350m"):
            timed = [
                program
                for program in by_purpose["time"]
                if program["preset"] == preset and program["dtype"] == dtype
            ]
            for program in timed:
                yield _ours(program)
            # Any program whose weights are stacked tells the peers their model.
            stacked = [program["name"] for program in timed if program["stacked"]]
            if stacked:
                yield Run("torch.compile", stacked[0], "torch_peer")
                if dtype == "bfloat16":
                    yield Run("JAX scan", stacked[0], "jax_peer")
                yield Run("PyTorch eager", stacked[0], "torch_peer", ("--eager",))
        if dtype == "bfloat16":
            for program in by_purpose["memory"]:
                yield _ours(program)


def _ours(program):
    return Run("fastaccum", program["name"], "run")


def run(folder, name, module, options, seconds):
    """Runs one contestant in a process of its own.

    Returns:
        Its measurements, or `{"skipped": reason}`, or `{"failed": last line, "stderr": text}`.
    """
    missing = [package for package in NEEDS[module] if importlib.util.find_spec(package) is None]
    if missing:
        return {"skipped": f"{' and '.join(missing)} not installed"}
    # JAX allocates as a program needs it, so that its peak is the program's.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [
        sys.executable,
        "-m",
        f"benchmarks.gpu.{module}",
        str(folder.resolve()),
        name,
        *options,
    ]
    # The process gets a group of its own: torch.compile's workers outlive it and hold its pipes.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=max(1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"skipped": f"was not done when the {MINUTES} minutes were over"}
    objects = [line for line in stdout.splitlines() if line.startswith("{")]
    if process.returncode or not objects:
        errors = stderr.strip().splitlines() or ["nothing on stderr"]
        return {"failed": errors[-1], "stderr": stderr[-4000:]}
    return json.loads(objects[-1])


def table(results):
    """Writes the results as Markdown: a row for each contestant, then notes on the others."""
    lines = [
        "| model, dtype | contestant | step, ms | predicted, ms | tokens/s | of the matmul rate "
        "| peak memory, GiB | first loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    measured = [
        result for result in results if "step_seconds" in result and result["purpose"] == "time"
    ]
    measured.sort(key=lambda result: (result["preset"], result["dtype"], result["step_seconds"]))
    lines += [_row(result) for result in measured]
    lines += _prediction_notes(measured)
    checked = [
        result["program"]
        for result in results
        if result["purpose"] == "check" and "losses" in result
    ]
    lines.append("")
    lines.append(f"Losses agree with TensorFlow's on a CPU: {', '.join(checked) or 'none run'}.")
    planned = [
        f"{result['micro_batches']}: {result['temp_bytes'] / 2**30:.3f}"
        for result in results
        if result["purpose"] == "memory" and "temp_bytes" in result
    ]
    if planned:
        lines += ["", f"Temp memory by micro-batches, GiB: {', '.join(planned)}."]
    for outcome in ("failed", "skipped"):
        lines.append("")
        for result in results:
            if outcome in result:
                program = f"{result['label']} on {result['program']}"
                lines.append(f"{outcome.capitalize()}: {program}: {result[outcome]}")
    return "\n".join(lines).rstrip() + "\n"


def _row(result):
    predicted = ""
    if result["predicted"]:
        predicted = f"{result['predicted']['ms']:.1f} to {result['predicted']['serial_ms']:.1f}"
    peak = ""
    if result["peak_bytes"] is not None:
        peak = f"{result['peak_bytes'] / 2**30:.1f}"
    return (
        f"| GPT {result['preset']}, {result['dtype']} | {result['label']} | "
        f"{1e3 * result['step_seconds']:.1f} | {predicted} | "
        f"{result['tokens_per_second']:,.0f} | {result['model_flops_utilisation']:.1%} | {peak} "
        f"| {result['losses'][0]:.4f} |"
    )


def _prediction_notes(measured):
    """Explains the predictions, and names the device if they are of another one."""
    predicted = [result for result in measured if result["predicted"]]
    if not predicted:
        return []
    device = predicted[0]["predicted"]["device"]
    lines = [
        "",
        f"Predicted for an {device}: from what its kernels take where all in one overlaps, to "
        "where nothing does.",
    ]
    other_devices = {result["device"] for result in predicted if device not in result["device"]}
    if other_devices:
        lines.append(f"**This is no {device}**: {', '.join(sorted(other_devices))}.")
    return lines


def disagreements(results):
    """Yields a line for each first loss that differs between contestants on the same weights."""
    references = {}
    for result in results:
        if result["purpose"] != "time" or not result["stacked"] or "losses" not in result:
            continue
        model = f"GPT {result['preset']}, {result['dtype']}"
        reference = references.setdefault(model, result)
        losses = zip(result["losses"], reference["losses"], strict=True)
        for step, (loss, expected) in enumerate(losses):
            if abs(loss - expected) > measure.TOLERANCE * abs(expected):
                yield (
                    f"{model}, step {step}: {result['label']} has a loss of {loss}, "
                    f"{reference['label']} one of {expected}"
                )


def label(contestant, program):
    """Names a contestant on a program in the table."""
    if contestant != "fastaccum":
        return contestant
    name = f"fastaccum, {program['attention']} attention"
    if program["policy"] != "auto":
        return f"{name}, in loops"
    if program["float8"]:
        return f"{name}, unrolled, float8"
    if program["optimizer_state_dtype"] != "float32":
        return f"{name}, unrolled, {program['optimizer_state_dtype']} slots"
    if not program["stacked"]:
        return f"{name}, unrolled"
    return name


def main(argv=None):
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument(
        "--results", type=Path, help="where results.json and results.md go (the same folder)"
    )
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * MINUTES
    target = arguments.results or arguments.folder
    try:
        programs = manifest.load(arguments.folder)
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    results = []
    for contestant, name, module, options in runs(programs):
        program = programs[name]
        about = {
            key: program[key]
            for key in ("preset", "dtype", "attention", "stacked", "purpose", "micro_batches")
        }
        about |= {"contestant": contestant, "program": name, "label": label(contestant, program)}
        about["predicted"] = program["predicted"] if contestant == "fastaccum" else None
        left = deadline - time.monotonic()
        if left > 0:
            result = run(arguments.folder, name, module, options, left)
        else:
            result = {"skipped": "no time was left"}
        results.append(about | result)
        outcome = result.get("failed") or result.get("skipped", "done")
        print(f"{left:4.0f} s left: {about['label']} on {name}: {outcome}", file=sys.stderr)
        # Written after each run, so that an interrupted command leaves what it has.
        _write(target, results)
    differences = list(disagreements(results))
    print(table(results), *differences, sep="\n")
    # A slow contestant is a result; one that computed something else, or broke, is a failure.
    is_failed = differences or any("failed" in result for result in results)
    return 1 if is_failed else 0


def _write(target, results):
    run_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    Path(target, "results.json").write_text(
        json.dumps({"date": run_at, "results": results}, indent=1)
    )
    Path(target, "results.md").write_text(table(results))


if __name__ == "__main__":
    sys.exit(main())
