"""Plans the memory of devices that share the optimizer's slots, by XLA for an H200.

The programs are those of the first replica, which has the most slots. No weights are made: the
variables are zeros in one shared buffer.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

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
from fastaccum.memory.buffers import Buffer

GB = 1e9
VOCABULARY = 50_304
MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """GPT with AdamW, clipping and recomputation; each device has one sequence of a micro-batch.

    Attributes:
        width, layers: its sizes; heads are 128 wide.
        stacked: makes the blocks one LayerStack, whose weights are dealt out as whole stacks.
        devices: how many share the slots.
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
        """The numbers in its weights."""
        blocks = self.layers * (12 * self.width**2 + 2 * self.width)
        final_norm = self.width
        return blocks + VOCABULARY * self.width + final_norm

    @property
    def formula(self) -> float:
        """The bytes by docs/distributed.md, without activations."""
        weights = 4
        half_copies = 0 if self.dtype == "float32" else 2
        gradients = 4
        slots = 8 / self.devices
        return self.parameters * (weights + half_copies + gradients + slots)


SEVEN_BILLION = Case(4096, 34, stacked=False, devices=8)
CASES = [
    Case(1024, 2, stacked=False, devices=8),
    SEVEN_BILLION,
    dataclasses.replace(SEVEN_BILLION, dtype="float32"),
    dataclasses.replace(SEVEN_BILLION, dtype="float32", context=512),
]


class Plan(NamedTuple):
    """Memory of the first device.

    Attributes:
        parameters: the numbers in the model's weights.
        held: the bytes that the device holds in each program of a step.
        slots: the bytes of its slots.
    """

    parameters: int
    held: dict[str, int]
    slots: int


def plan_of(case: Case) -> Plan:
    """Compiles the programs of a step and returns the `Plan`."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * case.devices
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(case.devices)])
    form = {"stacked": True, "policy": "nothing_saveable"} if case.stacked else {}
    with h200.weightless(), h200.as_on_a_gpu():
        with strategy.scope():
            model = fa.gpt(
                vocabulary_size=VOCABULARY,
                context=case.context,
                width=case.width,
                layers=case.layers,
                heads=case.width // 128,
                tied=True,
                dtype=case.dtype,
                **form,
            )
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
        exported = [_exported(function) for function in functions]
        arguments = [_total_bytes(analysis._arguments(function)) for function in functions]
    resident = analysis.resident(step)
    resident_bytes = _total_bytes(resident)
    slots = _total_bytes([buffer for buffer in resident if buffer.kind == "optimizer slots"])
    held = {"accumulate": 0, "measure": 0, "update": 0}
    for name, module, argument_bytes in zip(list(held), exported, arguments, strict=True):
        _, memory = programs.compiled(module)
        results = memory.output_bytes - memory.alias_bytes
        held[name] = resident_bytes + argument_bytes + results + memory.temp_bytes
    held["exchange"] = resident_bytes + step.exchanged_bytes
    return Plan(model.count_params(), held, slots)


def _total_bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _exported(concrete: ConcreteFunction) -> bytes:
    """Returns a program as the StableHLO that a GPU would get."""
    captured = concrete.captured_inputs
    arguments = concrete.inputs[: len(concrete.inputs) - len(captured)]
    return context.context().get_compiler_ir(
        device_name="/job:localhost/replica:0/task:0/device:CPU:0",
        platform_name=None,
        function_name=concrete.name,
        flat_args=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments],
        captured_inputs=captured,
        stage="stablehlo_serialized",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a case of the user's own."""
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
    """Compares XLA's plan with the formula for each of `CASES`, or for the user's case."""
    cases = CASES[:1] if options.quick else CASES
    if options.width:
        case = Case(
            width=options.width,
            layers=options.layers,
            stacked=options.stacked,
            devices=options.devices,
            dtype=options.dtype,
            context=options.context,
        )
        cases = [case]
    # Each case has a process of its own, because it needs other logical devices.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        plans = list(processes.map(plan_of, cases))
    rows = []
    missed = []
    for case, plan in zip(cases, plans, strict=True):
        peak = max(plan.held.values())
        rows.append(
            {
                "parameters, billions": plan.parameters / 1e9,
                "blocks": "stacked" if case.stacked else "apart",
                "dtype": case.dtype,
                "tokens": case.context,
                "devices": case.devices,
                "slots, GB": plan.slots / GB,
                **{f"{name}, GB": size / GB for name, size in plan.held.items()},
                "peak, GB": peak / GB,
                "bytes a parameter": peak / plan.parameters,
                "formula without activations, GB": case.formula / GB,
            }
        )
        if peak >= case.bar * GB:
            billions = plan.parameters / 1e9
            missed.append(
                f"{billions:.2f} billion parameters, {case.dtype}, on {case.devices}: "
                f"{peak / GB:.1f} GB"
            )
    return Result(
        "What each device holds that shares AdamW's slots out, by XLA's plans for an H200",
        rows,
        missed,
    )
