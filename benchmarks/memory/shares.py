"""What each of several devices holds that share the optimizer's slots out, by XLA's plans for an
H200: no weights made.

The programs are those of the first replica, which has the most slots. Its variables are zeros in
one shared buffer.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import keras
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.types.experimental import ConcreteFunction

import fastaccum as fa
from benchmarks.h200 import programs
from benchmarks.memory.results import Result
from benchmarks.support.stablehlo import h200
from fastaccum.data.stacks import Batch
from fastaccum.memory import analysis

GB = 1e9
VOCABULARY, MICRO_BATCHES = 50_304, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A GPT with AdamW, clipped, on devices with a sequence each in a micro-batch, its blocks
    computed again.

    Attributes:
        width, layers: its sizes; heads are 128 wide.
        stacked: whether the blocks are one LayerStack, whose weights are dealt out as the stacks
            that they are.
        devices: how many share the slots out.
        dtype: the layers' policy.
        context: tokens in a sequence.
        bar: GB that no device may hold.
    """

    width: int
    layers: int
    stacked: bool
    devices: int
    dtype: str = "mixed_bfloat16"
    context: int = 2048
    bar: float = 80.0

    @property
    def parameters(self) -> int:
        """Numbers in its weights."""
        return (
            self.layers * (12 * self.width**2 + 2 * self.width)
            + VOCABULARY * self.width
            + self.width
        )

    @property
    def formula(self) -> float:
        """Bytes by docs/distributed.md, without activations: weights, copies in halves, gradients,
        a share of slots.
        """
        return self.parameters * (4 + 2 * (self.dtype != "float32") + 4 + 8 / self.devices)


SEVEN_BILLION = Case(4096, 34, stacked=False, devices=8)
CASES = [
    Case(1024, 2, stacked=False, devices=8),
    SEVEN_BILLION,
    dataclasses.replace(SEVEN_BILLION, dtype="float32"),
    dataclasses.replace(SEVEN_BILLION, dtype="float32", context=512),
]


def plan_of(case: Case) -> tuple[int, dict[str, int], int]:
    """Returns the parameters, the bytes that a device holds in each program of a step, and those of
    the slots there.
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * case.devices
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(case.devices)])
    sizes = VOCABULARY, case.context, case.width, case.layers, case.width // 128
    with h200.weightless(), h200.as_on_a_gpu():
        with strategy.scope():
            form = {"stacked": True, "policy": "nothing_saveable"} if case.stacked else {}
            model = fa.gpt(*sizes, tied=True, dtype=case.dtype, **form)
        if not case.stacked:
            fa.remat(model, "nothing_saveable")
        trainer = fa.Trainer(
            model,
            keras.optimizers.AdamW(3e-4, weight_decay=0.1),
            fa.LinearCrossEntropy(),
            clip_norm=1.0,
            gradient_accumulation_steps=MICRO_BATCHES,
            shard_optimizer=True,
            jit_compile=True,
        )
        ids = tf.TensorSpec([case.devices, case.context], tf.int32)
        batch = Batch(ids, ids)
        step = trainer._builder.get_or_build(batch, trainer._present_options)
        functions = step.trace(analysis.dispatch_of(batch, case.devices, MICRO_BATCHES))
        exported = [_exported(each) for each in functions]
        arguments = [
            sum(buffer.bytes for buffer in analysis._arguments(each)) for each in functions
        ]
    resident = analysis.resident(step)
    stays = sum(buffer.bytes for buffer in resident)
    held = {}
    for name, module, given in zip(
        ("accumulate", "measure", "update"), exported, arguments, strict=True
    ):
        _, memory = programs.compiled(module)
        held[name] = stays + given + memory.output_bytes - memory.alias_bytes + memory.temp_bytes
    held["exchange"] = stays + step.exchanged_bytes
    return model.count_params(), held, sum(b.bytes for b in resident if b.kind == "optimizer slots")


def _exported(concrete: ConcreteFunction) -> bytes:
    """Returns a program as the StableHLO that a GPU would get."""
    captured = concrete.captured_inputs
    given = concrete.inputs[: len(concrete.inputs) - len(captured)]
    return context.context().get_compiler_ir(
        device_name="/job:localhost/replica:0/task:0/device:CPU:0",
        platform_name=None,
        function_name=concrete.name,
        flat_args=[tf.TensorSpec(t.shape, t.dtype) for t in given],
        captured_inputs=captured,
        stage="stablehlo_serialized",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds those of a case of one's own."""
    parser.add_argument("--width", type=int, help="of a GPT of your own, a multiple of 128")
    parser.add_argument("--layers", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--devices", type=int, default=8, help="(%(default)s)")
    parser.add_argument(
        "--dtype", choices=["mixed_bfloat16", "float32"], default=Case.dtype, help="(%(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=Case.context, help="tokens in a sequence (%(default)s)"
    )
    parser.add_argument("--stacked", action="store_true", help="its blocks are one LayerStack")


def run(options: argparse.Namespace) -> Result:
    """XLA's plan for each of `CASES` beside the formula."""
    rows, missed = [], []
    cases = CASES[:1] if options.quick else CASES
    if options.width:
        cases = [
            Case(
                options.width,
                options.layers,
                options.stacked,
                options.devices,
                options.dtype,
                options.context,
            )
        ]
    # A process for each, which needs devices of its own.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        plans = list(processes.map(plan_of, cases))
    for case, (parameters, held, slots) in zip(cases, plans, strict=True):
        peak = max(held.values())
        row = {
            "parameters, billions": parameters / 1e9,
            "blocks": "stacked" if case.stacked else "apart",
        }
        row |= {
            "dtype": case.dtype,
            "tokens": case.context,
            "devices": case.devices,
            "slots, GB": slots / GB,
        }
        row |= {f"{name}, GB": size / GB for name, size in held.items()}
        row |= {
            "peak, GB": peak / GB,
            "bytes a parameter": peak / parameters,
            "formula without activations, GB": case.formula / GB,
        }
        rows.append(row)
        if peak >= case.bar * GB:
            what = f"{parameters / 1e9:.2f} billion parameters, {case.dtype}, on {case.devices}"
            missed.append(f"{what}: {peak / GB:.1f} GB")
    return Result(
        "What each device holds that shares AdamW's slots out, by XLA's plans for an H200",
        rows,
        missed,
    )
