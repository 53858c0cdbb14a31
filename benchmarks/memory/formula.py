"""What a train step of `fa.gpt` holds, by arithmetic, beside what XLA plans for an H200:
docs/memory.md in code.

Shape suffixes: N tokens of a micro-batch, D width, L layers, V vocabulary, H heads, P parameters.
Half precision.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs
from benchmarks.memory.results import Result
from benchmarks.support.stablehlo import h200
from fastaccum import transformer
from fastaccum.kernels import layer_loop
from fastaccum.kernels.logit_chunks import cut
from fastaccum.memory.analysis import IN_FLIGHT
from fastaccum.step.compiler_ir import MemoryAnalysis

BAR = 0.05
GB = 1e9

# Bytes of an optimizer's slots for each parameter.
SLOTS = {
    "SGD": 0,
    "SGD, momentum": 4,
    "Lion": 4,
    "Adagrad": 4,
    "RMSprop": 4,
    "Adam": 8,
    "AdamW": 8,
    "Lamb": 8,
}

# Bytes that a block keeps of each token for the way back, as multiples of D: in half precision 2
# for each value. Its input; both norms, queries, keys, values, attention's output and the residual
# after it (2 each); the MLP's four times wider product before GELU and after it (8 each).
EVERYTHING = 2 + 2 * 2 + 3 * 2 + 2 + 2 + 2 * 8
# What has a name, and the input: the fused projection, attention's output, its projection, the
# MLP's first product.
NAMED = 2 + 3 * 2 + 2 + 2 + 8
INPUT = 2
# At work on the way back in a block that is computed again: all of these, and gradients: of the
# block's output, of the residual, of queries, keys, values, attention's output and both norms'
# inputs, 2 each.
AT_WORK = EVERYTHING + 7 * 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model of `fa.gpt` and how it is trained.

    Attributes:
        preset: its name in `PRESETS`.
        rows: in a micro-batch.
        policy: "unrolled", where no loop is over the blocks, or what the loops keep:
            "everything_saveable", "named", "nothing_saveable".
        micro_batches: in a step; at least 2.
        slots: bytes of the optimizer's slots for each parameter.
        copies: stacks of data in memory: 1 in XLA's plan, more in `fit`, which makes some ahead.
    """

    preset: str
    rows: int
    policy: str = "unrolled"
    micro_batches: int = 4
    slots: int = 8
    copies: int = 1


def sizes(preset: str) -> dict[str, Any]:
    """Of a preset, all of them."""
    return {**transformer._DEFAULTS, **transformer.PRESETS[preset]}


def parameters(preset: str) -> tuple[int, int]:
    """Of the blocks, and of the rest.

    >>> sum(parameters("1.3b"))
    1310986240
    """
    size = sizes(preset)
    width, layers = size["width"], size["layers"]
    tables = 1 if size["tied"] else 2
    return layers * (12 * width**2 + 2 * width), tables * size["vocabulary_size"] * width + width


def parts(setting: Setting) -> dict[str, int]:
    """Bytes by what they are for, at the step's fullest moment.

    That is in the head, when the blocks' activations are kept and the loss computes its gradients,
    or, where blocks are computed again, in the first of them on the way back.

    >>> found = parts(Setting("1.3b", 8, "nothing_saveable"))
    >>> for name, size in found.items():
    ...     print(f"{name} {size / 1e9:.1f} GB")
    weights 5.2 GB
    optimizer slots 10.5 GB
    data 0.0 GB
    accumulators 5.2 GB
    half-precision copies 2.6 GB
    activations 1.7 GB
    a block at work 1.7 GB
    """
    size = sizes(setting.preset)
    width, layers, heads, vocabulary = (
        size[name] for name in ("width", "layers", "heads", "vocabulary_size")
    )
    tokens = setting.rows * size["context"]
    blocks, rest = parameters(setting.preset)
    unrolled_stack = size["stacked"] and setting.policy == "unrolled"
    matrices = layers * 12 * width**2
    found = {
        "weights": 4 * (blocks + rest),
        "optimizer slots": setting.slots * (blocks + rest),
        "data": setting.copies * setting.micro_batches * tokens * (4 + 4),
        "accumulators": 4 * (blocks + rest),
        "half-precision copies": 2 * (matrices + vocabulary * width)
        + 2 * matrices * unrolled_stack,
    }
    statistics = 4 * heads + 2 * 8  # attention's log-sum-exp; each norm's mean and factor
    kept = {"everything_saveable": EVERYTHING, "named": NAMED, "nothing_saveable": INPUT}
    each = kept.get(setting.policy, EVERYTHING) * width + (
        0 if setting.policy == "nothing_saveable" else statistics
    )
    # The last block's output, the final norm's: and rotary tables.
    found["activations"] = (
        tokens * (layers * each + 2 * width) + 4 * size["context"] * width // heads
    )
    head = head_and_loss(tokens, width, vocabulary)
    if setting.policy in ("named", "nothing_saveable"):
        # With the gradient of its widest matrix in float32, and the block's own part of the copies.
        again = tokens * (AT_WORK * width + statistics) + 4 * 4 * width**2 + 2 * 8 * width**2
        if again > head:
            return found | {"a block at work": again}
    return found | {"head and loss": head}


def head_and_loss(tokens: int, width: int, vocabulary: int) -> int:
    """What the loss adds while it computes its gradients: `fa.LinearCrossEntropy` on a GPU."""
    # all logits: float32, their gradients, rounded and not
    if tokens * vocabulary <= max(4096**2, tokens * width):
        return tokens * vocabulary * (4 + 2 + 4) + 2 * tokens * width
    chunk = tokens_at_once(tokens, vocabulary)
    logits = chunk * vocabulary * (4 + 2) + 2 * chunk * width
    # of the table and of the final norm's output, in float32
    gradients = 4 * vocabulary * width + 4 * tokens * width
    # cuBLAS multiplies multiples of 16: XLA pads a copy of the table of another size.
    padded = 2 * 16 * math.ceil(vocabulary / 16) * width if vocabulary % 16 else 0
    return logits + gradients + padded + 2 * tokens * width


def tokens_at_once(tokens: int, vocabulary: int) -> int:
    """How many tokens' logits `fa.LinearCrossEntropy` has at once on a GPU, where it cuts them."""
    return cut(tokens, max(1024, min(tokens // 10, 2048), 2**25 // vocabulary)).length


def peak_bytes(setting: Setting) -> int:
    """The sum of `parts`."""
    return sum(parts(setting).values())


def plan_of(setting: Setting) -> MemoryAnalysis:
    """XLA's plan of the same step, compiled for an H200; weightless, and kept in a cache."""
    stacked = sizes(setting.preset)["stacked"]
    policies = {"unrolled": "auto", "named": ["projection", "attention"]}
    form = {"policy": policies.get(setting.policy, setting.policy)} if stacked else {}
    room = mock.patch.object(layer_loop, "device_memory", lambda: 1e15)  # "auto" keeps everything
    context = sizes(setting.preset)["context"]
    with (
        h200.weightless(),
        h200.as_on_a_gpu(),
        room if setting.policy == "unrolled" else contextlib.nullcontext(),
    ):
        model = fa.gpt(preset=setting.preset, dtype="mixed_bfloat16", **form)
        optimizer = {8: keras.optimizers.AdamW, 4: keras.optimizers.Lion}[setting.slots](3e-4)
        trainer = fa.Trainer(model, optimizer, fa.LinearCrossEntropy(), clip_norm=1.0)
        ids = np.zeros((setting.micro_batches, setting.rows, context), "int32")
        program = programs.of_trainer(trainer, (ids, ids))
    keras.backend.clear_session()
    return program.memory


LOOPS = ("everything_saveable", "named", "nothing_saveable")
CARDS = (24, 48, 80, 141)  # GB
OPTIMIZERS = {"AdamW": 8, "Lion": 4}


def largest_rows(card: int, policy: str, slots: int = 8, preset: str = "1.3b") -> int:
    """The largest micro-batch that fits a card, 0 where none does.

    A card of 24 GB counts as 24 * 10**9 bytes. It has 24 GiB, 7% more: for the driver, CUDA's
    context and libraries.
    """
    fits = [
        rows
        for rows in range(1, 513)
        if peak_bytes(Setting(preset, rows, policy, micro_batches=8, slots=slots, copies=IN_FLIGHT))
        <= card * GB
    ]
    return max(fits, default=0)


def on_cards() -> str:
    """The largest micro-batches of the 1.3B preset, as a table in Markdown."""
    lines = [["optimizer", "blocks", *(f"{card} GB" for card in CARDS)], ["---"] * (2 + len(CARDS))]
    for optimizer, slots in OPTIMIZERS.items():
        for policy in ("unrolled", *LOOPS):
            found = [largest_rows(card, policy, slots) for card in CARDS]
            lines.append([optimizer, policy, *(f"{rows:,}" if rows else "none" for rows in found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


CASES = [
    *(Setting(preset, 8) for preset in transformer.PRESETS),
    *(Setting(preset, 8, policy) for preset in ("124m", "350m", "1.3b") for policy in LOOPS),
    *(Setting("1.3b", rows, "nothing_saveable") for rows in (1, 32, 60)),
    *(Setting("1.3b", rows) for rows in (1, 16)),
    Setting("1.3b", 13, "nothing_saveable", slots=4),
    Setting("nano", 64),
]


def run(options: argparse.Namespace) -> Result:
    """The formula beside XLA's figure for each of `CASES`, and which micro-batch fits which
    card.
    """
    rows, missed = [], []
    cases = CASES[:2] if options.quick else CASES
    # A process for each: what a compilation has taken of memory does not come back.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        plans = list(processes.map(plan_of, cases))
    for setting, plan in zip(cases, plans, strict=True):
        predicted = peak_bytes(setting)
        ratio = predicted / plan.peak_bytes
        temp = predicted - plan.argument_bytes, plan.temp_bytes
        rows.append(
            {
                "preset": setting.preset,
                "micro-batch": setting.rows,
                "blocks": setting.policy,
                "formula, GB": predicted / GB,
                "XLA, GB": plan.peak_bytes / GB,
                "formula / XLA": ratio,
                "of the temporary part alone": temp[0] / temp[1],
            }
        )
        if abs(ratio - 1) > BAR:
            missed.append(
                f"{setting.preset}, {setting.rows} rows, {setting.policy}: {ratio:.3f} of XLA's "
                "figure"
            )
    notes = (
        "The largest micro-batch of the 1.3B preset, sequences of 2,048, by the "
        f"formula:\n\n{on_cards()}"
    )
    return Result(
        "The formula of docs/memory.md beside XLA's plan, compiled for an H200", rows, missed, notes
    )
