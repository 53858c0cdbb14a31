"""Sums the gradients of many micro-batches, and computes their norm and what unscales and clips.

The sum is made in a loop, by a kernel or as one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import HALF, dot, dynamic_update_slice

# The fewest elements of a matrix whose gradient is computed as one product. Adding a smaller one
# costs too little to be worth another kind of loop: the accumulator stays in the cache.
SMALLEST_MATRIX = 2**16
# The fewest micro-batches for such a product, for the same reason.
FEWEST_STEPS = 4


class Accumulator(NamedTuple):
    """The sum of a variable's gradients so far, as a micro-batch finds it."""

    total: tf.Tensor  # of the variable's shape, in float32 (float64 for float64 variables)
    noted: dict[Hashable, tf.Tensor]  # by the gradient's `ref`

    def note(self, gradient: tf.Tensor, total: tf.Tensor) -> None:
        """Notes that `total` is the accumulator with `gradient` added.

        The kernel must return `gradient`.
        """
        self.noted[gradient.ref()] = total


class Accumulators:
    """Accumulators of some variables, in the graph that a micro-batch is traced in.

    A kernel that finds a variable's accumulator computes, beside the gradient, the accumulator with
    the gradient added in place. XLA drops the sum unless the gradient that the kernel returned
    reaches the variable as it is.
    """

    def __init__(self, variables: Sequence[tf.Variable], totals: Sequence[tf.Tensor]):
        self._noted: dict[Hashable, tf.Tensor] = {}
        self._of: dict[Hashable, Accumulator] = {}
        for variable, total in zip(variables, totals, strict=False):
            self._of[variable.ref()] = Accumulator(total, self._noted)
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()

    def close(self) -> None:
        """Stops offering accumulators.

        A layer that the backward pass computes again would add its gradient twice.
        """
        self._graph = None

    def find(self, variable: tf.Tensor | tf.Variable | None) -> Accumulator | None:
        """Returns the accumulator of a variable, in the graph of the forward pass alone."""
        # What is traced in another graph, a branch or a loop's body, may run any number of times.
        if tf.compat.v1.get_default_graph() is not self._graph:
            return None
        if not isinstance(variable, tf.Variable):
            return None
        return self._of.get(variable.ref())

    def with_added(
        self, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
        """Returns the accumulator with a term of the gradient added, and the other terms.

        Returns None if no kernel has added a term.
        """
        if not isinstance(gradient, tf.Tensor):
            return None
        terms = _summands(gradient)
        for k, term in enumerate(terms):
            if term.ref() in self._noted:
                return self._noted[term.ref()], terms[:k] + terms[k + 1 :]
        return None


def _summands(gradient: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns the terms of a gradient: one for each use of a variable."""
    if isinstance(gradient, tf.IndexedSlices) or gradient.op.type != "AddN":
        return [gradient]
    return list(gradient.op.inputs)


class SumAccumulator:
    """Accumulator that starts from `total` and adds the gradient of each micro-batch."""

    def __init__(self, total: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices):
        terms = _summands(gradient)
        if len(terms) > 1:
            terms = [_by_rows(term) for term in terms]
        self.terms = terms  # what a micro-batch hands to the loop
        self._total = total

    def start(self) -> list[tf.Tensor]:
        """Returns what the loop carries before the first micro-batch."""
        return [self._total]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        """Returns what the loop carries after micro-batch `i`, which handed over `terms`."""
        return [_added(carried[0], terms)]

    def total(self, carried: list[tf.Tensor]) -> tf.Tensor:
        """Returns the sum over all micro-batches, from what the loop carried out."""
        return carried[0]


class AddedAccumulator(SumAccumulator):
    """`SumAccumulator` to which a kernel adds all but some terms of the gradient."""

    def __init__(self, total: tf.Tensor, added: tf.Tensor, terms: Sequence[tf.Tensor]):
        super().__init__(total, added)
        self.terms = [added, *(_by_rows(term) for term in terms)]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        added, *others = terms
        return [_added(added, others)]


def _by_rows(term: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a term as `IndexedSlices` where TensorFlow made a table of them to add it.

    It does so for a tied embedding, say.
    """
    if term.op.type == "UnsortedSegmentSum":
        values, indices, _ = term.op.inputs
        if indices.shape.rank == 1:
            return tf.IndexedSlices(values, indices)
    return term


def _added(total: tf.Tensor, terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Adds terms to a total, those of all rows first."""
    for term in terms:
        if not isinstance(term, tf.IndexedSlices):
            total += tf.cast(term, total.dtype)
    for term in terms:
        if isinstance(term, tf.IndexedSlices):  # costs O(rows it holds); repeated indices add up
            total = tf.tensor_scatter_nd_add(
                total, term.indices[:, tf.newaxis], tf.cast(term.values, total.dtype)
            )
    return total


class LookupAccumulator(SumAccumulator):
    """`SumAccumulator` of `IndexedSlices` that marks in `met`, bool [rows], which rows occurred."""

    def __init__(self, total: tf.Tensor, gradient: tf.IndexedSlices, met: tf.Tensor):
        super().__init__(total, gradient)
        self._met = met

    def start(self) -> list[tf.Tensor]:
        return [*super().start(), self._met]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        total, met = carried
        indices = terms[0].indices[:, tf.newaxis]
        marks = tf.fill(tf.shape(indices)[:1], True)
        added = super().add(i, [total], terms)
        return [*added, tf.tensor_scatter_nd_update(met, indices, marks)]

    def met(self, carried: list[tf.Tensor]) -> tf.Tensor:
        """Returns which rows occurred, from what the loop carried out."""
        _, met = carried
        return met


class FactoredAccumulator:
    """Sum of `a_i^T @ b_i` over micro-batches i, as one product `a^T @ b` over the rows of all.

    `wholes` are the factors of all micro-batches, [steps, rows, ...]; None for one that the loop is
    to write down.
    """

    def __init__(self, total: tf.Tensor, factors: tuple, wholes: tuple, steps: int):
        self._total = total
        self._wholes = wholes
        self._steps = steps
        self.terms = []
        for factor, whole in zip(factors, wholes, strict=True):
            if whole is None:
                self.terms.append(factor)

    def start(self) -> list[tf.Tensor]:
        return [tf.zeros([self._steps, *term.shape], term.dtype) for term in self.terms]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        pairs = zip(carried, terms, strict=True)
        return [dynamic_update_slice(whole, term[tf.newaxis], [i, 0, 0]) for whole, term in pairs]

    def total(self, carried: list[tf.Tensor]) -> tf.Tensor:
        written = iter(carried)
        a, b = (next(written) if whole is None else whole for whole in self._wholes)
        a = tf.reshape(a, [-1, a.shape[-1]])
        b = tf.reshape(b, [-1, b.shape[-1]])
        if a.dtype in HALF:
            product = dot(a, b, transpose_a=True)
        else:
            product = tf.matmul(a, b, transpose_a=True)
        return self._total + product


def accumulator(
    total: tf.Tensor,
    gradient: tf.Tensor | tf.IndexedSlices,
    steps: int,
    whole: Callable[[tf.Tensor], tf.Tensor | None],
) -> SumAccumulator | FactoredAccumulator:
    """Chooses a `FactoredAccumulator` where all factors are no larger than their product.

    The factors are those of all `steps` micro-batches. `whole(t)` returns the tensor of all
    micro-batches that a factor is a slice of, or None.
    """
    factors = _factors(gradient)
    if factors is None or steps < FEWEST_STEPS or total.shape.num_elements() < SMALLEST_MATRIX:
        return SumAccumulator(total, gradient)
    wholes = tuple(whole(_source(factor)) for factor in factors)
    factored = FactoredAccumulator(total, factors, wholes, steps)
    written_bytes = steps * sum(_bytes(term) for term in factored.terms)
    if written_bytes <= _bytes(total):
        return factored
    return SumAccumulator(total, gradient)


def _factors(gradient: tf.Tensor | tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns a and b where the gradient is `a^T @ b`, unrounded; else None.

    a and b are matrices of known shape.
    """
    if not isinstance(gradient, tf.Tensor):
        return None
    op = gradient.op
    if op.type == "MatMul":
        transposes = (op.get_attr("transpose_a"), op.get_attr("transpose_b"))
    elif op.type == "BatchMatMulV3":
        transposes = (op.get_attr("adj_x"), op.get_attr("adj_y"))
    else:
        return None
    if transposes != (True, False):
        return None
    if gradient.dtype not in (tf.float32, tf.float64):
        return None
    a, b = op.inputs
    for factor in (a, b):
        if factor.shape.rank != 2 or not factor.shape.is_fully_defined():
            return None
    return a, b


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


class Reduced(NamedTuple):
    """Scalars that one pass over the accumulators yields."""

    norm: tf.Tensor  # float32, the global norm of the unscaled gradient, before clipping
    finite: tf.Tensor  # bool, whether every element of every gradient is finite
    factor: tf.Tensor  # float32, turns an accumulator into the final gradient


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """Returns float64 for float64 variables, float32 for every other floating dtype."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def _sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    squares = tf.square(x)
    if x.shape.rank > 1 and not has_gpu():
        # XLA:CPU may not reorder a float sum, so its reductions are scalar chains. A product with
        # ones is none.
        columns = x.shape[-1]
        squares = tf.linalg.matvec(tf.reshape(squares, [-1, columns]), tf.ones([columns], x.dtype))
    return tf.cast(tf.reduce_sum(squares), tf.float32)


def squares(accumulators: Sequence[tf.Tensor], denominator: tf.Tensor) -> list[tf.Tensor]:
    """Computes the sum of squares of each `accumulator / denominator`: float32 scalars."""
    unscale = tf.math.reciprocal_no_nan(denominator)
    # Unscaled before it is squared: at a loss scale of 2**24 the squares would overflow float32.
    return [_sum_of_squares(a * tf.cast(unscale, a.dtype)) for a in accumulators]


def reduce(
    accumulators: Sequence[tf.Tensor],
    denominator: tf.Tensor,
    clip_norm: float | None = None,
    squared: Sequence[tf.Tensor] | None = None,
) -> Reduced:
    """Computes the norm, the finite check and the factor that unscales and clips, in one read.

    With `g = accumulator / denominator` for every accumulator, and `norm = sqrt(sum(sum(g ** 2)))`:

        finite = all(isfinite(g))                    # inf and NaN survive summation into the norm
        factor = 1 / denominator                     # clip_norm is None
        factor = clip_norm / max(norm, clip_norm) / denominator

    so that `accumulator * factor`, by which the optimizer's own pass begins, equals
    `tf.clip_by_global_norm(g, clip_norm)`. The denominator is the loss scale times the weight sum,
    a float32 scalar; 0 gives factor 0. `squared` has the `squares` of all accumulators where some
    are on other devices.
    """
    if squared is None:
        squared = squares(accumulators, denominator)
    norm = tf.sqrt(tf.add_n(squared))
    factor = tf.math.reciprocal_no_nan(denominator)
    if clip_norm is not None:
        factor *= clip_norm / tf.maximum(norm, clip_norm)
    return Reduced(norm=norm, finite=tf.math.is_finite(norm), factor=factor)
