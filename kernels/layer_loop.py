"""The loops over a stack of layers: one forward, and one backward that computes each layer again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from tensorflow.python.eager import record

from fastaccum.kernels import stackable
from fastaccum.kernels.accumulators import accumulator_of
from fastaccum.kernels.checks import naming
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.rounded import rounded_layer
from fastaccum.kernels.xla_ops import dynamic_add_slice, first_order, loop

# What layers raise, beside TypeError and ValueError, of an input that they cannot take.
OF_LAYERS = IndexError, AttributeError, NotImplementedError, tf.errors.UnimplementedError

Result = tuple[tf.Tensor, dict[int, tf.Tensor]]


class Body(NamedTuple):
    """One layer as a function of its input, of tensors that all layers share, and of its variables' values."""

    template: keras.layers.Layer
    weights: list[keras.Variable]  # those that are learned
    stacks: list[keras.Variable]  # these, of all layers
    state: list[keras.Variable]  # the others: statistics, then seeds
    training: bool
    arguments: list[Any]  # the mask (or None) and the keyword arguments

    @property
    def shared(self) -> list[tf.Tensor]:
        """The tensors among the arguments."""
        return [t for t in tf.nest.flatten(self.arguments) if tf.is_tensor(t)]

    def __call__(self, i, x, shared, weights, state):
        """The output of layer `i`, and by its place the new value of each state that the layer assigns."""
        shared, name = iter(shared), stackable.called(self.template)
        mask, kwargs = tf.nest.map_structure(lambda t: next(shared) if tf.is_tensor(t) else t, self.arguments)
        scope = keras.StatelessScope(collect_losses=True)
        for value in (*zip(self.weights, weights, strict=True), *zip(self.state, state, strict=True)):
            # Not as the scope's argument: in an outer layer's autocast scope Keras would round it there.
            scope.add_update(value)
        with scope, rounded_layer(zip(self.weights, self.stacks, strict=True), i):
            set_keras_mask(x, mask)
            with naming(f"{name}, called with x {_spec(x)} and {list(kwargs)}", *OF_LAYERS):
                y = self.template(x, training=self.training, **kwargs)
        if not tf.is_tensor(y) or y.dtype != x.dtype or not y.shape.is_compatible_with(x.shape):
            raise ValueError(
                f"{name} maps {_spec(x)} to {_spec(y)}: a LayerStack feeds each layer's output to the next, so it must "
                "be one tensor of the input's shape and dtype."
            )
        if mask is not None and get_keras_mask(y) is not mask:
            raise ValueError(f"{name} changes its input's mask, which a LayerStack passes to every layer as it is.")
        if scope.losses:
            raise ValueError(
                f"{name} adds losses (`add_loss` or an activity regularizer): add them outside the LayerStack."
            )
        y.set_shape(x.shape)
        after = [scope.get_current_value(v) for v in self.state]
        return y, {k: new for k, (new, old) in enumerate(zip(after, state, strict=True)) if new is not old}


def unrolled(body: Body, depth: int, x: tf.Tensor, weights: list[tf.Tensor], state: list[tf.Tensor]) -> Result:
    """`looped` as plain calls and plain autodiff."""
    states = []
    for i in range(depth):
        x, after = body(i, x, body.shared, [w[i] for w in weights], [s[i] for s in state])
        states.append(after)
    return x, {k: tf.stack([after[k] for after in states]) for k in states[0]}


def looped(body: Body, depth: int, x: tf.Tensor, weights: list[tf.Tensor], state: list[tf.Tensor]) -> Result:
    """The last layer's output, and by its place the new value of each stacked state that the layers assign."""
    accumulators = {k: found for k, v in enumerate(body.stacks) if (found := accumulator_of(v.value))}
    assigned: set[int] = set()  # known once the body has been traced

    @custom_gradient
    def run(x, shared, weights):
        def forward(i, x, inputs, states):
            before = _at(i, state)
            y, after = body(i, x, shared, _at(i, weights), before)
            assigned.update(after)
            return [y, inputs.write(i, x), [s.write(i, after.get(k, before[k])) for k, s in enumerate(states)]]

        # An eager tape would keep what the loop computes.
        with record.stop_recording():
            inputs = _buffer(x.dtype, [depth, *x.shape])
            y, inputs, states = loop(depth, forward, [x, inputs, [_buffer(s.dtype, s.shape) for s in state]])
            inputs, *after = [b.stack() for b in (inputs, *states)]

        def gradient(dy, *_, variables=None):
            if variables:
                raise ValueError(
                    f"{stackable.called(body.template)} uses variables that are not its own, so that they get no "
                    f"gradient: {[v.name for v in variables]}. Pass them to the LayerStack's call by keyword."
                )
            floating = [t for t in shared if t.dtype.is_floating]

            def backward(i, dy, sums, buffers, totals):
                layer = depth - 1 - i
                x, own_weights = tf.gather(inputs, layer), _at(layer, weights)
                sources = [x, floating, own_weights]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    y, _ = body(layer, x, shared, own_weights, _at(layer, state))
                gradients = tape.gradient(y, sources, dy, unconnected_gradients=tf.UnconnectedGradients.ZERO)
                dx, d_floating, d_weights = tf.nest.map_structure(tf.convert_to_tensor, gradients)
                sums = [s + tf.cast(g, s.dtype) for s, g in zip(sums, d_floating, strict=True)]
                buffers = [b.write(layer, g) for b, g in zip(buffers, d_weights, strict=True)]
                return [dx, sums, buffers, {k: _add_at(layer, total, d_weights[k]) for k, total in totals.items()}]

            sums = [tf.zeros_like(t, accumulator_dtype(t.dtype)) for t in floating]
            buffers = [_buffer(w.dtype, w.shape) for w in weights]
            totals = {k: accumulator.total for k, accumulator in accumulators.items()}
            dx, sums, buffers, totals = loop(depth, backward, [dy, sums, buffers, totals])
            sums = iter(sums)
            d_shared = [tf.cast(next(sums), t.dtype) if t.dtype.is_floating else None for t in shared]
            d_inputs = first_order([dx, *d_shared, *(b.stack() for b in buffers)], "A LayerStack")
            for k, total in totals.items():
                accumulators[k].note(d_inputs[k - len(weights)], total)
            return d_inputs

        return (y, *after), gradient

    y, *after = run(x, body.shared, weights)
    return y, {k: after[k] for k in assigned}


def _at(i: tf.Tensor, stacks: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.gather(stack, i) for stack in stacks]


def _add_at(i: tf.Tensor, total: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    part = tf.cast(gradient, total.dtype)[tf.newaxis]
    return dynamic_add_slice(total, part, [i, *[0] * gradient.shape.rank])


def _buffer(dtype: tf.DType, shape: Sequence[int | None]) -> tf.TensorArray:
    """A stack that a loop writes in place."""
    return tf.TensorArray(dtype, shape[0], element_shape=shape[1:])


def _spec(value: Any) -> str:
    return f"{value.dtype.name} {value.shape}" if tf.is_tensor(value) else repr(value)
