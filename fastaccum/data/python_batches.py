"""Batches that Python code yields: a PyDataset's, a generator's or a DataLoader's.

`tf.data.Dataset.from_generator`, by which Keras's `fit` reads them, takes some 1.8 ms for a small
batch; this takes 0.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum.data.rows import SparseRows, is_sparse, require_unmasked

_END = object()


class ReadAhead:
    """Iterates over `convert(item)`; a thread reads up to `depth` items ahead.

    The thread ends with the items, by `close`, or with the interpreter, which does not wait for it.
    """

    def __init__(self, items: Generator, depth: int, convert: Callable[[Any], Any]):
        self._items = items
        self._convert = convert
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._may_read = threading.Semaphore(depth)
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = threading.Thread(
            target=self._read, name="fastaccum-data", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # once the main thread has ended, Python starts no other
            self._thread = None

    def _read(self) -> None:
        item = None
        while item is not _END:
            self._may_read.acquire()
            if self._is_closed:
                return
            try:
                item = next(self._items, _END)
            except BaseException as error:
                self._error = error
                item = _END
            self._ready.put(item)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._thread is None:
            return self._convert(next(self._items))
        item = self._ready.get()
        self._may_read.release()
        if item is not _END:
            return self._convert(item)
        self._ready.put(_END)  # for who asks again
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, after the item that it may be reading."""
        if self._thread is not None:
            self._is_closed = True
            self._may_read.release()
            self._thread.join()
            self._ready.put(_END)  # for who asks again
        self._items.close()


@dataclasses.dataclass(frozen=True)
class PythonBatches:
    """The batches of a pass, as tensors: each iterator begins a pass, and has a `close`.

    Args:
        what: the data's name in messages.
        read: begins a pass: yields its elements, nests of arrays, dense or sparse.
        spec: specs of an element.
        to_batch: makes a batch of an element's tensors.
        ahead: how many batches are read ahead.
    """

    what: str
    read: Callable[[], Generator]
    spec: Any
    to_batch: Callable[[Any], Any]
    ahead: int = 1

    def __iter__(self) -> ReadAhead:
        return ReadAhead(self._copies(), self.ahead, self._as_batch)

    def _copies(self) -> Generator:
        with contextlib.closing(self.read()) as elements:
            for element in elements:
                yield self._checked_copy(element)

    def _checked_copy(self, element: Any) -> Any:
        """Copies an element's arrays, which the code that yields them may write over.

        Raises:
            ValueError: raised if the element is of another structure or of other shapes.
        """
        try:
            tf.nest.assert_same_structure(self.spec, element)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.what} yielded a batch of another structure than its first one: {error}"
            ) from None
        return tf.nest.map_structure(self._copy, element, self.spec)

    def _copy(self, array: Any, spec: Any) -> np.ndarray | None:
        if array is None and isinstance(spec, tf.OptionalSpec):
            return None
        if array is None:
            raise ValueError(
                f"{self.what} yielded None where an array was expected, as its first batch had it."
            )
        if isinstance(spec, tf.OptionalSpec):
            raise ValueError(f"{self.what} yielded an array where its first batch had None.")
        require_unmasked(self.what, array)
        dense = SparseRows(array)[...] if is_sparse(array) else array
        copied = np.array(dense, spec.dtype.as_numpy_dtype)
        if not spec.shape.is_compatible_with(copied.shape):
            raise ValueError(
                f"{self.what} yielded an array of shape {copied.shape} where {spec.shape} was "
                "expected, as the first two batches of Python code have shown, in Keras too. If "
                "it may differ, let these two differ in that axis, or pass "
                "tf.data.Dataset.from_generator(..., output_signature=...) with None there."
            )
        return copied

    def _as_batch(self, element: Any) -> Any:
        def as_tensor(array, spec):
            return None if array is None else tf.convert_to_tensor(array, spec.dtype)

        return self.to_batch(tf.nest.map_structure(as_tensor, element, self.spec))
