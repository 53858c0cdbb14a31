"""Our train steps, compiled for an H200: GPTs by options, traced as on a GPU and never run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

import fastaccum as fa
from benchmarks.gpu import export, manifest
from benchmarks.h200 import kernels
from benchmarks.support.stablehlo import h200, hlo
from fastaccum.step.compiler_ir import MemoryAnalysis

CACHE = Path(tempfile.gettempdir(), f"fastaccum-h200-{os.getuid()}")


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A GPT and its train step: `fa.gpt` with a tied head, AdamW, clipping by global norm,
    `fa.LinearCrossEntropy`.

    Attributes:
        layers, width, vocabulary, context: its sizes; heads are 128 wide.
        batch: sequences in a micro-batch.
        micro_batches: in a train step.
        dtype: what it computes in: "bfloat16", "float16" or "float32".
        stacked: whether the blocks are one LayerStack.
        policy: what that keeps: "auto", or as `fa.kernels.LayerStack` takes it.
        attention: implementation of it, "auto" or as `fa.kernels.attention` takes it.
        chunk_size: of the cross-entropy, or None for its own choice.
    """

    layers: int = 4
    width: int = 2048
    vocabulary: int = 50304
    context: int = 2048
    batch: int = 8
    micro_batches: int = 8
    dtype: str = "bfloat16"
    stacked: bool = True
    policy: str | tuple[str, ...] = "auto"
    attention: str = "auto"
    chunk_size: int | None = None

    @property
    def flops(self) -> float:
        """Of a train step, by hand."""
        sizes = {name: getattr(self, name) for name in ("layers", "width", "context")}
        sizes["vocabulary_size"] = self.vocabulary
        about = {"sizes": sizes, "micro_batches": self.micro_batches, "batch_size": self.batch}
        return float(manifest.model_flops(about))


@dataclasses.dataclass(frozen=True)
class JaxGpt:
    """A GPT in JAX and its train step: a scan over the micro-batches, optax's AdamW after a clip by
    global norm.

    Attributes:
        form: "scan" over the blocks; "remat", the same with each block under `jax.checkpoint`; or
            "unrolled".
        attention: the `implementation` of `jax.nn.dot_product_attention`.
        logits: the dtype that they are held in.
        sizes: where the sizes and the dtype of the model are taken from.
    """

    form: Literal["scan", "remat", "unrolled"] = "scan"
    attention: Literal["cudnn", "xla"] = "cudnn"
    logits: Literal["bfloat16", "float32"] = "bfloat16"
    sizes: Gpt = dataclasses.field(default_factory=Gpt)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for an H200.

    Attributes:
        text: the optimized HLO.
        memory: what XLA planned.
        micro_batches: in a run of it.
        flops: the model's own arithmetic in a run of it, or None where nobody has counted.
        matrices: shapes of the weights that are multiplied with, each layer's of a LayerStack.
    """

    text: str
    memory: MemoryAnalysis
    micro_batches: int
    flops: float | None = None
    matrices: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def kernels(self) -> list[kernels.Kernel]:
        """What it launches."""
        return kernels.read(self.text)

    @functools.cached_property
    def values(self) -> hlo.Program:
        """What it computes."""
        return hlo.Program(self.text)


def gpt(options: Gpt) -> Compiled:
    """Our program for these options."""
    policy = "float32" if options.dtype == "float32" else f"mixed_{options.dtype}"
    sizes = (
        options.vocabulary,
        options.context,
        options.width,
        options.layers,
        options.width // 128,
    )
    form = {"stacked": options.stacked} | (
        {} if options.policy == "auto" else {"policy": options.policy}
    )
    with h200.weightless(), _attention(options.attention):
        model = fa.gpt(*sizes, tied=True, dtype=policy, **form)
        loss = fa.LinearCrossEntropy(chunk_size=options.chunk_size)
        trainer = fa.Trainer(
            model, keras.optimizers.AdamW(3e-4, weight_decay=0.1), loss, clip_norm=1.0
        )
        ids = np.zeros((options.micro_batches, options.batch, options.context), "int32")
        program = of_trainer(trainer, (ids, ids))
    keras.backend.clear_session()
    return dataclasses.replace(program, flops=options.flops)


def of_trainer(trainer: fa.Trainer, stack: tuple[Any, ...], **flags: Any) -> Compiled:
    """The program of a trainer's step, traced as on a GPU.

    Args:
        trainer: one that has not been used yet.
        stack: as `trainer.train_step` takes it.
        **flags: XLA's debug options.
    """
    text, memory = compiled(h200.export_step(trainer, stack), **flags)
    return Compiled(text, memory, len(stack[0]), matrices=tuple(_matrices(trainer.model)))


def _matrices(model: Any) -> Iterator[tuple[int, int]]:
    for layer in model.layers:
        for weight in () if hasattr(layer, "embeddings") else layer.trainable_variables:
            depth = layer.depth if isinstance(layer, fa.kernels.LayerStack) else None
            shape = tuple(weight.shape)[1:] if depth else tuple(weight.shape)
            yield from (depth or 1) * [shape] if len(shape) == 2 else ()


def compiled(exported: bytes, **flags: Any) -> tuple[str, MemoryAnalysis]:
    """The optimized HLO of StableHLO and its memory; compiled once, and read from a file of `CACHE`
    afterwards.
    """
    compiler = importlib.metadata.version("jaxlib"), h200.H200, *sorted(flags.items())
    key = hashlib.sha256(repr((exported, compiler)).encode()).hexdigest()
    path = CACHE / f"{key[:32]}.json.gz"
    if path.exists():
        text, memory = json.loads(gzip.decompress(path.read_bytes()))
        return text, MemoryAnalysis(*memory)
    text, memory = h200.compile_for_h200(exported, **flags)
    CACHE.mkdir(mode=0o700, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_bytes(gzip.compress(json.dumps([text, memory]).encode(), 1))
    whole.replace(path)  # others may compile the same
    return text, memory


def _attention(implementation: str) -> contextlib.AbstractContextManager[Any]:
    return (
        contextlib.nullcontext()
        if implementation == "auto"
        else export.attention_by(implementation)
    )
