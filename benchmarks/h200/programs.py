"""Compiles our train steps for an H200: GPTs by options, traced as on a GPU and never run."""

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
    """Train step of `fa.gpt` with a tied head, AdamW, clipping and `fa.LinearCrossEntropy`.

    Attributes:
        layers, width, vocabulary, context: its sizes; heads are 128 wide.
        batch: sequences in a micro-batch.
        micro_batches: in a train step.
        dtype: "bfloat16", "float16" or "float32", in which it computes.
        stacked: makes the blocks one LayerStack.
        policy: of `fa.kernels.LayerStack`, or "auto".
        attention: the implementation of `fa.kernels.attention`, or "auto".
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
        """The floating point operations of the model in a train step, by hand."""
        sizes = {
            "layers": self.layers,
            "width": self.width,
            "context": self.context,
            "vocabulary_size": self.vocabulary,
        }
        program = {"sizes": sizes, "micro_batches": self.micro_batches, "batch_size": self.batch}
        return float(manifest.model_flops(program))


@dataclasses.dataclass(frozen=True)
class JaxGpt:
    """Train step of a GPT in JAX: a scan over the micro-batches, optax's AdamW after clipping.

    Attributes:
        form: "scan" over the blocks; "remat", the same with each block under `jax.checkpoint`; or
            "unrolled".
        attention: the `implementation` of `jax.nn.dot_product_attention`.
        logits: the dtype that the logits are held in.
        sizes: has the sizes and the dtype of the model.
    """

    form: Literal["scan", "remat", "unrolled"] = "scan"
    attention: Literal["cudnn", "xla"] = "cudnn"
    logits: Literal["bfloat16", "float32"] = "bfloat16"
    sizes: Gpt = dataclasses.field(default_factory=Gpt)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Program compiled for an H200.

    Attributes:
        text: the optimized HLO.
        memory: XLA's plan.
        micro_batches: in a run of it.
        flops: the model's own arithmetic in a run of it, or None if it is not counted.
        matrices: shapes of the weights that are factors of products, one for each layer.
    """

    text: str
    memory: MemoryAnalysis
    micro_batches: int
    flops: float | None = None
    matrices: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def kernels(self) -> list[kernels.Kernel]:
        """The kernels that the program launches."""
        return kernels.read(self.text)

    @functools.cached_property
    def values(self) -> hlo.Program:
        """The values that the program computes."""
        return hlo.Program(self.text)


def gpt(options: Gpt) -> Compiled:
    """Compiles our program for these options."""
    dtype = "float32" if options.dtype == "float32" else f"mixed_{options.dtype}"
    form = {} if options.policy == "auto" else {"policy": options.policy}
    with h200.weightless(), _attention(options.attention):
        model = fa.gpt(
            options.vocabulary,
            options.context,
            options.width,
            options.layers,
            heads=options.width // 128,
            tied=True,
            stacked=options.stacked,
            dtype=dtype,
            **form,
        )
        loss = fa.LinearCrossEntropy(chunk_size=options.chunk_size)
        trainer = fa.Trainer(
            model, keras.optimizers.AdamW(3e-4, weight_decay=0.1), loss, clip_norm=1.0
        )
        ids = np.zeros((options.micro_batches, options.batch, options.context), "int32")
        program = of_trainer(trainer, (ids, ids))
    keras.backend.clear_session()
    return dataclasses.replace(program, flops=options.flops)


def of_trainer(trainer: fa.Trainer, stack: tuple[Any, ...], **flags: Any) -> Compiled:
    """Compiles a trainer's step, traced as on a GPU.

    Args:
        trainer: not used before.
        stack: as `trainer.train_step` takes it.
        **flags: XLA's debug options.
    """
    text, memory = compiled(h200.export_step(trainer, stack), **flags)
    return Compiled(text, memory, len(stack[0]), matrices=tuple(_matrices(trainer.model)))


def _matrices(model: Any) -> Iterator[tuple[int, int]]:
    """Yields the shapes of the weights that are factors of products, one for each layer."""
    for layer in model.layers:
        if hasattr(layer, "embeddings"):
            continue
        for weight in layer.trainable_variables:
            shape = tuple(weight.shape)
            depth = 1
            if isinstance(layer, fa.kernels.LayerStack):
                depth, *shape = shape
            if len(shape) == 2:
                yield from depth * [tuple(shape)]


def compiled(exported: bytes, **flags: Any) -> tuple[str, MemoryAnalysis]:
    """Compiles StableHLO once, and later reads the result from a file of `CACHE`.

    Returns:
        The optimized HLO, and XLA's plan of its memory.
    """
    compiler = importlib.metadata.version("jaxlib"), h200.H200, *sorted(flags.items())
    key = hashlib.sha256(repr((exported, compiler)).encode()).hexdigest()
    path = CACHE / f"{key[:32]}.json.gz"
    if path.exists():
        text, memory = json.loads(gzip.decompress(path.read_bytes()))
        return text, MemoryAnalysis(*memory)
    text, memory = h200.compile_for_h200(exported, **flags)
    CACHE.mkdir(mode=0o700, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(gzip.compress(json.dumps([text, memory]).encode(), 1))
    unfinished.replace(path)  # other processes may compile the same
    return text, memory


def _attention(implementation: str) -> contextlib.AbstractContextManager[Any]:
    if implementation == "auto":
        return contextlib.nullcontext()
    return export.attention_by(implementation)
