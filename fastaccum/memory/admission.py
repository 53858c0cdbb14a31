"""Checks that a program fits before its first run, and protects the variables from one that does
not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

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

_TO_COMPILE = 2**30  # bytes without which compiling could end the process


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
        """Raises OutOfMemoryError where a program does not fit; keeps the variables' memory through
        the first run.
        """
        self._run, self._memory = run, None
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
                self._memory = analysis.measure(
                    self._engine, analysis.compile_programs(run.programs)
                )
            if self._memory is None:
                yield
                return
            if (needed := self._memory.peak_bytes) > limit:
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
        fits = self._fitting(run, limit) if run.training and not run.part else None
        room = f"{in_units(limit)} are there ({device.source})"
        message = (
            f"{_what(run)} takes {in_units(memory.peak_bytes)}, and {room}. Nothing was changed."
        )
        note = f"If there is more memory than that, {LIMIT} says how much: bytes, or as in 16GiB."
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
        """Compiles smaller micro-batches; returns the largest that fits, and how many of them hold
        the same rows.
        """
        *before, accumulation, micro_batch = _leading(run)
        rows = accumulation * micro_batch

        def peak(size: int) -> float:
            leading = *before, rows // size, size
            stacks = tf.nest.map_structure(
                lambda s: tf.TensorSpec([*leading, *s.shape[len(leading) :]], s.dtype),
                run.dispatch.stacks[:1],
            )
            with (
                contextlib.suppress(tf.errors.OpError, MemoryError),
                self._engine.temporary_retrace(),
            ):
                return analysis.dispatch_memory(
                    self._engine, run.dispatch._replace(stacks=stacks)
                ).peak_bytes
            return math.inf

        size = largest_that_fits(peak, divisors(rows, at_most=micro_batch - 1), limit)
        return None if size is None else (size, rows // size)

    @contextlib.contextmanager
    def translate_oom_errors(self) -> Iterator[None]:
        """Raises TensorFlow's and Python's out-of-memory errors inside the block as
        `OutOfMemoryError`.
        """
        try:
            yield
        except OutOfMemoryError:
            raise
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise self.error(error) from error

    def error(self, error: Exception) -> OutOfMemoryError:
        """Explains an error of memory at run time."""
        reason = (getattr(error, "message", "") or str(error) or type(error).__name__).partition(
            "\n"
        )[0]
        where = "" if self._run is None else f" for {_what(self._run).lower()}"
        message = f"There was no memory left{where}: {reason.partition(' [Op:')[0]} "
        if "[Op:__inference" in reason and error is not self._harmless:
            message += (
                "XLA had taken the variables over by then, and they are lost: go on in a new "
                "process, from a checkpoint."
            )
        else:
            message += "The variables are as they were."
        memory, limit = self._known(), analysis.limit_of(self._engine, physical())
        if self._run is None or memory is None:
            held = StepMemory(MemoryAnalysis(0, 0, 0, 0), tuple(analysis.resident(self._engine)))
            return explain(message, held, limit, (), more=["Take a smaller batch_size."])
        is_whole = self._run.training and not self._run.part
        fits = self._fitting(self._run, limit) if is_whole and memory.peak_bytes > limit else None
        return explain(
            message,
            memory,
            limit,
            self._outputs,
            fits,
            self._engine.advice,
            training=self._run.training,
        )

    def _known(self) -> StepMemory | None:
        """Measures the program that ran last; returns None where the host has too little memory to
        compile it.
        """
        run = self._run
        if (
            run is not None
            and run.is_compiled
            and self._memory is None
            and host().free > _TO_COMPILE
        ):
            with contextlib.suppress(tf.errors.OpError, MemoryError):
                self._memory = analysis.measure(
                    self._engine, analysis.compile_programs(run.programs)
                )
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
    """Allocates what a program will take, and frees it: an error comes before variables are at
    stake.
    """
    plan = memory.analysis
    size = plan.temp_bytes + plan.output_bytes - plan.alias_bytes
    with tf.device("GPU:0" if has_gpu() else "CPU:0"):
        tf.raw_ops.Empty(shape=[size // 2**20 + 1, 2**20], dtype=tf.uint8)


def _leading(run: FirstRun) -> tuple[int, ...]:
    """Returns the axes of a dispatch before those of an example: [steps,] micro-batches, rows."""
    return tuple(tf.nest.flatten(run.dispatch.stacks[0])[0].shape[: 2 + run.dispatch.is_multi_step])


def _what(run: FirstRun) -> str:
    if run.part:
        return run.part
    *steps, accumulation, rows = _leading(run)
    of = (
        f"{math.prod(steps)} train steps in one program, each"
        if steps
        else "A train step"
        if run.training
        else ""
    )
    size = "1 row" if rows == 1 else f"{rows:,} rows"
    return f"{of or 'An evaluation'} of {accumulation} x {size}"
