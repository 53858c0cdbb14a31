"""Building blocks of every kernel: loops of known length, writes in place, float32 products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu

HALF = (tf.float16, tf.bfloat16)
# a tensor where the size is not known when the program is traced
Size: TypeAlias = "int | tf.Tensor"


def in_xla() -> bool:
    """Returns whether XLA compiles what is being traced.

    Some operations only XLA has; others it lacks.
    """
    return private.control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def loop(
    steps: int | tf.Tensor,
    body: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    at_once: int = 1,
) -> list[Any]:
    """Runs `for i in range(steps): values = body(i, *values)` as one loop.

    Its trip count is known if `steps` is an int.

    Each of the values is a tensor, a TensorArray or a nest of them, and keeps its structure, shapes
    and dtypes. Without XLA `at_once` turns may run at a time, where one does not wait for what
    another computes or assigns.
    """
    # A Python int as trip count: with a tensor, a GPU would ask the host before every turn. No
    # `maximum_iterations`: its second counter hides the trip count from XLA in larger programs.
    _, *results = tf.while_loop(
        lambda i, *_: i < steps,
        lambda i, *values: [i + 1, *body(i, *values)],
        [tf.constant(0), *values],
        parallel_iterations=at_once,
    )
    return results


def opaque(scalars: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Hides from XLA on a CPU how scalars, numbers or bools, are computed; returns them.

    XLA would compute them again in each kernel that takes them, and compile a kernel for each value
    of a constant. Kernels that differ by a hidden scalar alone are compiled once.
    """
    if not scalars or not in_xla() or has_gpu():
        return list(scalars)
    # Two turns, each of which negates, give the same scalars. Of loops XLA computes in advance
    # only those that count.
    return loop(2, lambda _, *values: [_negated(value) for value in values], scalars)


def _negated(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        return tf.logical_not(value)
    return -value


# Elements of all results of a turn together, 1 GiB in float32: a larger turn runs alone, since two
# at a time take twice the memory.
_LARGEST_TURN = 2**28


def turns_at_once(turn: ConcreteFunction) -> int:
    """Returns how many turns of a loop over a traced function are to run at a time.

    On a CPU without XLA two: one computes where the operations of the other leave cores idle. It
    takes their memory.
    """
    if in_xla() or has_gpu() or not private.has("auto_control_deps"):
        return 1
    order = private.auto_control_deps
    # Operations that TensorFlow runs in any order: draws with a state of their own, and those that
    # wait for other devices.
    unordered = (
        order.LEGACY_RANDOM_OPS
        | order.ASYNC_STATEFUL_OPS
        | order.SKIPPED_ORDER_INSENSITIVE_STATEFUL_OPS
    )

    graph = turn.graph.as_graph_def(add_shapes=True)
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes.extend(function.node_def)
    if any(node.op in unordered for node in nodes):
        return 1
    if _count_elements(nodes) > _LARGEST_TURN:
        return 1
    return 2


def _count_elements(nodes: Sequence[Any]) -> float:
    """Counts the elements of all results of the nodes; infinity if a size is not known."""
    elements = 0
    for node in nodes:
        for shape in node.attr[private.OUTPUT_SHAPES].list.shape:
            sizes = [dim.size for dim in shape.dim]
            if any(size < 0 for size in sizes):
                return math.inf
            elements += math.prod(sizes)
    return elements


def dot(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Computes `a @ b` of one dtype in float32, without a gradient.

    A product of halves is summed in float32 and rounded nowhere.
    """
    if a.dtype in HALF and in_xla():
        # Only XLA has a kernel for a float32 product of halves.
        return tf.raw_ops.BatchMatMulV3(
            x=a, y=b, Tout=tf.float32, adj_x=transpose_a, adj_y=transpose_b
        )
    return tf.matmul(tf.cast(a, tf.float32), tf.cast(b, tf.float32), transpose_a, transpose_b)


def product(
    a: tf.Tensor, b: tf.Tensor, factor: Callable[[tf.Tensor], tf.Tensor | float] = lambda dy: 1.0
) -> tf.Tensor:
    """Computes `dot(a, cast(b, a.dtype))`, with gradients summed in float32.

    `factor(dy)` scales dy while it is rounded to a's dtype.
    """

    @custom_gradient
    def multiply(a, b):
        rounded = tf.cast(b, a.dtype)

        def gradient(dy):
            scale = factor(dy)
            dy = tf.cast(scale * dy, a.dtype)
            da = dot(dy, rounded, transpose_b=True) / scale
            db = dot(a, dy, transpose_a=True) / scale
            return tf.cast(da, a.dtype), tf.cast(db, b.dtype)

        return dot(a, rounded), gradient

    return multiply(a, b)


def unfilled(shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor | None:
    """Allocates a tensor without filling it, for a loop to write in full.

    Returns None where that is not possible.
    """
    if not (has_gpu() and in_xla() and tf.TensorShape(shape).is_fully_defined()):
        return None
    with tf.init_scope():
        device = tf.zeros([]).device
    if not _allocates(device):
        return None
    return _allocated(shape, dtype)


def _allocated(shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor:
    (buffer,) = private.xla.custom_call_v2("AllocateBuffer", [], [tf.TensorSpec(shape, dtype)])
    return buffer


@functools.cache
def _allocates(device: str) -> bool:
    """Returns whether XLA takes its own `AllocateBuffer` on a device; on CPUs it does not.

    It is tried once in a process.
    """

    @tf.function(jit_compile=True, autograph=False)
    def write():
        def body(i, whole):
            return [dynamic_update_slice(whole, tf.ones([1]), [i])]

        return loop(2, body, [_allocated([2], tf.float32)])

    try:
        with tf.init_scope():
            return write()[0].numpy().tolist() == [1.0, 1.0]
    except tf.errors.OpError:
        return False


@custom_gradient
def unfused(t: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns `t`, and keeps XLA on a GPU from fusing what follows with it.

    What follows is neither computed in one kernel with `t`, nor as a constant.
    """

    def gradient(upstream):
        return upstream

    if has_gpu() and in_xla():
        return private.xla.optimization_barrier(t)[0], gradient
    return tf.identity(t), gradient


@custom_gradient
def barred(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Sequence[tf.Tensor]]]:
    """Returns the tensors in XLA, none of which is used before all of them are there."""

    def gradient(*upstream):
        return upstream

    return list(private.xla.optimization_barrier(*tensors)), gradient


class MaxAndExpSum(NamedTuple):
    """Results of `max_and_exp_sum`."""

    maximum: tf.Tensor
    exp_sum: tf.Tensor
    argmax: tf.Tensor | None = None  # the first column of the maximum, if asked for


def max_and_exp_sum(x: tf.Tensor, argmax: bool = False) -> list[tf.Tensor]:
    """Computes `m = max(x)`, finite, and `sum(exp(x - m))` over a matrix's rows.

    If `argmax` asks for it, the first place of m is there too.
    """
    columns = x.shape[1]
    places = tf.range(columns)
    if not (has_gpu() and in_xla()):
        row_max = tf.maximum(tf.reduce_max(x, -1), tf.float32.min)
        row_sum = tf.reduce_sum(tf.exp(x - row_max[:, tf.newaxis]), -1)
        is_max = x == row_max[:, tf.newaxis]
        first_place = tf.reduce_min(tf.where(is_max, places, columns - 1), -1)
        if not argmax:
            return [row_max, row_sum]
        return [row_max, row_sum, first_place]

    # In one read: a large matrix is not in any cache when it is read again.
    @tf.function(autograph=False)
    def combined(*pairs):
        values_in_one = len(pairs) // 2
        a = MaxAndExpSum(*pairs[:values_in_one])
        b = MaxAndExpSum(*pairs[values_in_one:])
        smaller = tf.exp(-tf.abs(a.maximum - b.maximum))
        larger_a = a.maximum > b.maximum
        first_place = []
        if argmax:
            are_equal = a.maximum == b.maximum
            earlier = tf.minimum(a.argmax, b.argmax)
            first_place = [tf.where(are_equal, earlier, tf.where(larger_a, a.argmax, b.argmax))]
        maximum = tf.maximum(a.maximum, b.maximum)
        exp_sum = tf.where(
            larger_a, a.exp_sum + smaller * b.exp_sum, smaller * a.exp_sum + b.exp_sum
        )
        return (maximum, exp_sum, *first_place)

    inputs = [x, tf.ones_like(x)]
    places_of_rows = tf.broadcast_to(places, x.shape)
    start = [tf.constant(tf.float32.min), tf.constant(0.0)]
    last_place = tf.constant(columns - 1)
    if argmax:
        inputs.append(places_of_rows)
        start.append(last_place)
    specs = [tf.TensorSpec([], t.dtype) for t in start]
    reducer = combined.get_concrete_function(*specs, *specs)
    return list(private.xla.variadic_reduce(inputs, start, [1], reducer))


def dynamic_update_slice(whole: tf.Tensor, part: tf.Tensor, start: Sequence[Size]) -> tf.Tensor:
    """Returns `whole` with `part` written at `start`: in place, once compiled."""
    begin = tf.stack(start)
    if in_xla():
        return private.xla.dynamic_update_slice(whole, part, begin)
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=whole,
        begin=begin,
        end=begin + tf.shape(part),
        strides=tf.ones_like(begin),
        value=part,
    )


def dynamic_add_slice(whole: tf.Tensor, part: tf.Tensor, start: Sequence[Size]) -> tf.Tensor:
    """Returns `whole` with `part` added at `start`: in place, once compiled."""
    if in_xla():
        # Of tf.slice, XLA would compile a program for each start that follows from an argument.
        before = private.xla.dynamic_slice(whole, tf.stack(start), tf.shape(part))
    else:
        before = tf.slice(whole, start, tf.shape(part))
    return dynamic_update_slice(whole, before + part, start)


def first_order(gradients: Sequence[tf.Tensor | None], what: str) -> list[tf.Tensor | None]:
    """Returns a custom gradient's results, whose own derivatives raise an error naming `what`."""
    message = (
        f'{what} has no second derivatives: pass implementation="reference", '
        "to a Trainer flash_attention=False."
    )
    results = []
    for gradient in gradients:
        if gradient is not None:
            gradient = tf.raw_ops.PreventGradient(input=gradient, message=message)
        results.append(gradient)
    return results


def sizes(t: tf.Tensor) -> list[Size]:
    """Returns the shape, with tensors only where a size is not known."""
    known_sizes = []
    for i, size in enumerate(t.shape):
        if size is None:
            size = tf.shape(t)[i]
        known_sizes.append(size)
    return known_sizes
