"""Variables of one kind, one for each layer of a loop, taken as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from fastaccum.kernels import private


class VariableStack:
    """Variables of one shape and dtype: those at the same place in layers that a loop runs.

    A loop over the layers takes them as one tensor, [layers, ...]. A train step that knows the
    stack makes the tensor once, before its micro-batches, and sums its gradient as one.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self.variables = list(variables)

    def ref(self) -> VariableStack:
        """Returns what stands for the stack in a dict, as `tf.Variable.ref` does."""
        return self

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([len(self.variables), *self.variables[0].shape])

    @property
    def dtype(self) -> tf.DType:
        return tf.as_dtype(private.variable_dtype(self.variables[0]))

    def read(self) -> tf.Tensor:
        """Reads the variables, in their own dtype, and stacks their values."""
        with private.AutocastScope(None):
            return tf.stack([tf.convert_to_tensor(variable.value) for variable in self.variables])

    def assign(self, values: tf.Tensor) -> None:
        """Assigns each variable its part of stacked values."""
        with private.AutocastScope(None):
            for variable, value in zip(self.variables, tf.unstack(values), strict=True):
                variable.assign(value)
