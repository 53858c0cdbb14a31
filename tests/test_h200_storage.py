"""Compiles the step of a GPT for an H200 whose slots and weights are stored in fewer bytes.

The update reads them as float32, and no float32 copy of one stands in the program.
"""

import math
import re

import h200
import hlo
import keras
import numpy as np
import pytest

import fastaccum as fa

WIDTH = 512
IDS = np.zeros((4, 1, 64), "int32")


def compiled(state_dtype, policy):
    """Returns the step's text, XLA's plan and the shapes of its matrices."""
    with h200.weightless():
        model = fa.gpt(256, 64, WIDTH, 2, heads=4, tied=True, stacked=False, dtype=policy)
        trainer = fa.Trainer(
            model,
            keras.optimizers.Adam(1e-3),
            fa.LinearCrossEntropy(),
            clip_norm=1.0,
            optimizer_state_dtype=state_dtype,
        )
        exported = h200.export_step(trainer, (IDS, IDS))
    text, memory = h200.compile_for_h200(exported)
    shapes = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1]
    parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
    return text, memory, shapes, parameters


def float32_after_the_loop(text, size):
    """Lists the float32 results of `size` numbers or more that the update computes in memory.

    The last micro-batch's weight gradients, which a product adds to, are none of the update.
    """
    entry = text[text.index("\nENTRY") :]
    entry = entry[: entry.index("\n}")]
    after_loop = entry[entry.index(" while(") :]
    found = []
    for line in after_loop.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) (fusion|copy|convert)\(", line)
        if match is None or "gemm" in match[1] or "dot" in match[1]:
            continue
        for dims in re.findall(r"f32\[([\d,]+)\]", match[2]):
            if math.prod(map(int, dims.split(","))) >= size:
                found.append(line.strip()[:200])
    return found


@pytest.mark.parametrize(
    ("state_dtype", "policy", "least", "most", "float32_results"),
    [
        # In so small a model the gradients of one micro-batch, in bfloat16, take another byte.
        ("int8", "bfloat16", 8.0, 9.6, 0),
        # One for each weight: the weight itself.
        pytest.param("int8", "mixed_bfloat16", 10.0, 12.0, 9, marks=pytest.mark.slow),
        pytest.param("bfloat16", "mixed_bfloat16", 12.0, 14.0, 9, marks=pytest.mark.slow),
        pytest.param("float32", "mixed_bfloat16", 16.0, 18.0, 27, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_a_parameter(state_dtype, policy, least, most, float32_results):
    text, memory, shapes, parameters = compiled(state_dtype, policy)
    activations = 0.9e6  # of 64 tokens
    assert least < memory.peak_bytes / parameters
    assert (memory.peak_bytes - activations) / parameters < most
    # Of the embedding table XLA keeps 0.5 MB, which it finds cheaper than to compute them again.
    assert len(shapes) == 9
    assert len(float32_after_the_loop(text, WIDTH**2)) <= float32_results
    program = hlo.Program(text)
    assert program.count("conditional") == 0
    assert program.unknown_trip_counts == 0
