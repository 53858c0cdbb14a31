"""Compares `fa.remat` with the plain model: temp memory on an H200, gradients, time on a CPU."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs
from benchmarks.memory.results import Result
from benchmarks.support.stablehlo import h200
from fastaccum.layers import blocks

# The most that a column of the table may have.
BARS = {"temp / plain": 0.2, "gradients": 1e-5, "step time / plain": 1.4}
VOCABULARY = 1024
CLASSES = 10
ROUNDS = 7  # of timing, a step of each trainer


class Block(keras.layers.Layer):
    """Transformer layer as users write it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.inner = keras.layers.Dense(4 * width, "gelu")
        self.outer = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], self.inner.units))

    def call(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.outer(self.inner(self.norms[1](x)))


def flat_gpt(depth: int, width: int, length: int) -> keras.Model:
    """Makes a GPT of plain layers in one flat graph."""
    ids = keras.Input((length,), dtype="int32")
    heads = width // 64
    x = keras.layers.Embedding(VOCABULARY, width)(ids)
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        x = keras.layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))


def block_gpt(depth: int, width: int, length: int) -> keras.Model:
    """Makes a GPT of `Block`s."""
    ids = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(ids)
    for _ in range(depth):
        x = Block(width, width // 64)(x)
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))


def resnet(depth: int, width: int, size: int) -> keras.Model:
    """Makes residual blocks of two convolutions with batch statistics."""
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(width, 3, padding="same")(images)
    for _ in range(depth):
        y = x
        for activation in ("relu", "linear"):
            y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
            y = keras.layers.Activation(activation)(keras.layers.BatchNormalization()(y))
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    scores = keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, scores)


class Case(NamedTuple):
    """Model, and its sizes for `make`: depth, width and length (or height).

    Attributes:
        name: as the table shows it.
        make: makes the model.
        large: the sizes on the H200.
        small: the sizes on the CPU.
        bars: the columns that must stay below their bars.
    """

    name: str
    make: Callable[..., keras.Model]
    large: tuple[int, int, int]
    small: tuple[int, int, int]
    bars: tuple[str, ...] = ("gradients",)


CASES = [
    Case("GPT of plain layers", flat_gpt, (24, 512, 1024), (8, 128, 128), tuple(BARS)),
    Case("GPT of a class's layers", block_gpt, (24, 512, 1024), (8, 128, 128)),
    Case("ResNet", resnet, (24, 64, 64), (8, 16, 32)),
]
QUICK = Case("GPT of plain layers", flat_gpt, (24, 512, 1024), (4, 64, 32))


def run(options: argparse.Namespace) -> Result:
    """Measures every model; with `quick` the first at a depth of 4, on the CPU alone."""
    rows = []
    missed = []
    for case in [QUICK] if options.quick else CASES:
        row: dict[str, Any] = {
            "model": case.name,
            "depth": case.large[0],
            "blocks": None,
            "temp GiB plain": None,
            "temp GiB": None,
            "temp / plain": None,
        }
        if not options.quick:
            row |= _on_an_h200(case.make, case.large)
        row |= _on_a_cpu(case.make, case.small)
        rows.append(row)
        for column in case.bars:
            if row[column] > BARS[column]:
                missed.append(f"{case.name}: {column} {row[column]:.3g}, over {BARS[column]}")
    notes = (
        "temp: XLA's plan of the train step compiled for an H200, in mixed_bfloat16, 2 "
        "micro-batches of 8 rows, AdamW; gradients: the distance of one SGD step's update from "
        "the plain one in float32, dropout included, relative to the update; step time: a step "
        "on this machine's CPU, both in turn, medians (XLA:CPU saves no memory by recomputation)."
    )
    return Result("Recomputation by fa.remat", rows, missed, notes)


def _trainer(
    make: Callable[..., keras.Model], sizes: tuple[int, ...], recompute: bool, optimizer: Any
) -> fa.Trainer:
    keras.utils.set_random_seed(0)
    model = make(*sizes)
    if recompute:
        fa.remat(model)
    takes_tokens = len(model.input_shape) == 2
    if takes_tokens:
        loss = fa.LinearCrossEntropy()
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fa.Trainer(model, optimizer, loss, loss_scale=None, jit_compile=True)


def _stack(trainer: fa.Trainer, micro_batches: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (micro_batches, rows, *trainer.model.input_shape[1:])
    rng = np.random.default_rng(0)
    if len(shape) == 3:  # token ids
        ids = rng.integers(0, VOCABULARY, shape)
        return ids, np.roll(ids, -1, -1)
    return rng.normal(size=shape).astype("float32"), rng.integers(0, CLASSES, shape[:2])


@contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _on_an_h200(make: Callable[..., keras.Model], sizes: tuple[int, ...]) -> dict[str, Any]:
    plain = _temp_gib(make, sizes, recompute=False)
    recomputed = _temp_gib(make, sizes, recompute=True)
    return {"temp GiB plain": plain, "temp GiB": recomputed, "temp / plain": recomputed / plain}


def _temp_gib(make: Callable[..., keras.Model], sizes: tuple[int, ...], recompute: bool) -> float:
    with h200.weightless(), _policy("mixed_bfloat16"):
        trainer = _trainer(make, sizes, recompute, keras.optimizers.AdamW(3e-4))
        program = programs.of_trainer(trainer, _stack(trainer, 2, 8))
    keras.backend.clear_session()
    return program.memory.temp_bytes / 2**30


def _on_a_cpu(make: Callable[..., keras.Model], sizes: tuple[int, ...]) -> dict[str, Any]:
    plain = _trainer(make, sizes, False, keras.optimizers.SGD(0.1))
    recomputing = _trainer(make, sizes, True, keras.optimizers.SGD(0.1))
    stack = _stack(plain, 2, 8)
    expected = _update(plain, stack)
    update = _update(recomputing, stack)
    distance = np.linalg.norm(update - expected) / np.linalg.norm(expected)
    plain_seconds = []
    seconds = []
    for _ in range(ROUNDS):
        plain_seconds.append(_seconds(plain, stack))
        seconds.append(_seconds(recomputing, stack))
    return {
        "blocks": _count_blocks(recomputing.model),
        "gradients": float(distance),
        "step time / plain": statistics.median(seconds) / statistics.median(plain_seconds),
    }


def _update(trainer: fa.Trainer, stack: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Returns the change of all weights in one step, as one vector."""
    variables = trainer.model.trainable_variables
    before = [variable.numpy() for variable in variables]
    trainer.train_step(stack)
    changes = [
        (variable.numpy() - value).ravel()
        for variable, value in zip(variables, before, strict=True)
    ]
    return np.concatenate(changes)


def _count_blocks(model: keras.Model) -> int:
    """Counts the blocks and segments that are recomputed."""
    count = 0
    for block in blocks.find(model):
        if block.segments is None:
            count += 1
        else:
            count += sum(segment.recomputed for segment in block.segments)
    return count


def _seconds(trainer: fa.Trainer, stack: tuple[np.ndarray, np.ndarray]) -> float:
    start = time.perf_counter()
    float(trainer.train_step(stack).loss)
    return time.perf_counter() - start
