"""Computes the memory of a train step of `fa.gpt`, beside XLA's plan for an H200.

It is docs/memory.md in code, for half precision.
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

BAR = 0.05  # the relative difference that formula and plan may have
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

HALF = 2  # bytes of a value in half precision
SINGLE = 4  # and in float32

# Bytes of residuals that a block keeps for each token and each channel of its width. These are its
# input, both norms, queries, keys and values, attention's output, the sum after it, and the MLP's
# four times wider product before GELU and after it.
INPUT = HALF
EVERYTHING = HALF * (1 + 2 + 3 + 1 + 1 + 4 + 4)
# Those of the input and of the residuals that have a name: the fused projection of queries, keys
# and values, attention's output, its projection, the MLP's first product.
NAMED = HALF * (1 + 3 + 1 + 1 + 4)
# Those in use while a block is recomputed in the backward pass: all residuals, and seven gradients,
# of the block's output, the sum, queries, keys, values, attention's output and the block's input.
AT_WORK = EVERYTHING + HALF * 7

LOOPS = ("everything_saveable", "named", "nothing_saveable")
# Those of `SLOTS` that the steps are compiled with and the table of the cards has.
OPTIMIZERS = {name: SLOTS[name] for name in ("AdamW", "Lion")}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Model of `fa.gpt` and its training.

    Attributes:
        preset: its name in `PRESETS`.
        rows: in a micro-batch.
        policy: "unrolled", where the blocks are not in a loop and keep everything; else the
            residuals that a loop over the blocks keeps: "everything_saveable", "named" or
            "nothing_saveable".
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
    """Returns the sizes of a preset, defaults among them."""
    return {**transformer._DEFAULTS, **transformer.PRESETS[preset]}


def parameters(preset: str) -> int:
    """Counts the parameters of a preset.

    >>> parameters("1.3b")
    1310986240
    """
    size = sizes(preset)
    width = size["width"]
    blocks = size["layers"] * (12 * width**2 + 2 * width)
    tables = 1 if size["tied"] else 2
    final_norm = width
    return blocks + tables * size["vocabulary_size"] * width + final_norm


def parts(setting: Setting) -> dict[str, int]:
    """Computes the bytes of each purpose at the step's fullest moment.

    That is in the head, while the residuals of the blocks are kept and the loss computes its
    gradients, or, with recomputation, in the first block of the backward pass.

    >>> for name, size in parts(Setting("1.3b", 8, "nothing_saveable")).items():
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
    width = size["width"]
    layers = size["layers"]
    heads = size["heads"]
    vocabulary = size["vocabulary_size"]
    tokens = setting.rows * size["context"]
    numbers = parameters(setting.preset)
    matrices = layers * 12 * width**2
    half_copies = HALF * (matrices + vocabulary * width)
    if size["stacked"] and setting.policy == "unrolled":
        # A LayerStack has one stack of each weight. cuBLAS takes no layer's part of it as it lies.
        half_copies += HALF * matrices
    bytes_of = {
        "weights": SINGLE * numbers,
        "optimizer slots": setting.slots * numbers,
        "data": setting.copies * setting.micro_batches * tokens * (4 + 4),  # int32 x and y
        "accumulators": SINGLE * numbers,
        "half-precision copies": half_copies,
    }
    # For each token, in float32: attention's log-sum-exp, and each norm's mean and factor.
    statistics = SINGLE * heads + 2 * 2 * SINGLE
    match setting.policy:
        case "nothing_saveable":
            residuals = INPUT * width
        case "named":
            residuals = NAMED * width + statistics
        case _:
            residuals = EVERYTHING * width + statistics
    outputs = 2 * width  # the last block's and the final norm's
    rotary_tables = SINGLE * size["context"] * width // heads
    bytes_of["activations"] = tokens * (layers * residuals + outputs) + rotary_tables
    head = head_and_loss(tokens, width, vocabulary)
    if setting.policy in ("named", "nothing_saveable"):
        block = block_at_work(tokens, width, statistics)
        if block > head:
            return bytes_of | {"a block at work": block}
    return bytes_of | {"head and loss": head}


def block_at_work(tokens: int, width: int, statistics: int) -> int:
    """Computes the bytes that the recomputation of a block adds in the backward pass.

    Beside its residuals and gradients, these are the gradient of its widest matrix, [4 D, D] in
    float32, and 16 D**2 for its part of the half-precision copies.
    """
    widest_gradient = SINGLE * 4 * width**2
    part_of_copies = HALF * 8 * width**2
    return tokens * (AT_WORK * width + statistics) + widest_gradient + part_of_copies


def head_and_loss(tokens: int, width: int, vocabulary: int) -> int:
    """Computes the bytes that `fa.LinearCrossEntropy` adds on a GPU for its gradients.

    It computes all logits at once where they are small, as `kernels/cross_entropy.py` decides, and
    else in chunks of tokens.
    """
    hidden_gradient = HALF * tokens * width
    if tokens * vocabulary <= max(4096**2, tokens * width):
        # The logits in float32, and their gradients in half precision and in float32.
        return tokens * vocabulary * (SINGLE + HALF + SINGLE) + hidden_gradient
    chunk = tokens_at_once(tokens, vocabulary)
    logits = chunk * vocabulary * (SINGLE + HALF) + HALF * chunk * width
    # The gradients of the table and of the final norm's output are summed in float32.
    summed_gradients = SINGLE * vocabulary * width + SINGLE * tokens * width
    padded_table = 0
    if vocabulary % 16:  # cuBLAS multiplies multiples of 16, so XLA pads a copy of the table
        padded_table = HALF * 16 * math.ceil(vocabulary / 16) * width
    return logits + summed_gradients + padded_table + hidden_gradient


def tokens_at_once(tokens: int, vocabulary: int) -> int:
    """Returns the tokens of a chunk of logits of `fa.LinearCrossEntropy` on a GPU.

    As `kernels/cross_entropy.py` chooses, they are a tenth of all, within bounds, or more where the
    vocabulary is small.
    """
    tenth = max(1024, min(tokens // 10, 2048))
    most = max(tenth, 2**25 // vocabulary)
    return cut(tokens, most).length


def peak_bytes(setting: Setting) -> int:
    """Returns the sum of `parts`."""
    return sum(parts(setting).values())


def plan_of(setting: Setting) -> MemoryAnalysis:
    """Compiles the same step for an H200, without weights, and returns XLA's plan."""
    size = sizes(setting.preset)
    options = {}
    if size["stacked"]:
        policies = {"unrolled": "auto", "named": ["projection", "attention"]}
        options["policy"] = policies.get(setting.policy, setting.policy)
    with contextlib.ExitStack() as scope:
        scope.enter_context(h200.weightless())
        scope.enter_context(h200.as_on_a_gpu())
        if setting.policy == "unrolled":
            # With room for all activations, the policy "auto" makes no loop and keeps everything.
            scope.enter_context(mock.patch.object(layer_loop, "device_memory", lambda: 1e15))
        model = fa.gpt(preset=setting.preset, dtype="mixed_bfloat16", **options)
        names = {slots: name for name, slots in OPTIMIZERS.items()}
        optimizer = getattr(keras.optimizers, names[setting.slots])(3e-4)
        trainer = fa.Trainer(model, optimizer, fa.LinearCrossEntropy(), clip_norm=1.0)
        ids = np.zeros((setting.micro_batches, setting.rows, size["context"]), "int32")
        program = programs.of_trainer(trainer, (ids, ids))
    keras.backend.clear_session()
    return program.memory


CARDS = (24, 48, 80, 141)  # GB


def largest_rows(card: int, policy: str, slots: int = 8, preset: str = "1.3b") -> int:
    """Returns the largest micro-batch of up to 512 rows that fits a card, or 0.

    A card of 24 GB counts as 24 * 10**9 bytes. It has 24 GiB, 7% more, which the driver, CUDA's
    context and libraries take.
    """
    largest = 0
    for rows in range(1, 513):
        setting = Setting(preset, rows, policy, micro_batches=8, slots=slots, copies=IN_FLIGHT)
        if peak_bytes(setting) <= card * GB:
            largest = rows
    return largest


def on_cards() -> str:
    """Writes the largest micro-batches of the 1.3B preset as a table in Markdown."""
    lines = [["optimizer", "blocks", *(f"{card} GB" for card in CARDS)], ["---"] * (2 + len(CARDS))]
    for optimizer, slots in OPTIMIZERS.items():
        for policy in ("unrolled", *LOOPS):
            line = [optimizer, policy]
            for card in CARDS:
                rows = largest_rows(card, policy, slots)
                line.append(f"{rows:,}" if rows else "none")
            lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


CASES = [
    *(Setting(preset, 8) for preset in transformer.PRESETS),
    *(Setting("124m", 8, policy) for policy in LOOPS),
    *(Setting("350m", 8, policy) for policy in LOOPS),
    *(Setting("1.3b", 8, policy) for policy in LOOPS),
    *(Setting("1.3b", rows, "nothing_saveable") for rows in (1, 32, 60)),
    *(Setting("1.3b", rows) for rows in (1, 16)),
    Setting("1.3b", 13, "nothing_saveable", slots=4),
    Setting("nano", 64),
]


def run(options: argparse.Namespace) -> Result:
    """Compares the formula with XLA's plan for each of `CASES`, and lists what fits which card."""
    rows = []
    missed = []
    cases = CASES[:2] if options.quick else CASES
    # Each case has a process of its own, because a compilation does not give its memory back.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        plans = list(processes.map(plan_of, cases))
    for setting, plan in zip(cases, plans, strict=True):
        predicted = peak_bytes(setting)
        ratio = predicted / plan.peak_bytes
        predicted_temp = predicted - plan.argument_bytes
        rows.append(
            {
                "preset": setting.preset,
                "micro-batch": setting.rows,
                "blocks": setting.policy,
                "formula, GB": predicted / GB,
                "XLA, GB": plan.peak_bytes / GB,
                "formula / XLA": ratio,
                "of the temporary part alone": predicted_temp / plan.temp_bytes,
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
