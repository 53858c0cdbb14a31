"""Writes a run up in a folder of benchmarks/results/: the report, its charts and the run itself."""

import datetime
import json
import pathlib

from benchmarks.support import scores
from benchmarks.tools import runner

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def write(run, folder=None):
    """Writes `README.md`, the charts and `run.json` to `folder`; returns the folder.

    By default `folder` is named after the run's date and device, and after what it left out: a part
    of the benchmarks does not take the place of a whole run.
    """
    from benchmarks.tools import charts  # needs matplotlib, which is optional

    folder = folder or RESULTS / folder_name(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "README.md").write_text(markdown(run, charts.draw(run, folder)))
    return folder


def folder_name(run):
    """Names the folder of a run.

    A whole run is `2026-11-21-2-cores`, a quick one `2026-11-21-2-cores-quick`, and one of the
    suite `fit` alone `2026-11-21-2-cores-fit`.
    """
    date = datetime.datetime.fromisoformat(run["datetime"])
    parts = [f"{date:%Y-%m-%d}", device(run)[1]]
    if run.get("quick"):
        parts.append("quick")
    elif run.get("left_out"):
        parts.extend(run["suites"])
    return "-".join(parts)


def device(run):
    """Names the hardware, in words and as a part of a file name."""
    info = run["machine_info"]
    if info["gpus"]:
        gpu = info["gpus"][0]
        return f"{len(info['gpus'])} x {gpu}", gpu.lower().replace(" ", "-")
    cpu = info["cpu"].get("brand_raw", "CPU")
    return f"{info['cores']} cores of {cpu}", f"{info['cores']}-cores"


def markdown(run, charts):
    """Writes the report; `charts` is `{title: path}`, of pictures in the report's own folder."""
    info = run["machine_info"]
    commit = run["commit_info"].get("id") or "none"
    versions = ", ".join(f"{package} {version}" for package, version in info["versions"].items())
    changed = " with uncommitted changes" if run["commit_info"].get("dirty") else ""
    pictures = "\n\n".join(f"![{title}]({path.name})" for title, path in charts.items())
    return f"""# Benchmarks, {run["datetime"][:10]}

{device(run)[0]}; {versions}, Python {info["python_version"]}; commit {commit[:12]}{changed}.

Ratios are medians over interleaved rounds. Contestants of the same training have first trained to the same losses and
weights (with BatchNorm, the full batch in inference mode), kernels have computed the same gradients.

{pictures}

{scores.markdown(scores.of_run(run))}

{_suites(run)}
"""


def _suites(run):
    """Says how the suites ran, and which were skipped, failed or left out."""
    if "suites" in run:
        lines = ["Each suite ran in a process of its own."]
    else:
        lines = ["All suites ran in one process."]
    if run.get("quick"):
        lines.append("Quick: of the workloads only the smallest, in few rounds.")
    if run.get("left_out"):
        lines.append(f"Left out: {', '.join(run['left_out'])}.")
    lines.append("")
    for suite, result in run.get("suites", {}).items():
        for outcome in ("failed", "skipped"):
            for line in runner.by_reason(result[outcome]):
                lines.append(f"- {outcome} in {suite}: {line}")
    return "\n".join(lines).strip()
