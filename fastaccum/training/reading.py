"""The end of the threads that read data ahead, however a fit or an evaluation ends."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Protocol

# Seconds to wait for a batch that is being read, which may never come where a worker of a PyDataset
# was killed.
LONGEST_WAIT = 2.0


class Reader(Protocol):
    """An object whose threads read data ahead."""

    def close(self) -> None: ...


@contextlib.contextmanager
def reading(*readers: Reader | None) -> Iterator[None]:
    """Closes the readers at the end of the block, also where it raises.

    TensorFlow's threads call Python for a `tf.data.Dataset` of Python code. An iterator that
    something still holds, such as an error's traceback, is deleted only as the interpreter ends.
    That waits for the threads, which can no longer call Python by then: the process would never
    end.
    """
    try:
        yield
    except BaseException as error:
        _release_iterators(error)
        raise
    finally:
        closing = threading.Thread(
            target=_close, args=(readers,), name="fastaccum-close", daemon=True
        )
        try:
            closing.start()
            closing.join(LONGEST_WAIT)
        except RuntimeError:  # the main thread has ended: Python starts no other
            _close(readers)


def _close(readers: Sequence[Reader | None]) -> None:
    for reader in readers:
        if reader is not None:
            reader.close()


def _release_iterators(error: BaseException) -> None:
    """Clears TensorFlow's frames in an error's traceback, one of which may hold the iterator."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("tensorflow."):
            with contextlib.suppress(RuntimeError):  # a frame that still runs
                frame.clear()
