"""The gradient of many micro-batches: summed in a loop, by a kernel or as one product; then norm,
unscale and clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.xla_ops import HALF, dot, dynamic_update_slice

# Below these, adding costs too little to be worth another kind of loop: the accumulator stays in
# the cache.
SMALLEST_MATRIX = 2**16
FEWEST_STEPS = 4


class Accumulator(NamedTuple):
    """The sum of a variable's gradients so far, as a micro-batch finds it."""

    total: tf.Tensor  # of the variable's shape, in float32 (float64 for float64 variables)
    noted: dict[Hashable, tf.Tensor]  # by the gradient's `ref`

    def note(self, gradient: tf.Tensor, total: tf.Tensor) -> None:
        """Notes that `total` is the accumulator with `gradient` added; the kernel must return
        `gradient`.
        """
        self.noted[gradient.ref()] = total


class Accumulators:
    """Accumulators of some variables, in the graph in which a micro-batch's forward and backward
    pass are traced.

    A kernel that finds a variable's accumulator computes, beside the gradient, the accumulator with
    the gradient added in place. XLA drops the sum unless the gradient that the kernel returned
    reaches the variable as it is.
    """

    def __init__(self, variables: Sequence[tf.Variable], totals: Sequence[tf.Tensor]):
        self._noted: dict[Hashable, tf.Tensor] = {}
        self._of = {
            v.ref(): Accumulator(t, self._noted) for v, t in zip(variables, totals, strict=False)
        }
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()

    def close(self) -> None:
        """Stops offering accumulators: a layer that the backward pass computes again would add
        twice.
        """
        self._graph = None

    def find(self, variable: tf.Tensor | tf.Variable | None) -> Accumulator | None:
        """Returns the accumulator of a variable, in the graph of the forward pass alone."""
        # What is traced in another graph, a branch or a loop's body, may run any number of times.
        found = self._of.get(variable.ref()) if isinstance(variable, tf.Variable) else None
        return found if tf.compat.v1.get_default_graph() is self._graph else None

    def with_added(
        self, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
        """Returns the accumulator to which a kernel added a term of the gradient, and the other
        terms; else None.
        """
        terms = _summands(gradient) if isinstance(gradient, tf.Tensor) else []
        for k, term in enumerate(terms):
            if term.ref() in self._noted:
                return self._noted[term.ref()], terms[:k] + terms[k + 1 :]
        return None


def _summands(gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns the terms of a gradient: for a variable that is used twice, the gradients of both
    uses.
    """
    return list(gradient.op.inputs) if gradient.op.type == "AddN" else [gradient]


class SumAccumulator:
    """Accumulator that starts from `total` and adds the gradient of each micro-batch."""

    def __init__(self, total: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices):
        terms = [gradient] if isinstance(gradient, tf.IndexedSlices) else _summands(gradient)
        # what a micro-batch hands to the loop
        self.terms = [*map(_by_rows, terms)] if len(terms) > 1 else terms
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
        self.terms = [added, *map(_by_rows, terms)]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        return [_added(terms[0], terms[1:])]


def _by_rows(term: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a term as `IndexedSlices` where TensorFlow made a table of them to add it, as of a
    tied embedding.
    """
    if term.op.type == "UnsortedSegmentSum" and term.op.inputs[1].shape.rank == 1:
        return tf.IndexedSlices(*term.op.inputs[:2])
    return term


def _added(total: tf.Tensor, terms: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    for term in sorted(terms, key=lambda term: isinstance(term, tf.IndexedSlices)):
        if isinstance(term, tf.IndexedSlices):  # costs O(rows it holds); repeated indices add up
            total = tf.tensor_scatter_nd_add(
                total, term.indices[:, tf.newaxis], tf.cast(term.values, total.dtype)
            )
        else:
            total += tf.cast(term, total.dtype)
    return total


class LookupAccumulator(SumAccumulator):
    """`SumAccumulator` of `IndexedSlices` that marks the rows that occurred, in `met`, bool
    [rows].
    """

    def __init__(self, total: tf.Tensor, gradient: tf.IndexedSlices, met: tf.Tensor):
        super().__init__(total, gradient)
        self._met = met

    def start(self) -> list[tf.Tensor]:
        return [*super().start(), self._met]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        *total, met = carried
        indices = terms[0].indices[:, tf.newaxis]
        marks = tf.fill(tf.shape(indices)[:1], True)
        return [*super().add(i, total, terms), tf.tensor_scatter_nd_update(met, indices, marks)]

    def met(self, carried: list[tf.Tensor]) -> tf.Tensor:
        """Returns which rows occurred, from what the loop carried out."""
        return carried[1]


class FactoredAccumulator:
    """Sum of `a_i^T @ b_i` over micro-batches i, computed as one product `a^T @ b` over the rows of
    all of them.

    `wholes` are the factors of all micro-batches, [steps, rows, ...]; None for one that the loop is
    to write down.
    """

    def __init__(self, total: tf.Tensor, factors: tuple, wholes: tuple, steps: int):
        self._total, self._wholes, self._steps = total, wholes, steps
        self.terms = [
            factor for factor, whole in zip(factors, wholes, strict=True) if whole is None
        ]

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
        a, b = (tf.reshape(factor, [-1, factor.shape[-1]]) for factor in (a, b))
        return self._total + (
            dot(a, b, transpose_a=True) if a.dtype in HALF else tf.matmul(a, b, transpose_a=True)
        )


def accumulator(
    total: tf.Tensor,
    gradient: tf.Tensor | tf.IndexedSlices,
    steps: int,
    whole: Callable[[tf.Tensor], tf.Tensor | None],
) -> SumAccumulator | FactoredAccumulator:
    """Chooses a `FactoredAccumulator` where the factors of a product over all `steps` are no larger
    than the product.

    `whole(t)` returns the tensor of all micro-batches that a factor is a slice of, or None.
    """
    factors = _factors(gradient)
    if factors is None or steps < FEWEST_STEPS or total.shape.num_elements() < SMALLEST_MATRIX:
        return SumAccumulator(total, gradient)
    factored = FactoredAccumulator(
        total, factors, tuple(whole(_source(factor)) for factor in factors), steps
    )
    return (
        factored
        if steps * sum(map(_bytes, factored.terms)) <= _bytes(total)
        else SumAccumulator(total, gradient)
    )


def _factors(gradient: tf.Tensor | tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns a and b, matrices of known shape, where the gradient is `a^T @ b`, unrounded; else
    None.
    """
    if not isinstance(gradient, tf.Tensor):
        return None
    op = gradient.op
    transposed = {
        "MatMul": ("transpose_a", "transpose_b"),
        "BatchMatMulV3": ("adj_x", "adj_y"),
    }.get(op.type)
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
        # XLA:CPU may not reorder a float sum, so its reductions are scalar chains; a product with
        # ones is not.
        columns = x.shape[-1]
        squares = tf.linalg.matvec(tf.reshape(squares, [-1, columns]), tf.ones([columns], x.dtype))
    return tf.cast(tf.reduce_sum(squares), tf.float32)


def squares(accumulators: Sequence[tf.Tensor], denominator: tf.Tensor) -> list[tf.Tensor]:
    """Computes the sum of squares of `accumulator / denominator` for each accumulator: float32
    scalars.
    """
    unscale = tf.math.reciprocal_no_nan(denominator)
    # Unscaled before it is squared: at a loss scale of 2**24 the squares would overflow float32.
    return [_sum_of_squares(a * tf.cast(unscale, a.dtype)) for a in accumulators]


def reduce(
    accumulators: Sequence[tf.Tensor],
    denominator: tf.Tensor,
    clip_norm: float | None = None,
    squared: Sequence[tf.Tensor] | None = None,
) -> Reduced:
    """Computes the norm, the finite check and the one factor that unscales and clips, in one read
    of the accumulators.

    With `g = accumulator / denominator` for every accumulator, and `norm = sqrt(sum(sum(g ** 2)))`:

        finite = all(isfinite(g))                    # inf and NaN survive summation into the norm
        factor = 1 / denominator                     # clip_norm is None
        factor = clip_norm / max(norm, clip_norm) / denominator

    so that `accumulator * factor`, by which the optimizer's own pass begins, equals
    `tf.clip_by_global_norm(g, clip_norm)`. The denominator is the loss scale times the weight sum,
    a float32 scalar; 0 gives factor 0. `squared` has the `squares` of all accumulators where some
    are on other devices.
    """
    norm = tf.sqrt(tf.add_n(squares(accumulators, denominator) if squared is None else squared))
    factor = tf.math.reciprocal_no_nan(denominator)
    if clip_norm is not None:
        factor *= clip_norm / tf.maximum(norm, clip_norm)
    return Reduced(norm=norm, finite=tf.math.is_finite(norm), factor=factor)
