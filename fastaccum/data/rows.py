"""Arrays that hold dense numbers, in memory or as stacks made by hand, and their rows as
tensors.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.kernels.devices import has_gpu

NUMBERS = (
    "pass numbers, with text and objects encoded beforehand; or text to a model that encodes it, "
    "without jit_compile=True."
)
DENSE = (
    "the rows of a stack have one shape. Pad them (.to_tensor(), or .padded_batch), and mask "
    "what is padding (mask_zero, Masking, or a sample_weight of 0)."
)


def is_sparse(leaf: object) -> bool:
    """Tells if `leaf` is a sparse array of any kind."""
    return isinstance(leaf, tf.SparseTensor) or hasattr(leaf, "tocoo") or hasattr(leaf, "todense")


class SparseRows:
    """A sparse array (a tf.SparseTensor, SciPy's or JAX's), whose rows become dense as they are
    taken.
    """

    def __init__(self, array: Any):
        if isinstance(array, tf.SparseTensor):
            indices, values = array.indices.numpy(), array.values.numpy()
        elif hasattr(array, "tocoo"):
            array = array.tocoo()
            indices, values = np.stack([array.row, array.col], -1), array.data
        else:
            indices, values = np.asarray(array.indices), np.asarray(array.data)
        order = np.argsort(indices[:, 0], kind="stable")
        self._indices, self._values = indices[order], values[order]
        self.shape, self.dtype = tuple(int(size) for size in array.shape), values.dtype
        self._starts = np.searchsorted(self._indices[:, 0], np.arange(self.shape[0] + 1))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns these rows, dense."""
        rows = np.arange(self.shape[0])[rows]
        taken = rows.ravel()
        counts = self._starts[taken + 1] - self._starts[taken]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.repeat(self._starts[taken], counts) + within
        dense = np.zeros((len(taken), *self.shape[1:]), self.dtype)
        places = (np.repeat(np.arange(len(taken)), counts), *self._indices[entries, 1:].T)
        np.add.at(dense, places, self._values[entries])  # an element given twice is their sum
        return dense.reshape(*rows.shape, *self.shape[1:])


def is_array_nest(x: object) -> bool:
    """Tells if `x` is an array, or a nest that holds arrays or numbers alone, dense or not."""
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        return False
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(
        hasattr(leaf, "__array__")
        or is_sparse(leaf)
        or isinstance(leaf, (tf.RaggedTensor, SparseRows, int, float, str, bytes))
        for leaf in leaves
    )


def as_arrays(batch: tuple, text: bool = False) -> Batch:
    """Checks nests of arrays, and copies none of NumPy's. With `text` x may hold strings."""

    def checked(name, nest):
        return tf.nest.map_structure(lambda leaf: _checked(name, leaf, text and name == "x"), nest)

    return Batch(*map(checked, Batch._fields, without_none(batch)))


def without_none(batch: Sequence[Any]) -> list[Any]:
    """Returns inputs, and nests of targets and weights with (), a nest without leaves, for None."""
    x, *others = batch
    return [
        x,
        *(
            tf.nest.map_structure(lambda leaf: () if leaf is None else leaf, nest)
            for nest in others
        ),
    ]


def as_tensors(name: str, nest: object, text: bool = False) -> Any:
    """Converts a nest of arrays to tensors, float64 to Keras's default float, as Keras does."""
    return tf.nest.map_structure(lambda leaf: take(_checked(name, leaf, text), ...), nest)


def as_stack(stack: object, needs_targets: bool = True, text: bool = False) -> Batch:
    """Converts (x, y) or (x, y, sample_weight) of arrays [micro-batches, rows, ...] to tensors; a
    `Batch` stays.
    """
    if isinstance(stack, Batch):
        return stack
    if not isinstance(stack, (tuple, list)) or not 1 + needs_targets <= len(stack) <= 3:
        entries = f" of {len(stack)} entries" if isinstance(stack, (tuple, list)) else ""
        raise ValueError(
            "A train step takes (x, y) or (x, y, sample_weight); got "
            f"{type(stack).__name__}{entries}."
        )
    if needs_targets and stack[1] is None:
        raise ValueError("y=None: a train step needs targets, as in (x, y).")
    for name, nest in zip(Batch._fields, stack, strict=False):
        checks.require_nest(name, nest)
    batch = tf.nest.map_structure(
        lambda leaf: take(leaf, ...), as_arrays((*stack, None)[: max(2, len(stack))], text)
    )
    if not tf.nest.flatten(batch.x):
        raise ValueError(
            f"x={stack[0]!r} holds no array: a train step takes (x, y) or (x, y, sample_weight)."
        )
    trip_count(batch)
    shapes = [tuple(t.shape) for t in tf.nest.flatten(batch)]
    if len({shape[:2] for shape in shapes}) > 1 or len(shapes[0]) < 2 or 0 in shapes[0][:2]:
        raise ValueError(
            "Every tensor of a stack has shape [micro-batches, rows, ...], the same first two "
            f"axes in all: {shapes}."
        )
    return batch


def count(what: str, batch: Batch) -> int:
    """Counts the rows: the first axis of all arrays; raises ValueError if that differs between
    them.
    """
    sizes = {
        name: [int(t.shape[0]) for t in tf.nest.flatten(nest)]
        for name, nest in batch._asdict().items()
    }
    sizes = {name: rows for name, rows in sizes.items() if rows}
    first, *others = set(itertools.chain.from_iterable(sizes.values()))
    if others:
        raise ValueError(
            f"{what} have different numbers of rows: {sizes}. Pass one of each per example."
        )
    return first


def _checked(name: str, leaf: object, text: bool = False) -> np.ndarray | tf.Tensor | SparseRows:
    if isinstance(leaf, tf.RaggedTensor):
        raise TypeError(f"{name} holds a RaggedTensor: {DENSE}")
    if isinstance(leaf, SparseRows) or is_sparse(leaf):
        return leaf if isinstance(leaf, SparseRows) else SparseRows(leaf)
    if not hasattr(leaf, "__array__"):
        raise TypeError(
            f"{name} holds {leaf!r} ({type(leaf).__name__}); pass arrays, such as np.asarray(...)."
        )
    require_unmasked(name, leaf)
    with checks.naming(name):
        array = (
            tf.convert_to_tensor(leaf)
            if isinstance(leaf, (tf.Tensor, tf.Variable))
            else _as_numpy(leaf)
        )
    try:
        dtype = _dtype(array)
    except TypeError:  # datetimes, records, long doubles: TensorFlow has none
        dtype = None
    if dtype == tf.string and text:
        return tf.convert_to_tensor(array if isinstance(array, tf.Tensor) else array.astype(object))
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise TypeError(f"{name} has dtype {array.dtype}: {NUMBERS}")
    if len(array.shape) == 0:
        raise ValueError(f"{name}={leaf!r} is a scalar: the first axis must count examples.")
    return array


def _dtype(array: np.ndarray | tf.Tensor) -> tf.DType | None:
    if array.dtype != np.dtype(object) or isinstance(array, tf.Tensor):
        return tf.as_dtype(array.dtype)
    return tf.string if all(isinstance(each, (str, bytes)) for each in array.flat) else None


def _as_numpy(leaf: Any) -> np.ndarray:
    if not hasattr(leaf, "iloc"):
        return np.asarray(leaf)
    # As Keras does with pandas: a column of a Series, and one dtype for a table of numbers.
    if leaf.ndim == 1:
        return np.expand_dims(leaf.to_numpy(), -1)
    mixed = len(set(leaf.dtypes)) > 1 and all(dtype.kind in "biuf" for dtype in leaf.dtypes)
    return (leaf.astype(keras.config.floatx()) if mixed else leaf).to_numpy()


def require_unmasked(name: str, leaf: object) -> None:
    """Raises TypeError if `leaf` is a masked array with masked elements."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise TypeError(
            f"{name} is a masked array with {int(np.ma.count_masked(leaf)):,} masked elements, "
            "which would count as if they were not: fill them (.filled(value)), and leave them "
            "out by a sample_weight of 0."
        )


def model_dtype(array: np.ndarray | tf.Tensor | SparseRows) -> tf.DType:
    """Returns the dtype in which an array reaches the model: for float64, Keras's default float, as
    in Keras.
    """
    dtype = tf.as_dtype(array.dtype)
    return tf.as_dtype(keras.config.floatx()) if dtype == tf.float64 else dtype


def take(array: np.ndarray | tf.Tensor | SparseRows, rows: Any) -> tf.Tensor:
    """Takes rows of an array as a tensor; all of them for `...`."""
    if isinstance(array, tf.Tensor):
        return tf.cast(array if rows is ... else tf.gather(array, rows), model_dtype(array))
    dtype = np.dtype(model_dtype(array).as_numpy_dtype)
    # Of an array that is not contiguous, `take` would copy the whole.
    if rows is ... or isinstance(array, SparseRows) or not array.flags.c_contiguous:
        return tf.convert_to_tensor(array[rows].astype(dtype, copy=False))
    if dtype.kind not in "fiu" or has_gpu():
        return tf.convert_to_tensor(array.take(rows, axis=0).astype(dtype, copy=False))
    # Gathered to where TensorFlow can use it as it is: its own copy takes twice as long as the
    # gather.
    taken = _aligned((*rows.shape, *array.shape[1:]), dtype)
    if array.dtype == dtype:
        # "raise", the default, would gather into a buffer first
        array.take(rows, axis=0, out=taken, mode="clip")
    else:
        # `out` would first be cast to the array's dtype, with a warning where what is in memory is
        # no number
        taken[...] = array.take(rows, axis=0)
    return tf.experimental.dlpack.from_dlpack(taken.__dlpack__())


def _aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """Allocates an uninitialised array that starts where TensorFlow's own tensors may start."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def checksum(nest: object) -> int:
    """Returns the CRC-32 of the bytes of all tensors of a nest."""
    value = 0
    for tensor in tf.nest.flatten(nest):
        array = tensor.numpy()
        if tensor.dtype == tf.string:
            array = np.frombuffer(b"\0".join(array.ravel()), np.uint8)
        value = zlib.crc32(np.ascontiguousarray(array).view(np.uint8), value)  # type: ignore[arg-type]
    return value
