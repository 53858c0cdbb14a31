"""Accumulators that a kernel adds to in its own backward pass, where a sum of whole gradients later costs one more."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_offered: contextvars.ContextVar[Accumulators | None] = contextvars.ContextVar("accumulators", default=None)


class Accumulator(NamedTuple):
    """What a variable's gradients are summed in, as a micro-batch finds it."""

    total: tf.Tensor  # of the variable's shape, in float32 (float64 for float64 variables)
    noted: dict[Any, tf.Tensor]

    def note(self, gradient: tf.Tensor, total: tf.Tensor) -> None:
        """Says that `total` is the accumulator with `gradient` added, which the kernel returns as the variable's."""
        self.noted[gradient.ref()] = total


class Accumulators:
    """Those of some variables, in the graph in which a micro-batch's forward and backward pass are traced.

    A kernel that finds a variable's (`accumulator_of`) computes, beside the gradient, the accumulator with it
    added in place. XLA drops whichever the step does not use: it uses the sum only where the gradient that the kernel
    returned is what reaches the variable. One that was scaled or lost on its way counts for what it is.
    """

    def __init__(self, variables: Sequence[tf.Variable], totals: Sequence[tf.Tensor]):
        self._noted: dict[Any, tf.Tensor] = {}
        self._of = {v.ref(): Accumulator(t, self._noted) for v, t in zip(variables, totals, strict=False)}
        self._graph = tf.compat.v1.get_default_graph()

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """Within the scope, that of the forward pass, kernels find them."""
        token = _offered.set(self)
        try:
            yield
        finally:
            _offered.reset(token)

    def find(self, variable: Any) -> Accumulator | None:
        # What is traced in another graph, a branch or a loop's body, may run any number of times.
        found = isinstance(variable, tf.Variable) and tf.compat.v1.get_default_graph() is self._graph
        return self._of.get(variable.ref()) if found else None

    def with_added(self, gradient: Any) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
        """The accumulator with a gradient added by its kernel, or with one term of a sum, and the terms left to add."""
        if not isinstance(gradient, tf.Tensor):
            return None
        terms = summands(gradient)
        for k, term in enumerate(terms):
            if term.ref() in self._noted:
                return self._noted[term.ref()], terms[:k] + terms[k + 1 :]
        return None


def summands(gradient: tf.Tensor) -> list[tf.Tensor]:
    """What a gradient is the sum of: of a variable that is used twice, those of both uses."""
    return list(gradient.op.inputs) if gradient.op.type == "AddN" else [gradient]


def accumulator_of(variable: Any) -> Accumulator | None:
    """The accumulator of a variable that a kernel's forward pass reads; None where the step does not offer one."""
    offered = _offered.get()
    return None if offered is None else offered.find(variable)
