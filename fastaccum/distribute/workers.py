"""Messages of worker processes beside the collectives, and the errors of workers that differ, fail
or stay away.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from fastaccum.basics.warnings import short_tracebacks
from fastaccum.checkpoint import state
from fastaccum.checkpoint.state import WorkerLostError
from fastaccum.kernels import private

P = ParamSpec("P")
R = TypeVar("R")
TIMEOUT = "FASTACCUM_WORKER_TIMEOUT"  # seconds, in the environment
# Between two looks at whether the others are still there, of one that waits for them.
LOOK_EVERY_S = 1.0
# In every process alike, whichever model they are about: the workers' calls are the same, in the
# same order.
_rounds = itertools.count()
_entrance = threading.Lock()  # to a Trainer
_CALLS = "fastaccum_calls"  # an attribute of a Trainer: its calls that go on, with their threads
_steps: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)  # by the part of a step


class WorkersDifferError(ValueError):
    """Raised on every worker where the workers were given different arguments, data or programs."""


def abort_peers_on_error(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Decorates a Trainer's method: one thread at a time calls it, and an error here ends the other
    workers' waits.

    Its errors show the caller's lines, and not those of fastaccum.
    """

    @short_tracebacks
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        replicas = self._replicas
        with _in_one_thread(self, method.__name__.strip("_")):
            try:
                return method(self, *args, **kwargs)
            except (WorkerLostError, WorkersDifferError):
                raise
            except BaseException as error:  # Ctrl-C and SIGTERM too
                if replicas is None or replicas.workers == 1:
                    raise
                if not isinstance(error, tf.errors.OpError) or "ollective" not in str(error):
                    replicas.report(error)
                    raise
                updates = int(self.optimizer.iterations.numpy())
                raise WorkerLostError(
                    f"Worker {replicas.worker} of {replicas.workers} lost another one after "
                    f"{updates} updates, in {method.__name__}: {_cause(error)} No update is half "
                    "done, but these workers cannot go on together: restart all of them, from "
                    "the last checkpoint."
                ) from error

    return call


@contextlib.contextmanager
def _in_one_thread(trainer: Any, name: str) -> Iterator[None]:
    """Raises RuntimeError while another thread is in a method of the Trainer; any number may
    predict.
    """
    mine = threading.current_thread(), name
    with _entrance:
        calls: list[tuple[threading.Thread, str]] = vars(trainer).setdefault(_CALLS, [])
        for thread, running in tuple(calls):
            if thread is not mine[0] and not running == name == "predict":
                raise RuntimeError(
                    f"{name}: this Trainer is in use by {running} in the thread {thread.name!r}, "
                    "and belongs to one thread at a time: wait for that call to end, or make "
                    "another Trainer, of another model."
                )
        calls.append(mine)
    try:
        yield
    finally:
        calls.remove(mine)


def _cause(error: tf.errors.OpError) -> str:
    """Returns the reason of a failed collective, without the graph's stack trace."""
    reason = error.message.partition("Collective ops is aborted by: ")[2] or error.message
    lines = reason.partition("The error could be from a previous operation")[0].strip().splitlines()
    return " ".join(line.strip() for line in lines)[:500].rstrip(".") + "."


def timeout() -> float:
    """Reads from the environment the seconds for which workers wait; raises ValueError for anything
    else.
    """
    given = os.environ.get(TIMEOUT, "600")
    with contextlib.suppress(ValueError):
        if 0 < float(given) < threading.TIMEOUT_MAX:
            return float(given)
    raise ValueError(f"{TIMEOUT}={given!r} in the environment must be a number of seconds above 0.")


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
        """Returns every worker's text; raises WorkerLostError if a worker has failed, or does not
        come in time.
        """
        if self.workers == 1:
            return [text]
        this, end = next(_rounds), time.monotonic() + timeout()
        self.tell(f"said/{this}", text)
        texts = [
            text if i == self.worker else self.hear(f"said/{this}", i, end)
            for i in range(self.workers)
        ]
        if this:  # all are here, so all have read what was said before
            self.forget(f"said/{this - 1}")
        return texts

    def tell(self, about: str, text: str = "") -> None:
        """Leaves a text for all workers, once; any thread may, and `hear`."""
        private.context.context().set_config_key_value(_key(about, self.worker), text)

    def forget(self, about: str) -> None:
        """Removes what this worker told, once all have heard it."""
        private.context.context().delete_config_key_value(_key(about, self.worker))

    def hear(self, about: str, worker: int, end: float | None = None) -> str:
        """Returns what a worker tells, and waits for it; raises as `exchange`."""
        store, end = private.context.context(), time.monotonic() + timeout() if end is None else end
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
            f"Worker {self.worker} of {self.workers} lost {who}: {_cause(error)} Restart all of "
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
            private.context.context().report_error_to_cluster(tf.errors.ABORTED, message[:1000])

    def require_same(self, advice: str, **numbers: float) -> None:
        """Raises WorkersDifferError, with advice, on every worker if the workers differ in one of
        the numbers.
        """
        for name, column in zip(
            numbers, zip(*self.gather(list(numbers.values())), strict=True), strict=True
        ):
            if len(set(column)) > 1:
                raise WorkersDifferError(
                    f"Workers differ in {name.replace('_', ' ')}: {list(column)}, in their "
                    f"order. {advice}"
                )

    def require_alike(self, call: str, **description: object) -> None:
        """Raises WorkersDifferError on every worker unless all are in this call, with one
        description of it.
        """
        text = json.dumps([call, state.plain(description)])
        if len(set(self.exchange(hashlib.sha256(text.encode()).hexdigest()))) == 1:
            return
        texts = self.exchange(text)
        other = next(number for number, each in enumerate(texts) if each != text)
        of_other, of_this = f"worker {other}", f"this one, worker {self.worker}"
        their_call, theirs = json.loads(texts[other])
        if their_call == call:
            found = state.differences(
                theirs, json.loads(text)[1], words=f"{{}} on {of_other}, {{}} on {of_this}"
            )
        else:
            found = [f"{of_other} is in {their_call}, {of_this}, in {call}"]
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise WorkersDifferError(
            f"Workers differ, and nothing was trained: {'; '.join(found[:10])}{more}. Run the "
            "same program on all, with the same arguments, files and versions."
        )

    def missing(self, step: str) -> list[int]:
        """Lists the workers that have not said that they are in a step."""
        missing = []
        for other in range(self.workers):
            try:
                private.context.context().get_config_key_value(_key(f"in/{step}", other), 1000)
            except tf.errors.DeadlineExceededError:
                missing.append(other)
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
        watch.at = self, f"{part} {next(_steps[part])}"
        try:
            yield
        finally:
            watch.at = None


class _Watch(threading.Thread):
    """Watches a step's collective, which waits without end, and reports the workers that have not
    come to the step.

    A worker that waits for long says that it is in the step, so that a worker that computes for
    long is not missed.
    """

    # with the part and the number of the step; None between two steps
    at: tuple[Workers, str] | None = None

    def __init__(self) -> None:
        super().__init__(name="fastaccum-workers", daemon=True)
        self.start()

    def run(self) -> None:
        at: tuple[Workers, str] | None = None
        since, said = 0.0, False
        while True:
            grace = timeout() / 10  # after it a worker says that it is in the step
            time.sleep(min(LOOK_EVERY_S, grace / 2))
            if self.at is not at:
                at, since, said = self.at, time.monotonic(), False
            if at is None:
                continue
            (workers, step), waited = at, time.monotonic() - since
            # of a cluster that is no more: the step fails by itself
            with contextlib.suppress(tf.errors.OpError):
                if not said and waited > grace:
                    private.context.context().set_config_key_value(
                        _key(f"in/{step}", workers.worker), ""
                    )
                    said = True
                if said and waited > timeout() + grace and (missing := workers.missing(step)):
                    workers.lost(
                        f"workers {missing} have not come to the step that worker "
                        f"{workers.worker} is in"
                    )
                    at = None


_watch = functools.cache(_Watch)


def _key(what: str, worker: int) -> str:
    return f"fastaccum/{what}/{worker}"
