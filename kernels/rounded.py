"""Half-precision copies of float32 weights, and tables, made once before a loop and not in each of its turns."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from fastaccum.kernels.custom_gradients import custom_gradient

# Of a variable, or of a function with its arguments, and a dtype.
Find = Callable[[Any, tf.DType], "tf.Tensor | None"]
_find: contextvars.ContextVar[Find] = contextvars.ContextVar("rounded", default=lambda asked, dtype: None)
# The scope of Keras's, or none, in which variables have the values that were rounded.
_scope: contextvars.ContextVar[Any] = contextvars.ContextVar("scope", default=None)


@contextlib.contextmanager
def rounded_once(values: Iterable[tuple[Any, tf.Tensor]]) -> Iterator[None]:
    """Within it, each variable is rounded where its value was read: outside of the loop that is traced here.

    Args:
        values: variables that the loop does not assign, as they are asked for, and what was read of each before it.
    """
    known = {id(variable): value for variable, value in values}
    if not known:
        yield
        return
    outside = next(iter(known.values())).graph
    made: dict[tuple[Any, tf.DType], tf.Tensor] = {}

    def find(asked, dtype):
        is_table = isinstance(asked, tuple)
        key = (asked if is_table else id(asked), dtype)
        if key not in made:
            if not is_table and id(asked) not in known:
                return None
            with outside.as_default():
                made[key] = tf.cast(asked[0](*asked[1:]) if is_table else known[id(asked)], dtype)
        return made[key]

    with _finding(find):
        yield


@contextlib.contextmanager
def rounded_layer(stacks: Iterable[tuple[Any, Any]], i: tf.Tensor, scope: keras.StatelessScope) -> Iterator[None]:
    """Within it and `scope`, the copy of a layer's variable is slice `i` of that of the stacked one, if it has one.

    `stacks` has layer i's variables, slices too in that scope, each with the one of all layers, `[depth, ...]`.
    """
    of_stacks, stacked = _find.get(), {id(variable): whole for variable, whole in stacks}
    same = stateless_scope() is _scope.get()

    def find(asked, dtype):
        if isinstance(asked, tuple):
            return of_stacks(asked, dtype)
        whole = of_stacks(stacked.get(id(asked)), dtype) if same else None
        return None if whole is None else tf.gather(whole, i)

    with scope, _finding(find):
        yield


@contextlib.contextmanager
def copies_at_hand() -> Iterator[None]:
    """Within it, a function that is traced may capture copies as the loop around it may: it is not kept for later."""
    find, graph = _find.get(), tf.compat.v1.get_default_graph()

    def find_here(variable, dtype):
        with graph.as_default():
            return find(variable, dtype)

    token = _find.set(find_here)
    try:
        yield
    finally:
        _find.reset(token)


@contextlib.contextmanager
def _finding(find: Find) -> Iterator[None]:
    graph = tf.compat.v1.get_default_graph()
    token = _find.set(lambda variable, dtype: find(variable, dtype) if _may_capture_from(graph) else None)
    scope = _scope.set(stateless_scope())
    try:
        yield
    finally:
        _find.reset(token)
        _scope.reset(scope)


def stateless_scope() -> Any:
    """The scope that gives variables other values here, as a model's `stateless_call` does."""
    with keras.StatelessScope(initialize_variables=False) as inner:
        return inner.original_scope


def _may_capture_from(graph: tf.Graph) -> bool:
    """Whether nothing but loops and branches lies between `graph` and what is traced: a `tf.function` of a layer's own
    is kept for later calls, and a tensor that it had captured would no longer be there.
    """
    current = tf.compat.v1.get_default_graph()
    while current is not graph:
        if type(current) in (tf.Graph, tf.__internal__.FuncGraph):
            return False
        current = current.outer_graph
    return True


def copy_of(variable: Any, dtype: tf.DType) -> tf.Tensor | None:
    """The copy of a variable that is at hand here, or None."""
    return _find.get()(variable, dtype) if stateless_scope() is _scope.get() else None


def table(make: Callable[..., tf.Tensor], *arguments: Any, dtype: Any) -> tf.Tensor:
    """`tf.cast(make(*arguments), dtype)`, constant to autodiff; made once where the arguments are numbers."""
    known = not any(tf.is_tensor(argument) for argument in arguments)  # a size may be known only when this runs
    found = _find.get()((make, *arguments), tf.as_dtype(dtype)) if known else None
    return tf.cast(make(*arguments), dtype) if found is None else found


def rounded(weight: tf.Tensor, dtype: tf.DType, copy: tf.Tensor | None) -> tf.Tensor:
    """`tf.cast(weight, dtype)` and its gradient; where there is a copy, that is the value, and the weight is not read.

    >>> weight = tf.constant([1 / 3])
    >>> rounded(weight, tf.float16, copy=tf.cast(weight, tf.float16)).numpy().tolist()
    [0.333251953125]
    """
    if copy is None:
        return tf.cast(weight, dtype)

    @custom_gradient
    def standing_in(weight):
        return tf.identity(copy), lambda dy: tf.cast(dy, weight.dtype)

    return standing_in(weight)
