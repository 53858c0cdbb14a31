"""The context of a trace: objects for kernels that Keras's layers in between do not hand on."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels.float8 import Float8
from fastaccum.kernels.gradients import OfferedTotal, OfferedTotals
from fastaccum.kernels.variable_stack import VariableStack

# A variable, or the result of a function, in another dtype.
Copy: TypeAlias = "tf.Tensor | Float8"


class Find(Protocol):
    """Finds the copy of a variable, or of a function with its arguments, in a dtype."""

    def __call__(self, asked: object, dtype: tf.DType, layer_axes: int = 0, /) -> Copy | None:
        """Returns the copy or None.

        A variable's `layer_axes` leading axes count layers, whose float8 copies have scales of
        their own.
        """
        ...


Names = dict[int, tuple[tf.Tensor, str]]  # by the tensor's id


class Casts(NamedTuple):
    """Finds casts that were made outside of what is traced."""

    find: Find = lambda asked, dtype, layer_axes=0: None
    scope: keras.StatelessScope | None = None  # in which variables have the values that were cast


NO_CASTS = Casts()


class Documents(NamedTuple):
    """The documents of packed rows, of whose tokens none sees another document's."""

    ids: tf.Tensor  # int32 [B, T], ascending; padding has one of its own
    positions: tf.Tensor  # int32 [B, T], within documents


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """Holds what kernels find while a micro-batch's forward and backward pass are traced."""

    accumulators: OfferedTotals | None = None  # that a kernel may add to in its backward pass
    # reads a stack of layers' weights for a loop over the layers: outside of the loop over
    # micro-batches, so that the step gets one gradient for the whole stack
    read_stack: Callable[[VariableStack], tf.Tensor] = VariableStack.read
    # half-precision casts of weights, made before the loop over micro-batches
    casts: Casts = NO_CASTS
    names: Names | None = None  # collects what `checkpoint_name` names, where somebody asks for it
    # true where keys of random draws are derived outside the loop that draws
    hoists_keys: bool = False
    # for `keras.ops.dot_product_attention`; None for Keras's formula
    attention: Callable[..., tf.Tensor] | None = None
    documents: Documents | None = None  # None where each row is one document
    documents_are_masked: bool = False  # true where an attention's mask keeps documents apart

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the context of the trace inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def extended(self, **changes: Any) -> contextlib.AbstractContextManager[None]:
        """Enters this context with other values of some attributes."""
        return dataclasses.replace(self, **changes).entered()


_EMPTY = TraceContext()
_current = contextvars.ContextVar("trace context", default=_EMPTY)


def current() -> TraceContext:
    """Returns the context of the trace; an empty one outside of a train step."""
    return _current.get()


def accumulator_of(
    variable: tf.Tensor | tf.Variable | VariableStack | None,
) -> OfferedTotal | None:
    """Returns the accumulator of a variable, or a stack, that a kernel's forward pass reads.

    None is returned where the step offers none.
    """
    offered = current().accumulators
    return None if offered is None else offered.find(variable)
