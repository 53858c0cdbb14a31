"""Profiles a train step kernel by kernel: `python -m benchmarks.tools.profile "MLP 128"`.

Runs a workload's fused step under TensorFlow's profiler, and prints the time of its kernels by
phase and by kind, then the longest kernels, each with the operation that XLA made it from.
"""

import argparse
import collections
import pathlib
import re
import tempfile
import time
from typing import NamedTuple

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.support import contestants, models

# The phase of the first of these name scopes that an operation's name holds: XLA keeps them.
PHASES = {
    "gradient_tape": "backward",
    "backward": "backward",
    "forward": "forward",
    "accumulate": "accumulate",
    "update": "update",
}
KINDS = {
    "dot": "matmul",
    "convolution": "convolution",
    "reduce": "reduction",
    "reduce-window": "reduction",
}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*? ([\w-]+)\(")
OPERATION = re.compile(r'op_name="([^"]*)"')


# Opcodes that are no kernels.
NO_KERNELS = ("while", "call", "parameter", "constant")


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workload", choices=[workload.name for workload in models.ALL])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--top", type=int, default=15, help="how many kernels to list")
    options = parser.parse_args()
    workload = models.named(options.workload)
    trainer = contestants.trainer(workload, jit_compile=True)
    step = contestants.as_train_step(trainer)
    stack = step.feed(workload.stacks(1)[0])
    instructions = instructions_of(trainer.compiler_ir(stack))
    wall, events = event_times(lambda: step.update(stack), options.updates)

    kernels = collections.Counter()
    totals = collections.Counter()
    for name, seconds in events.items():
        if name in instructions:
            kernels[name] = seconds
            totals[phase_and_kind(instructions[name])] += seconds
    print(f"{workload.name}: {1e3 * wall:.3f} ms an update")
    for (phase, kind), seconds in totals.most_common():
        print(f"{1e3 * seconds:10.3f} ms  {phase:10}  {kind}")
    between = wall - sum(kernels.values())
    print(f"{1e3 * between:10.3f} ms  {'between':10}  dispatch, threads, loop\n")
    for name, seconds in kernels.most_common(options.top):
        print(f"{1e3 * seconds:10.3f} ms  {name:40}  {instructions[name].operation[-90:]}")


class Instruction(NamedTuple):
    """Instruction of a compiled program.

    Args:
        opcode: XLA's, such as "fusion".
        operation: the name of the TensorFlow operation behind it, with its scopes; or nothing.
    """

    opcode: str
    operation: str


def instructions_of(hlo):
    """Reads the instructions of a program that may run as kernels, by name.

    >>> instructions_of('%sum.1 = f32[] reduce(%a, %b), metadata={op_name="forward/Sum"}')
    {'sum.1': Instruction(opcode='reduce', operation='forward/Sum')}
    """
    instructions = {}
    for line in hlo.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        name, opcode = instruction.groups()
        if opcode not in NO_KERNELS:
            operation = OPERATION.search(line)
            instructions[name] = Instruction(opcode, operation[1] if operation else "")
    return instructions


def phase_and_kind(instruction):
    """Returns the phase and the kind of a kernel; a fusion has the operation at its root."""
    phases = (phase for scope, phase in PHASES.items() if scope in instruction.operation)
    phase = next(phases, "other")
    operation = instruction.operation.rpartition("/")[2]
    if instruction.opcode == "fusion" and re.match(r"Sum|Mean|BiasAddGrad|Max$", operation):
        return phase, "reduction"
    return phase, KINDS.get(instruction.opcode, "elementwise")


def event_times(update, updates):
    """Returns the wall seconds of one update, and those of each event in the profiler's trace."""
    float(update())  # compiles
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        started = time.perf_counter()
        for _ in range(updates):
            loss = update()
        float(loss)
        wall = time.perf_counter() - started
        tf.profiler.experimental.stop()
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    seconds = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                seconds[name] += event.duration_ps / 1e12 / updates
    return wall / updates, seconds


if __name__ == "__main__":
    main()
