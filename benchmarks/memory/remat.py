"""Recomputation by `fa.remat` beside the plain model: temp memory on an H200, the gradients, a
step's time on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs
from benchmarks.memory.results import Result
from benchmarks.support.stablehlo import h200
from fastaccum.layers import blocks

BARS = {"temp / plain": 0.2, "gradients": 1e-5, "step time / plain": 1.4}
VOCABULARY, CLASSES = 1024, 10
ROUNDS = 7  # of steps, one of each kind


class Block(keras.layers.Layer):
    """A Transformer layer as one writes it oneself."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.inner, self.outer = keras.layers.Dense(4 * width, "gelu"), keras.layers.Dense(width)

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
    """Plain layers in one flat graph."""
    ids, heads = keras.Input((length,), dtype="int32"), width // 64
    x = keras.layers.Embedding(VOCABULARY, width)(ids)
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        attended = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(
            y, y, use_causal_mask=True
        )
        x = keras.layers.Add()([x, attended])
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))


def block_gpt(depth: int, width: int, length: int) -> keras.Model:
    """Layers of a class of one's own."""
    ids = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(ids)
    for _ in range(depth):
        x = Block(width, width // 64)(x)
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))


def resnet(depth: int, width: int, size: int) -> keras.Model:
    """Residual blocks of two convolutions with batch statistics."""
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(width, 3, padding="same")(images)
    for _ in range(depth):
        y = x
        for activation in ("relu", "linear"):
            y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
            y = keras.layers.Activation(activation)(keras.layers.BatchNormalization()(y))
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    return keras.Model(
        images, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    )


# Depth, width and length (or height), on the H200 and on the CPU.
MODELS: dict[str, tuple[Callable[..., keras.Model], tuple[int, ...], tuple[int, ...]]] = {
    "GPT of plain layers": (flat_gpt, (24, 512, 1024), (8, 128, 128)),
    "GPT of a class's layers": (block_gpt, (24, 512, 1024), (8, 128, 128)),
    "ResNet": (resnet, (24, 64, 64), (8, 16, 32)),
}


def run(options: argparse.Namespace) -> Result:
    """Every model; with `quick` the first at a depth of 4, on the CPU alone."""
    rows, missed = [], []
    for name, (make, large, small) in list(MODELS.items())[: 1 if options.quick else None]:
        found: dict[str, Any] = {"model": name, "depth": large[0], "blocks": None}
        found |= {"temp GiB plain": None, "temp GiB": None, "temp / plain": None}
        if not options.quick:
            found |= _on_an_h200(make, large)
        found |= _on_a_cpu(make, (4, 64, 32) if options.quick else small)
        rows.append(found)
        bars = dict(BARS) if name == next(iter(MODELS)) else {"gradients": BARS["gradients"]}
        missed += [
            f"{name}: {what} {found[what]:.3g}, over {bar}"
            for what, bar in bars.items()
            if found[what] is not None
            and found[what] > bar
            and not (options.quick and "time" in what)
        ]
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
    of_tokens = len(model.input_shape) == 2
    loss = (
        fa.LinearCrossEntropy()
        if of_tokens
        else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return fa.Trainer(model, optimizer, loss, loss_scale=None, jit_compile=True)


def _stack(trainer: fa.Trainer, micro_batches: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    shape, rng = (micro_batches, rows, *trainer.model.input_shape[1:]), np.random.default_rng(0)
    if len(shape) == 3:
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
    temp = []
    for recompute in (False, True):
        with h200.weightless(), _policy("mixed_bfloat16"):
            trainer = _trainer(make, sizes, recompute, keras.optimizers.AdamW(3e-4))
            temp.append(programs.of_trainer(trainer, _stack(trainer, 2, 8)).memory.temp_bytes)
        keras.backend.clear_session()
    plain, recomputed = (bytes_ / 2**30 for bytes_ in temp)
    return {"temp GiB plain": plain, "temp GiB": recomputed, "temp / plain": recomputed / plain}


def _on_a_cpu(make: Callable[..., keras.Model], sizes: tuple[int, ...]) -> dict[str, Any]:
    trainers = [
        _trainer(make, sizes, recompute, keras.optimizers.SGD(0.1)) for recompute in (False, True)
    ]
    stack = _stack(trainers[0], 2, 8)
    updates, seconds = [], [[], []]
    for trainer in trainers:
        variables = trainer.model.trainable_variables
        before = [v.numpy() for v in variables]
        _seconds(trainer, stack)
        updates.append([v.numpy() - b for v, b in zip(variables, before, strict=True)])
    for _ in range(ROUNDS):
        for trainer, each in zip(trainers, seconds, strict=True):
            each.append(_seconds(trainer, stack))
    plain, recomputed = map(statistics.median, seconds)
    expected, given = (np.concatenate([part.ravel() for part in update]) for update in updates)
    distance = np.linalg.norm(given - expected) / np.linalg.norm(expected)
    found = blocks.find(trainers[1].model)
    number = sum(1 if b.segments is None else sum(s.recomputed for s in b.segments) for b in found)
    return {"blocks": number, "gradients": float(distance), "step time / plain": recomputed / plain}


def _seconds(trainer: fa.Trainer, stack: tuple[np.ndarray, np.ndarray]) -> float:
    start = time.perf_counter()
    float(trainer.train_step(stack).loss)
    return time.perf_counter() - start
