"""Checks that a program fits before its first run, and protects the variables if it does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.devices import has_gpu
from fastaccum.memory import analysis
from fastaccum.memory.buffers import StepMemory
from fastaccum.memory.device import LIMIT, DeviceMemory, available, host, physical
from fastaccum.memory.errors import OutOfMemoryError, explain, in_units
from fastaccum.memory.planner import divisors, largest_that_fits
from fastaccum.step.compiler_ir import MemoryAnalysis
from fastaccum.step.engine import Engine, FirstRun

# Bytes of free memory of the host below which compiling a program could end the process.
_MIN_TO_COMPILE = 2**30

# Bytes of a row of the buffer that rehearses a program's memory: an int32 length, as `Empty` takes
# it, could not count the bytes of a GPU on one axis.
_REHEARSAL_ROW = 2**20


class Admission:
    """Admits the first run of each of a step's programs if it fits, and explains errors of memory.

    A program for which there is plainly room is not compiled to find out. Where there is room for a
    second copy of the variables, the first run does not write over them, so that an error leaves
    them as they were.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._outputs = engine.objective.losses.outputs
        self._run: FirstRun | None = None
        self._memory: StepMemory | None = None  # of `_run`, once it was compiled to find out
        self._harmless: Exception | None = None  # the error with which no variable was lost

    @contextlib.contextmanager
    def admit(self, run: FirstRun) -> Iterator[None]:
        """Raises OutOfMemoryError where a program does not fit.

        The variables keep their memory through the first run inside the block.
        """
        self._run = run
        self._memory = None
        if not run.is_compiled:
            yield
            return
        device = available()
        limit = analysis.limit_of(self._engine, device)
        copies = analysis.resident_bytes(self._engine)
        needed = analysis.bytes_at_most(self._engine, run.programs)
        if needed is None or needed + copies > limit:
            # XLA cannot compile it: the run's own error says more
            with contextlib.suppress(ValueError):
                compiled = analysis.compile_programs(run.programs)
                self._memory = analysis.measure(self._engine, compiled)
            if self._memory is None:
                yield
                return
            needed = self._memory.peak_bytes
            if needed > limit:
                raise self._refused(run, self._memory, limit, device)
            if needed + copies > limit:
                _rehearse(self._memory)
                yield
                return
        try:
            with preserve_variables(run.captured):
                yield
        except tf.errors.ResourceExhaustedError as error:
            self._harmless = error
            raise

    def _refused(
        self, run: FirstRun, memory: StepMemory, limit: int, device: DeviceMemory
    ) -> OutOfMemoryError:
        fits = None
        if run.training and not run.part:
            fits = self._fitting(run, limit)
        message = (
            f"{_what(run)} takes {in_units(memory.peak_bytes)}, and {in_units(limit)} are there "
            f"({device.source}). Nothing was changed."
        )
        note = f"If there is more memory than that, {LIMIT} says how much: bytes, or as in 16GiB."
        return self._explain(message, run, memory, limit, fits, note)

    def _explain(
        self,
        message: str,
        run: FirstRun,
        memory: StepMemory,
        limit: int,
        fits: tuple[int, int] | None,
        note: str = "",
    ) -> OutOfMemoryError:
        """Makes the error of a run whose program's memory is known, with the engine's advice."""
        return explain(
            message,
            memory,
            limit,
            self._outputs,
            fits,
            self._engine.advice,
            note=note,
            training=run.training,
        )

    def _fitting(self, run: FirstRun, limit: int) -> tuple[int, int] | None:
        """Compiles smaller micro-batches to find the largest that fits.

        Returns it, and how many of them hold the same rows; None where none fits.
        """
        axes = _leading_axes(run)
        rows = axes.micro_batches * axes.rows

        def peak_bytes(size: int) -> float:
            leading = [*axes.steps, rows // size, size]

            def resized(spec):
                example_axes = spec.shape[len(leading) :]
                return tf.TensorSpec([*leading, *example_axes], spec.dtype)

            stacks = tf.nest.map_structure(resized, run.dispatch.stacks[:1])
            dispatch = run.dispatch._replace(stacks=stacks)
            try:
                with self._engine.temporary_retrace():
                    return analysis.dispatch_memory(self._engine, dispatch).peak_bytes
            except (tf.errors.OpError, MemoryError):
                return math.inf

        sizes = divisors(rows, at_most=axes.rows - 1)
        size = largest_that_fits(peak_bytes, sizes, limit)
        if size is None:
            return None
        return size, rows // size

    @contextlib.contextmanager
    def translate_oom_errors(self) -> Iterator[None]:
        """Raises out-of-memory errors of TensorFlow and Python as `OutOfMemoryError`."""
        try:
            yield
        except OutOfMemoryError:
            raise
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise self.error(error) from error

    def error(self, error: Exception) -> OutOfMemoryError:
        """Explains an error of memory at run time."""
        text = getattr(error, "message", "") or str(error) or type(error).__name__
        first_line, _, _ = text.partition("\n")
        reason, _, _ = first_line.partition(" [Op:")
        where = ""
        if self._run is not None:
            where = f" for {_what(self._run).lower()}"
        message = f"There was no memory left{where}: {reason} "
        if "[Op:__inference" in first_line and error is not self._harmless:
            message += (
                "XLA had taken the variables over by then, and they are lost: go on in a new "
                "process, from a checkpoint."
            )
        else:
            message += "The variables are as they were."
        memory = self._memory_of_run()
        limit = analysis.limit_of(self._engine, physical())
        if self._run is None or memory is None:
            held = StepMemory(MemoryAnalysis(0, 0, 0, 0), tuple(analysis.resident(self._engine)))
            return explain(message, held, limit, (), more=["Take a smaller batch_size."])
        is_train_step = self._run.training and not self._run.part
        fits = None
        if is_train_step and memory.peak_bytes > limit:
            fits = self._fitting(self._run, limit)
        return self._explain(message, self._run, memory, limit, fits)

    def _memory_of_run(self) -> StepMemory | None:
        """Measures the program that ran last.

        Returns None where the host has too little memory to compile it.
        """
        run = self._run
        if self._memory is not None or run is None or not run.is_compiled:
            return self._memory
        if host().free > _MIN_TO_COMPILE:
            with contextlib.suppress(tf.errors.OpError, MemoryError):
                compiled = analysis.compile_programs(run.programs)
                self._memory = analysis.measure(self._engine, compiled)
        return self._memory


@contextlib.contextmanager
def preserve_variables(handles: Iterable[tf.Tensor]) -> Iterator[None]:
    """Keeps the values of a program's variables through a failure of its run inside the block."""
    # XLA writes results over variables, and may run out of memory once these are freed. Variables
    # that are held elsewhere it leaves as they are.
    variables = []
    for handle in handles:
        if handle.dtype == tf.resource:
            kind = private.get_eager_safe_handle_data(handle).shape_and_type[0]
            variables.append((handle, kind.dtype))
    values = []
    for handle, dtype in variables:
        values.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
    yield
    values.clear()
    # XLA does not write over what it has allocated, then or later: the variables go back to memory
    # of TensorFlow's.
    for handle, dtype in variables:
        with tf.device(handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=value))


def _rehearse(memory: StepMemory) -> None:
    """Allocates what a program will take, and frees it, so that an error comes before the run."""
    plan = memory.analysis
    size = plan.temp_bytes + plan.output_bytes - plan.alias_bytes
    device = "GPU:0" if has_gpu() else "CPU:0"
    with tf.device(device):
        tf.raw_ops.Empty(shape=[size // _REHEARSAL_ROW + 1, _REHEARSAL_ROW], dtype=tf.uint8)


class _LeadingAxes(NamedTuple):
    """The axes of a dispatch's tensors before those of an example."""

    steps: tuple[int, ...]  # of one length, or none where the dispatch is one step
    micro_batches: int
    rows: int


def _leading_axes(run: FirstRun) -> _LeadingAxes:
    first_tensor = tf.nest.flatten(run.dispatch.stacks[0])[0]
    if run.dispatch.is_multi_step:
        steps, micro_batches, rows = first_tensor.shape[:3]
        return _LeadingAxes((steps,), micro_batches, rows)
    micro_batches, rows = first_tensor.shape[:2]
    return _LeadingAxes((), micro_batches, rows)


def _what(run: FirstRun) -> str:
    """Describes a run by its steps and rows, as the beginning of a sentence."""
    if run.part:
        return run.part
    axes = _leading_axes(run)
    if axes.steps:
        kind = f"{math.prod(axes.steps)} train steps in one program, each"
    elif run.training:
        kind = "A train step"
    else:
        kind = "An evaluation"
    rows = "1 row" if axes.rows == 1 else f"{axes.rows:,} rows"
    return f"{kind} of {axes.micro_batches} x {rows}"
