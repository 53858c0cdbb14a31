"""Sparse arrays, whose rows become dense as they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def is_sparse(leaf: object) -> bool:
    """Tells if `leaf` is a sparse array of any kind."""
    return isinstance(leaf, tf.SparseTensor) or hasattr(leaf, "tocoo") or hasattr(leaf, "todense")


class SparseRows:
    """A sparse array (a tf.SparseTensor, SciPy's or JAX's), to be taken from by rows."""

    def __init__(self, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]):
        order = np.argsort(indices[:, 0], kind="stable")
        self._indices, self._values = indices[order], values[order]
        self._starts = np.searchsorted(self._indices[:, 0], np.arange(shape[0] + 1))
        self.shape, self.dtype = shape, values.dtype

    @staticmethod
    def of(array: Any) -> SparseRows:
        """Converts any kind of sparse array."""
        shape = tuple(int(size) for size in array.shape)
        if isinstance(array, tf.SparseTensor):
            return SparseRows(array.indices.numpy(), array.values.numpy(), shape)
        if hasattr(array, "tocoo"):
            array = array.tocoo()
            return SparseRows(np.stack([array.row, array.col], -1), array.data, shape)
        return SparseRows(np.asarray(array.indices), np.asarray(array.data), shape)

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
