"""Loops over a stack of layers: one forward, which keeps the policy's residuals, one backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checkpoint_name import collected_names
from fastaccum.kernels.checks import naming
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import device_memory, has_gpu
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.hoisted_casts import allow_outer_casts, rounded_layer
from fastaccum.kernels.recomputed_function import Gradient, Nest, Policy, RecomputedFunction
from fastaccum.kernels.trace_context import accumulator_of
from fastaccum.kernels.variable_stack import VariableStack
from fastaccum.kernels.xla_ops import dynamic_add_slice, first_order, loop, unfilled

# What layers raise, beside TypeError and ValueError, of an input that they cannot take.
OF_LAYERS = (IndexError, AttributeError, NotImplementedError, tf.errors.UnimplementedError)

Tensors = list[tf.Tensor]
Result = tuple[tf.Tensor, dict[int, tf.Tensor]]


class NotStackable(ValueError):
    """Raised for a layer that does what a stack would not do with it."""


class LoopOptions(NamedTuple):
    """A LayerStack's options: the residuals that its loops keep, and if they are unrolled."""

    policy: Policy
    unroll: bool | Literal["auto"]


class Body(NamedTuple):
    """One layer as a function of its input, of tensors that layers share, and of its variables."""

    name: str  # of the layer, for errors
    layer: Callable[..., tf.Tensor]  # called with x and the keyword arguments
    weights: list[keras.Variable]  # those that are learned
    stacks: Sequence[keras.Variable | VariableStack]  # these, of all layers
    state: list[keras.Variable]  # the others: statistics, then seeds
    training: bool  # false where no gradient is asked for
    arguments: list[object]  # the mask (or None) and the keyword arguments
    # Given the mask and what the layer returns while it is traced; may raise NotStackable.
    check: Callable[[tf.Tensor | None, tf.Tensor], None] = lambda mask, y: None

    @property
    def shared(self) -> Tensors:
        """The floating tensors among the arguments.

        Others, which have no gradient, are captured, so that an attention mask can be followed to
        what makes it outside.
        """
        return [t for t in tf.nest.flatten(self.arguments) if _is_floating(t)]

    def __call__(self, i, x, shared, weights, state):
        """Returns layer `i`'s output, and the new values of states that it assigns, by place."""
        remaining = iter(shared)
        mask, kwargs = tf.nest.map_structure(
            lambda t: next(remaining) if _is_floating(t) else t, self.arguments
        )
        scope = _LayerScope()
        # The values are not the scope's argument: in an outer layer's autocast scope Keras would
        # round them there.
        for variable, value in zip(self.weights, weights, strict=True):
            scope.add_update((variable, value))
        for variable, value in zip(self.state, state, strict=True):
            scope.add_update((variable, value))
        scope.in_call = True
        with rounded_layer(zip(self.weights, self.stacks, strict=True), i, scope):
            private.keras_mask.set(x, mask)
            with naming(f"{self.name}, called with x {_spec(x)} and {list(kwargs)}", *OF_LAYERS):
                y = self.layer(x, **kwargs)
        self._require_stackable(x, y, mask, weights, scope)
        self.check(mask, y)
        y.set_shape(x.shape)

        assigned = {}
        for k, (variable, before) in enumerate(zip(self.state, state, strict=True)):
            after = scope.get_current_value(variable)
            if after is not before:
                assigned[k] = after
        return y, assigned

    def _require_stackable(
        self,
        x: tf.Tensor,
        y: Any,
        mask: tf.Tensor | None,
        weights: Sequence[tf.Tensor],
        scope: keras.StatelessScope,  # in which the layer mapped x to y
    ) -> None:
        """Raises NotStackable for what a layer did that a stack would not do with it."""
        name = self.name
        if not tf.is_tensor(y) or y.dtype != x.dtype or not y.shape.is_compatible_with(x.shape):
            raise NotStackable(
                f"{name} maps {_spec(x)} to {_spec(y)}: a layer of a loop must return one "
                "tensor, of its input's shape and dtype."
            )
        if mask is not None and private.keras_mask(y, None) is not mask:
            raise NotStackable(
                f"{name} changes its input's mask, which a loop over layers passes to each as it "
                "is."
            )
        if scope.losses:
            raise NotStackable(
                f"{name} adds losses (`add_loss` or an activity regularizer), which a loop over "
                "layers would lose: add them outside."
            )
        for variable, value in zip(self.weights, weights, strict=True):
            if scope.get_current_value(variable) is not value:
                raise NotStackable(
                    f"{name} assigns {variable.path!r}, which is trained: a LayerStack would "
                    "lose it."
                )


class _LayerScope(keras.StatelessScope):
    """The values of a layer's variables while its call is traced."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        self.in_call = False

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if self.in_call:
            # What is read from a variable has no gradient to what was assigned to it.
            value = tf.stop_gradient(value)
        super().add_update((variable, value))


class _Arguments(NamedTuple):
    """The arguments of a `Body`: tensors, or their specs."""

    i: Any
    x: Any
    shared: Any  # a list
    weights: Any  # a list
    state: Any  # a list


class _Gradients(NamedTuple):
    """The gradients of one layer's arguments."""

    x: tf.Tensor
    shared: Tensors
    weights: Tensors


class LayerGraph(RecomputedFunction):
    """A `Body` traced once for specs of its arguments, to be copied into loops."""

    def __init__(self, body: Body, specs: _Arguments):
        with collected_names() as names:
            function = tf.function(body, autograph=False).get_concrete_function(*specs)
        y, after = function.structured_outputs
        self._y = y
        self.after = after  # the new states
        count = len(tf.nest.flatten(specs))  # captured tensors come after these
        self._inputs = tf.nest.pack_sequence_as(specs, function.inputs[:count])
        x = self._inputs.x
        sources = [x, *self._inputs.shared, *self._inputs.weights]
        super().__init__(function, names, roots=[x], targets=[y], sources=sources)

    @property
    def keeps_input(self) -> bool:
        """True if x is a residual, which is then the first."""
        return any(t.name == self._inputs.x.name for t in self.residuals)

    @property
    def reached_weights(self) -> list[bool]:
        """Tells of each weight if the layer's output depends on it."""
        count = len(self._inputs.weights)
        gradients = self._gradients.d_sources
        return [gradient is not None for gradient in gradients[len(gradients) - count :]]

    @property
    def residual_bytes(self) -> float:
        """Bytes of one layer's residuals; infinite where a size is not known."""
        total: float = 0
        for t in self.residuals:
            elements = math.inf if None in t.shape else math.prod(t.shape)
            total += t.dtype.size * elements
        return total

    def forward(self, *arguments: Any) -> Any:
        """Copies the forward pass: y, the new states and the residuals."""
        fetches = [self._y, self.after, self.residuals]
        fed = self.feed(self._inputs, arguments)
        return self.copy("forward", fetches, fed, self._graph.control_outputs)

    def backward(
        self,
        dy: tf.Tensor,
        residuals: Tensors,
        i: tf.Tensor | int,
        shared: Tensors,
        weights: Tensors,
        state: Tensors,
    ) -> _Gradients:
        """Copies the gradients of x, the shared tensors and the weights."""
        inputs = self._inputs
        fed = self.feed(
            [inputs.i, inputs.shared, inputs.weights, inputs.state, self.residuals],
            [i, shared, weights, state, residuals],
        )
        gradients = iter(self.gradients([dy], fed))  # in the order of the sources
        return _Gradients(
            x=_or_zeros(next(gradients), dy),
            shared=[_or_zeros(next(gradients), t) for t in shared],
            weights=[_or_zeros(next(gradients), t) for t in weights],
        )


def _or_zeros(gradient: Gradient, like: tf.Tensor) -> tf.Tensor:
    """Returns a gradient as a tensor, zeros where there is none."""
    return tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)


def run_plainly(
    body: Body, depth: int, options: LoopOptions, x: tf.Tensor, weights: Tensors, state: Tensors
) -> Result:
    """Computes `run_loops` as plain calls with plain autodiff, which keeps everything."""
    weights_by_layer = _layers(depth, weights)
    state_by_layer = _layers(depth, state)
    assigned_by_layer = []
    for i, (layer_weights, layer_state) in enumerate(
        zip(weights_by_layer, state_by_layer, strict=True)
    ):
        x, assigned = body(i, x, body.shared, layer_weights, layer_state)
        assigned_by_layer.append(assigned)

    stacked = {}
    for k in assigned_by_layer[0]:
        stacked[k] = tf.stack([assigned[k] for assigned in assigned_by_layer])
    return x, stacked


def run_loops(
    body: Body, depth: int, options: LoopOptions, x: tf.Tensor, weights: Tensors, state: Tensors
) -> Result:
    """Computes the last layer's output and, by place, each new stacked state.

    There is one loop each way, or the loops are unrolled.
    """
    accumulators = {}
    for k, variable in enumerate(body.stacks):
        source = variable
        if isinstance(variable, keras.Variable):
            source = variable.value
        accumulator = accumulator_of(source)
        if accumulator is not None:
            accumulators[k] = accumulator
    assigned: list[int] = []  # the places of the states that the layer assigns

    @custom_gradient
    def run(x, shared, weights):
        specs = _Arguments(
            i=tf.TensorSpec([], tf.int32),
            x=_specs(x),
            shared=_specs(shared),
            weights=_layer_specs(weights),
            state=_layer_specs(state),
        )
        with allow_outer_casts():
            layer = LayerGraph(body, specs)
        is_unrolled = body.training and _choose(layer, options, depth, weights)
        is_chained = body.training and layer.keeps_input
        assigned.extend(layer.after)
        loops = _Loops(layer, depth, is_unrolled, is_chained, shared, weights, state)

        # An eager tape would keep what the loop computes.
        with private.record.stop_recording():
            y, after, kept = loops.forward(x)

        def gradient(dy, *_, variables=None):
            if variables:
                raise ValueError(
                    f"{body.name} uses variables that are not its own, "
                    f"so that they get no gradient: {[v.name for v in variables]}. Pass them to "
                    "the LayerStack's call by keyword."
                )
            totals = {k: accumulator.total for k, accumulator in accumulators.items()}
            d_inputs, totals = loops.backward(dy, kept, totals)
            d_inputs = first_order(d_inputs, "A LayerStack")
            first_weight = len(d_inputs) - len(weights)
            for k, is_reached in enumerate(layer.reached_weights):
                if not is_reached:
                    # As in plain layers: an optimizer leaves such a weight alone.
                    d_inputs[first_weight + k] = None
                elif k in totals:
                    accumulators[k].note(d_inputs[first_weight + k], totals[k])
            return d_inputs

        return (y, *after), gradient

    y, *after = run(x, body.shared, weights)
    return y, dict(zip(assigned, after, strict=True))


def _choose(layer: LayerGraph, options: LoopOptions, depth: int, weights: Tensors) -> bool:
    """Chooses what is kept, and whether the loops are unrolled."""
    weight_bytes = sum(w.dtype.size * w.shape.num_elements() for w in weights)
    # In training each weight has its gradient and, under Adam, two slots.
    budget = (device_memory() - 4 * weight_bytes) / 2
    if options.unroll:
        layer.keep("everything_saveable")
        if options.unroll is True:
            return True
        if has_gpu() and depth * layer.residual_bytes <= budget:
            return True
    layer.keep(options.policy)
    if options.policy == "auto" and depth * layer.residual_bytes > budget:
        layer.keep("nothing_saveable")
    return False


class _Forward(NamedTuple):
    """The results of the loop forward."""

    y: tf.Tensor
    after: Tensors  # the new states, stacked
    kept: list[tf.Tensor | UnrolledBuffer]  # the residuals of all layers


class _Backward(NamedTuple):
    """The results of the loop backward."""

    d_inputs: list[tf.Tensor | None]  # of x, the shared tensors and the stacked weights
    totals: dict[int, tf.Tensor]  # the accumulators with the gradients of weights added, by place


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The two loops over a stack's layers: every turn is a copy of one layer's graph."""

    layer: LayerGraph
    depth: int
    is_unrolled: bool
    # True if the layers' inputs are kept. They lie where the layer before has written its output:
    # no layer copies its own.
    is_chained: bool
    shared: Tensors
    weights: Tensors  # stacked
    state: Tensors  # stacked

    def forward(self, x: tf.Tensor) -> _Forward:
        """Maps x through all layers, the first one first."""

        def turn(i, x, kept, states):
            if self.is_chained:
                inputs = x
                x = inputs.read(i)
            y, after, residuals = self.layer.forward(
                i, x, self.shared, _at(i, self.weights), _at(i, self.state)
            )
            if self.is_chained:
                y = inputs.write(i + 1, y)
                residuals = residuals[1:]  # the first is x
            return [y, _write(i, kept, residuals), _write(i, states, list(after.values()))]

        start = x
        residuals = self.layer.residuals
        if self.is_chained:
            start = self._buffer(x.dtype, [self.depth + 1, *x.shape]).write(0, x)
            residuals = residuals[1:]
        buffers = [self._buffer(t.dtype, [self.depth, *t.shape]) for t in residuals]
        states = [self._buffer(t.dtype, [self.depth, *t.shape]) for t in self.layer.after.values()]
        y, buffers, states = self._repeat(turn, [start, buffers, states])

        kept = [_read_all(buffer) for buffer in buffers]
        after = [buffer.stack() for buffer in states]
        if self.is_chained:
            inputs = y
            y = inputs.read(self.depth)
            kept = [_read_all(inputs), *kept]
        return _Forward(y, after, kept)

    def backward(
        self,
        dy: tf.Tensor,
        kept: list[tf.Tensor | UnrolledBuffer],
        totals: dict[int, tf.Tensor],  # accumulators of stacked weights, by place
    ) -> _Backward:
        """Computes the gradients of what the layers take, the last layer first."""

        def turn(turns_before, dy, sums, buffers, totals):
            i = self.depth - 1 - turns_before
            gradients = self.layer.backward(
                dy, _at(i, kept), i, self.shared, _at(i, self.weights), _at(i, self.state)
            )
            new_sums = []
            for total, gradient in zip(sums, gradients.shared, strict=True):
                new_sums.append(total + tf.cast(gradient, total.dtype))
            new_totals = {k: _add_at(i, total, gradients.weights[k]) for k, total in totals.items()}
            return [gradients.x, new_sums, _write(i, buffers, gradients.weights), new_totals]

        sums = [tf.zeros_like(t, accumulator_dtype(t.dtype)) for t in self.shared]
        buffers = [self._buffer(w.dtype, w.shape) for w in self.weights]
        dx, sums, buffers, totals = self._repeat(turn, [dy, sums, buffers, totals])

        d_shared = [tf.cast(total, t.dtype) for total, t in zip(sums, self.shared, strict=True)]
        d_weights = [buffer.stack() for buffer in buffers]
        return _Backward([dx, *d_shared, *d_weights], totals)

    def _repeat(self, turn: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
        if not self.is_unrolled:
            return loop(self.depth, turn, values)
        for i in range(self.depth):
            values = turn(i, *values)
        return values

    def _buffer(self, dtype: tf.DType, shape: Sequence[int | None]) -> Buffer:
        if self.is_unrolled:
            return UnrolledBuffer()
        return _array(dtype, shape)


def _is_floating(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _specs(tensors: Nest) -> Nest:
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), tensors)


def _layer_specs(stacks: Nest) -> Nest:
    """Returns the specs of one layer's part of stacked tensors."""
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), stacks)


def _layers(depth: int, stacks: Tensors) -> list[tuple[tf.Tensor, ...]]:
    """Returns each layer's part of stacked tensors."""
    if not stacks:
        return [()] * depth
    return list(zip(*(tf.unstack(stack) for stack in stacks), strict=True))


def _write(i: int | tf.Tensor, buffers: list[Buffer], values: Tensors) -> list[Buffer]:
    return [buffer.write(i, value) for buffer, value in zip(buffers, values, strict=True)]


def _at(i: int | tf.Tensor, stacks: Sequence[tf.Tensor | UnrolledBuffer]) -> Tensors:
    """Returns the parts of layer `i`, whose number is an int where the loops are unrolled."""
    if not isinstance(i, int):
        return [tf.gather(stack, i) for stack in stacks]
    values = []
    for stack in stacks:
        if isinstance(stack, UnrolledBuffer):
            values.append(stack.read(i))
        else:
            values.append(stack[i])
    return values


def _add_at(i: tf.Tensor, total: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """Returns a stacked accumulator with the gradient of layer `i` added."""
    part = tf.cast(gradient, total.dtype)[tf.newaxis]
    return dynamic_add_slice(total, part, [i, *[0] * gradient.shape.rank])


def _array(dtype: tf.DType, shape: Sequence[int | None]) -> tf.TensorArray:
    """Returns a stack that a loop writes in place."""
    array = tf.TensorArray(dtype, shape[0], element_shape=shape[1:])
    memory = unfilled(shape, dtype)
    return array if memory is None else array.unstack(memory)


class UnrolledBuffer(dict[int, tf.Tensor]):
    """Stand-in for a `tf.TensorArray` in an unrolled loop: its values stay where they are."""

    def write(self, i: int, value: tf.Tensor) -> UnrolledBuffer:
        return UnrolledBuffer({**self, i: value})

    def read(self, i: int) -> tf.Tensor:
        return self[i]

    def stack(self) -> tf.Tensor:
        return tf.stack([self[i] for i in sorted(self)])


Buffer: TypeAlias = "tf.TensorArray | UnrolledBuffer"


def _read_all(buffer: Buffer) -> tf.Tensor | UnrolledBuffer:
    return buffer if isinstance(buffer, UnrolledBuffer) else buffer.stack()


def _spec(value: Any) -> str:
    return f"{value.dtype.name} {value.shape}" if tf.is_tensor(value) else repr(value)
