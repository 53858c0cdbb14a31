"""Half-precision casts of float32 weights, and tables, made once before a loop and not in each of
its turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from fastaccum.kernels import trace_context
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.trace_context import NO_CASTS, Casts, Find


def hoisted_casts(values: Iterable[tuple[keras.Variable | tf.Variable, tf.Tensor]]) -> Casts:
    """Returns casts that are made where each variable's value was read, outside of the loop that is
    traced here.
    """
    known = {id(variable): value for variable, value in values}
    if not known:
        return NO_CASTS
    outside = next(iter(known.values())).graph
    made: dict[tuple[int | tuple, tf.DType], tf.Tensor] = {}

    def find(asked, dtype):
        is_table = isinstance(asked, tuple)
        key = (asked if is_table else id(asked), dtype)
        if key not in made:
            if not is_table and id(asked) not in known:
                return None
            with outside.as_default():
                made[key] = tf.cast(asked[0](*asked[1:]) if is_table else known[id(asked)], dtype)
        return made[key]

    return _for_this_graph(find)


@contextlib.contextmanager
def rounded_layer(
    stacks: Iterable[tuple[keras.Variable, keras.Variable]],
    i: tf.Tensor,
    scope: keras.StatelessScope,
) -> Iterator[None]:
    """Enters `scope`, and takes the cast of layer i's variable as a slice of that of the variable
    of all layers.
    """
    of_stacks, stacked = (
        trace_context.current().casts,
        {id(variable): whole for variable, whole in stacks},
    )
    same = stateless_scope() is of_stacks.scope

    def find(asked, dtype):
        if isinstance(asked, tuple):
            return of_stacks.find(asked, dtype)
        whole = of_stacks.find(stacked.get(id(asked)), dtype) if same else None
        return None if whole is None else tf.gather(whole, i)

    with scope, trace_context.current().extended(casts=_for_this_graph(find)):
        yield


def allow_outer_casts() -> contextlib.AbstractContextManager[None]:
    """Lets functions traced inside the block capture casts as the loop around them may; none is
    kept for later.
    """
    context, graph = trace_context.current(), tf.compat.v1.get_default_graph()

    def find(asked, dtype):
        with graph.as_default():
            return context.casts.find(asked, dtype)

    return context.extended(casts=context.casts._replace(find=find))


def _for_this_graph(find: Find) -> Casts:
    graph = tf.compat.v1.get_default_graph()
    return Casts(
        lambda asked, dtype: find(asked, dtype) if _may_capture_from(graph) else None,
        stateless_scope(),
    )


def stateless_scope() -> keras.StatelessScope | None:
    """Returns the scope that gives variables other values here, as a model's `stateless_call`
    does.
    """
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


def copy_of(variable: keras.Variable | tf.Variable, dtype: tf.DType) -> tf.Tensor | None:
    """Returns the cast of a variable that was made before, or None."""
    casts = trace_context.current().casts
    return casts.find(variable, dtype) if stateless_scope() is casts.scope else None


def table(
    make: Callable[..., tf.Tensor], *arguments: tf.Tensor | float, dtype: tf.DType | str
) -> tf.Tensor:
    """Returns `tf.cast(make(*arguments), dtype)`, constant to autodiff; made once where the
    arguments are numbers.
    """
    # a size may be known only when this runs
    known = not any(tf.is_tensor(argument) for argument in arguments)
    found = (
        trace_context.current().casts.find((make, *arguments), tf.as_dtype(dtype))
        if known
        else None
    )
    return tf.cast(make(*arguments), dtype) if found is None else found


def rounded(weight: tf.Tensor, dtype: tf.DType, copy: tf.Tensor | None) -> tf.Tensor:
    """Casts a weight, with the gradient of a cast; a `copy` is taken for the value, and the weight
    is not read.
    """
    if copy is None:
        return tf.cast(weight, dtype)

    @custom_gradient
    def standing_in(weight):
        return tf.identity(copy), lambda dy: tf.cast(dy, weight.dtype)

    return standing_in(weight)
