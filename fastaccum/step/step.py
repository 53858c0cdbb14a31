"""The interface of a model's step: its programs on one device, or on the replicas of a strategy."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.attributes import replaced
from fastaccum.data.source import Stacks
from fastaccum.data.stacks import Dispatch
from fastaccum.step import compilable
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.running_state import Executed, RunningState
from fastaccum.step.tracing import TracedFunction
from fastaccum.step.train_step import TrainStep


class FirstRun(NamedTuple):
    """A program that is about to run for the first time."""

    programs: list[ConcreteFunction]  # of one device, in this order
    # handles and constants of `programs`, on all of this process's devices
    captured: Sequence[tf.Tensor]
    dispatch: Dispatch  # of specs; empty for a part of a train step
    training: bool
    part: str = ""  # what the program computes, where that is not a whole train step or evaluation
    is_compiled: bool = True  # by XLA


class MemoryGuard(Protocol):
    """Checks that programs fit the device's memory."""

    def admit(self, run: FirstRun) -> contextlib.AbstractContextManager[None]:
        """Encloses a first run; an error of the scope keeps the program from running."""

    def translate_oom_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raises the out-of-memory errors inside the block as `OutOfMemoryError`."""


class Step(abc.ABC):
    """Trains and evaluates a model by compiled programs, on one device or on the replicas of a
    strategy.
    """

    objective: ModelObjective  # the model's losses, metrics and state
    cycle: TrainStep
    running: RunningState  # logs and counts that go on from step to step
    sharing: int = 1  # how many of this process's replicas share the memory of one device
    guard: MemoryGuard | None = None  # checks the memory of each program before its first run
    shapes_are_free: bool = False  # one trace takes single micro-batches of any rows and lengths

    @property
    @abc.abstractmethod
    def programs(self) -> dict[str, Program]:
        """The programs that the host calls, by what a call does."""

    @property
    def elsewhere(self) -> Collection[int]:
        """The ids of the optimizer's variables that the first replica, which holds the most, does
        not.
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
        """Retraces the training programs inside the block, for XLA, and restores their earlier
        traces on exit.
        """
        compiled = dataclasses.replace(self.objective.options, jit_compile=True)
        programs = self._training_programs
        traced = [(each, name, value) for each in programs for name, value in vars(each).items()]
        with replaced([(self.objective, "options", compiled), *traced]):
            for each in programs:
                each.jit_compile = True
                each.retrace()
            yield

    @abc.abstractmethod
    def trace(self, dispatch: Dispatch) -> list[ConcreteFunction]:
        """Returns the concrete functions that one device runs, in order, for a dispatch of tensors
        or specs.
        """

    def dispatch(self, dispatch: Dispatch) -> Executed:
        """Runs a dispatch, on a GPU without a wait; raises ValueError if XLA cannot compile it,
        OutOfMemoryError.
        """
        try:
            return self._dispatch(dispatch)
        except Exception as error:
            self._reraise(error)

    def evaluate(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        """Returns the sums of `ModelObjective.evaluate`, and a function that raises for indices out
        of range.
        """
        try:
            return self._evaluate_dispatch(dispatch)
        except Exception as error:
            self._reraise(error)

    def require(self, executed: Executed, dispatch: Dispatch) -> None:
        """Waits for a dispatch; raises ValueError for indices out of range, NonFiniteError,
        OutOfMemoryError.
        """
        try:
            self._require(executed, dispatch)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            # no scope is entered in each step
            with self._translate_oom_errors():
                raise error

    def lockstep(
        self, stacks: Stacks, dispatches: Iterator[Dispatch], training: bool = True
    ) -> Iterator[Dispatch]:
        """Yields the dispatches of a pass; raises WorkersDifferError on every worker if their data
        differ in length.
        """
        with self._translate_oom_errors():
            yield from self._lockstep(stacks, dispatches, training)

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raises XLA's refusal of an operation inside the block as a ValueError that names the
        layer.
        """
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
        return contextlib.nullcontext() if self.guard is None else self.guard.admit(run)

    def _translate_oom_errors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.guard is None else self.guard.translate_oom_errors()

    def _reraise(self, error: Exception) -> NoReturn:
        """Raises a program's error in the caller's terms."""
        if isinstance(error, tf.errors.InvalidArgumentError):
            self.running.index_checks.reset()
        with self._translate_oom_errors(), self.translate_errors():
            raise error


class PendingStep:
    """A dispatch whose outcome has not been read yet; `require` lets go of its data, which logs
    would hold.
    """

    def __init__(self, step: Step, executed: Executed, dispatch: Dispatch):
        self._require: Callable[[], None] | None = functools.partial(
            step.require, executed, dispatch
        )

    def require(self) -> None:
        """Waits for the dispatch and raises what `Step.require` raises, once."""
        if self._require is not None:
            self._require()
            self._require = None
