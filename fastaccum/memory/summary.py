"""`Trainer.summary`: the FLOPs and memory of a train step, and the programs compiled so far."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf
from rich.table import Table

from fastaccum.basics.attributes import Variable
from fastaccum.basics.warnings import one_line
from fastaccum.data.stacks import Batch, Layout
from fastaccum.layers.float8 import IN_FLOAT8
from fastaccum.memory import analysis, cost
from fastaccum.memory.buffers import StepMemory
from fastaccum.memory.errors import head_advice, in_units, state_advice
from fastaccum.memory.plan import render
from fastaccum.step.engine import Engine

# The number of the largest buffers that the table names.
LARGEST = 3


class Compiled(NamedTuple):
    """A program that has run."""

    name: str  # "train step", "train steps of a dispatch" or "evaluation"
    shapes: tuple[tuple[int, ...], ...]  # of the program's inputs
    seconds: float  # time of its first call, which traces, compiles and runs it


@dataclasses.dataclass(frozen=True)
class Summary:
    """A train step in figures, on each replica's device; `print` shows them as a table.

    Attributes:
        model: its name.
        trainable_parameters: parameters that the step trains.
        frozen_parameters: all other parameters of the model, with moving statistics.
        rows: of a micro-batch on each replica.
        accumulation_steps: micro-batches of a step.
        jit_compile: whether the step runs as an XLA program; without, the figures are those that it
            would have as one.
        replicas: over which a micro-batch is split.
        flops: floating point operations of a step's matrix products and convolutions, as compiled
            for this device: two for a multiplication and its addition. Recomputed products count
            again.
        at_least: whether FLOPs are more: one turn counts of a loop whose length XLA does not know,
            such as a recurrent layer's backward pass.
        memory: the step's memory at its peak.
        programs: the programs that were compiled so far.
        attention: what computes each attention layer, and why: "fused: ..." or "unfused: ...", by
            the layer's path. On packed rows it ends with "documents apart".
        float8: what each layer of products computes in, where the Trainer's `float8` is on, by the
            layer's path: "float8", or why it stays in half precision.
        loops: layers that repeat: those that run as one loop (`scan_layers`), by the names of the
            first and the last, and why others do not.
        advice: the argument of the Trainer that would save a large table of logits, for each output
            that has one.
    """

    model: str
    trainable_parameters: int
    frozen_parameters: int
    rows: int
    accumulation_steps: int
    jit_compile: bool
    replicas: int
    flops: int
    at_least: bool
    memory: StepMemory
    programs: tuple[Compiled, ...]
    attention: Mapping[str, str]
    float8: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loops: Mapping[str, str] = dataclasses.field(default_factory=dict)
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Returns one line: a notebook shows it after `Trainer.summary` has printed the table."""
        return (
            f"<Summary of {self._title()}: {self.trainable_parameters:,} trainable parameters, "
            f"{self._format_flops()}, {in_units(self.memory.peak_bytes)}>"
        )

    def _format_flops(self) -> str:
        flops = f"{self.flops / 1e9:,.4g} GFLOP"
        if self.at_least:
            return f"at least {flops}"
        return flops

    def _title(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        title = f"{one_line(self.model)}: a train step of {self.accumulation_steps:,} x {rows}"
        if self.replicas > 1:
            title += f", on each of {self.replicas} replicas"
        return title

    def __str__(self) -> str:
        table = Table("", "", title=self._title(), title_justify="left", show_header=False)
        table.columns[1].justify = "right"
        sections = [
            self._sizes(),
            self._memory(),
            self._attention(),
            self._float8(),
            self._loops(),
            self._programs(),
        ]
        for section in sections:
            for name, value in section:
                table.add_row(name, value)
            table.add_section()
        return render(table)

    def _sizes(self) -> Iterator[tuple[str, str]]:
        yield "parameters, trainable", f"{self.trainable_parameters:,}"
        yield "parameters, frozen", f"{self.frozen_parameters:,}"
        yield "runs", "with XLA" if self.jit_compile else "without XLA (figures: with it)"
        yield "FLOPs of an update", self._format_flops()

    def _memory(self) -> Iterator[tuple[str, str]]:
        for kind, size in self.memory.by_kind.items():
            yield f"memory, {kind}", in_units(size)
        yield "memory, all of it", in_units(self.memory.peak_bytes)
        for number, buffer in enumerate(self.memory.largest[:LARGEST], 1):
            place = "/".join(part for part in (buffer.layer, buffer.operation) if part)
            yield f"  largest {number}: {one_line(place)} ({buffer.kind})", in_units(buffer.bytes)
        for line in self.advice:
            yield "to hold a part of the logits at a time", line
        for line in state_advice(self.memory):
            yield "to store slots in fewer bytes", line

    def _attention(self) -> Iterator[tuple[str, str]]:
        for choice, layers in Counter(self.attention.values()).items():
            yield f"attention, layers: {layers}", one_line(choice)

    def _float8(self) -> Iterator[tuple[str, str]]:
        for choice, layers in Counter(self.float8.values()).items():
            name = "products in float8" if choice == IN_FLOAT8 else "products not in float8"
            reason = "in training alone" if choice == IN_FLOAT8 else choice
            yield f"{name}, layers: {layers}", one_line(reason)

    def _loops(self) -> Iterator[tuple[str, str]]:
        for layers, choice in self.loops.items():
            yield f"layers {one_line(layers)}", one_line(choice)

    def _programs(self) -> Iterator[tuple[str, str]]:
        for program in self.programs:
            shapes = []
            for shape in program.shapes:
                if shape:  # a scalar's would be empty
                    shapes.append("x".join(map(str, shape)))
            yield f"made: {program.name}, {', '.join(shapes)}", f"{program.seconds:.1f} s"
        if not self.programs:
            yield "compiled so far", "none"


def summary(engine: Engine, sample: Batch, layout: Layout) -> Summary:
    """Compiles a step for micro-batches like the sample, and runs nothing.

    The sample has the specs of all replicas' rows together.
    """
    all_rows = tf.nest.flatten(sample.x)[0].shape[0]
    if all_rows is None:
        raise ValueError(
            "batch_size=None, and the data do not say how many rows a micro-batch has: pass "
            "batch_size."
        )
    rows = -(-all_rows // layout.replicas)  # rounded up, as a micro-batch is cut for the replicas
    local_replicas = len(range(layout.replicas)[layout.shards])

    # Tracing the step notes anew what computes each attention layer.
    attention = engine.objective.attention
    if attention is not None:
        attention.choices.clear()
    float8 = engine.objective.float8
    if float8 is not None:
        float8.choices.clear()
    scanned = engine.objective.scanned
    uses_xla = engine.objective.options.uses_xla  # without XLA, the figures are still those with it
    dispatch = analysis.dispatch_of(sample, rows * local_replicas, layout.accumulation)
    with engine.temporary_retrace():
        programs = analysis.compile_programs(engine.trace(dispatch))
    choices = {}
    if attention is not None:
        choices = scanned.expand_choices(attention.choices)
    float8_choices = {}
    if float8 is not None:
        float8_choices = scanned.expand_choices(float8.choices)

    total = cost.count(proto for _, proto in programs)
    memory = analysis.measure(engine, programs)
    model = engine.objective.model.model
    trained = engine.cycle.trained
    trained_ids = {id(variable) for variable in trained}
    frozen = [variable for variable in model.weights if id(variable) not in trained_ids]
    return Summary(
        model=model.name,
        trainable_parameters=_count_parameters(trained),
        frozen_parameters=_count_parameters(frozen),
        rows=rows,
        accumulation_steps=layout.accumulation,
        jit_compile=uses_xla,
        replicas=layout.replicas,
        flops=total.flops,
        at_least=total.at_least,
        memory=memory,
        programs=_list_compiled(engine),
        attention=choices,
        float8=float8_choices,
        loops=scanned.choices,
        advice=tuple(head_advice(memory, engine.objective.losses.outputs)),
    )


def _count_parameters(variables: Iterable[Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def _list_compiled(engine: Engine) -> tuple[Compiled, ...]:
    """Lists the programs that the step has run, one for each signature of their inputs."""
    compiled = []
    for name, program in engine.programs.items():
        for signature, seconds in program.seconds.items():
            shapes = [shape for shape in signature.shapes if shape]
            compiled.append(Compiled(name, tuple(shapes), seconds))
    return tuple(compiled)
