"""docs/models.md, from the results of the zoo."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

_COLUMNS = {"float32": "error", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
_PACKAGES = (
    *("tensorflow", "keras", "tf_keras", "tensorflow-addons"),
    *("keras-hub", "keras-rs", "transformers", "tensorflow-probability"),
)
_HEAD = """# Models

<!-- written by: .venv/bin/pytest -q tests/zoo -m zoo --models-page docs/models.md -->

Models and idioms that this project did not write, at a tiny size, each trained by the code its users would write: one
update over micro-batches, beside the model's own full-batch step in Keras (a loop over micro-batches where there are
batch statistics). {summary} *By TrainStep* are loops of one's own, several models or several optimizers, which `fit`
takes in no Keras: there the loop over `fastaccum.TrainStep` is compared with the plain one. {largest}

*error* is the largest difference of a weight, beyond its last bit, relative to the update of its variable, in float32.
*float16* and *bfloat16* are the distance of the whole update from the float32 one under `mixed_float16` and
`mixed_bfloat16`, relative to the update, and in brackets that of Keras's own step. In float32, where the comparison is
with Keras's `fit`, loss and metrics are compared too. *remat*: as *error*, of the step with `fa.remat(model)` beside
ours without; or why the model does not take it; empty where that was not tried.

{versions}
"""


def page(results: Sequence[tuple[dict[str, Any], str]], notes: str) -> str:
    """The page, from each test's properties and outcome; `notes` is Markdown for its end."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for properties, outcome in results:
        about = properties["zoo"]
        key = about["family"], about["name"]
        cells = rows.setdefault(key, {"note": about["note"], "failed": False})
        result = properties.get("zoo_result", {})
        cells["failed"] |= outcome == "failed"
        if "remat" in result:
            cells["remat"] = _reason(result["remat"])
        elif "refused" in result:
            cells["refused"] = result["refused"]
        elif result:
            own = f" ({result['own_error']:.1e})" if "own_error" in result else ""
            cells[_COLUMNS[about["policy"]]] = f"{result['error']:.1e}{own}"
            cells.update({k: result[k] for k in ("seconds", "parameters", "by_train_step") if k in result})
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    refused = sum("refused" in cells for cells in rows.values())
    failed = sum(cells["failed"] for cells in rows.values())
    by_hand = sum(cells.get("by_train_step", False) and not cells["failed"] for cells in rows.values())
    summary = (
        f"{len(rows)} rows: {len(rows) - refused - failed - by_hand} work as written, {by_hand} by TrainStep, "
        f"{refused} are refused by name, {failed} fail."
    )
    versions = f"{versions}; {platform.machine()} CPU."
    lines = [_HEAD.format(summary=summary, largest=_largest(rows), versions=versions)]
    for family in dict.fromkeys(family for family, _ in rows):
        lines += [f"## {family}", "", "| model | | error | float16 | bfloat16 | remat | note |", "|---" * 7 + "|"]
        lines += [_line(name, cells) for (of, name), cells in rows.items() if of == family]
        lines.append("")
    return "\n".join([*lines, notes.rstrip(), ""])


def _reason(remat: str) -> str:
    """An error of the step, or what is in brackets in a refusal."""
    reason = re.search(r"\((.*?)[;)]", remat) if "fa.remat" in remat else None
    return f"no: {reason[1]}" if reason else remat.split("\n")[0]


def _largest(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    trained = [(cells["parameters"], cells["seconds"], name) for (_, name), cells in rows.items() if "seconds" in cells]
    if not trained:
        return ""
    parameters, seconds, name = max(trained)
    return (
        f"The largest, {name}, has {parameters:,} weights; making its trainer and the first step took {seconds:.0f} s, "
        "beside another test on two CPU cores."
    )


def _line(name: str, cells: dict[str, Any]) -> str:
    works = "by TrainStep" if cells.get("by_train_step") else "works"
    verdict = "**fails**" if cells["failed"] else "refused" if "refused" in cells else works
    note = cells["note"]
    if "refused" in cells:
        note = f"{note} “{' '.join(cells['refused'].split())}”".strip()
    errors = (cells.get(column, "") for column in (*_COLUMNS.values(), "remat"))
    return "| " + " | ".join([name, verdict, *errors, note.replace("|", "\\|")]) + " |"
