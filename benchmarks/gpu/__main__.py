"""Runs every contestant on this machine's GPU: `python -m benchmarks.gpu FOLDER`.

FOLDER is what `benchmarks.gpu.export` wrote. Each contestant has a process of its own, so that its
peak memory and its autotuning are its own. Prints one Markdown table, and writes results.json and
results.md. Needs JAX, optax, PyTorch.
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

from benchmarks.gpu import manifest, measure

MINUTES = 8
NEEDS = {"run": ("jax",), "jax_peer": ("jax", "optax"), "torch_peer": ("torch",)}
ROOT = Path(__file__).parents[2]


def runs(programs):
    """What is to be run, the most wanted first: `(contestant, program's name, module, options)`."""

    def ours(program):
        return "fastaccum", program["name"], "run", []

    by_name = {program["name"]: program for program in programs.values()}
    yield from (ours(program) for program in by_name.values() if program["purpose"] == "check")
    for dtype in ("bfloat16", "float16"):
        for preset in ("124m", "350m"):
            of_size = [
                p for p in by_name.values() if p["purpose"] == "time" and p["preset"] == preset
            ]
            of_dtype = [p for p in of_size if p["dtype"] == dtype]
            yield from (ours(program) for program in of_dtype)
            # Any program whose weights are stacked tells the peers their model.
            model = next((p["name"] for p in of_dtype if p["stacked"]), None)
            if model is not None:
                yield "torch.compile", model, "torch_peer", []
                if dtype == "bfloat16":
                    yield "JAX scan", model, "jax_peer", []
                yield "PyTorch eager", model, "torch_peer", ["--eager"]
        if dtype == "bfloat16":
            yield from (
                ours(program) for program in by_name.values() if program["purpose"] == "memory"
            )


def run(folder, name, module, options, seconds):
    """One contestant in a process of its own: what it measured, or `{"skipped": why}`, or
    `{"failed": last line}`.
    """
    missing = [package for package in NEEDS[module] if importlib.util.find_spec(package) is None]
    if missing:
        return {"skipped": f"{' and '.join(missing)} not installed"}
    # JAX takes what it needs, as it needs it, so that its peak is the program's.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [
        sys.executable,
        "-m",
        f"benchmarks.gpu.{module}",
        str(folder.resolve()),
        name,
        *options,
    ]
    # A group of its own: torch.compile's workers outlive their parent, and hold its pipes.
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
    found = [line for line in stdout.splitlines() if line.startswith("{")]
    if process.returncode or not found:
        printed = stderr.strip().splitlines() or ["nothing on stderr"]
        return {"failed": printed[-1], "stderr": stderr[-4000:]}
    return json.loads(found[-1])


def table(results):
    """The results as Markdown: a row for each contestant, then what was skipped and the memory by
    micro-batches.
    """
    lines = [
        "| model, dtype | contestant | step, ms | predicted, ms | tokens/s | of the matmul rate "
        "| peak memory, GiB | first loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    measured = [
        result for result in results if "step_seconds" in result and result["purpose"] == "time"
    ]
    for each in sorted(measured, key=lambda r: (r["preset"], r["dtype"], r["step_seconds"])):
        peak = "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**30:.1f}"
        lines.append(
            f"| GPT {each['preset']}, {each['dtype']} | {each['label']} | "
            f"{1e3 * each['step_seconds']:.1f} | {_predicted(each)} | "
            f"{each['tokens_per_second']:,.0f} | {each['model_flops_utilisation']:.1%} | {peak} "
            f"| {each['losses'][0]:.4f} |"
        )
    lines += _predicted_for(measured)
    checked = [r for r in results if r["purpose"] == "check" and "losses" in r]
    lines += [
        "",
        "Losses agree with TensorFlow's on a CPU: "
        f"{', '.join(r['program'] for r in checked) or 'none run'}.",
    ]
    planned = [r for r in results if r["purpose"] == "memory" and "temp_bytes" in r]
    if planned:
        sizes = ", ".join(f"{r['micro_batches']}: {r['temp_bytes'] / 2**30:.3f}" for r in planned)
        lines += ["", f"Temp memory by micro-batches, GiB: {sizes}."]
    for how in ("failed", "skipped"):
        without = [r for r in results if how in r]
        lines += [
            "",
            *(f"{how.capitalize()}: {r['label']} on {r['program']}: {r[how]}" for r in without),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _predicted(result):
    predicted = result["predicted"]
    return f"{predicted['ms']:.1f} to {predicted['serial_ms']:.1f}" if predicted else ""


def _predicted_for(measured):
    """What the predictions are, and that they are of another device, if they are."""
    predicted = [each for each in measured if each["predicted"]]
    if not predicted:
        return []
    device = predicted[0]["predicted"]["device"]
    lines = [
        "",
        f"Predicted for an {device}: from what its kernels take where all in one overlaps, to "
        "where nothing does.",
    ]
    others = sorted({each["device"] for each in predicted if device not in each["device"]})
    return lines + [f"**This is no {device}**: {', '.join(others)}."] * bool(others)


def disagreements(results):
    """Contestants on one model, dtype and weights whose first losses differ: a line for each."""
    first = {}
    for each in results:
        if each["purpose"] == "time" and each["stacked"] and "losses" in each:
            key = each["preset"], each["dtype"]
            reference = first.setdefault(key, each)
            for step, (loss, expected) in enumerate(
                zip(each["losses"], reference["losses"], strict=True)
            ):
                if abs(loss - expected) > measure.TOLERANCE * abs(expected):
                    yield (
                        f"GPT {each['preset']}, {each['dtype']}, step {step}: {each['label']} "
                        f"has a loss of {loss}, {reference['label']} one of {expected}"
                    )


def label(contestant, program):
    if contestant != "fastaccum":
        return contestant
    form = (
        ", in loops" if program["policy"] != "auto" else "" if program["stacked"] else ", unrolled"
    )
    return f"fastaccum, {program['attention']} attention{form}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument(
        "--results", type=Path, help="where results.json and results.md go (the same folder)"
    )
    arguments = parser.parse_args(argv)
    deadline, target = time.monotonic() + 60 * MINUTES, arguments.results or arguments.folder
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
        done = (
            run(arguments.folder, name, module, options, left)
            if left > 0
            else {"skipped": "no time was left"}
        )
        results.append(about | done)
        print(
            f"{left:4.0f} s left: {about['label']} on {name}: "
            f"{done.get('failed') or done.get('skipped', 'done')}",
            file=sys.stderr,
        )
        # After each, so that a run that is broken off leaves what it has.
        _write(target, results)
    wrong = list(disagreements(results))
    print(table(results), *wrong, sep="\n")
    # A contestant that fell behind is a result; one that computed something else, or broke, is a
    # failure.
    return 1 if wrong or any("failed" in result for result in results) else 0


def _write(target, results):
    run_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    Path(target, "results.json").write_text(
        json.dumps({"date": run_at, "results": results}, indent=1)
    )
    Path(target, "results.md").write_text(table(results))


if __name__ == "__main__":
    sys.exit(main())
