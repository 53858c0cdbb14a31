"""Writes a run of the benchmarks up as a dated Markdown report in benchmarks/results/.

`pytest benchmarks --benchmark-json=run.json`, then `python -m benchmarks.report run.json`; with `--readme`, the tables
of README.md and docs/kernels.md become those of this run too.
"""

import argparse
import datetime
import json
import pathlib

from benchmarks import readme, scores

RESULTS = pathlib.Path(__file__).parent / "results"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=pathlib.Path, help="what `pytest benchmarks --benchmark-json` wrote")
    parser.add_argument("--readme", action="store_true", help="rewrite the measured tables of README and docs too")
    options = parser.parse_args()
    run = json.loads(options.json.read_text())
    path = RESULTS / f"{datetime.datetime.fromisoformat(run['datetime']):%Y-%m-%d}-{device(run)[1]}.md"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(markdown(run))
    if options.readme:
        readme.update(found_in(run))
    print(path)


def device(run):
    """The hardware, in words and as a part of a file name."""
    info = run["machine_info"]
    if info["gpus"]:
        name = info["gpus"][0]
        return f"{len(info['gpus'])} x {name}", name.lower().replace(" ", "-")
    cpu = info["cpu"].get("brand_raw", "CPU")
    return f"{info['cores']} cores of {cpu}", f"{info['cores']}-cores"


def found_in(run):
    """The scores of all its benchmarks."""
    extra = [benchmark["extra_info"] for benchmark in run["benchmarks"]]
    return [scores.Score(**score) for info in extra for score in info.get("scores", [])]


def markdown(run):
    info, commit = run["machine_info"], run["commit_info"].get("id") or "none"
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    changed = " with uncommitted changes" if run["commit_info"].get("dirty") else ""
    return f"""# Benchmarks, {run["datetime"][:10]}

{device(run)[0]}; {versions}, Python {info["python_version"]}; commit {commit[:12]}{changed}.

Ratios are medians over interleaved rounds in one process. Before anything is timed, all contestants have
trained the same model on the same data to the same losses and weights.

{scores.markdown(found_in(run))}
"""


if __name__ == "__main__":
    main()
