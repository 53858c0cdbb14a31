"""Loops over a stack of layers: one forward, which keeps the residuals that the policy names, and
one backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels import private, stackable
from fastaccum.kernels.checkpoint_name import collected_names
from fastaccum.kernels.checks import naming
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import device_memory, has_gpu
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.recomputed_function import Nest, Policy, RecomputedFunction
from fastaccum.kernels.rounded import allow_outer_casts, rounded_layer
from fastaccum.kernels.trace_context import accumulator_of
from fastaccum.kernels.xla_ops import dynamic_add_slice, first_order, loop, unfilled

# What layers raise, beside TypeError and ValueError, of an input that they cannot take.
OF_LAYERS = IndexError, AttributeError, NotImplementedError, tf.errors.UnimplementedError

# the `policy` and `unroll` of a LayerStack
Form: TypeAlias = "tuple[Policy, bool | Literal['auto']]"
Tensors = list[tf.Tensor]
Result = tuple[tf.Tensor, dict[int, tf.Tensor]]


class Body(NamedTuple):
    """One layer as a function of its input, of tensors that all layers share, and of its variables'
    values.
    """

    template: keras.layers.Layer
    weights: list[keras.Variable]  # those that are learned
    stacks: list[keras.Variable]  # these, of all layers
    state: list[keras.Variable]  # the others: statistics, then seeds
    training: bool
    arguments: list[object]  # the mask (or None) and the keyword arguments

    @property
    def shared(self) -> Tensors:
        """The tensors among the arguments."""
        return [t for t in tf.nest.flatten(self.arguments) if tf.is_tensor(t)]

    def __call__(self, i, x, shared, weights, state):
        """Returns the output of layer `i` and, by its place, the new value of each state that the
        layer assigns.
        """
        shared, name = iter(shared), stackable.describe(self.template)
        mask, kwargs = tf.nest.map_structure(
            lambda t: next(shared) if tf.is_tensor(t) else t, self.arguments
        )
        scope = keras.StatelessScope(collect_losses=True)
        for value in (
            *zip(self.weights, weights, strict=True),
            *zip(self.state, state, strict=True),
        ):
            # Not as the scope's argument: in an outer layer's autocast scope Keras would round it
            # there.
            scope.add_update(value)
        with rounded_layer(zip(self.weights, self.stacks, strict=True), i, scope):
            private.keras_mask.set(x, mask)
            with naming(f"{name}, called with x {_spec(x)} and {list(kwargs)}", *OF_LAYERS):
                y = self.template(x, training=self.training, **kwargs)
        if not tf.is_tensor(y) or y.dtype != x.dtype or not y.shape.is_compatible_with(x.shape):
            raise ValueError(
                f"{name} maps {_spec(x)} to {_spec(y)}: a LayerStack's layer must return one "
                "tensor, of its input's shape and dtype."
            )
        if mask is not None and private.keras_mask(y, None) is not mask:
            raise ValueError(
                f"{name} changes its input's mask, which a LayerStack passes to every layer as "
                "it is."
            )
        if scope.losses:
            raise ValueError(
                f"{name} adds losses (`add_loss` or an activity regularizer): add them outside "
                "the LayerStack."
            )
        for variable, value in zip(self.weights, weights, strict=True):
            if scope.get_current_value(variable) is not value:
                raise ValueError(
                    f"{name} assigns {variable.path!r}, which is trained: a LayerStack would "
                    "lose it."
                )
        y.set_shape(x.shape)
        after = [scope.get_current_value(v) for v in self.state]
        return y, {
            k: new for k, (new, old) in enumerate(zip(after, state, strict=True)) if new is not old
        }


class LayerGraph(RecomputedFunction):
    """A `Body` traced once for specs of its arguments, to be copied into loops; `after` are the new
    states.
    """

    def __init__(self, body: Body, specs: list[Nest]):
        with collected_names() as names:
            function = tf.function(body, autograph=False).get_concrete_function(*specs)
        self._y, self.after = function.structured_outputs
        self._inputs = tf.nest.pack_sequence_as(
            specs, function.inputs[: len(tf.nest.flatten(specs))]
        )
        _, x, shared, weights, _ = self._inputs
        super().__init__(function, names, [x], [self._y], [x, *_floating(shared), *weights])

    @property
    def keeps_input(self) -> bool:
        """True if x is a residual, which is then the first."""
        return any(t.name == self._inputs[1].name for t in self.residuals)

    @property
    def residual_bytes(self) -> float:
        """Bytes of one layer's residuals; infinite where a size is not known."""
        sizes = [math.inf if None in t.shape else math.prod(t.shape) for t in self.residuals]
        return sum(t.dtype.size * size for t, size in zip(self.residuals, sizes, strict=True))

    def forward(self, *arguments: Any) -> Any:
        """Copies the forward pass: y, the new states and the residuals."""
        fetches = [self._y, self.after, self.residuals]
        return self.copy(
            "forward", fetches, self.feed(self._inputs, arguments), self._graph.control_outputs
        )

    def backward(self, dy: tf.Tensor, residuals: Tensors, *arguments: Any) -> Tensors:
        """Copies the gradients of x, the floating shared tensors and the weights; takes `forward`'s
        arguments but x.
        """
        number, _, *others = self._inputs
        found = self.gradients(
            [dy], self.feed([number, *others, self.residuals], [*arguments, residuals])
        )
        _, shared, weights, _ = arguments
        like = [dy, *_floating(shared), *weights]
        return [
            tf.zeros_like(t) if g is None else tf.convert_to_tensor(g)
            for t, g in zip(like, found, strict=True)
        ]


def run_plainly(
    body: Body, depth: int, form: Form, x: tf.Tensor, weights: Tensors, state: Tensors
) -> Result:
    """Computes `run_loops` as plain calls with plain autodiff, which keeps everything."""
    states = []
    for i, (own_weights, own_state) in enumerate(
        zip(_layers(depth, weights), _layers(depth, state), strict=True)
    ):
        x, after = body(i, x, body.shared, own_weights, own_state)
        states.append(after)
    return x, {k: tf.stack([after[k] for after in states]) for k in states[0]}


def run_loops(
    body: Body, depth: int, form: Form, x: tf.Tensor, weights: Tensors, state: Tensors
) -> Result:
    """Computes the last layer's output and, by its place, each new stacked state, in a loop each
    way or unrolled.
    """
    accumulators = {
        k: found for k, v in enumerate(body.stacks) if (found := accumulator_of(v.value))
    }
    assigned: list[int] = []

    @custom_gradient
    def run(x, shared, weights):
        specs = [
            tf.TensorSpec([], tf.int32),
            *_specs([x, shared]),
            *_specs([weights, state], axis=0),
        ]
        with allow_outer_casts():
            layer = LayerGraph(body, specs)
        unroll = body.training and _choose(layer, form, depth, weights)
        repeat, buffer = (
            (_repeat, lambda dtype, shape: UnrolledBuffer()) if unroll else (loop, _buffer)
        )
        assigned.extend(layer.after)

        # Inputs that are kept lie where the layer before has written its output: no layer copies
        # its own.
        chained = body.training and layer.keeps_input

        def forward(i, x, kept, states):
            if chained:
                x, inputs = x.read(i), x
            y, after, values = layer.forward(i, x, shared, _at(i, weights), _at(i, state))
            y, values = (inputs.write(i + 1, y), values[1:]) if chained else (y, values)
            return [y, _write(i, kept, values), _write(i, states, list(after.values()))]

        # An eager tape would keep what the loop computes.
        with private.record.stop_recording():
            start = buffer(x.dtype, [depth + 1, *x.shape]).write(0, x) if chained else x
            buffers = [buffer(t.dtype, [depth, *t.shape]) for t in layer.residuals[chained:]]
            states = [buffer(t.dtype, [depth, *t.shape]) for t in layer.after.values()]
            y, buffers, states = repeat(depth, forward, [start, buffers, states])
            kept, after = [_read_all(b) for b in buffers], [b.stack() for b in states]
            if chained:
                y, kept = y.read(depth), [_read_all(y), *kept]

        def gradient(dy, *_, variables=None):
            if variables:
                raise ValueError(
                    f"{stackable.describe(body.template)} uses variables that are not its own, "
                    f"so that they get no gradient: {[v.name for v in variables]}. Pass them to "
                    "the LayerStack's call by keyword."
                )
            floating = _floating(shared)

            def backward(i, dy, sums, buffers, totals):
                at = depth - 1 - i
                dx, *found = layer.backward(
                    dy, _at(at, kept), at, shared, _at(at, weights), _at(at, state)
                )
                d_floating, d_weights = found[: len(floating)], found[len(floating) :]
                sums = [s + tf.cast(g, s.dtype) for s, g in zip(sums, d_floating, strict=True)]
                totals = {k: _add_at(at, total, d_weights[k]) for k, total in totals.items()}
                return [dx, sums, _write(at, buffers, d_weights), totals]

            sums = [tf.zeros_like(t, accumulator_dtype(t.dtype)) for t in floating]
            buffers = [buffer(w.dtype, w.shape) for w in weights]
            totals = {k: accumulator.total for k, accumulator in accumulators.items()}
            dx, sums, buffers, totals = repeat(depth, backward, [dy, sums, buffers, totals])
            sums = iter(sums)
            d_shared = [
                tf.cast(next(sums), t.dtype) if t.dtype.is_floating else None for t in shared
            ]
            d_inputs = first_order([dx, *d_shared, *(b.stack() for b in buffers)], "A LayerStack")
            for k, total in totals.items():
                accumulators[k].note(d_inputs[k - len(weights)], total)
            return d_inputs

        return (y, *after), gradient

    y, *after = run(x, body.shared, weights)
    return y, dict(zip(assigned, after, strict=True))


def _choose(layer: LayerGraph, form: Form, depth: int, weights: Tensors) -> bool:
    """Chooses what is kept, and whether the loops are unrolled."""
    # In training each weight has its gradient and, under Adam, two slots.
    budget = (device_memory() - 4 * sum(w.dtype.size * w.shape.num_elements() for w in weights)) / 2
    policy, unroll = form
    if unroll:
        layer.keep("everything_saveable")
        if unroll is True or (has_gpu() and depth * layer.residual_bytes <= budget):
            return True
    layer.keep(policy)
    if policy == "auto" and depth * layer.residual_bytes > budget:
        layer.keep("nothing_saveable")
    return False


def _floating(tensors: Sequence[tf.Tensor]) -> Tensors:
    return [t for t in tensors if t.dtype.is_floating]


def _specs(tensors: Nest, axis: int | None = None) -> Nest:
    """Returns the specs of tensors, or of one layer's part of stacked tensors."""
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape if axis is None else t.shape[1:], t.dtype), tensors
    )


def _layers(depth: int, stacks: Tensors) -> list[tuple[tf.Tensor, ...]]:
    return (
        list(zip(*(tf.unstack(stack) for stack in stacks), strict=True)) if stacks else [()] * depth
    )


def _write(i: int | tf.Tensor, buffers: list[Buffer], values: Tensors) -> list[Buffer]:
    return [buffer.write(i, value) for buffer, value in zip(buffers, values, strict=True)]


def _at(i: int | tf.Tensor, stacks: Sequence[tf.Tensor | UnrolledBuffer]) -> Tensors:
    if isinstance(i, int):
        return [
            stack.read(i) if isinstance(stack, UnrolledBuffer) else stack[i] for stack in stacks
        ]
    return [tf.gather(stack, i) for stack in stacks]


def _add_at(i: tf.Tensor, total: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    return dynamic_add_slice(
        total, tf.cast(gradient, total.dtype)[tf.newaxis], [i, *[0] * gradient.shape.rank]
    )


def _buffer(dtype: tf.DType, shape: Sequence[int | None]) -> tf.TensorArray:
    """Returns a stack that a loop writes in place."""
    array, memory = tf.TensorArray(dtype, shape[0], element_shape=shape[1:]), unfilled(shape, dtype)
    return array if memory is None else array.unstack(memory)


class UnrolledBuffer(dict[int, tf.Tensor]):
    """Stand-in for a `tf.TensorArray` in an unrolled loop: its values stay where they were
    computed.
    """

    def write(self, i: int, value: tf.Tensor) -> UnrolledBuffer:
        return UnrolledBuffer({**self, i: value})

    def read(self, i: int) -> tf.Tensor:
        return self[i]

    def stack(self) -> tf.Tensor:
        return tf.stack([self[i] for i in sorted(self)])


Buffer: TypeAlias = "tf.TensorArray | UnrolledBuffer"


def _read_all(buffer: Buffer) -> tf.Tensor | UnrolledBuffer:
    return buffer if isinstance(buffer, UnrolledBuffer) else buffer.stack()


def _repeat(steps: int, body: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Runs `loop` unrolled."""
    for i in range(steps):
        values = body(i, *values)
    return values


def _spec(value: Any) -> str:
    return f"{value.dtype.name} {value.shape}" if tf.is_tensor(value) else repr(value)
