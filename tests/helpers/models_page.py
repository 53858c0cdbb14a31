"""docs/models.md, from the results of the zoo."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

_COLUMNS = {
    "float32": "error",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "fused": "fused",
}
_CELLS = "error", "float16", "bfloat16", "remat", "scanned", "fused"
_PACKAGES = (
    *("tensorflow", "keras", "tf_keras", "tensorflow-addons"),
    *("keras-hub", "keras-rs", "transformers", "tensorflow-probability"),
)
_HEAD = """# Models

<!-- written by: XLA_FLAGS= .venv/bin/pytest -q tests/zoo -m zoo --models-page docs/models.md -->

This page lists the models and training scripts of other projects that fastaccum was tried on: KerasHub, Hugging Face,
keras.applications, the examples of keras.io, tensorflow-addons and others. Look here to see whether your kind of model
works, and what to do where it doesn't.

Each was trained at a tiny size, with the code that its users would write. One update over several micro-batches was
compared with one update of the full batch by the model's own Keras. Where a model treats a batch as a whole (batch
normalization, a loss that compares rows), no split into micro-batches equals the full batch. It was then compared with
a plain loop over the same micro-batches.

{summary} {largest}

The columns:

- *result*. *works*: `fa.Trainer` trains it as it is written. *by TrainStep*: it has a loop of its own, several models
  or several optimizers, which Keras's `fit` can't train either; a loop with `fa.TrainStep` does. *refused*: an error
  says, before a weight changes, why not and what to do. The note quotes it.
- *error*: the largest difference between a weight after our update and after Keras's, in float32, as a fraction of
  the update of its variable. A difference in a weight's last bit does not count. Where the comparison is with Keras's
  `fit`, the loss and the metrics were compared too.
- *float16*, *bfloat16*: how far the update under `mixed_float16` or `mixed_bfloat16` is from the float32 update, as a
  fraction of it. In brackets: how far Keras's own is. 1.0 there means that Keras skipped its first step, because its
  loss scale was too high.
- *remat*: the error of our step with `fa.remat(model)`, compared with ours without it, or why `fa.remat` refuses the
  model.
- *scanned*: the error of our step with `scan_layers=True`, compared with ours without it, where layers repeat; or why
  they run one after the other.
- *fused*: the *error*, with fused attention, computed by the blockwise kernel for CPUs. At this tiny size
  `flash_attention="auto"` would not fuse it, so the tests fuse all attention that "auto" fuses in large models. {fused}

An empty cell was not tried. The versions: {versions}
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
        elif "scanned" in result:
            cells["scanned"] = result["scanned"].replace("unrolled: ", "no: ")
        elif "refused" in result:
            cells["refused"] = result["refused"]
        elif result:
            own = f" ({result['own_error']:.1e})" if "own_error" in result else ""
            cells[_COLUMNS[about["policy"]]] = f"{result['error']:.1e}{own}"
            cells.update(
                {k: result[k] for k in ("seconds", "parameters", "by_train_step") if k in result}
            )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    refused = sum("refused" in cells for cells in rows.values())
    failed = sum(cells["failed"] for cells in rows.values())
    by_hand = sum(
        cells.get("by_train_step", False) and not cells["failed"] for cells in rows.values()
    )
    summary = (
        f"Of {len(rows)} rows, {len(rows) - refused - failed - by_hand} work as written, "
        f"{by_hand} work by TrainStep, {refused} are refused, and {failed} fail."
    )
    versions = f"{versions}; {platform.machine()} CPU."
    lines = [
        _HEAD.format(summary=summary, largest=_largest(rows), fused=_fused(rows), versions=versions)
    ]
    for family in dict.fromkeys(family for family, _ in rows):
        lines += [
            f"## {family}",
            "",
            f"| model | result | {' | '.join(_CELLS)} | note |",
            "|---" * (len(_CELLS) + 3) + "|",
        ]
        lines += [_line(name, cells) for (of, name), cells in rows.items() if of == family]
        lines.append("")
    return "\n".join([*lines, notes.rstrip(), ""])


def _reason(remat: str) -> str:
    """An error of the step, or what is in brackets in a refusal."""
    reason = re.search(r"\((.*?)[;)]", remat) if "fa.remat" in remat else None
    return f"no: {reason[1]}" if reason else remat.split("\n")[0]


def _largest(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    trained = [
        (cells["parameters"], cells["seconds"], name)
        for (_, name), cells in rows.items()
        if "seconds" in cells
    ]
    if not trained:
        return ""
    parameters, seconds, name = max(trained)
    return (
        f"The largest, {name}, has {parameters:,} weights. Its trainer and first step took "
        f"{seconds:.0f} s, on two CPU cores beside another test."
    )


def _fused(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    errors = [
        (float(cells["fused"]), name) for (_, name), cells in rows.items() if "fused" in cells
    ]
    return (
        f"The largest of {len(errors)} is {max(errors)[0]:.1e}, of {max(errors)[1]}."
        if errors
        else ""
    )


def _line(name: str, cells: dict[str, Any]) -> str:
    works = "by TrainStep" if cells.get("by_train_step") else "works"
    verdict = "**fails**" if cells["failed"] else "refused" if "refused" in cells else works
    note = cells["note"]
    if "refused" in cells:
        note = f"{note} “{' '.join(cells['refused'].split())}”".strip()
    errors = (cells.get(column, "") for column in _CELLS)
    return "| " + " | ".join([name, verdict, *errors, note.replace("|", "\\|")]) + " |"
