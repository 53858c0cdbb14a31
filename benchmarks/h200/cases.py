"""Programs of the report, ours and JAX's for the same GPTs, and their figures."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import fastaccum as fa
from benchmarks.h200 import measures, programs, roofline
from benchmarks.h200.programs import Gpt, JaxGpt
from benchmarks.support.stablehlo import h200
from fastaccum.kernels.cross_entropy import linear_cross_entropy_sum_and_scores
from fastaccum.step.compiler_ir import compiler_ir

Case = Gpt | JaxGpt

SHIPPED = "fastaccum, as shipped"
RECOMPUTED = "fastaccum, everything recomputed"
PORTABLE_RECOMPUTED = "fastaccum without cuDNN, everything recomputed"
CHECKPOINT = "JAX, scan and jax.checkpoint"
LONG = {"context": 8192, "batch": 2}  # the sizes of long sequences
PORTABLE = {"attention": "blockwise"}  # options of a GPT whose attention doesn't need cuDNN

OURS = {
    SHIPPED: Gpt(),
    "fastaccum, loops over layers": Gpt(policy=("projection", "attention")),
    RECOMPUTED: Gpt(policy="nothing_saveable"),
    "fastaccum, everything kept": Gpt(policy="everything_saveable"),
    "fastaccum, unrolled": Gpt(stacked=False),
    "fastaccum without cuDNN, as shipped": Gpt(**PORTABLE),
    PORTABLE_RECOMPUTED: Gpt(policy="nothing_saveable", **PORTABLE),
}
JAX = {
    f"{CHECKPOINT}, cuDNN": JaxGpt("remat"),
    "JAX, scan, cuDNN": JaxGpt("scan"),
    "JAX, unrolled, cuDNN": JaxGpt("unrolled"),
    f"{CHECKPOINT}, XLA attention": JaxGpt("remat", attention="xla"),
    "JAX, unrolled, XLA attention": JaxGpt("unrolled", attention="xla"),
    f"{CHECKPOINT}, cuDNN, float32 logits": JaxGpt("remat", logits="float32"),
    f"{CHECKPOINT}, XLA attention, float32 logits": JaxGpt(
        "remat", attention="xla", logits="float32"
    ),
}
DEEP = 24  # the layers of deep programs; all others have 4
# The programs that are compiled with 4 layers alone.
ONLY_SHALLOW = (
    "JAX, scan, cuDNN",
    "JAX, unrolled, XLA attention",
    f"{CHECKPOINT}, cuDNN, float32 logits",
)

# The programs that the pictures draw against sizes, and for each axis of sizes its points: the
# value on the axis, and the sizes of a program that differ from the default.
DRAWN = {
    SHIPPED: OURS[SHIPPED],
    f"{CHECKPOINT}, cuDNN": JAX[f"{CHECKPOINT}, cuDNN"],
    "JAX, unrolled, cuDNN": JAX["JAX, unrolled, cuDNN"],
}
AXES: dict[str, list[tuple[int, dict[str, int]]]] = {
    "layers": [(n, {"layers": n}) for n in (2, 4, 12, 24)],
    "tokens in a micro-batch": [(2048 * n, {"batch": n}) for n in (2, 4, 8, 16)],
    "sequence length": [(t, {"context": t, "batch": 16384 // t}) for t in (512, 2048, 8192, 16384)],
    "width": [(n, {"width": n}) for n in (1024, 2048, 4096)],
    "vocabulary": [(n, {"vocabulary": n}) for n in (8192, 50304, 131072)],
}


def sized(case: Case, **sizes: int) -> Case:
    """Returns the same program of another size."""
    if isinstance(case, Gpt):
        return dataclasses.replace(case, **sizes)
    # A JAX program has the sizes of one of ours.
    return dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, **sizes))


def everything() -> list[Case]:
    """Lists all programs of the report, each once, the slowest to compile first."""
    named = {**OURS, **JAX}
    cases = [*named.values()]
    cases += [sized(case, layers=DEEP) for name, case in named.items() if name not in ONLY_SHALLOW]
    long = (OURS[SHIPPED], OURS[RECOMPUTED], JAX[f"{CHECKPOINT}, cuDNN"])
    cases += [sized(case, **LONG) for case in long]
    cases += [Gpt(dtype="float16"), Gpt(dtype="float16", layers=DEEP)]
    for points in AXES.values():
        for _, sizes in points:
            cases += [sized(case, **sizes) for case in DRAWN.values()]
    without_duplicates = dict.fromkeys(cases)
    return sorted(without_duplicates, key=_cost, reverse=True)


def _cost(case: Case) -> tuple[bool, int]:
    """Returns a key that orders cases by the time of their compilation.

    Ours take longer than JAX's. Of either, the time grows with the layers that XLA compiles: a loop
    over the layers has one.
    """
    if isinstance(case, Gpt):
        layers_compiled = 1 if case.stacked else case.layers
        return True, layers_compiled
    layers_compiled = case.sizes.layers if case.form == "unrolled" else 1
    return False, layers_compiled


def figures(
    cases: list[Case], rates: roofline.Rates, processes: int = 2
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Compiles the programs and yields the figures of each as soon as it is compiled.

    Args:
        cases: the programs.
        rates: of the device.
        processes: how many compile side by side.
    """
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        running = {pool.submit(_in_its_own_process, case, rates): case for case in cases}
        for number, future in enumerate(concurrent.futures.as_completed(running), 1):
            case = running[future]
            try:
                results = future.result()
            except Exception as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise RuntimeError(f"{case} was not compiled") from error
            print(f"{number} of {len(cases)}: {case}", file=sys.stderr, flush=True)
            yield case, results


def _in_its_own_process(case: Case, rates: roofline.Rates) -> dict[str, Any]:
    """Computes the figures in a process of their own.

    When it ends, the memory that the compilation took is free again. Where memory runs out, the
    system kills that process and not this one.
    """
    context = multiprocessing.get_context("spawn")  # TensorFlow's threads do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(1, context) as one:
        return one.submit(_figures, case, rates).result()


def _figures(case: Case, rates: roofline.Rates) -> dict[str, Any]:
    if isinstance(case, Gpt):
        return measures.of(programs.gpt(case), case, rates)
    from benchmarks.h200 import jax_programs  # needs JAX and optax

    return measures.of(jax_programs.gpt(case), case.sizes, rates)


def head_memory() -> dict[str, float]:
    """Returns how many bytes the head's loss takes: "temp", and "logits" to compare it with.

    "temp" is what XLA plans for the intermediate values of a program that computes the loss and its
    gradients alone: for the logits and their gradients that exist at once. Left out is what any
    implementation holds: the gradient of the hidden states, in float32, is subtracted, and the
    kernel in 16 bits, which a train step makes once, is an argument of the program.

    "logits" are all logits of a micro-batch in float32.
    """
    gpt = Gpt()
    tokens = (gpt.batch, gpt.context)
    token_count = gpt.batch * gpt.context

    def gradients(
        hidden: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, rounded: tf.Tensor
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            loss, _ = linear_cross_entropy_sum_and_scores(
                hidden,
                table,
                labels,
                tf.ones(tokens),
                transpose_kernel=True,
                rounded_kernel=rounded,
            )
        return tape.gradient(loss, [hidden, table])

    half = tf.as_dtype(gpt.dtype)
    table = (gpt.vocabulary, gpt.width)
    arguments = [
        tf.TensorSpec((*tokens, gpt.width), half),
        tf.TensorSpec(table),
        tf.TensorSpec(tokens, tf.int32),
        tf.TensorSpec(table, half),
    ]
    with h200.as_on_a_gpu():
        function = tf.function(gradients, jit_compile=True, autograph=False)
        exported = compiler_ir(function, *arguments, stage="stablehlo_serialized")
    _, memory = programs.compiled(exported)
    hidden_gradient_bytes = 4.0 * token_count * gpt.width
    return {
        "temp": memory.temp_bytes - hidden_gradient_bytes,
        "logits": 4.0 * token_count * gpt.vocabulary,
    }


def versions() -> dict[str, str]:
    """Returns the versions of the packages that write and compile the programs."""
    import jax
    import jaxlib
    import keras
    import optax

    packages = {
        "tensorflow": tf,
        "keras": keras,
        "jax": jax,
        "jaxlib": jaxlib,
        "optax": optax,
        "fastaccum": fa,
    }
    return {name: package.__version__ for name, package in packages.items()}
