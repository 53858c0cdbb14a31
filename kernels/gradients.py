"""Sums the gradients of many micro-batches, and computes their norm and what unscales and clips.

`GradientSums` chooses how each variable's gradient is summed: in a loop, by a kernel, or as one
product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.variable_stack import VariableStack
from fastaccum.kernels.xla_ops import HALF, dot, dynamic_update_slice, in_xla

# What a gradient is summed for: a variable, or a stack of some.
Trained: TypeAlias = "tf.Variable | VariableStack"
# The tensors that a loop carries, by the variable's place.
Carried = dict[int, list[tf.Tensor]]

# The fewest elements of a matrix whose gradient is computed as one product. Adding a smaller one
# costs too little to be worth another kind of loop: the accumulator stays in the cache.
SMALLEST_MATRIX = 2**16
# The fewest micro-batches for such a product, for the same reason.
FEWEST_STEPS = 4


class OfferedTotal(NamedTuple):
    """The sum of a variable's gradients so far, which a kernel may add to."""

    total: tf.Tensor  # of the variable's shape, in float32 (float64 for float64 variables)
    noted: dict[Hashable, tf.Tensor]  # by the gradient's `ref`

    def note(self, gradient: tf.Tensor, total: tf.Tensor) -> None:
        """Notes that `total` is the sum so far with `gradient` added.

        The kernel must return `gradient`.
        """
        self.noted[gradient.ref()] = total


class OfferedTotals:
    """Sums of gradients so far, offered to kernels in the graph that a micro-batch is traced in.

    A kernel of the backward pass may add its gradient to the total, as in this loop:

        for i in range(steps):
            gradients, noted = forward_and_backward(i, totals)
            for j, gradient in enumerate(gradients):
                if gradient in noted:
                    totals[j] = noted[gradient]  # a kernel has computed total + gradient
                else:
                    totals[j] += gradient

    A kernel that finds a variable's total notes, beside the gradient that it returns, the total
    with that gradient added in place. `with_added` finds the noted sum if this very tensor reaches
    the variable, and `AddedAccumulator` takes the sum in place of the gradient. If the gradient is
    changed on its way, nobody reads the noted sum, and XLA drops it.
    """

    def __init__(self, variables: Sequence[Trained], totals: Sequence[tf.Tensor]):
        self._noted: dict[Hashable, tf.Tensor] = {}
        self._by_variable: dict[Hashable, OfferedTotal] = {}
        for variable, total in zip(variables, totals, strict=False):
            self._by_variable[variable.ref()] = OfferedTotal(total, self._noted)
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()

    def close(self) -> None:
        """Stops offering totals.

        A layer that the backward pass computes again would add its gradient twice.
        """
        self._graph = None

    def find(self, variable: tf.Tensor | tf.Variable | VariableStack | None) -> OfferedTotal | None:
        """Returns the total of a variable, or of a stack of some.

        It does so in the graph of the forward pass alone.
        """
        # What is traced in another graph, a branch or a loop's body, may run any number of times.
        if tf.compat.v1.get_default_graph() is not self._graph:
            return None
        if not isinstance(variable, (tf.Variable, VariableStack)):
            return None
        return self._by_variable.get(variable.ref())

    def with_added(
        self, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
        """Returns the total with a term of the gradient added, and the other terms.

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
    """`SumAccumulator` of a variable to whose total a kernel has added a term of the gradient.

    A micro-batch hands `total_after`, the total with that term, to the loop in place of the term,
    and `other_terms`, which the loop adds.
    """

    def __init__(self, total: tf.Tensor, total_after: tf.Tensor, other_terms: Sequence[tf.Tensor]):
        super().__init__(total, total_after)
        self.terms = [total_after, *(_by_rows(term) for term in other_terms)]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        total_after, *other_terms = terms
        return [_added(total_after, other_terms)]


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
    """`SumAccumulator` of `IndexedSlices` that marks the rows of a table which are looked up.

    `looked_up`, bool [rows], has the rows of earlier stacks.
    """

    def __init__(self, total: tf.Tensor, gradient: tf.IndexedSlices, looked_up: tf.Tensor):
        super().__init__(total, gradient)
        self._looked_up = looked_up

    def start(self) -> list[tf.Tensor]:
        return [*super().start(), self._looked_up]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor]:
        total, looked_up = carried
        indices = terms[0].indices[:, tf.newaxis]
        marks = tf.fill(tf.shape(indices)[:1], True)
        added = super().add(i, [total], terms)
        return [*added, tf.tensor_scatter_nd_update(looked_up, indices, marks)]

    def looked_up(self, carried: list[tf.Tensor]) -> tf.Tensor:
        """Returns which rows occurred, from what the loop carried out."""
        _, looked_up = carried
        return looked_up


class FactoredAccumulator:
    """Sum of `a_i^T @ b_i` over micro-batches i, as one product `a^T @ b` over the rows of all.

    Args:
        total: the sum that the product is added to.
        factors: a_i and b_i of one micro-batch.
        stacked_factors: a and b, [steps, rows, ...]. None for one that no tensor of the stack
            holds: the loop writes it, a slice for each micro-batch.
        steps: the number of micro-batches.
    """

    def __init__(
        self,
        total: tf.Tensor,
        factors: tuple[tf.Tensor, tf.Tensor],
        stacked_factors: tuple[tf.Tensor | None, tf.Tensor | None],
        steps: int,
    ):
        self._total = total
        self._stacked_factors = stacked_factors
        self._steps = steps
        self.terms = []
        for factor, stacked in zip(factors, stacked_factors, strict=True):
            if stacked is None:
                self.terms.append(factor)

    def start(self) -> list[tf.Tensor]:
        return [tf.zeros([self._steps, *term.shape], term.dtype) for term in self.terms]

    def add(
        self, i: tf.Tensor, carried: list[tf.Tensor], terms: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        written = []
        for stacked, term in zip(carried, terms, strict=True):
            written.append(dynamic_update_slice(stacked, term[tf.newaxis], [i, 0, 0]))
        return written

    def total(self, carried: list[tf.Tensor]) -> tf.Tensor:
        factors = []
        written = iter(carried)
        for stacked in self._stacked_factors:
            if stacked is None:
                stacked = next(written)
            factors.append(stacked)
        a, b = factors
        a = tf.reshape(a, [-1, a.shape[-1]])
        b = tf.reshape(b, [-1, b.shape[-1]])
        if a.dtype in HALF:
            product = dot(a, b, transpose_a=True)
        else:
            product = tf.matmul(a, b, transpose_a=True)
        return self._total + product


def choose_accumulator(
    total: tf.Tensor,
    gradient: tf.Tensor | tf.IndexedSlices,
    steps: int,
    find_stacked: Callable[[tf.Tensor], tf.Tensor | None],
) -> SumAccumulator | FactoredAccumulator:
    """Chooses a `FactoredAccumulator` where the loop writes no more bytes than its total has.

    Those bytes are the factors of all `steps` micro-batches, except where the stack holds them:
    `find_stacked(t)` returns the tensor of the stack that `t` is a slice of, or None.
    """
    factors = _factors(gradient)
    if factors is None or steps < FEWEST_STEPS or total.shape.num_elements() < SMALLEST_MATRIX:
        return SumAccumulator(total, gradient)
    a, b = factors
    stacked_factors = (find_stacked(_source(a)), find_stacked(_source(b)))
    factored = FactoredAccumulator(total, factors, stacked_factors, steps)
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
    """Returns the tensor that others pass on unchanged."""
    while tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


class TotalsBefore(NamedTuple):
    """Totals that a stack's micro-batches are added to, by the variable's place."""

    gradients: list[tf.Tensor]
    looked_up: list[tf.Tensor]  # bool [rows]; of tables alone it has a meaning


def totals_before(
    variables: Sequence[Trained],
    sums: Sequence[tf.Tensor | None],
    looked_up: Mapping[int, tf.Tensor],
) -> TotalsBefore:
    """Returns the totals of the stacks so far, with zeros where there are none."""
    zeros = _Zeros()
    totals = []
    for v in variables:
        totals.append(zeros.of(v.shape, accumulator_dtype(v.dtype)))
    for j, total in enumerate(sums):
        if total is not None:
            totals[j] = total
    rows_looked_up = [zeros.of(v.shape[:1], tf.bool) for v in variables]
    for j, rows in looked_up.items():
        rows_looked_up[j] = rows
    return TotalsBefore(totals, rows_looked_up)


class _Zeros:
    """Zeros in the graph that is traced now, made once for each shape and dtype."""

    def __init__(self) -> None:
        self._made: dict[tuple, tf.Tensor] = {}

    def of(self, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        key = (tuple(shape), dtype)
        if key not in self._made:
            self._made[key] = tf.zeros(shape, dtype)
        return self._made[key]


def offered_specs(before: TotalsBefore, steps: int) -> list[tf.TensorSpec]:
    """Returns the specs of the totals that kernels may add to: one a variable, or none at all."""
    # Only XLA adds to a part of a tensor in place. A single micro-batch would add to zeros.
    if not in_xla() or steps == 1:
        return []
    return [tf.TensorSpec.from_tensor(total) for total in before.gradients]


class GradientSums:
    """Sums the gradients of a stack's micro-batches, each variable's in its own way.

    It is made from the gradients of one traced micro-batch, and equals

        for i in range(steps):
            total += gradient(i)

    in a loop that carries what the variables' accumulators need:

        carried = sums.start()
        for i in range(steps):
            carried = sums.add(i, carried, terms_of_micro_batch_i)
        totals = sums.totals(carried)

    Args:
        before: the totals of earlier stacks.
        grads: the gradients of a micro-batch; None for variables that the loss does not reach.
        offered: the totals that kernels were offered while it was traced.
        steps: the number of micro-batches.
        stacked: tensors of the stack, by the `ref` of the slice of each in one micro-batch.
        notes_lookups: notes which rows of a table occurred.

    Attributes:
        terms: what a micro-batch hands to `add`, by the place of each variable that it reaches.
    """

    def __init__(
        self,
        before: TotalsBefore,
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        offered: OfferedTotals,
        steps: int,
        stacked: Mapping[Hashable, tf.Tensor],
        notes_lookups: bool,
    ):
        self._accumulators: dict[int, SumAccumulator | FactoredAccumulator] = {}
        for j, gradient in enumerate(grads):
            if gradient is None:
                continue
            total = before.gradients[j]
            added = offered.with_added(gradient)
            if added is not None:
                total_after, other_terms = added
                self._accumulators[j] = AddedAccumulator(total, total_after, other_terms)
            elif isinstance(gradient, tf.IndexedSlices) and notes_lookups:
                self._accumulators[j] = LookupAccumulator(total, gradient, before.looked_up[j])
            else:
                self._accumulators[j] = choose_accumulator(
                    total, gradient, steps, lambda t: stacked.get(t.ref())
                )
        self.terms = {j: accumulator.terms for j, accumulator in self._accumulators.items()}

    def start(self) -> Carried:
        """Returns what the loop carries before the first micro-batch."""
        return {j: accumulator.start() for j, accumulator in self._accumulators.items()}

    def offered(self, specs: Sequence[tf.TensorSpec], carried: Carried) -> list[tf.Tensor]:
        """Returns the totals so far, from what the loop carries, for kernels that add to them."""
        totals = []
        zeros = _Zeros()
        for j, spec in enumerate(specs):
            if isinstance(self._accumulators.get(j), AddedAccumulator):
                totals.append(carried[j][0])
            else:
                # Those that no kernel adds to are not read. Zeros from outside would be copied into
                # the loop in an order that differs from process to process, and with it the name by
                # which a compiled program is found again.
                totals.append(zeros.of(spec.shape, spec.dtype))
        return totals

    def add(self, i: tf.Tensor, carried: Carried, terms: Mapping[int, list[tf.Tensor]]) -> Carried:
        """Adds the terms of micro-batch `i` to what the loop carries.

        Nothing may stand between a gradient and its add, or XLA cannot fuse the add into the
        matmul.
        """
        added = {}
        for j, accumulator in self._accumulators.items():
            added[j] = accumulator.add(i, carried[j], terms[j])
        return added

    def totals(self, carried: Carried) -> dict[int, tf.Tensor]:
        """Returns the sums over all micro-batches by place, from what the loop carried out."""
        return {j: sums.total(carried[j]) for j, sums in self._accumulators.items()}

    def looked_up(self, carried: Carried) -> dict[int, tf.Tensor]:
        """Returns which rows of a table occurred, by place: bool [rows]."""
        rows = {}
        for j, accumulator in self._accumulators.items():
            if isinstance(accumulator, LookupAccumulator):
                rows[j] = accumulator.looked_up(carried[j])
        return rows


class Reduced(NamedTuple):
    """Scalars that one pass over the accumulators yields."""

    norm: tf.Tensor  # float32, the global norm of the unscaled gradient, before clipping
    finite: tf.Tensor  # bool, whether every element of every gradient is finite
    factor: tf.Tensor  # float32, turns an accumulator into the final gradient


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """Returns float64 for float64 variables, float32 for every other floating dtype."""
    if dtype == tf.float64:
        return tf.float64
    return tf.float32


def _sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    squares = tf.square(x)
    if x.shape.rank > 1 and not has_gpu():
        # XLA:CPU may not reorder a float sum, so it reduces one element after another. It computes
        # the same sum faster as a product with a vector of ones.
        columns = x.shape[-1]
        squares = tf.linalg.matvec(tf.reshape(squares, [-1, columns]), tf.ones([columns], x.dtype))
    return tf.cast(tf.reduce_sum(squares), tf.float32)


def squares(accumulators: Sequence[tf.Tensor], denominator: tf.Tensor) -> list[tf.Tensor]:
    """Computes the sum of squares of each `accumulator / denominator`: float32 scalars."""
    unscale = tf.math.reciprocal_no_nan(denominator)
    # Unscaled before it is squared: at a loss scale of 2**24 the squares would overflow float32.
    return [_sum_of_squares(a * tf.cast(unscale, a.dtype)) for a in accumulators]


def _whole_tensors(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, with a whole one in place of all of its parts.

    One kernel then reduces what would be one for each layer of a model.
    """
    parts_by_whole: dict[str, list[tf.Tensor]] = {}
    for t in tensors:
        if _is_part(t):
            parts_by_whole.setdefault(t.op.inputs[0].name, []).append(t)
    wholes = []
    for t in tensors:
        parts = []
        if _is_part(t):
            whole = t.op.inputs[0]
            parts = parts_by_whole[whole.name]
        if not parts or len(parts) < whole.shape[0]:
            wholes.append(t)
        elif t is parts[0]:
            wholes.append(whole)
    return wholes


def has_parts(tensors: Sequence[tf.Tensor | None]) -> bool:
    """Tells if some tensors are parts of another: gradients that a loop over layers has made."""
    return any(t is not None and _is_part(t) for t in tensors)


def _is_part(t: tf.Tensor) -> bool:
    """Tells if a tensor is a part of another, along its first axis."""
    return tf.is_symbolic_tensor(t) and t.op.type == "GatherV2" and t.op.inputs[1].shape.rank == 0


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
        squared = squares(_whole_tensors(accumulators), denominator)
    norm = tf.sqrt(tf.add_n(squared))
    factor = tf.math.reciprocal_no_nan(denominator)
    if clip_norm is not None:
        factor *= clip_norm / tf.maximum(norm, clip_norm)
    return Reduced(norm=norm, finite=tf.math.is_finite(norm), factor=factor)
