"""Memory that XLA plans for a step of the 1.3B-parameter GPT on an H200.

Nothing of that size is held here: the variables are zeros in one shared buffer, and the step is
compiled for a device that is only described. Peak memory is what the program needs on the device:
arguments (the weights in float32, AdamW's two slots, the ids), results that are not written in
place, and temp memory (accumulators, activations, workspaces).
"""

import types

import h200
import keras
import numpy as np

import fastaccum as fa

MICRO_BATCHES = 8
BATCH_SIZE = 8
CONTEXT = 2048  # tokens
GIB = 2**30


def test_peak_memory_of_a_large_gpt(benchmark, report):
    layers = 1 if benchmark.disabled else 24
    ids = np.zeros((MICRO_BATCHES, BATCH_SIZE, CONTEXT), "int32")
    with h200.weightless():
        model = fa.gpt(preset="1.3b", layers=layers, dtype="mixed_float16")
        trainer = fa.Trainer(
            model, keras.optimizers.AdamW(2e-4), fa.LinearCrossEntropy(), clip_norm=1.0
        )
        exported = h200.export_step(trainer, (ids, ids))
    _, memory = benchmark.pedantic(h200.compile_for_h200, (exported,), rounds=1)
    if benchmark.disabled:
        return
    report(
        "peak memory on an H200, GiB",
        types.SimpleNamespace(name="GPT 1.3B"),
        memory.peak_bytes / GIB,
        f"{model.count_params() / 1e9:.3g} B parameters, {MICRO_BATCHES} x {BATCH_SIZE} x "
        f"{CONTEXT:,} tokens: arguments {memory.argument_bytes / GIB:.3g}, temp "
        f"{memory.temp_bytes / GIB:.3g}",
    )
