"""Writes the dated report on the programs compiled for an H200: tables, pictures, and limits."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tools.report import RESULTS

BEFORE = Path(__file__).with_name("before.json")
NEEDED = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jax_plugins": "jax-cuda12-pjrt",
    "optax": "optax",
    "matplotlib": "matplotlib",
}


class Run(NamedTuple):
    """Run of the report.

    Attributes:
        date: of the run.
        rates: of the device.
        versions: of the packages that write and compile the programs.
        results: `bars.Results`, the programs' figures.
        head_memory: as `bars.measures` takes it.
        before: the figures of an earlier commit, and its name.
    """

    date: str
    rates: dict[str, float]
    versions: dict[str, str]
    results: Any
    head_memory: dict[str, float]
    before: dict[str, Any]


def write(rates: Any, folder: Path | None = None, processes: int = 2) -> Path:
    """Compiles all programs, and writes README.md, pictures and figures.json; returns the folder.

    Args:
        rates: `roofline.Rates` of the device.
        folder: by default in benchmarks/results/, named after the date.
        processes: how many compile side by side.

    Raises:
        SystemExit: a package is missing.
    """
    missing = [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise SystemExit(
            f'The report needs {", ".join(missing)}. In a clone: pip install -c constraints.txt -e ".[test,bench,h200]"'
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for the processes that compile
    from benchmarks.h200 import bars, cases, pictures

    figures = dict(cases.figures(cases.everything(), rates, processes))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    run = Run(
        date=f"{today}",
        rates=dataclasses.asdict(rates),
        versions=cases.versions(),
        results=bars.Results(figures),
        head_memory=cases.head_memory(),
        before=json.loads(BEFORE.read_text()),
    )
    folder = folder or RESULTS / f"{today}-h200-predicted"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures.draw(run.results, run.before["programs"], folder)
    (folder / "README.md").write_text(markdown(run, drawn))
    kept = {
        "date": run.date,
        "rates": run.rates,
        "versions": run.versions,
        "head memory": run.head_memory,
        "programs": {str(case): figures[case] for case in sorted(figures, key=str)},
    }
    (folder / "figures.json").write_text(json.dumps(kept, indent=1) + "\n")
    return folder


def markdown(run: Run, drawn: dict[str, Path]) -> str:
    """Writes the report; `drawn` is `{title: path}`, of pictures in the report's own folder."""
    where_the_time_goes, *against_sizes = (
        f"![{title}]({path.name})" for title, path in drawn.items()
    )
    jaxlib = run.versions["jaxlib"]
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    return (
        "\n\n".join(
            (
                f"# Predicted for an H200, {run.date}",
                "No GPU was at hand: these programs were compiled for an H200 by the XLA of "
                f"jaxlib {jaxlib}, and put on a roofline. Nothing has run, and every time below "
                "is a prediction. A step is 8 micro-batches of 8 sequences of 2,048 tokens, "
                "through a GPT of width 2,048 with 16 heads and a tied head of 50,304 ids, in "
                "bfloat16, with AdamW and a clip by global norm.",
                "## Measures",
                _measures(run),
                "## Where the time goes",
                where_the_time_goes,
                _parts(run),
                "## Programs",
                "4 layers; in brackets 24 layers.",
                _programs(run),
                "## Against sizes",
                *against_sizes,
                "## What was lost, and is lost",
                "In milliseconds of a step, 4 layers; in brackets 24 layers. Before: commit "
                f"{run.before['commit']}, compiled and read in the same way; its presets' "
                "attention was the portable one. What was elementwise in its second forward "
                "pass counts in row 2, and where there is none in row 5.",
                _losses(run),
                "## How it is counted",
                COUNTED,
                f"Rates, each a parameter of the command: {_rates(run.rates)}.",
                f"Versions: {versions}.",
                "## What this cannot know",
                UNKNOWN,
            )
        )
        + "\n"
    )


COUNTED = """\
- A kernel takes the longest of its arithmetic, its traffic and a launch; a step the sum of its kernels. "Serial" adds
  all three up. Elementwise arithmetic hides behind memory.
- MFU is the model's own arithmetic over the step's time at the rate of half-precision matmuls: 6 FLOPs for each token
  and matmul parameter, and the causal half of attention's products. What is recomputed does not count. Published
  figures are parts of the peak, 989 TFLOP/s for an H200: at a rate of 790, 0.8 times the MFU given here.
- Launches a micro-batch are those in the loop over micro-batches, over their number.
- "Head and loss" are all kernels under the scope of the loss, both passes: logits, softmax, both gradients. Its
  memory is the temp memory of a program that computes the loss and its gradients alone, without what any form has:
  the float32 gradient of the hidden states, and the rounded table.
- "Accumulating" counts float32 results of the matmuls that compute a block's weight gradients, and all that kernels
  move which write arrays of their shapes. JAX sums gradients that its matmuls rounded to bfloat16, which it counts
  not.
- Attention is cuDNN's kernels, or those of the portable form, and what prepares their operands under the same scope,
  without projections and rotary positions; the forward pass that is computed once more among them.
- A fusion counts where XLA's name for it says, so what it fuses across a border is on one side of it.
- The JAX programs are what a user of JAX writes, not tuned to this XLA: float32 weights cast where they are
  multiplied, a scan over micro-batches, optax. They round weight gradients and logits to bfloat16; ours round
  neither."""

UNKNOWN = """\
- **What autotuning finds.** With no device, XLA takes its matmuls' tiles by rule; on one it times Triton, cuBLAS and
  cuDNN, and takes the fastest. All matmuls are given the same rate here, large or narrow.
- **Caches.** Each kernel reads its operands from memory, though 50 MB of them may still be in the L2 cache; a matmul
  that reads an operand twice is not charged for it.
- **Clocks.** Under load they fall with temperature and power; a rate of 790 TFLOP/s is 80% of the peak.
- **cuDNN.** Attention is given 60% of the matmul rate, whatever the shape; whether cuDNN builds these plans has not
  been seen on a device.
- **TensorFlow's own XLA**, which would compile the step there, is another version than jaxlib's.
- **The host**: launches are charged at a fixed time, as if the host were never late; command buffers may make them
  less.
- **Several GPUs**: there is one here, and no collective."""


def _measures(run: Run) -> str:
    from benchmarks.h200.bars import measures

    rows = []
    for measure in measures(run.results, run.head_memory):
        ratio = f"{measure.value:.2f}" if measure.is_ratio else ""
        bar = f"{measure.bar:.0%}" if measure.name.endswith("MFU") else f"{measure.bar:g}"
        relation = "at least" if measure.at_least else "at most"
        is_met = "yes" if measure.is_met else "**no**"
        rows.append(
            (measure.name, measure.ours, measure.theirs, ratio, f"{relation} {bar}", is_met)
        )
    return _table(("measure", "ours", "JAX", "ours / JAX", "bar", "met"), rows)


def _losses(run: Run) -> str:
    from benchmarks.h200.bars import lost_times

    return _table(
        ("lost time", "before", "now"), list(lost_times(run.results, run.before["programs"]))
    )


def _parts(run: Run) -> str:
    from benchmarks.h200.parts import PARTS
    from benchmarks.h200.pictures import SHOWN_IN_PARTS

    shown = [run.results.of(name) for name in SHOWN_IN_PARTS]
    rows = []
    for part in PARTS:
        rows.append((part, *(f"{figures['parts'][part]:,.1f}" for figures in shown)))
    rows.append(("all", *(f"{figures['predicted ms']:,.1f}" for figures in shown)))
    return _table(("predicted ms, 4 layers", *SHOWN_IN_PARTS), rows)


def _programs(run: Run) -> str:
    from benchmarks.h200.cases import JAX, ONLY_SHALLOW, OURS

    def cell(name, key, form):
        shallow = f"{run.results.of(name)[key]:{form}}"
        if name in ONLY_SHALLOW:
            return shallow
        return f"{shallow} ({run.results.deep(name)[key]:{form}})"

    columns = {
        "launches a micro-batch": ",.0f",
        "GB moved": ",.0f",
        "temp GB": ",.1f",
        "peak GB": ",.0f",
        "predicted ms": ",.0f",
        "serial ms": ",.0f",
        "MFU": ".0%",
    }
    rows = []
    for name in (*OURS, *JAX):
        rows.append((name, *(cell(name, key, form) for key, form in columns.items())))
    return _table(("program", *columns), rows)


def _rates(rates: dict[str, float]) -> str:
    sentences = {
        "half": "{:.4g} FLOP/s of half-precision matmuls",
        "float8": "{:.4g} of float8 ones",
        "tf32": "{:.4g} of float32 ones, as TF32",
        "bandwidth": "{:.4g} bytes/s of memory",
        "launch": "{:.2g} s for a kernel at least",
        "attention": "{:.0%} of the matmul rate in cuDNN's attention",
    }
    return ", ".join(sentences[name].format(value) for name, value in rates.items())


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---", *(len(head) - 1) * ("---:",)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
