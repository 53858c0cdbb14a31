"""Writes checkpoints in a thread, one at a time, and shares of them with other workers."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.basics.processes import WorkerLostError, Workers
from fastaccum.checkpoint import store
from fastaccum.checkpoint.errors import CheckpointWriteError
from fastaccum.fingerprint.values import Json


class Copy(NamedTuple):
    """A copy of all that a checkpoint holds."""

    manifest: Json
    tensors: dict[str, tf.Tensor | np.ndarray]  # by name

    @property
    def step(self) -> int:
        """The number of train steps done."""
        return self.manifest["progress"]["step"]


class Writer:
    """Writes the checkpoints of a fit, one at a time, in a thread.

    Of several workers the chief alone writes. Where workers have tensors that no other has, each
    writes its own, and all wait for the chief to complete the checkpoint.

    Args:
        keep: how many checkpoints stay in the folder.
        workers: the processes that train together, or None.
        fit: a name of this fit, which all workers know and no other fit has.
        held_here: names of the tensors that this worker alone has, where each has some.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        workers: Workers | None,
        fit: str,
        held_here: Collection[str],
    ):
        self._directory = directory
        self._keep = keep
        self._workers = workers
        self._fit = fit
        self._held_here = held_here
        self._told = ""  # the key of the latest checkpoint that this worker told of
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fastaccum-checkpoint")
        self._write: concurrent.futures.Future | None = None  # the one that goes on
        self._step = 0  # whose state is written

    def write(self, copied: Copy) -> None:
        """Begins to write a checkpoint, once the one before is written; raises as `wait`."""
        self.wait()
        self._step = copied.step
        if self._held_here:
            self._submit(self._write_with_others, copied)
        elif self._workers is None or self._workers.is_chief:
            self._submit(store.write, self._directory, copied.manifest, copied.tensors, self._keep)

    def wait(self) -> None:
        """Waits for the write that goes on.

        Raises CheckpointWriteError if it failed, and WorkerLostError if another worker is lost.
        """
        write = self._write
        self._write = None
        try:
            if write is not None:
                write.result()
        except WorkerLostError:  # the folder is good
            raise
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")  # TensorFlow adds lines
            reason = first_line or type(error).__name__
            raise CheckpointWriteError(
                f"The checkpoint of step {self._step} could not be written to "
                f"{str(self._directory)!r}: {reason}. No earlier one was touched. Make room or "
                "mend the folder, then call fit again."
            ) from error

    def close(self) -> None:
        """Waits for the thread to end."""
        self._thread.shutdown()

    def _submit(self, write: Callable[..., object], *arguments: object) -> None:
        try:
            self._write = self._thread.submit(write, *arguments)
        except RuntimeError:  # the main thread has ended: Python starts no call in another
            self._write = concurrent.futures.Future()
            try:
                self._write.set_result(write(*arguments))
            except Exception as error:  # for `wait`, as from a thread
                self._write.set_exception(error)

    def _write_with_others(self, copied: Copy) -> None:
        """Writes what this worker alone has, and waits for the checkpoint.

        The chief writes all else and completes the checkpoint.
        """
        workers = self._workers
        assert workers is not None
        told_before = self._told
        self._told = f"share/{self._fit}/{copied.step}"
        if workers.is_chief:
            waits = []  # for the share of each other worker
            for worker in range(1, workers.workers):
                waits.append(functools.partial(workers.hear, self._told, worker))
            store.write(
                self._directory, copied.manifest, copied.tensors, self._keep, self._fit, waits
            )
        else:
            share = {name: copied.tensors[name] for name in self._held_here}
            path = store.folder(self._directory, copied.step)
            store.write_share(path, self._fit, workers.worker, share)
        workers.tell(self._told)
        if not workers.is_chief:
            workers.hear(self._told, 0)  # this worker must not leave before the chief is done
        if told_before:  # all who have told of this checkpoint have heard of the one before
            workers.forget(told_before)
