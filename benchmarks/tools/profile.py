"""Where the time of a train step goes: `python -m benchmarks.tools.profile "MLP 128"`.

Runs a workload's fused step under TensorFlow's profiler, and prints the time of its kernels by
phase and by kind, then the longest kernels, each with the operation that XLA made it from.
"""

import argparse
import collections
import pathlib
import re
import tempfile
import time

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.support import contestants, models

# The first that an operation's name holds; XLA keeps the name scopes of the step.
PHASES = {"gradient_tape": "backward", "backward": "backward"} | {
    p: p for p in ("forward", "accumulate", "update")
}
KINDS = {
    "dot": "matmul",
    "convolution": "convolution",
    "reduce": "reduction",
    "reduce-window": "reduction",
}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*? ([\w-]+)\(")
OPERATION = re.compile(r'op_name="([^"]*)"')


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workload", choices=[workload.name for workload in models.ALL])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--top", type=int, default=15, help="how many kernels to list")
    options = parser.parse_args()
    (workload,) = (workload for workload in models.ALL if workload.name == options.workload)

    trainer = contestants.trainer(workload, jit_compile=True)
    step = contestants.as_train_step(trainer)
    stack = step.feed(workload.stacks(1)[0])
    made_from = operations(trainer.compiler_ir(stack))
    wall, kernels = kernel_times(lambda: step.update(stack), options.updates)
    kernels = {name: seconds for name, seconds in kernels.items() if name in made_from}
    totals = collections.Counter()
    for name, seconds in kernels.items():
        totals[phase_and_kind(*made_from[name])] += seconds
    print(f"{workload.name}: {1e3 * wall:.3f} ms an update")
    for (phase, kind), seconds in totals.most_common():
        print(f"{1e3 * seconds:10.3f} ms  {phase:10}  {kind}")
    print(
        f"{1e3 * (wall - sum(kernels.values())):10.3f} ms  {'between':10}  dispatch, threads, "
        "loop\n"
    )
    for name, seconds in collections.Counter(kernels).most_common(options.top):
        print(f"{1e3 * seconds:10.3f} ms  {name:40}  {made_from[name][1][-90:]}")


def operations(hlo):
    """The opcode and the operation's name behind each instruction of a program that runs as a
    kernel of its own.

    >>> operations('%sum.1 = f32[] reduce(%a, %b), metadata={op_name="forward/Sum"}')
    {'sum.1': ('reduce', 'forward/Sum')}
    """
    found = {}
    for line in hlo.splitlines():
        instruction, operation = INSTRUCTION.match(line), OPERATION.search(line)
        if instruction and instruction[2] not in ("while", "call", "parameter", "constant"):
            found[instruction[1]] = instruction[2], operation[1] if operation else ""
    return found


def phase_and_kind(opcode, operation):
    """Of a kernel; a fusion is named after the operation at its root."""
    phase = next((phase for part, phase in PHASES.items() if part in operation), "other")
    last = operation.rpartition("/")[2]
    if opcode == "fusion" and re.match(r"Sum|Mean|BiasAddGrad|Max$", last):
        return phase, "reduction"
    return phase, KINDS.get(opcode, "elementwise")


def kernel_times(update, updates):
    """Wall seconds of one update, and those of each kernel in it, from the profiler's trace."""
    float(update())
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
    kernels = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                kernels[plane.event_metadata[event.metadata_id].name] += (
                    event.duration_ps / 1e12 / updates
                )
    return wall / updates, kernels


if __name__ == "__main__":
    main()
