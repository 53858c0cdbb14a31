"""Half-precision and float8 copies of float32 weights, and tables, made once before a loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from fastaccum.kernels import private, trace_context
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.float8 import E4M3, quantize
from fastaccum.kernels.trace_context import Casts, Copy, Find
from fastaccum.kernels.variable_stack import VariableStack


def hoisted_casts(
    variables: Iterable[tuple[keras.Variable | tf.Variable, tf.Variable]],
    outside: tf.Graph,
    stacks: Mapping[VariableStack, tf.Tensor] | None = None,
    float8_kernels: Iterable[tuple[keras.Variable | tf.Variable, tf.Variable]] = (),
) -> Casts:
    """Returns casts that are made in the graph `outside` of the loop that is traced here.

    `variables` are those that keep their values in the loop, each with its tf.Variable, which is
    read where a cast is asked for first. `stacks` has the values of those that were read by then.
    `float8_kernels` are such variables, too, trained or not, of which float8 copies may be made:
    half-precision ones of frozen weights would take memory during all of a step.
    """
    kept = {id(asked): variable for asked, variable in variables}
    kept_in_float8 = {id(asked): variable for asked, variable in float8_kernels} | kept
    made: dict[tuple[int | tuple, tf.DType, int], Copy] = {}

    def find(source, dtype, layer_axes=0):
        is_table = isinstance(source, tuple)
        is_stack = isinstance(source, VariableStack)
        key = (source if is_table else id(source), dtype, layer_axes)
        readable = kept_in_float8 if dtype == E4M3 else kept
        if key in made:
            return made[key]
        with outside.as_default():
            if is_table:
                make, *arguments = source
                value = make(*arguments)
            elif is_stack and stacks is not None and source in stacks:
                value = stacks[source]
            elif id(source) in readable:
                variable = readable[id(source)]
                with private.record.stop_recording():  # as if it were read before the loop
                    # No tape and no graph in between is to note that it is read here.
                    value = tf.raw_ops.ReadVariableOp(
                        resource=variable.handle, dtype=variable.dtype
                    )
            else:
                return None
            made[key] = _copied(value, dtype, layer_axes)
        return made[key]

    return _for_this_graph(find)


def _copied(value: tf.Tensor, dtype: tf.DType, layer_axes: int) -> Copy:
    """Casts a value, or rounds it to float8: each of stacked layers by a scale of its own."""
    if dtype == E4M3:
        return quantize(value, E4M3, layer_axes)
    return tf.cast(value, dtype)


@contextlib.contextmanager
def rounded_layer(
    stacks: Iterable[tuple[keras.Variable, keras.Variable | VariableStack]],
    i: tf.Tensor,
    scope: keras.StatelessScope,
) -> Iterator[None]:
    """Enters `scope`, and slices the casts of layer i's variables from casts of stacked variables.

    `stacks` lists the variables of one layer with those that hold them for all layers.
    """
    casts_of_stacks = trace_context.current().casts
    stack_by_id = {id(variable): stack for variable, stack in stacks}
    in_same_scope = stateless_scope() is casts_of_stacks.scope

    def find(source, dtype, layer_axes=0):
        if isinstance(source, tuple):
            return casts_of_stacks.find(source, dtype)
        if not in_same_scope:
            return None
        whole = casts_of_stacks.find(stack_by_id.get(id(source)), dtype, layer_axes + 1)
        if whole is None:
            return None
        return tf.nest.map_structure(lambda stacked: tf.gather(stacked, i), whole)

    with scope, trace_context.current().extended(casts=_for_this_graph(find)):
        yield


def allow_outer_casts() -> contextlib.AbstractContextManager[None]:
    """Lets functions traced inside the block capture casts as the loop around them may.

    None of the functions may be kept for later calls.
    """
    context = trace_context.current()
    graph = tf.compat.v1.get_default_graph()

    def find(source, dtype, layer_axes=0):
        with graph.as_default():
            return context.casts.find(source, dtype, layer_axes)

    return context.extended(casts=context.casts._replace(find=find))


def _for_this_graph(find: Find) -> Casts:
    """Limits casts to what may capture tensors of the graph that is traced now."""
    graph = tf.compat.v1.get_default_graph()

    def find_here(source, dtype, layer_axes=0):
        if not _may_capture_from(graph):
            return None
        return find(source, dtype, layer_axes)

    return Casts(find_here, stateless_scope())


def stateless_scope() -> keras.StatelessScope | None:
    """Returns the scope that gives variables other values, as in a model's `stateless_call`."""
    with keras.StatelessScope(initialize_variables=False) as inner:
        return inner.original_scope


def _may_capture_from(graph: tf.Graph) -> bool:
    """Tells if nothing but loops and branches lies between `graph` and what is traced."""
    # A `tf.function` of a layer's own is kept for later calls, when a captured tensor would no
    # longer be there.
    current = tf.compat.v1.get_default_graph()
    while current is not graph:
        if type(current) in (tf.Graph, tf.__internal__.FuncGraph):
            return False
        current = current.outer_graph
    return True


def copy_of(variable: keras.Variable | tf.Variable, dtype: tf.DType) -> Any:
    """Returns the copy of a variable that was made before, or None.

    It is a tensor of the dtype, or for E4M3 a `Float8`.
    """
    casts = trace_context.current().casts
    if stateless_scope() is not casts.scope:
        return None
    return casts.find(variable, dtype)


def table(
    make: Callable[..., tf.Tensor], *arguments: tf.Tensor | float, dtype: tf.DType | str
) -> tf.Tensor:
    """Returns `tf.cast(make(*arguments), dtype)`, constant to autodiff.

    Where the arguments are numbers, it is made once and not in each turn of a loop.
    """
    # A size may be known only when the program runs: it is then a tensor of the loop's body.
    if not any(tf.is_tensor(argument) for argument in arguments):
        cast = trace_context.current().casts.find((make, *arguments), tf.as_dtype(dtype))
        if cast is not None:
            return cast
    return tf.cast(make(*arguments), dtype)


def rounded(weight: tf.Tensor, dtype: tf.DType, copy: tf.Tensor | None) -> tf.Tensor:
    """Casts a weight, with the gradient of a cast.

    A `copy` is taken for the value, and the weight is not read.
    """
    if copy is None:
        return tf.cast(weight, dtype)

    @custom_gradient
    def cast_of(weight):
        def gradient(dy):
            return tf.cast(dy, weight.dtype)

        return tf.identity(copy), gradient

    return cast_of(weight)
