"""The dated report on the programs compiled for an H200: tables, pictures, and what they cannot
tell.
"""

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
    """What a report tells of.

    Attributes:
        date: of the run.
        rates: of the device.
        versions: of what the programs were written with and compiled by.
        found: `bars.Found`, the programs' figures.
        head_memory: as `bars.measures` takes it.
        before: the figures of the commit before, and its name.
    """

    date: str
    rates: dict[str, float]
    versions: dict[str, str]
    found: Any
    head_memory: dict[str, float]
    before: dict[str, Any]


def write(rates: Any, folder: Path | None = None, processes: int = 2) -> Path:
    """Compiles all programs, and writes `README.md`, pictures and `figures.json`; returns the
    folder.

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
        f"{today}",
        dataclasses.asdict(rates),
        cases.versions(),
        bars.Found(figures),
        cases.head_memory(),
        json.loads(BEFORE.read_text()),
    )
    folder = folder or RESULTS / f"{today}-h200-predicted"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures.draw(run.found, run.before["programs"], folder)
    (folder / "README.md").write_text(markdown(run, drawn))
    programs = {str(case): figures[case] for case in sorted(figures, key=str)}
    about = {
        "date": run.date,
        "rates": run.rates,
        "versions": run.versions,
        "head memory": run.head_memory,
    }
    (folder / "figures.json").write_text(
        json.dumps({**about, "programs": programs}, indent=1) + "\n"
    )
    return folder


def markdown(run: Run, drawn: dict[str, Path]) -> str:
    """The report; `drawn` is `{title: path}`, of pictures in the report's own folder."""
    pictures = {title: f"![{title}]({path.name})" for title, path in drawn.items()}
    jaxlib = run.versions["jaxlib"]
    first, *others = pictures.values()
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
                first,
                _parts(run),
                "## Programs",
                "4 layers; in brackets 24 layers.",
                _programs(run),
                "## Against sizes",
                *others,
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

    rows = [
        (
            row.what,
            row.ours,
            row.theirs,
            f"{row.value:.2f}" if row.is_ratio else "",
            ("at least " if row.at_least else "at most ")
            + (f"{row.bar:.0%}" if _is_mfu(row) else f"{row.bar:g}"),
            "yes" if row.is_met else "**no**",
        )
        for row in measures(run.found, run.head_memory)
    ]
    return _table(("measure", "ours", "JAX", "ours / JAX", "bar", "met"), rows)


def _is_mfu(row: Any) -> bool:
    return row.what.endswith("MFU")


def _losses(run: Run) -> str:
    from benchmarks.h200.bars import losses

    return _table(("loss", "before", "now"), list(losses(run.found, run.before["programs"])))


def _parts(run: Run) -> str:
    from benchmarks.h200.parts import PARTS
    from benchmarks.h200.pictures import SHOWN

    figures = {name: run.found.of(name) for name in SHOWN}
    rows = [(part, *(f"{each['parts'][part]:,.1f}" for each in figures.values())) for part in PARTS]
    rows.append(("all", *(f"{each['predicted ms']:,.1f}" for each in figures.values())))
    return _table(("predicted ms, 4 layers", *figures), rows)


def _programs(run: Run) -> str:
    from benchmarks.h200.cases import JAX, ONLY_SHALLOW, OURS

    def cell(name, key, form):
        deep = "" if name in ONLY_SHALLOW else f" ({run.found.deep(name)[key]:{form}})"
        return f"{run.found.of(name)[key]:{form}}{deep}"

    columns = {
        "launches a micro-batch": ",.0f",
        "GB moved": ",.0f",
        "temp GB": ",.1f",
        "peak GB": ",.0f",
        "predicted ms": ",.0f",
        "serial ms": ",.0f",
        "MFU": ".0%",
    }
    rows = [
        (name, *(cell(name, key, form) for key, form in columns.items()))
        for name in {**OURS, **JAX}
    ]
    return _table(("program", *columns), rows)


def _rates(rates: dict[str, float]) -> str:
    told = {
        "half": "{:.4g} FLOP/s of half-precision matmuls",
        "tf32": "{:.4g} of float32 ones, as TF32",
        "bandwidth": "{:.4g} bytes/s of memory",
        "launch": "{:.2g} s for a kernel at least",
        "attention": "{:.0%} of the matmul rate in cuDNN's attention",
    }
    return ", ".join(told[name].format(value) for name, value in rates.items())


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---", *(len(head) - 1) * ("---:",)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
