"""Traces that are open in the lengths of their arguments, so that one is for all lengths."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.step.signatures import Signature
from fastaccum.step.tracing import TracedFunction

Shape = tuple[int | None, ...]


class RelaxedTrace:
    """A trace that is open in the rows, and in the lengths in which its signatures have differed.

    Attributes:
        concrete: the trace; None before `trace`, and where the function cannot be traced so.
    """

    def __init__(self, signature: Signature):
        self.concrete: ConcreteFunction | None = None
        self._shapes: list[Shape] = list(signature.shapes)
        self._is_refused = False

    def covers(self, signature: Signature) -> bool:
        """Tells if the trace takes arguments of this signature."""
        return self.concrete is not None and self._merged_with(signature) == self._shapes

    def trace(
        self, function: TracedFunction, leaves: Sequence[tf.Tensor], signature: Signature
    ) -> ConcreteFunction | None:
        """Traces the function for all lengths so far; None if it needs to know them."""
        if self._is_refused:
            return None
        shapes: list[Shape] = []
        for shape in self._merged_with(signature):
            if len(shape) > 1:
                shape = (shape[0], None, *shape[2:])  # any rows, since a last batch is short
            shapes.append(shape)
        specs = []
        for shape, leaf in zip(shapes, leaves, strict=True):
            specs.append(tf.TensorSpec(shape, leaf.dtype))
        try:
            concrete = function.trace(*optree.tree_unflatten(signature.structure, specs))
        except Exception:  # of any code in the model
            self.refuse()
            return None
        self._shapes = shapes
        self.concrete = concrete
        return concrete

    def refuse(self) -> None:
        """Gives up the trace for good: the function needs to know lengths."""
        self._is_refused = True
        self.concrete = None

    def _merged_with(self, signature: Signature) -> list[Shape]:
        """Returns the trace's shapes, open in each axis in which this signature differs."""
        merged: list[Shape] = []
        for known_shape, shape in zip(self._shapes, signature.shapes, strict=True):
            axes: list[int | None] = []
            for known_length, length in zip(known_shape, shape, strict=True):
                if known_length == length:
                    axes.append(length)
                else:
                    axes.append(None)
            merged.append(tuple(axes))
        return merged


class RelaxedTraces:
    """The relaxed traces of a program: one for signatures that differ in lengths alone."""

    def __init__(self) -> None:
        self._traces: dict[tuple, RelaxedTrace] = {}

    def find(self, signature: Signature) -> RelaxedTrace:
        """Returns the trace of signatures that differ from this one in lengths alone."""
        in_common: list[object] = [signature.structure]
        for leaf in signature.leaves:
            in_common.append((len(leaf.shape), *leaf.shape[:1], leaf.dtype))
        key = tuple(in_common)
        if key not in self._traces:
            self._traces[key] = RelaxedTrace(signature)
        return self._traces[key]
