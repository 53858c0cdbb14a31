"""The interface of the programs that train a model, on one device or a strategy's replicas."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.attributes import Nest, replaced
from fastaccum.basics.packed_rows import PackedRows
from fastaccum.data.source import Stacks
from fastaccum.data.stacks import Dispatch
from fastaccum.step import compilable, document_check
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.running_state import Executed, RunningState
from fastaccum.step.token_counts import TokenCounts, sources_of
from fastaccum.step.tracing import TracedFunction
from fastaccum.step.train_step import TrainStep


class FirstRun(NamedTuple):
    """A program that is about to run for the first time."""

    programs: list[ConcreteFunction]  # of one device, in this order
    # Handles and constants of `programs`, on all of this process's devices.
    captured: Sequence[tf.Tensor]
    dispatch: Dispatch  # of specs; empty for a part of a train step
    training: bool
    part: str = ""  # what the program computes, where that is not a whole train step or evaluation
    is_compiled: bool = True  # by XLA


class MemoryAdmission(Protocol):
    """Admits programs that fit the device's memory."""

    def admit(self, run: FirstRun) -> contextlib.AbstractContextManager[None]:
        """Encloses a first run; an error of the scope keeps the program from running."""

    def translate_oom_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raises the out-of-memory errors inside the block as `OutOfMemoryError`."""


class Engine(abc.ABC):
    """Trains and evaluates a model by compiled programs, on one device or on several.

    A dispatch of it is one or more train steps, each of them a `TrainStep`'s.

    Attributes:
        objective: the model's losses, metrics and state.
        cycle: the accumulation, and the update that ends it.
        running: logs and counts that go on from step to step.
        sharing: how many of this process's replicas share the memory of one device.
        admission: checks the memory of each program before its first run; None for no check.
        shapes_are_free: True if one trace takes single micro-batches of any rows and lengths.
    """

    objective: ModelObjective
    cycle: TrainStep
    running: RunningState
    sharing: int = 1
    admission: MemoryAdmission | None = None
    shapes_are_free: bool = False
    # Lengths of packed rows, with or without training, for which the model keeps documents apart.
    _tried_out: frozenset[tuple[int, bool]] = frozenset()

    @property
    @abc.abstractmethod
    def programs(self) -> dict[str, Program]:
        """The programs that the host calls, by what a call does."""

    @property
    def elsewhere(self) -> Collection[int]:
        """The ids of the optimizer's variables that the first replica does not hold.

        The first replica holds the most.
        """
        return ()

    @property
    def holders(self) -> Mapping[int, int]:
        """The worker of each variable that one worker alone has, by its id."""
        return {}

    @property
    def exchanged_bytes(self) -> int:
        """The most that a device holds of gradients while replicas exchange them."""
        return 0

    @property
    def advice(self) -> list[str]:
        """Lists what else would save memory."""
        return []

    @abc.abstractmethod
    def retrace(self) -> None:
        """Retraces all programs at their next call, since the model computes otherwise now."""

    @property
    @abc.abstractmethod
    def _training_programs(self) -> Sequence[TracedFunction]: ...

    @contextlib.contextmanager
    def temporary_retrace(self) -> Iterator[None]:
        """Retraces the training programs for XLA, and restores their earlier traces on exit."""
        compiled = dataclasses.replace(self.objective.options, jit_compile=True)
        programs = self._training_programs
        restored_on_exit: list[tuple[object, str, object]] = [(self.objective, "options", compiled)]
        for program in programs:
            for name, value in vars(program).items():
                restored_on_exit.append((program, name, value))
        with replaced(restored_on_exit):
            for program in programs:
                program.jit_compile = True
                program.retrace()
            yield

    def count_tokens(self, x: Nest) -> None:
        """Lets train steps on inputs like x count tokens, if these are packed rows."""
        counted = self.running.tokens
        counted_sources = None if counted is None else counted.sources
        sources = sources_of(x)
        if sources == counted_sources:
            return
        tokens = None
        if sources is not None:
            tokens = TokenCounts(sources)
            self.running.require_free(tokens.log_names)
        self.running.tokens = tokens
        self.retrace()

    @abc.abstractmethod
    def trace(self, dispatch: Dispatch) -> list[ConcreteFunction]:
        """Returns the concrete functions that one device runs for a dispatch, in order.

        The dispatch is of tensors or specs.
        """

    def dispatch(self, dispatch: Dispatch) -> Executed:
        """Runs a dispatch, on a GPU without a wait.

        Raises ValueError if XLA cannot compile it, or if its rows are packed and the model mixes
        their documents; and OutOfMemoryError.
        """
        self._require_documents_apart(dispatch, training=True)
        try:
            return self._dispatch(dispatch)
        except Exception as error:
            self._reraise(error)

    def evaluate(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        """Returns the sums of `ModelObjective.evaluate`, and a check of indices.

        The check raises ValueError for indices out of range.
        """
        self._require_documents_apart(dispatch, training=False)
        try:
            return self._evaluate_dispatch(dispatch)
        except Exception as error:
            self._reraise(error)

    def _require_documents_apart(self, dispatch: Dispatch, training: bool) -> None:
        """Raises ValueError if the model, a loss or a metric mixes the documents of packed rows."""
        stack = dispatch.stacks[0]
        if not isinstance(stack.x, PackedRows):
            return
        kind = int(stack.x.documents.shape[-1]), training
        if kind in self._tried_out:
            return
        document_check.require_packable(self.objective)
        document_check.require_documents_apart(self.objective, stack, training)
        self._tried_out |= {kind, (kind[0], False)}  # a training tries evaluations out, too

    def require(self, executed: Executed, dispatch: Dispatch) -> None:
        """Waits for a dispatch.

        Raises ValueError for indices out of range, NonFiniteError and OutOfMemoryError.
        """
        try:
            self._require(executed, dispatch)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            # The scope is entered here alone, since entering it in each step would take time.
            with self._translate_oom_errors():
                raise error

    def lockstep(
        self, stacks: Stacks, dispatches: Iterator[Dispatch], training: bool = True
    ) -> Iterator[Dispatch]:
        """Yields the dispatches of a pass, in which all workers keep step.

        Raises WorkersDifferError on every worker if their data differ in length.
        """
        with self._translate_oom_errors():
            yield from self._lockstep(stacks, dispatches, training)

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raises XLA's refusal of an operation as a ValueError that names the layer."""
        return compilable.translate_errors(self.objective.model)

    @abc.abstractmethod
    def _dispatch(self, dispatch: Dispatch) -> Executed: ...

    @abc.abstractmethod
    def _evaluate_dispatch(
        self, dispatch: Dispatch
    ) -> tuple[list[tf.Tensor], Callable[[], None]]: ...

    @abc.abstractmethod
    def _require(self, executed: Executed, dispatch: Dispatch) -> None: ...

    def _lockstep(
        self, stacks: Stacks, dispatches: Iterator[Dispatch], training: bool
    ) -> Iterator[Dispatch]:
        return dispatches

    def _admit(self, run: FirstRun) -> contextlib.AbstractContextManager[None]:
        float8 = self.objective.float8
        if run.training and not run.part and float8 is not None:
            float8.require_some()
        if self.admission is None:
            return contextlib.nullcontext()
        return self.admission.admit(run)

    def _translate_oom_errors(self) -> contextlib.AbstractContextManager[None]:
        if self.admission is None:
            return contextlib.nullcontext()
        return self.admission.translate_oom_errors()

    def _reraise(self, error: Exception) -> NoReturn:
        """Raises a program's error in the caller's terms."""
        if isinstance(error, tf.errors.InvalidArgumentError):
            self.running.index_checks.reset()
        with self._translate_oom_errors(), self.translate_errors():
            raise error


class PendingDispatch:
    """A dispatch whose outcome has not been read yet.

    `require` lets go of the dispatch's data, which the logs would hold.
    """

    def __init__(self, engine: Engine, executed: Executed, dispatch: Dispatch):
        self._require: Callable[[], None] | None = functools.partial(
            engine.require, executed, dispatch
        )

    def require(self) -> None:
        """Waits for the dispatch and raises what `Engine.require` raises, once."""
        if self._require is not None:
            self._require()
            self._require = None
