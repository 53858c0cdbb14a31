"""Checks of arrays in memory and of stacks made by hand, and their rows as tensors."""

from __future__ import annotations

import functools
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
    """A sparse array (a tf.SparseTensor, SciPy's or JAX's) whose rows become dense when taken."""

    def __init__(self, array: Any):
        if isinstance(array, tf.SparseTensor):
            indices = array.indices.numpy()
            values = array.values.numpy()
        elif hasattr(array, "tocoo"):  # SciPy's
            array = array.tocoo()
            indices = np.stack([array.row, array.col], -1)
            values = array.data
        else:
            indices = np.asarray(array.indices)
            values = np.asarray(array.data)
        self.shape = tuple(int(size) for size in array.shape)
        self.dtype = values.dtype
        # Entries in the order of rows; where those of each row start.
        order = np.argsort(indices[:, 0], kind="stable")
        self._indices = indices[order]
        self._values = values[order]
        self._starts = np.searchsorted(self._indices[:, 0], np.arange(self.shape[0] + 1))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns these rows, dense."""
        rows = np.arange(self.shape[0])[rows]
        wanted = rows.ravel()
        starts = self._starts[wanted]
        counts = self._starts[wanted + 1] - starts
        # For each entry of a wanted row: the row of the result that it goes to, and its number
        # among the entries of that row.
        to_rows = np.repeat(np.arange(len(wanted)), counts)
        starts_in_result = np.cumsum(counts) - counts
        numbers = np.arange(counts.sum()) - starts_in_result[to_rows]
        entries = starts[to_rows] + numbers
        dense = np.zeros((len(wanted), *self.shape[1:]), self.dtype)
        other_axes = self._indices[entries, 1:].T
        # An element given twice is their sum.
        np.add.at(dense, (to_rows, *other_axes), self._values[entries])
        return dense.reshape(*rows.shape, *self.shape[1:])


def is_array_nest(x: object) -> bool:
    """Tells if `x` is an array, or a nest that holds arrays or numbers alone, dense or not."""
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        return False
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(map(_is_array, leaves))


def _is_array(leaf: object) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, SparseRows, int, float, str, bytes)):
        return True
    return hasattr(leaf, "__array__") or is_sparse(leaf)


def as_arrays(batch: tuple, text: bool = False) -> Batch:
    """Checks nests of arrays, and copies none of NumPy's. With `text` x may hold strings."""
    parts = []
    for name, nest in zip(Batch._fields, without_none(batch), strict=False):
        may_be_text = text and name == "x"
        check = functools.partial(_checked, name, text=may_be_text)
        parts.append(tf.nest.map_structure(check, nest))
    return Batch(*parts)


def without_none(batch: Sequence[Any]) -> list[Any]:
    """Returns inputs, targets and weights, with an empty tuple for each None but in the inputs.

    None stands for no targets or weights, for which a `Batch` has an empty tuple. Among inputs it
    stands for nothing, and is refused later.
    """

    def replace_none(leaf):
        return () if leaf is None else leaf

    inputs = batch[0]
    targets_and_weights = batch[1:]
    return [inputs, *(tf.nest.map_structure(replace_none, nest) for nest in targets_and_weights)]


def _checked(name: str, leaf: object, text: bool = False) -> np.ndarray | tf.Tensor | SparseRows:
    """Returns a leaf as an array of numbers, or of strings with `text`; raises for any other."""
    if isinstance(leaf, tf.RaggedTensor):
        raise TypeError(f"{name} holds a RaggedTensor: {DENSE}")
    if isinstance(leaf, SparseRows):
        return leaf
    if is_sparse(leaf):
        return SparseRows(leaf)
    if not hasattr(leaf, "__array__"):
        raise TypeError(
            f"{name} holds {leaf!r} ({type(leaf).__name__}); pass arrays, such as np.asarray(...)."
        )
    require_unmasked(name, leaf)
    with checks.naming(name):
        if isinstance(leaf, (tf.Tensor, tf.Variable)):
            array = tf.convert_to_tensor(leaf)
        else:
            array = _as_numpy(leaf)
    try:
        dtype = _dtype(array)
    except TypeError:  # TensorFlow has no datetimes, records and long doubles
        dtype = None
    if dtype == tf.string and text:
        if not isinstance(array, tf.Tensor):
            array = array.astype(object)
        return tf.convert_to_tensor(array)
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise TypeError(f"{name} has dtype {array.dtype}: {NUMBERS}")
    if len(array.shape) == 0:
        raise ValueError(f"{name}={leaf!r} is a scalar: the first axis must count examples.")
    return array


def _dtype(array: np.ndarray | tf.Tensor) -> tf.DType | None:
    """Returns TensorFlow's dtype; None for objects that are not all text."""
    if isinstance(array, tf.Tensor) or array.dtype != np.dtype(object):
        return tf.as_dtype(array.dtype)
    if all(isinstance(element, (str, bytes)) for element in array.flat):
        return tf.string
    return None


def _as_numpy(leaf: Any) -> np.ndarray:
    if not hasattr(leaf, "iloc"):
        return np.asarray(leaf)
    # As Keras does with pandas: a column of a Series, and one dtype for a table of numbers.
    if leaf.ndim == 1:
        return np.expand_dims(leaf.to_numpy(), -1)
    has_numbers = all(dtype.kind in "biuf" for dtype in leaf.dtypes)
    if has_numbers and len(set(leaf.dtypes)) > 1:
        leaf = leaf.astype(keras.config.floatx())
    return leaf.to_numpy()


def require_unmasked(name: str, leaf: object) -> None:
    """Raises TypeError if `leaf` is a masked array with masked elements."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise TypeError(
            f"{name} is a masked array with {int(np.ma.count_masked(leaf)):,} masked elements, "
            "which would count as if they were not: fill them (.filled(value)), and leave them "
            "out by a sample_weight of 0."
        )


def count(what: str, batch: Batch) -> int:
    """Counts the rows: the first axis of all arrays.

    Args:
        what: the name of the arrays in the error.
        batch: arrays that `as_arrays` returned.

    Raises:
        ValueError: raised if arrays differ in that.
    """
    rows_by_name = {}
    for name, nest in batch._asdict().items():
        rows = [int(t.shape[0]) for t in tf.nest.flatten(nest)]
        if rows:
            rows_by_name[name] = rows
    counts = set(itertools.chain.from_iterable(rows_by_name.values()))
    if len(counts) > 1:
        raise ValueError(
            f"{what} have different numbers of rows: {rows_by_name}. Pass one of each per example."
        )
    return counts.pop()


def as_tensors(name: str, nest: object, text: bool = False) -> Any:
    """Converts a nest of arrays to tensors, float64 to Keras's default float, as Keras does."""
    return tf.nest.map_structure(lambda leaf: take(_checked(name, leaf, text), ...), nest)


def as_stack(stack: object, needs_targets: bool = True, text: bool = False) -> Batch:
    """Converts (x, y) or (x, y, sample_weight) of arrays [micro-batches, rows, ...] to tensors.

    A `Batch` is returned as it is.
    """
    if isinstance(stack, Batch):
        return stack
    expected = "A train step takes (x, y) or (x, y, sample_weight)"
    if not isinstance(stack, (tuple, list)):
        raise ValueError(f"{expected}; got {type(stack).__name__}.")
    fewest = 2 if needs_targets else 1
    if not fewest <= len(stack) <= 3:
        raise ValueError(f"{expected}; got {type(stack).__name__} of {len(stack)} entries.")
    if needs_targets and stack[1] is None:
        raise ValueError("y=None: a train step needs targets, as in (x, y).")
    for name, nest in zip(Batch._fields, stack, strict=False):
        checks.require_nest(name, nest)

    parts = tuple(stack)
    if len(parts) == 1:
        parts = (*parts, None)  # without targets
    arrays = as_arrays(parts, text)
    batch = tf.nest.map_structure(lambda leaf: take(leaf, ...), arrays)
    if not tf.nest.flatten(batch.x):
        raise ValueError(
            f"x={stack[0]!r} holds no array: a train step takes (x, y) or (x, y, sample_weight)."
        )
    _require_rows(batch)
    return batch


def _require_rows(batch: Batch) -> None:
    """Raises ValueError unless all tensors have the same first two axes, and neither is empty."""
    trip_count(batch)  # raises an error of its own where the first axes differ
    shapes = [tuple(t.shape) for t in tf.nest.flatten(batch)]
    first_axes = {shape[:2] for shape in shapes}
    if len(first_axes) > 1 or len(shapes[0]) < 2 or 0 in shapes[0][:2]:
        raise ValueError(
            "Every tensor of a stack has shape [micro-batches, rows, ...], the same first two "
            f"axes in all: {shapes}."
        )


def model_dtype(array: np.ndarray | tf.Tensor | SparseRows) -> tf.DType:
    """Returns the dtype in which an array reaches the model: Keras's default float for float64."""
    dtype = tf.as_dtype(array.dtype)
    if dtype == tf.float64:
        return tf.as_dtype(keras.config.floatx())
    return dtype


def take(array: np.ndarray | tf.Tensor | SparseRows, rows: Any) -> tf.Tensor:
    """Takes rows of an array as a tensor; all of them for `...`.

    On a CPU, rows of a contiguous array of numbers are gathered to where TensorFlow can use them as
    they are. For others TensorFlow makes a copy.
    """
    if isinstance(array, tf.Tensor):
        taken = array if rows is ... else tf.gather(array, rows)
        return tf.cast(taken, model_dtype(array))
    dtype = np.dtype(model_dtype(array).as_numpy_dtype)
    # Of an array that is not contiguous, `take` would copy the whole.
    if rows is ... or isinstance(array, SparseRows) or not array.flags.c_contiguous:
        return tf.convert_to_tensor(array[rows].astype(dtype, copy=False))
    if dtype.kind not in "fiu" or has_gpu():
        return tf.convert_to_tensor(array.take(rows, axis=0).astype(dtype, copy=False))
    gathered = _gather_aligned(array, rows, dtype)
    return tf.experimental.dlpack.from_dlpack(gathered.__dlpack__())


def _gather_aligned(array: np.ndarray, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Gathers rows into memory that TensorFlow needs not copy.

    Such a copy takes twice as long as the gather.
    """
    gathered = _aligned((*rows.shape, *array.shape[1:]), dtype)
    if array.dtype == dtype:
        # With "raise", its default mode, `take` would gather into a buffer first.
        array.take(rows, axis=0, out=gathered, mode="clip")
    else:
        # `take` would first cast `out` to the array's dtype, and warn where its memory holds no
        # number.
        gathered[...] = array.take(rows, axis=0)
    return gathered


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
