"""Renews the summaries of six programs in tests/golden: `python -m benchmarks.h200 golden`.

The programs are compiled for an H200. A change of ours that changes a compiled program shows as a
change of these files in review.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import fastaccum as fa
from benchmarks.h200 import programs, summary
from benchmarks.support.stablehlo import h200

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
# The packages that decide, beside this repository, what is compiled.
VERSIONS = ("tensorflow", "keras", "tf-keras", "jaxlib")
# The command that renews the files, for messages that advise it.
COMMAND = "python -m benchmarks.h200 golden"


def bert() -> programs.Compiled:
    """Compiles an encoder with masked-token loss, of tf_keras's own layers."""
    import tf_keras

    layers = tf_keras.layers
    width = 1024
    vocabulary = 8192
    K, B, T = 4, 12, 512  # micro-batches, batch, time
    policy = tf_keras.mixed_precision.Policy("mixed_float16")
    ids = tf_keras.Input((T,), dtype="int32")
    x = layers.Embedding(vocabulary, width, dtype=policy)(ids)
    for _ in range(2):
        attended = layers.MultiHeadAttention(16, width // 16, dtype=policy)(x, x)
        x = layers.LayerNormalization(dtype=policy)(layers.add([x, attended]))
        hidden = layers.Dense(4 * width, "gelu", dtype=policy)(x)
        x = layers.LayerNormalization(dtype=policy)(
            layers.add([x, layers.Dense(width, dtype=policy)(hidden)])
        )
    model = tf_keras.Model(ids, layers.Dense(vocabulary, dtype="float32")(x))
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    token_ids = np.zeros((K, B, T), "int32")
    stack = (token_ids, token_ids)  # inputs and targets
    trainer = fa.Trainer(model, tf_keras.optimizers.Adam(1e-4), loss)
    program = programs.of_trainer(trainer, stack)
    # The matrices of a block; those of its attention have an axis of heads.
    block = [*4 * [(width, width)], (width, 4 * width), (4 * width, width)]
    return dataclasses.replace(program, matrices=(*block, *block, (width, vocabulary)))


def convnet() -> programs.Compiled:
    """Compiles a residual network with batch normalization, of Keras's own layers."""
    K, B, size = 4, 64, 64  # micro-batches, batch, pixels along each side
    layers = keras.layers

    def convolved(x, filters, stride=1):
        x = layers.Conv2D(filters, 3, stride, "same", use_bias=False, dtype="mixed_float16")(x)
        return layers.BatchNormalization(dtype="mixed_float16")(x)

    with h200.weightless():  # no memory for Keras's variables: the program is only compiled
        images = keras.Input((size, size, 3))
        x = layers.ReLU(dtype="mixed_float16")(convolved(images, 64))
        for filters in (128, 256):
            x = layers.ReLU(dtype="mixed_float16")(convolved(x, filters, 2))
            h = convolved(layers.ReLU(dtype="mixed_float16")(convolved(x, filters)), filters)
            x = layers.ReLU(dtype="mixed_float16")(layers.Add(dtype="mixed_float16")([x, h]))
        model = keras.Model(
            images, layers.Dense(1000, dtype="float32")(layers.GlobalAveragePooling2D()(x))
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        stack = (np.zeros((K, B, size, size, 3), "float32"), np.zeros((K, B), "int32"))
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return programs.of_trainer(trainer, stack)


def _gpt(**options: Any) -> Callable[[], programs.Compiled]:
    return lambda: programs.gpt(programs.Gpt(**{"layers": 2, **options}))


PROGRAMS: dict[str, Callable[[], programs.Compiled]] = {
    "gpt": _gpt(),  # blocks in one LayerStack, as in the presets of GPT-2's sizes
    "gpt_unrolled": _gpt(stacked=False),
    # These run their blocks in loops. With 3 layers, no activation has the shape of a stack of
    # weights.
    "gpt_2048": _gpt(batch=2, layers=3, policy=("projection", "attention")),
    "gpt_8192": _gpt(batch=2, layers=3, context=8192),
    "bert": bert,
    "convnet": convnet,
}


def summarize(program: programs.Compiled) -> dict[str, Any]:
    """Returns what is kept of a program: counts, and figures of four digits."""
    return {name: _rounded(value) for name, value in summary.of(program).items() if name != "ms"}


def renew(names: list[str]) -> None:
    """Writes the files of these programs."""
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        path = FOLDER / f"{name}.json"
        kept = {**summarize(PROGRAMS[name]()), "versions": versions()}
        before = json.loads(path.read_text()) if path.exists() else None
        path.write_text(json.dumps(kept, indent=1) + "\n")
        state = "as before" if kept == before else "renewed"
        print(f"{name}: {state}, {kept['predicted ms']} ms", flush=True)


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lists the figures of a summary that differ from the kept ones.

    Counts of matmuls and of added gradients, and counts that stand by themselves, such as that of
    host transfers, are compared exactly, since one more is another form of the program. Other
    figures may differ by 2%. Counts of kernels may also differ by 8 launches a step, since one more
    small kernel in a micro-batch does not matter.
    """
    differing = []
    for name in sorted({*kept, *now} - {"versions"}):
        before = kept.get(name)
        after = now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            slack = 0 if name in ("matmuls", "weight gradients added") else 8
            for key in sorted({*before, *after}):
                old = before.get(key, 0)
                new = after.get(key, 0)
                if _differ(old, new, slack):
                    differing.append(f"{name}, {key}: {old} -> {new}")
        elif _differ(before, after, slack=0):
            differing.append(f"{name}: {before} -> {after}")
    return differing


def _differ(old: Any, new: Any, slack: int) -> bool:
    """Tells if two figures differ by more than 2% and by more than the slack.

    Without slack, any difference of a count is one.
    """
    if old == new:
        return False
    if old is None or new is None:
        return True
    if isinstance(old, int) and slack == 0:
        return True
    return abs(new - old) > max(slack, 0.02 * abs(old))


def versions() -> dict[str, str]:
    """Returns the versions of the packages that decide what is compiled."""
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(figure) for name, figure in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value
