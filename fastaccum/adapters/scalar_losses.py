"""Loss functions that return one number for a batch, a mean or a sum over its rows.

Keras multiplies such a number by every sample weight and reduces the products, so that the weights
do not tell rows apart: they scale the batch's loss, by their mean under the reduction
"sum_over_batch_size".
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.graphs import row_mixing, traces
from fastaccum.kernels.shapes import lengths

Pair = tuple[tf.Tensor, tf.Tensor]  # y_true and y_pred
Specs = Sequence[keras.KerasTensor]  # of both


class ScalarLoss(NamedTuple):
    """How the values of micro-batches make up the value of the whole batch.

    Attributes:
        kind: "mean" if each value counts by its rows; "sum" if the values are added up; "pair" if
            the function returns `(loss_sum, weight_sum)`, of which both are added up before they
            are divided.
        unproven: an operation because of which the result may be another than the value of the
            whole batch, or None.
    """

    kind: Literal["mean", "sum", "pair"]
    unproven: str | None = None


class Factor(NamedTuple):
    """Factor of a scalar loss in Keras: `weighted / counted`, or `weighted` where `counted` is 0.

    Both are float32 scalars, and those of micro-batches add up to those of the whole batch.
    """

    weighted: tf.Tensor
    counted: tf.Tensor


# Which reductions a function seems to have.

# The rows of the smaller of two batches that are compared with both together. Few rows show a small
# mean beside a sum, many a small sum beside a mean. All are even: functions take rows in pairs.
_FEW_ROWS = 2
# The rows of the larger batch: as many as have `_ELEMENTS` elements, within these bounds.
_MIN_MORE_ROWS = 4
_MAX_MORE_ROWS = 256
_ELEMENTS = 2**15
# The rows of a trace that groups of up to ten rows divide, such as triplets.
_GROUPED_ROWS = 5_040
# The length that is drawn for an axis of unknown length: the windows of SSIM have 11.
_UNKNOWN_AXIS = 12
# The relative error of float32 sums up to which two values count as equal.
_TOLERANCE = 2e-5


def find(
    call: Callable[[Pair], Any],
    specs: Specs,
    name: str,
    traced: tf.types.experimental.ConcreteFunction | None,
) -> ScalarLoss | None:
    """Finds what a loss function `name` is over rows.

    Returns None if it returns something else than a scalar or a pair. `traced` is what `trace`
    returned for it.

    The trace decides if the value is made of sums over rows. Their factors are decided by numbers:
    a mean over all rows is the mean of two batches' means by their rows, and a sum is the sum of
    their sums.

    Raises ValueError for a pair whose parts do not add up, and for a function that assigns
    variables.
    """
    if traced is None:
        # The trace of the step fails, too, with an error that names the loss.
        return None
    _require_no_counter(traced, name)  # before the function runs
    returned = traced.structured_outputs
    if _is_pair(returned):
        _require_sums(call, specs, returned, name)
        return ScalarLoss("pair")
    if not _is_scalar(returned) and not _is_scalar_with_axes(returned, traced):
        return None
    fitting = _compare_batches(call, specs)
    operation = _first_op_beyond_sums(returned)
    if operation is None and not fitting:
        operation = returned.op.name
    return ScalarLoss(fitting or "mean", operation)


def _is_pair(returned: Any) -> bool:
    """Tells if a loss function returned `(loss_sum, weight_sum)`; the second may be a count."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        return False
    loss_sum, weight_sum = returned
    return _is_scalar(loss_sum) and tf.is_tensor(weight_sum) and weight_sum.shape.rank == 0


def trace(
    call: Callable[[Pair], Any], specs: Specs
) -> tf.types.experimental.ConcreteFunction | None:
    """Traces a loss function with as many rows as it takes; None if it takes none of these.

    The rows are as many as tell what is computed from them, those of the specs, or as many as
    groups of rows divide.
    """
    for rows in (traces.TELLING_ROWS, None, _GROUPED_ROWS):
        with contextlib.suppress(Exception):  # whatever a user's function raises
            return traces.trace(call, specs, rows)
    return None


def _is_scalar(value: object) -> bool:
    return tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating  # type: ignore[attr-defined]


def _is_scalar_with_axes(value: Any, traced: tf.types.experimental.ConcreteFunction) -> bool:
    """Tells if a result has one element for many rows, as a mean that keeps its axes."""
    has_many_rows = traced.inputs[0].shape[0] == traces.TELLING_ROWS
    if not has_many_rows or not tf.is_tensor(value) or not value.shape.is_fully_defined():
        return False
    return value.dtype.is_floating and value.shape.num_elements() == 1


def _require_no_counter(traced: tf.types.experimental.ConcreteFunction, name: str) -> None:
    """Raises ValueError for a loss that assigns numbers, such as a count of its calls."""
    names = []
    for variable in traces.list_assigned(traced.graph, []):
        is_seed = not variable.dtype.is_floating and variable.shape.rank
        if not is_seed:
            names.append(variable.name)
    if names:
        raise ValueError(
            f"loss {name!r} assigns {names}. A train step computes it for each micro-batch, and "
            "not once for the batch. Let the loss only read the variable, and assign it in a "
            "callback (on_train_batch_end). Or, where its value comes from the batch, assign a "
            "weight of the model in its compute_loss: checkpoints hold it. It is assigned for "
            "each micro-batch."
        )


def _first_op_beyond_sums(scalar: tf.Tensor) -> str | None:
    """Names an operation of a trace by which a scalar may be no sum or mean over rows."""
    beyond = row_mixing.first_op_beyond_sums(scalar, model_is_by_row=True, functions_are_sums=False)
    if beyond is not None:
        return beyond
    for op in scalar.graph.get_operations():
        if op.type in traces.CALLS:  # the function that it calls was not looked into
            return op.name
    return row_mixing.first_comparison_of_rows(scalar.graph) or row_mixing.first_op_along_rows(
        scalar.graph
    )


def _compare_batches(
    call: Callable[[Pair], Any], specs: Specs
) -> Literal["mean", "sum", ""] | None:
    """Tells by numbers if a function is a mean or a sum over rows, in value and gradient.

    Returns "" for neither, and None where the numbers say nothing.
    """
    kinds: set[Literal["mean", "sum"]] = set()
    for draw in (_draw_labels, _draw_numbers):
        fitting = _fitting_kinds(call, specs, draw)
        if fitting is None:  # the function is not defined for such numbers, or they say nothing
            continue
        if not fitting:
            return ""
        kinds |= fitting
    if len(kinds) != 1:
        return None
    return kinds.pop()


def _draw_labels(
    random: np.random.Generator, shape: tuple[int, ...], is_target: bool
) -> np.ndarray:
    """Draws targets that are 0 or 1, and predictions that may be probabilities."""
    if is_target:
        return random.integers(0, 2, shape)
    return random.uniform(0.1, 0.9, shape)


def _draw_numbers(
    random: np.random.Generator, shape: tuple[int, ...], is_target: bool
) -> np.ndarray:
    """Draws targets between 0 and 1, and predictions of either sign."""
    if is_target:
        return random.uniform(0.1, 0.9, shape)
    return random.normal(size=shape)


def _fitting_kinds(
    call: Callable[[Pair], Any], specs: Specs, draw: Callable[..., np.ndarray]
) -> set[Literal["mean", "sum"]] | None:
    """Returns which of both a function is for one draw of two batches.

    Returns None if its value is not finite there, or 0.
    """
    random = np.random.default_rng(0)
    shapes = [_shape_of_row(spec) for spec in specs]
    elements = max(1, *(math.prod(shape) for shape in shapes))
    even_rows = _ELEMENTS // elements // 2 * 2
    more_rows = min(max(even_rows, _MIN_MORE_ROWS), _MAX_MORE_ROWS)
    all_rows = _FEW_ROWS + more_rows
    whole = []
    for spec, shape, is_target in zip(specs, shapes, (True, False), strict=True):
        dtype = tf.as_dtype(spec.dtype)
        if dtype.is_floating:
            dtype = tf.float32  # half precision would round gradients by more than is tolerated
        whole.append(tf.cast(draw(random, (all_rows, *shape), is_target), dtype))
    drawn_specs = tuple(keras.KerasTensor(tensor.shape, tensor.dtype.name) for tensor in whole)

    def value_and_gradient(pair: Pair) -> tuple[tf.Tensor, tf.Tensor]:
        _, y_pred = pair
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            value = tf.reshape(tf.cast(call(pair), tf.float32), [])
        zero = tf.UnconnectedGradients.ZERO
        gradient = tape.gradient(value, y_pred, unconnected_gradients=zero)
        return value, tf.cast(tf.convert_to_tensor(gradient), tf.float32)

    def evaluate(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        batch = tuple(tensor[rows] for tensor in whole)
        value, gradient = traces.trace(value_and_gradient, drawn_specs, len(batch[0]))(batch)
        return value.numpy(), gradient.numpy()

    try:
        few, few_gradient = evaluate(slice(_FEW_ROWS))
        more, more_gradient = evaluate(slice(_FEW_ROWS, None))
        both, both_gradient = evaluate(slice(None))
    except Exception:  # the function takes no such numbers
        return None
    for result in (few, more, both, few_gradient, more_gradient, both_gradient):
        if not np.isfinite(result).all():
            return None
    if not np.any(both) and not np.any(both_gradient):
        return None
    shares: dict[Literal["mean", "sum"], tuple[float, float]] = {
        "mean": (_FEW_ROWS / all_rows, more_rows / all_rows),
        "sum": (1.0, 1.0),
    }
    fitting: set[Literal["mean", "sum"]] = set()
    for kind, (few_share, more_share) in shares.items():
        value = few_share * few + more_share * more
        gradient = np.concatenate([few_share * few_gradient, more_share * more_gradient])
        if _are_close(value, both) and _are_close(gradient, both_gradient):
            fitting.add(kind)
    return fitting


def _shape_of_row(spec: keras.KerasTensor) -> list[int]:
    shape = []
    for length in spec.shape[1:]:
        if length is None:
            length = _UNKNOWN_AXIS
        shape.append(length)
    return shape


def _are_close(value: np.ndarray, expected: np.ndarray) -> bool:
    largest = np.abs(expected).max(initial=0.0)
    return np.allclose(value, expected, rtol=_TOLERANCE, atol=_TOLERANCE * largest)


def _require_sums(
    call: Callable[[Pair], Any], specs: Specs, returned: Sequence[tf.Tensor], name: str
) -> None:
    """Raises ValueError if one of the two numbers of a pair is no sum over the rows of a batch."""
    for position, part in enumerate(("loss_sum", "weight_sum")):
        kind = _compare_batches(functools.partial(_call_part, call, position), specs)
        changed_by = _first_op_on_sums(returned[position])
        if kind == "mean":
            reason = "does not grow with the rows: it is a mean, or a constant"
        elif changed_by is not None:
            reason = f"is no sum over the rows (see {changed_by})"
        elif kind == "":
            reason = "is no sum over the rows: those of two batches do not add up to that of both"
        else:
            continue
        raise ValueError(
            f"loss {name!r} returns a pair (loss_sum, weight_sum), and its {part} {reason}. "
            "Return sums over the batch as they are, without a maximum(..., 1) or an epsilon: "
            "the loss of an update is the sum of all loss_sums divided by the sum of all "
            "weight_sums, and 0 where these are 0."
        )


def _first_op_on_sums(scalar: tf.Tensor) -> str | None:
    """Names an operation on sums over rows, such as a maximum, by which a scalar is no sum.

    Returns None if there is none.
    """
    name = row_mixing.first_op_beyond_sums(scalar, model_is_by_row=True)
    if name is None:
        return None
    result = scalar.graph.get_operation_by_name(name).outputs[0]
    if result.shape.rank != 0:  # as of a boolean_mask, which forgets how many rows there are
        return None
    return name


def _call_part(call: Callable[[Pair], Any], position: int, pair: Pair) -> tf.Tensor:
    return call(pair)[position]


# What weights and masks do to a scalar.


def make_factor(
    reduction: str | None,
    rows: tf.Tensor,
    weights: tf.Tensor | None,
    mask: tf.Tensor | None,
    name: str,
) -> Factor:
    """Returns what Keras multiplies the scalar of a loss `name` by, for its `reduction`."""
    if weights is None and mask is None:
        return Factor(rows, rows)
    if reduction is None:
        raise ValueError(
            f"loss {name!r} returns one number for a batch and has reduction=None: with "
            "sample_weight, class_weight or a mask it is a number for each weight. Pass "
            "reduction='sum_over_batch_size' or 'sum'."
        )
    if weights is None:
        weights = tf.ones_like(mask, tf.float32)
    if mask is None:
        mask = tf.ones_like(weights)
    weights, mask = _of_one_rank(tf.cast(weights, tf.float32), tf.cast(mask, tf.float32))
    products = weights * mask
    weighted = tf.reduce_sum(products)
    if reduction == "sum":
        return Factor(weighted, tf.constant(0.0))
    if reduction == "mean_with_sample_weight":
        return Factor(weighted, weighted)
    return Factor(weighted, tf.reduce_sum(tf.broadcast_to(mask, lengths(products))))


def _of_one_rank(one: tf.Tensor, other: tf.Tensor) -> Pair:
    """Appends axes of 1 to the tensor of lower rank."""
    rank = max(one.shape.rank, other.shape.rank)
    one = tf.reshape(one, [*lengths(one), *[1] * (rank - one.shape.rank)])
    other = tf.reshape(other, [*lengths(other), *[1] * (rank - other.shape.rank)])
    return one, other


def divide_out(denominator: tf.Tensor, factor: Factor) -> tf.Tensor:
    """Returns a scalar loss's divisor for its factor.

    `loss_sum / divisor` is `factor * loss_sum / denominator`. A factor of 0 makes the divisor
    infinite, and the loss 0.
    """
    quotient = tf.math.divide_no_nan(factor.weighted, factor.counted)
    return denominator / tf.where(tf.equal(factor.counted, 0.0), factor.weighted, quotient)
