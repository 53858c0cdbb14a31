"""Building blocks of every kernel: loops of known length, parts written in place, products summed
in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu

HALF = (tf.float16, tf.bfloat16)
# a tensor where the size is not known when the program is traced
Size: TypeAlias = "int | tf.Tensor"


def in_xla() -> bool:
    """Returns whether XLA compiles what is being traced: some operations only XLA has, others it
    lacks.
    """
    return private.control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def loop(
    steps: int, body: Callable[..., Sequence[Any]], values: Sequence[Any], at_once: int = 1
) -> list[Any]:
    """Runs `for i in range(steps): values = body(i, *values)`, compiled to one loop whose trip
    count XLA knows.

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


_LARGEST_TURN = 2**28  # elements of all results together, 1 GiB in float32


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
    nodes = [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]
    shapes = (shape for node in nodes for shape in node.attr[private.OUTPUT_SHAPES].list.shape)
    elements = sum(
        math.inf if any(d.size < 0 for d in s.dim) else math.prod(d.size for d in s.dim)
        for s in shapes
    )
    return 2 if elements <= _LARGEST_TURN and not any(node.op in unordered for node in nodes) else 1


def dot(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Computes `a @ b` of one dtype, without a gradient, in float32: half x half -> float32,
    rounded nowhere.
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
    """Computes `dot(a, cast(b, a.dtype))`, with gradients summed in float32; `factor(dy)` scales dy
    to be rounded.
    """

    @custom_gradient
    def multiply(a, b):
        rounded = tf.cast(b, a.dtype)

        def gradient(dy):
            by = factor(dy)
            dy = tf.cast(by * dy, a.dtype)
            da, db = dot(dy, rounded, transpose_b=True) / by, dot(a, dy, transpose_a=True) / by
            return tf.cast(da, a.dtype), tf.cast(db, b.dtype)

        return dot(a, rounded), gradient

    return multiply(a, b)


def unfilled(shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor | None:
    """Allocates a tensor without filling it, for a loop to write in full; returns None where that
    is not possible.
    """
    if not (has_gpu() and in_xla() and tf.TensorShape(shape).is_fully_defined()):
        return None
    with tf.init_scope():
        device = tf.zeros([]).device
    return _allocated(shape, dtype) if _allocates(device) else None


def _allocated(shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor:
    return private.xla.custom_call_v2("AllocateBuffer", [], [tf.TensorSpec(shape, dtype)])[0]


@functools.cache
def _allocates(device: str) -> bool:
    """Returns whether XLA takes its own `AllocateBuffer` on a device (on CPUs it does not): tried
    once in a process.
    """

    @tf.function(jit_compile=True, autograph=False)
    def write():
        return loop(
            2,
            lambda i, whole: [dynamic_update_slice(whole, tf.ones([1]), [i])],
            [_allocated([2], tf.float32)],
        )

    try:
        with tf.init_scope():
            return write()[0].numpy().tolist() == [1.0, 1.0]
    except tf.errors.OpError:
        return False


@custom_gradient
def unfused(t: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns `t`, and keeps XLA on a GPU from computing what follows in one kernel with `t`, or as
    a constant.
    """
    return private.xla.optimization_barrier(t)[0] if has_gpu() and in_xla() else tf.identity(
        t
    ), lambda dy: dy


@custom_gradient
def barred(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Sequence[tf.Tensor]]]:
    """Returns the tensors in XLA, none of which is used before all of them are there."""
    return list(private.xla.optimization_barrier(*tensors)), lambda *upstream: upstream


def max_and_exp_sum(x: tf.Tensor, argmax: bool = False) -> list[tf.Tensor]:
    """Computes `m = max(x)`, finite, `sum(exp(x - m))` and, if asked to, the first place of m over
    a matrix's rows.
    """
    places = tf.range(x.shape[1])
    if not (has_gpu() and in_xla()):
        row_max = tf.maximum(tf.reduce_max(x, -1), tf.float32.min)
        row_sum = tf.reduce_sum(tf.exp(x - row_max[:, tf.newaxis]), -1)
        first = [
            tf.reduce_min(tf.where(x == row_max[:, tf.newaxis], places, x.shape[1] - 1), -1)
        ] * argmax
        return [row_max, row_sum, *first]

    # In one read: a large matrix is not in any cache when it is read again.
    @tf.function(autograph=False)
    def combined(*pairs):
        (max_a, sum_a, *at_a), (max_b, sum_b, *at_b) = (
            pairs[: len(pairs) // 2],
            pairs[len(pairs) // 2 :],
        )
        smaller = tf.exp(-tf.abs(max_a - max_b))
        larger_a = max_a > max_b
        both = zip(at_a, at_b, strict=True)
        firsts = [
            tf.where(max_a == max_b, tf.minimum(a, b), tf.where(larger_a, a, b)) for a, b in both
        ]
        return (
            tf.maximum(max_a, max_b),
            tf.where(larger_a, sum_a + smaller * sum_b, smaller * sum_a + sum_b),
            *firsts,
        )

    inputs = [x, tf.ones_like(x), *[tf.broadcast_to(places, x.shape)] * argmax]
    start = [tf.constant(tf.float32.min), tf.constant(0.0), *[tf.constant(x.shape[1] - 1)] * argmax]
    reducer = combined.get_concrete_function(
        *[tf.TensorSpec([], t.dtype) for t in (*start, *start)]
    )
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
    return dynamic_update_slice(whole, tf.slice(whole, start, tf.shape(part)) + part, start)


def first_order(gradients: Sequence[tf.Tensor | None], what: str) -> list[tf.Tensor | None]:
    """Returns a custom gradient's results, with an error where a tape asks for second derivatives
    of a loop.
    """
    message = (
        f'{what} has no second derivatives: pass implementation="reference", '
        "to a Trainer flash_attention=False."
    )
    return [
        None if g is None else tf.raw_ops.PreventGradient(input=g, message=message)
        for g in gradients
    ]


def sizes(t: tf.Tensor) -> list[Size]:
    """Returns the shape, with tensors only where a size is not known."""
    return [tf.shape(t)[i] if size is None else size for i, size in enumerate(t.shape)]
