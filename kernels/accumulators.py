"""Accumulators that a kernel adds to in its own backward pass, where a sum of whole gradients later costs one more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf


class Accumulator(NamedTuple):
    """The sum of a variable's gradients so far, as a micro-batch finds it."""

    total: tf.Tensor  # of the variable's shape, in float32 (float64 for float64 variables)
    noted: dict[Hashable, tf.Tensor]  # by the gradient's `ref`

    def note(self, gradient: tf.Tensor, total: tf.Tensor) -> None:
        """Notes that `total` is the accumulator with `gradient` added; the kernel must return `gradient`."""
        self.noted[gradient.ref()] = total


class Accumulators:
    """Accumulators of some variables, in the graph in which a micro-batch's forward and backward pass are traced.

    A kernel that finds a variable's accumulator (`trace_context.accumulator_of`) computes, beside the gradient, the
    accumulator with the gradient added in place. XLA drops whichever of the two the step does not use: the step uses
    the sum only where the gradient that the kernel returned reaches the variable as it is, neither scaled nor lost.
    """

    def __init__(self, variables: Sequence[tf.Variable], totals: Sequence[tf.Tensor]):
        self._noted: dict[Hashable, tf.Tensor] = {}
        self._of = {v.ref(): Accumulator(t, self._noted) for v, t in zip(variables, totals, strict=False)}
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()

    def close(self) -> None:
        """Stops offering accumulators: a layer that the backward pass computes again would add twice."""
        self._graph = None

    def find(self, variable: tf.Tensor | tf.Variable | None) -> Accumulator | None:
        """Returns the accumulator of a variable, in the graph of the forward pass alone."""
        # What is traced in another graph, a branch or a loop's body, may run any number of times.
        found = self._of.get(variable.ref()) if isinstance(variable, tf.Variable) else None
        return found if tf.compat.v1.get_default_graph() is self._graph else None

    def with_added(self, gradient: tf.Tensor | tf.IndexedSlices | None) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
        """Returns the accumulator with the gradient, or one term of it, added by a kernel, and the terms left to add.

        None where no kernel has added any.
        """
        if not isinstance(gradient, tf.Tensor):
            return None
        terms = summands(gradient)
        for k, term in enumerate(terms):
            if term.ref() in self._noted:
                return self._noted[term.ref()], terms[:k] + terms[k + 1 :]
        return None


def summands(gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns the terms of a gradient: for a variable that is used twice, the gradients of both uses."""
    return list(gradient.op.inputs) if gradient.op.type == "AddN" else [gradient]
