"""How the gradient of one variable is summed over a loop: in an accumulator, or as one product after the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fastaccum.kernels import gradients
from fastaccum.kernels.xla_ops import HALF, dot, dynamic_update_slice

# Below these, adding costs too little to be worth another kind of loop: the accumulator stays in the cache.
SMALLEST_MATRIX = 2**16
FEWEST_STEPS = 4


class SumAccumulator:
    """An accumulator that starts from `total`, to which the gradient of each micro-batch is added."""

    def __init__(self, total: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices):
        self.terms = [gradient]  # what a micro-batch hands to the loop
        self._total = total

    def start(self) -> list[tf.Tensor]:
        """What the loop carries, before the first micro-batch."""
        return [self._total]

    def add(self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[Any]) -> list[tf.Tensor]:
        """What it carries after micro-batch `i`, which handed over `terms`."""
        return [gradients.accumulate(*carried, *terms)]

    def total(self, carried: list[tf.Tensor]) -> tf.Tensor:
        """The sum over all micro-batches, from what the loop carried out."""
        (total,) = carried
        return total


class FactoredAccumulator:
    """The sum of `a_i^T @ b_i` over micro-batches i, as one product `a^T @ b` over the rows of them all.

    The loop only writes the factors down. Where they are smaller than the accumulator they replace, this saves one
    pass over it for each micro-batch, and the one product has more rows to run fast on.

    Args:
        total, steps: as in `accumulator`.
        factors: a and b of one micro-batch, [rows, in] and [rows, out].
        wholes: those of all micro-batches, [steps, rows, ...]; None for one that the loop is to write down.
    """

    def __init__(self, total: tf.Tensor, factors: tuple, wholes: tuple, steps: int):
        self._total, self._wholes, self._steps = total, wholes, steps
        self.terms = [factor for factor, whole in zip(factors, wholes, strict=True) if whole is None]

    def start(self) -> list[tf.Tensor]:
        return [tf.zeros([self._steps, *term.shape], term.dtype) for term in self.terms]

    def add(self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor]) -> list[tf.Tensor]:
        pairs = zip(carried, terms, strict=True)
        return [dynamic_update_slice(whole, term[tf.newaxis], [i, 0, 0]) for whole, term in pairs]

    def total(self, carried: list[tf.Tensor]) -> tf.Tensor:
        written = iter(carried)
        a, b = (next(written) if whole is None else whole for whole in self._wholes)
        a, b = (tf.reshape(factor, [-1, factor.shape[-1]]) for factor in (a, b))
        product = dot(a, b, transpose_a=True) if a.dtype in HALF else tf.matmul(a, b, transpose_a=True)
        return self._total + product


def accumulator(
    total: tf.Tensor, gradient: Any, steps: int, whole: Callable[[tf.Tensor], tf.Tensor | None]
) -> SumAccumulator | FactoredAccumulator:
    """A `FactoredAccumulator` where the gradient is a matrix product whose factors, over all micro-batches, take no
    more memory than the accumulator; else a `SumAccumulator`.

    Args:
        total: what to start from: zeros of the variable's shape, in the accumulator's dtype.
        gradient: one micro-batch's, in the graph of its forward and backward pass.
        steps: the number of micro-batches.
        whole: of a tensor of that graph, the tensor of all micro-batches [steps, ...] that it is a slice of, or None.
    """
    factors = _factors(gradient)
    if factors is None or steps < FEWEST_STEPS or total.shape.num_elements() < SMALLEST_MATRIX:
        return SumAccumulator(total, gradient)
    wholes = tuple(whole(_source(factor)) for factor in factors)
    written = sum(_bytes(factor) for factor, known in zip(factors, wholes, strict=True) if known is None)
    if steps * written > _bytes(total):
        return SumAccumulator(total, gradient)
    return FactoredAccumulator(total, factors, wholes, steps)


def _factors(gradient: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """a and b, matrices of known shape, where the gradient is `a^T @ b`, unrounded."""
    if not isinstance(gradient, tf.Tensor):
        return None
    op = gradient.op
    transposed = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV3": ("adj_x", "adj_y")}.get(op.type)
    if transposed is None or tuple(map(op.get_attr, transposed)) != (True, False):
        return None
    known = all(t.shape.rank == 2 and t.shape.is_fully_defined() for t in op.inputs)
    return tuple(op.inputs) if known and gradient.dtype in (tf.float32, tf.float64) else None


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size
