"""Signatures of a program's arguments: what nests of tensors that share a trace have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import tensorflow as tf


class LeafSignature(NamedTuple):
    """The class, shape and dtype of a tensor; the shape and dtype of other objects are None."""

    kind: type
    shape: Any
    dtype: tf.DType | None


class Signature(NamedTuple):
    """The structure of a nest, and the signatures of its leaves."""

    structure: optree.PyTreeSpec
    leaves: tuple[LeafSignature, ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the leaves."""
        return [tuple(leaf.shape) for leaf in self.leaves]


def flatten(nest: Any) -> tuple[list[Any], Signature]:
    """Flattens a nest of tensors or arrays to its leaves and their signature."""
    leaves, structure = optree.tree_flatten(nest)
    signatures = []
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        signatures.append(LeafSignature(type(leaf), shape, getattr(leaf, "dtype", None)))
    return leaves, Signature(structure, tuple(signatures))
