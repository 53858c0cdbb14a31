"""Plans what slots and weights in fewer bytes take, by XLA for an H200, and predicts their update.

No weights are made: the variables are zeros in one shared buffer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs, roofline
from benchmarks.memory.results import Result
from benchmarks.support.stablehlo import h200
from fastaccum.adapters.storage import StateDtype
from fastaccum.step.compiler_ir import MemoryAnalysis

GB = 1e9
CARD = 80.0  # GB
LEFT_OVER = 4.0  # GB of the card, for CUDA's context, libraries and fragments
# Kernels of the once-a-step part that are no update: products, and zeros of accumulators.
NO_UPDATE = ("gemm", "fill", "convert")


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage of a training with Adam, and the bytes a parameter that its plan may take."""

    state: StateDtype
    policy: str
    least: float
    most: float

    @property
    def title(self) -> str:
        weights = "bfloat16" if self.policy == "bfloat16" else "float32"
        state = self.state
        return f"{weights} weights, {state} slots"


STORAGES = (
    Storage("float32", "mixed_bfloat16", 16.0, 18.0),
    Storage("bfloat16", "mixed_bfloat16", 12.0, 14.0),
    Storage("int8", "mixed_bfloat16", 10.0, 12.0),
    Storage("bfloat16", "bfloat16", 10.0, 10.5),
    Storage("int8", "bfloat16", 8.0, 8.5),
)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A compiled step.

    Attributes:
        parameters: numbers in its weights.
        memory: XLA's plan.
        update_ms: what is predicted of the kernels that run once a step and are no products: the
            gradient's norm, and the update.
    """

    parameters: int
    memory: MemoryAnalysis
    update_ms: float


def gpt() -> tuple[keras.Model, Any]:
    """Builds a GPT with few tokens, so that its activations are few bytes beside its weights."""
    model = fa.gpt(8192, 128, 4096, 2, heads=32, tied=True, stacked=False)
    return model, np.zeros((4, 1, 128), "int32")


def preset() -> tuple[keras.Model, Any]:
    """Builds the 1.3B preset, with one sequence in a micro-batch and blocks that are recomputed."""
    model = fa.gpt(preset="1.3b", policy="nothing_saveable")
    return model, np.zeros((4, 1, 2048), "int32")


def llama(layers: int) -> tuple[keras.Model, Any]:
    """Builds KerasHub's Llama 2 with blocks that are recomputed: 6.7 billion with 32 layers."""
    from keras_hub import models

    backbone = models.LlamaBackbone(
        vocabulary_size=32_000,
        num_layers=layers,
        num_query_heads=32,
        num_key_value_heads=32,
        hidden_dim=4096,
        intermediate_dim=11_008,
    )
    model = fa.remat(models.LlamaCausalLM(backbone))
    ids = np.zeros((8, 1, 2048), "int32")
    return model, {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def plan(build: Callable[[], tuple[keras.Model, Any]], storage: Storage) -> Planned:
    """Compiles a step for an H200, and predicts its update."""
    keras.config.set_dtype_policy(storage.policy)
    with h200.weightless():
        model, x = build()
        y = x if isinstance(x, np.ndarray) else x["token_ids"]
        trainer = fa.Trainer(
            model,
            keras.optimizers.Adam(3e-4),
            fa.LinearCrossEntropy(),
            clip_norm=1.0,
            scan_layers=False,  # a loop would take the weights as stacks, which are copies
            optimizer_state_dtype=storage.state,
        )
        program = programs.of_trainer(trainer, (x, y))
    update_ms = 0.0
    for timed in roofline.predict(program.kernels, roofline.Rates()).kernels:
        if not timed.kernel.loops and timed.kernel.kind not in NO_UPDATE:
            update_ms += timed.ms
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return Planned(parameters, program.memory, update_ms)


def run(options: argparse.Namespace) -> Result:
    """Compares the storages on a GPT; then plans a Llama of 7 billion on a card of 80 GB."""
    rows = []
    missed = []
    first_ms = None
    storages = STORAGES[-1:] if options.quick else STORAGES
    # Each case has a process of its own, because a compilation does not give its memory back.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        for storage in storages:
            planned = processes.submit(plan, gpt, storage).result()
            a_parameter = planned.memory.peak_bytes / planned.parameters
            if storage is STORAGES[0]:
                first_ms = planned.update_ms
            ratio = planned.update_ms / first_ms if first_ms else None
            rows.append(_row("GPT", storage, planned, ratio))
            if not storage.least <= a_parameter <= storage.most:
                missed.append(f"{storage.title}: {a_parameter:.2f} bytes a parameter")
            if first_ms and planned.update_ms > first_ms:
                missed.append(f"{storage.title}: the update takes longer than with float32 slots")

        if not options.quick:
            for storage in storages:
                planned = processes.submit(plan, preset, storage).result()
                rows.append(_row("fa.gpt, preset 1.3b", storage, planned, None))
        smallest = STORAGES[-1]
        layers = 2 if options.quick else 32
        planned = processes.submit(plan, functools.partial(llama, layers), smallest).result()
        rows.append(_row(f"Llama, {layers} layers", smallest, planned, None))
        if planned.memory.peak_bytes > (CARD - LEFT_OVER) * GB:
            missed.append(f"Llama: {planned.memory.peak_bytes / GB:.1f} GB")
    notes = (
        "Adam with clipping. The GPT has 2 layers of width 4,096 and 4 micro-batches of 128 "
        "tokens; the preset 4 of one sequence of 2,048, recomputed; the Llama, KerasHub's with the "
        "sizes of Llama 2 7B, 8 of one sequence of 2,048, and `fa.remat`. The update is the "
        "gradient's norm and all that follows it, by a roofline; each figure is compared with the "
        "first row's, where that is there."
    )
    return Result("Slots and weights in fewer bytes, planned for an H200", rows, missed, notes)


def _row(model: str, storage: Storage, planned: Planned, ratio: float | None) -> dict[str, Any]:
    memory = planned.memory
    return {
        "model": model,
        "storage": storage.title,
        "parameters, billions": planned.parameters / GB,
        "variables, GB": memory.argument_bytes / GB,
        "temporary, GB": memory.temp_bytes / GB,
        "peak, GB": memory.peak_bytes / GB,
        "bytes a parameter": memory.peak_bytes / planned.parameters,
        "update, ms": planned.update_ms,
        "update / float32's": ratio,
    }
