"""Compares the first step of a process that finds another's compile cache with that other's.

A first step is what a user waits for: from `Trainer(...)` on, through tracing
and compiling to the loss. Each has a process of its own, each cold one a folder of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import fastaccum as fa  # reads FASTACCUM_COMPILE_CACHE before TensorFlow is imported

# isort: split

from benchmarks.memory.results import Result

BAR = 0.35  # the most of warm / cold
# Arguments of fa.gpt. The bar holds for 12 blocks, as many as the smallest GPT-2 has.
CASES = {
    "nano: 3 blocks of 128": {"preset": "nano"},
    "micro: 4 blocks of 256": {"preset": "micro"},
    "12 blocks of 256": {"preset": "micro", "layers": 12},
    "12 blocks of 256, stacked": {"preset": "micro", "layers": 12, "stacked": True},
}
QUICK = "nano: 3 blocks of 128"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument(
        "--pairs", type=int, default=3, help="of a cold and a warm process, for each model (3)"
    )


def run(options: argparse.Namespace) -> Result:
    """Runs cold and warm processes in turn, for each model."""
    cases = CASES
    rounds = options.pairs
    if options.quick:
        cases = {QUICK: CASES[QUICK]}
        rounds = 1
    cold: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    warm: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, sizes in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                cold[name].append(_process(sizes, folder))
                warm[name].append(_process(sizes, folder))
    rows = []
    missed = []
    for name, sizes in cases.items():
        ratio = _median_ratio(warm[name], cold[name], "first")
        expected_weights = _process(sizes, "")["weights"]
        same = all(step["weights"] == expected_weights for step in cold[name] + warm[name])
        rows.append(
            {
                "model": name,
                "cold, s": statistics.median(step["first"] for step in cold[name]),
                "warm, s": statistics.median(step["first"] for step in warm[name]),
                "warm / cold": ratio,
                "warm / cold, CPU seconds": _median_ratio(warm[name], cold[name], "used"),
                "of the warm one, traced in s": statistics.median(
                    step["traced"] for step in warm[name]
                ),
                "weights as without a cache": same,
            }
        )
        if ratio > BAR and name.startswith("12"):
            missed.append(
                f"{name}: a second process's first step takes {ratio:.2f} of the first's, and "
                f"may take {BAR}"
            )
        if not same:
            missed.append(f"{name}: the weights are not those that there are without a cache")
        if not all(step["loaded"] for step in warm[name]):
            missed.append(f"{name}: a second process compiled")
    notes = (
        "Medians over pairs of processes in turn; `fa.gpt`, 2 micro-batches of 4 x 64 tokens, "
        "AdamW. What a cache cannot save is Python's: tracing the model; and TensorFlow's "
        "translation of the graph, by which it looks up the program."
    )
    return Result("Warm start: a second process's first step", rows, missed, notes)


def _median_ratio(warm: list[dict[str, Any]], cold: list[dict[str, Any]], key: str) -> float:
    return statistics.median(w[key] / c[key] for w, c in zip(warm, cold, strict=True))


def _process(sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory.warm", json.dumps(sizes)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "FASTACCUM_COMPILE_CACHE": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _first_step(sizes: dict[str, Any]) -> dict[str, Any]:
    import keras
    import numpy as np

    from fastaccum.step import announcements

    keras.utils.set_random_seed(0)
    model = fa.gpt(**sizes)
    ids = np.arange(512, dtype=np.int32).reshape(2, 4, 64) % 256
    lines: list[str] = []  # that `fit` prints while it traces and compiles
    start = time.perf_counter()
    start_used = time.process_time()
    loss = fa.LinearCrossEntropy()
    trainer = fa.Trainer(model, "adamw", loss, gradient_accumulation_steps=2)
    with announcements.announce(lines.append):
        float(trainer.train_step((ids, ids)).loss)
    first = time.perf_counter() - start
    used = time.process_time() - start_used
    for _ in range(3):
        trainer.train_step((ids, ids))
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
    traced = float(lines[1].split()[0])
    return {
        "first": first,
        "used": used,
        "traced": traced,
        "weights": weights,
        "loaded": "loaded" in lines[-1],
    }


if __name__ == "__main__":
    print(json.dumps(_first_step(json.loads(sys.argv[1]))))
