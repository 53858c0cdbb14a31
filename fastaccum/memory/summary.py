"""`Trainer.summary`: the FLOPs and memory of a train step, and the programs compiled so far."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf
from rich.table import Table

from fastaccum.data.stacks import Batch, Layout
from fastaccum.lines import one_line
from fastaccum.memory import analysis, cost
from fastaccum.memory.buffers import StepMemory
from fastaccum.memory.errors import head_advice, in_units
from fastaccum.memory.planner import render
from fastaccum.step.step import Step

LARGEST = 3  # buffers that the table names


class Compiled(NamedTuple):
    """A program that has run."""

    name: str  # "train step", "train steps of a dispatch" or "evaluation"
    shapes: tuple[tuple[int, ...], ...]  # of the program's inputs
    seconds: float  # time of its first call, which traces, compiles and runs it


@dataclasses.dataclass(frozen=True)
class Summary:
    """A train step in figures, on each replica's device; `print` shows them as a table.

    Attributes: model: its name. trainable_parameters: parameters that the step trains.
        frozen_parameters: all other parameters of the model, with moving statistics. rows: of a
        micro-batch on each replica. accumulation_steps: micro-batches of a step. jit_compile:
        whether the step runs as an XLA program; without, the figures are those that it would have
        as one. replicas: over which a micro-batch is split. flops: floating point operations of a
        step's matrix products and convolutions, as compiled for this device: two
            for a multiplication and its addition. Recomputed products count again.
        at_least: whether FLOPs are more: one turn counts of a loop whose length XLA does not know,
            such as a recurrent layer's backward pass.
        memory: the step's memory at its peak.
        programs: the programs that were compiled so far.
        attention: what computes each attention layer, and why: "fused: ..." or "unfused: ...", by
            the layer's path.
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
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Returns one line, since `Trainer.summary` has printed the table when a notebook shows
        what it returned.
        """
        parameters = f"{self.trainable_parameters:,} trainable parameters"
        flops = f"{'at least ' if self.at_least else ''}{self.flops / 1e9:,.4g} GFLOP"
        return (
            f"<Summary of {self._title()}: {parameters}, {flops}, "
            f"{in_units(self.memory.peak_bytes)}>"
        )

    def _title(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        on_each = f", on each of {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{one_line(self.model)}: a train step of {self.accumulation_steps:,} x {rows}{on_each}"
        )

    def __str__(self) -> str:
        table = Table("", "", title=self._title(), title_justify="left", show_header=False)
        table.columns[1].justify = "right"
        for section in (self._sizes(), self._memory(), self._attention(), self._programs()):
            for name, value in section:
                table.add_row(name, value)
            table.add_section()
        return render(table)

    def _sizes(self) -> Iterator[tuple[str, str]]:
        yield "parameters, trainable", f"{self.trainable_parameters:,}"
        yield "parameters, frozen", f"{self.frozen_parameters:,}"
        yield "runs", "with XLA" if self.jit_compile else "without XLA (figures: with it)"
        yield "FLOPs of an update", f"{'at least ' * self.at_least}{self.flops / 1e9:,.4g} GFLOP"

    def _memory(self) -> Iterator[tuple[str, str]]:
        for kind, size in self.memory.by_kind.items():
            yield f"memory, {kind}", in_units(size)
        yield "memory, all of it", in_units(self.memory.peak_bytes)
        for number, buffer in enumerate(self.memory.largest[:LARGEST], 1):
            place = "/".join(part for part in (buffer.layer, buffer.operation) if part)
            yield f"  largest {number}: {one_line(place)} ({buffer.kind})", in_units(buffer.bytes)
        for line in self.advice:
            yield "to hold a part of the logits at a time", line

    def _attention(self) -> Iterator[tuple[str, str]]:
        for choice, layers in Counter(self.attention.values()).items():
            yield f"attention, layers: {layers}", one_line(choice)

    def _programs(self) -> Iterator[tuple[str, str]]:
        for program in self.programs:
            shapes = ", ".join("x".join(map(str, shape)) for shape in program.shapes if shape)
            yield f"made: {program.name}, {shapes}", f"{program.seconds:.1f} s"
        if not self.programs:
            yield "compiled so far", "none"


def summary(step: Step, sample: Batch, layout: Layout) -> Summary:
    """Compiles a step for micro-batches like the sample, specs of all replicas' rows together; runs
    nothing.
    """
    rows = tf.nest.flatten(sample.x)[0].shape[0]
    if rows is None:
        raise ValueError(
            "batch_size=None, and the data do not say how many rows a micro-batch has: pass "
            "batch_size."
        )
    rows = -(-rows // layout.replicas)  # as they are cut, on each replica
    local = rows * len(range(layout.replicas)[layout.shards])
    if (fused := step.objective.attention) is not None:
        fused.choices.clear()
    uses_xla = step.objective.options.uses_xla
    with step.temporary_retrace():
        programs = analysis.compile_programs(
            step.trace(analysis.dispatch_of(sample, local, layout.accumulation))
        )
    total = cost.count(proto for _, proto in programs)
    model, trained = step.objective.model.model, step.cycle.trained
    training = {id(v) for v in trained}
    memory = analysis.measure(step, programs)
    return Summary(
        model=model.name,
        trainable_parameters=sum(math.prod(v.shape) for v in trained),
        frozen_parameters=sum(math.prod(v.shape) for v in model.weights if id(v) not in training),
        rows=rows,
        accumulation_steps=layout.accumulation,
        jit_compile=uses_xla,
        replicas=layout.replicas,
        **total._asdict(),
        memory=memory,
        advice=tuple(head_advice(memory, step.objective.losses.outputs)),
        programs=tuple(
            Compiled(name, tuple(tuple(shape) for _, shape, _ in leaves if shape), seconds)
            for name, program in step.programs.items()
            for (_, *leaves), seconds in program.seconds.items()
        ),
        attention={} if fused is None else dict(fused.choices),
    )
