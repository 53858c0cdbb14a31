"""The calls of a Trainer: one thread at a time makes them, and their errors reach all workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import tensorflow as tf

from fastaccum.basics.processes import WorkerLostError, WorkersDifferError, cause
from fastaccum.basics.warnings import short_tracebacks

P = ParamSpec("P")
R = TypeVar("R")

# An attribute of a Trainer: its calls that go on.
_CALLS = "fastaccum_calls"
_calls_lock = threading.Lock()  # held while a call begins


class _Call(NamedTuple):
    thread: threading.Thread
    method: str


def abort_peers_on_error(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Decorates a Trainer's method, so that an error in it ends the other workers' waits.

    One thread at a time calls the method. Its errors show the caller's lines, and not those of
    fastaccum.
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
                    f"{updates} updates, in {method.__name__}: {cause(error)} No update is half "
                    "done, but these workers cannot go on together: restart all of them, from "
                    "the last checkpoint."
                ) from error

    return call


@contextlib.contextmanager
def _in_one_thread(trainer: Any, method: str) -> Iterator[None]:
    """Raises RuntimeError while another thread is in a method of the Trainer.

    Any number of threads may predict.
    """
    begun = _Call(threading.current_thread(), method)
    with _calls_lock:
        calls: list[_Call] = vars(trainer).setdefault(_CALLS, [])
        for call in tuple(calls):  # other threads remove theirs meanwhile
            both_predict = call.method == method == "predict"
            if call.thread is not begun.thread and not both_predict:
                raise RuntimeError(
                    f"{method}: this Trainer is in use by {call.method} in the thread "
                    f"{call.thread.name!r}, and belongs to one thread at a time: wait for that "
                    "call to end, or make another Trainer, of another model."
                )
        calls.append(begun)
    try:
        yield
    finally:
        calls.remove(begun)
