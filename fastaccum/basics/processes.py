"""Messages between the processes that train together, and errors where one differs or is lost."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from fastaccum.kernels import private

TIMEOUT = "FASTACCUM_WORKER_TIMEOUT"  # seconds, in the environment
DEFAULT_TIMEOUT_S = "600"

# A worker that waits for a text looks this often if the others are still there.
LOOK_EVERY_S = 1.0

# Characters of a failed collective's message that an error quotes: more is a stack trace.
_MAX_CAUSE = 500
# Characters of an error that is reported: the coordination service keeps short messages.
_MAX_REPORT = 1000

# The processes count their exchanges alike, whichever model they are about: all make the same
# calls, in the same order.
_rounds = itertools.count()
_steps: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)  # by the part of a step


class WorkerLostError(RuntimeError):
    """Raised where another worker died, failed, stopped answering or did not come."""


class WorkersDifferError(ValueError):
    """Raised on every worker where the workers were given different arguments, data or programs."""


def cause(error: tf.errors.OpError) -> str:
    """Returns the reason of a failed collective, without the graph's stack trace."""
    _, _, reason = error.message.partition("Collective ops is aborted by: ")
    if not reason:
        reason = error.message
    reason, _, _ = reason.partition("The error could be from a previous operation")
    lines = [line.strip() for line in reason.strip().splitlines()]
    return " ".join(lines)[:_MAX_CAUSE].rstrip(".") + "."


def timeout() -> float:
    """Reads from the environment the seconds for which workers wait.

    Raises ValueError for anything else than a positive number.
    """
    text = os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S)
    with contextlib.suppress(ValueError):
        if 0 < float(text) < threading.TIMEOUT_MAX:
            return float(text)
    raise ValueError(f"{TIMEOUT}={text!r} in the environment must be a number of seconds above 0.")


class Workers:
    """Exchanges messages between the processes that train together.

    Messages go through the key-value store of TensorFlow's coordination service. A collective would
    wait for ever for a worker that calls another one.
    """

    def __init__(self, worker: int, workers: int):
        self.worker = worker  # 0 is the chief
        self.workers = workers

    @property
    def is_chief(self) -> bool:
        """True for the process that writes what all share."""
        return self.worker == 0

    def exchange(self, text: str) -> list[str]:
        """Returns every worker's text.

        Raises WorkerLostError if a worker has failed, or does not come in time.
        """
        if self.workers == 1:
            return [text]
        number = next(_rounds)
        end = time.monotonic() + timeout()
        self.tell(f"said/{number}", text)
        texts = []
        for worker in range(self.workers):
            if worker == self.worker:
                texts.append(text)
            else:
                texts.append(self.hear(f"said/{number}", worker, end))
        if number > 0:  # all are here, so all have read what was said before
            self.forget(f"said/{number - 1}")
        return texts

    def tell(self, about: str, text: str = "") -> None:
        """Leaves a text for all workers, once; any thread may, and `hear`."""
        _store().set_config_key_value(_key(about, self.worker), text)

    def forget(self, about: str) -> None:
        """Removes what this worker told, once all have heard it."""
        _store().delete_config_key_value(_key(about, self.worker))

    def hear(self, about: str, worker: int, end: float | None = None) -> str:
        """Waits for what a worker tells and returns it; raises as `exchange`."""
        store = _store()
        if end is None:
            end = time.monotonic() + timeout()
        while True:
            try:
                with contextlib.suppress(tf.errors.DeadlineExceededError):
                    return store.get_config_key_value(_key(about, worker), int(1000 * LOOK_EVERY_S))
                states = store.get_task_states([("worker", self.workers)])
            except tf.errors.OpError as error:  # of the chief, who keeps what is said
                raise self._died("the chief", error) from error
            for number, failure in enumerate(states):
                if failure is not None:
                    raise self._died(f"worker {number}", failure)
            if time.monotonic() > end:
                raise self.lost(f"worker {worker} has not reached the point where this one waits")

    def _died(self, who: str, error: tf.errors.OpError) -> WorkerLostError:
        return WorkerLostError(
            f"Worker {self.worker} of {self.workers} lost {who}: {cause(error)} Restart all of "
            "them, from the last checkpoint."
        )

    def lost(self, what: str) -> WorkerLostError:
        """Returns the error of workers that did not come, and reports it to the others."""
        error = WorkerLostError(
            f"After {timeout():g} s {what}. It may be stopped, at work on something else, or in "
            f"another call. Restart all workers, from the last checkpoint; {TIMEOUT}=SECONDS in "
            "the environment lets them wait for longer."
        )
        self.report(error)
        return error

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Waits for all workers and returns the numbers of each."""
        return [json.loads(text) for text in self.exchange(json.dumps(list(numbers)))]

    def report(self, error: BaseException) -> None:
        """Reports an error to the other workers, whose present and later waits raise it."""
        message = f"worker {self.worker} failed with {type(error).__name__}: {error}"
        with contextlib.suppress(tf.errors.OpError):  # none of them is left
            _store().report_error_to_cluster(tf.errors.ABORTED, message[:_MAX_REPORT])

    def require_same(self, advice: str, **numbers: float) -> None:
        """Raises WorkersDifferError, with advice, on every worker if one of the numbers differs."""
        numbers_of_workers = self.gather(list(numbers.values()))
        for name, values in zip(numbers, zip(*numbers_of_workers, strict=True), strict=True):
            if len(set(values)) > 1:
                raise WorkersDifferError(
                    f"Workers differ in {name.replace('_', ' ')}: {list(values)}, in their "
                    f"order. {advice}"
                )

    def missing(self, step: str) -> list[int]:
        """Lists the workers that have not said that they are in a step."""
        missing = []
        for worker in range(self.workers):
            try:
                _store().get_config_key_value(_key(f"in/{step}", worker), 1000)
            except tf.errors.DeadlineExceededError:
                missing.append(worker)
        return missing

    @contextlib.contextmanager
    def in_step(self, part: str) -> Iterator[None]:
        """Ends a wait for the other workers inside the block if one of them does not come in time.

        All workers come to a `part` in the same order, but one may read a step's logs before the
        next step, and another after it.
        """
        if self.workers == 1:
            yield
            return
        watch = _watch()
        watch.wait = _Wait(self, f"{part} {next(_steps[part])}")
        try:
            yield
        finally:
            watch.wait = None


class _Wait(NamedTuple):
    """A worker in a collective, which waits for the others there."""

    workers: Workers
    step: str  # the part of the step and its number


class _Watch(threading.Thread):
    """Watches a step's collective, and reports the workers that have not come to the step.

    The collective itself waits without end. A worker that waits for long says that it is in the
    step, so that a worker that computes for long is not missed.

    Attributes:
        wait: the collective that this process is in, or None between two steps.
    """

    def __init__(self) -> None:
        super().__init__(name="fastaccum-workers", daemon=True)
        self.wait: _Wait | None = None
        self.start()

    def run(self) -> None:
        wait: _Wait | None = None
        since = 0.0
        has_said = False
        while True:
            grace = timeout() / 10  # after it a worker says that it is in the step
            time.sleep(min(LOOK_EVERY_S, grace / 2))
            if self.wait is not wait:
                wait = self.wait
                since = time.monotonic()
                has_said = False
            if wait is None:
                continue

            waited = time.monotonic() - since
            # of a cluster that is no more: the step fails by itself
            with contextlib.suppress(tf.errors.OpError):
                if not has_said and waited > grace:
                    wait.workers.tell(f"in/{wait.step}")
                    has_said = True
                if has_said and waited > timeout() + grace:
                    missing = wait.workers.missing(wait.step)
                    if missing:
                        wait.workers.lost(
                            f"workers {missing} have not come to the step that worker "
                            f"{wait.workers.worker} is in"
                        )
                        wait = None


_watch = functools.cache(_Watch)


def _store() -> Any:
    """Returns TensorFlow's context, which holds the coordination service's key-value store."""
    return private.context.context()


def _key(about: str, worker: int) -> str:
    return f"fastaccum/{about}/{worker}"
