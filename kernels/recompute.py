"""Calls functions of tensors whose gradients recompute values, instead of keeping them."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import keras
import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checkpoint_name import collected_names
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.gradients import OfferedTotal
from fastaccum.kernels.hoisted_casts import allow_outer_casts, stateless_scope
from fastaccum.kernels.recomputed_function import (
    DRAWS,
    Gradient,
    Policy,
    RecomputedFunction,
    Values,
    require_policy,
)
from fastaccum.kernels.trace_context import accumulator_of
from fastaccum.kernels.xla_ops import in_xla

R = TypeVar("R")

# How an operation that assigns a variable combines the old value with its operand, by the
# operation's type; None where the operand replaces the old value.
_ASSIGNS = {
    "AssignVariableOp": None,
    "AssignAddVariableOp": tf.add,
    "AssignSubVariableOp": tf.subtract,
}


@tf.autograph.experimental.do_not_convert
def recomputed(
    function: Callable[..., R],
    # nests of tensors, of any dtypes, and of other values; Keras masks on them go in and come out
    *inputs: object,
    policy: str | Sequence[str] = "nothing_saveable",  # by the words of `LayerStack`
    # called by the function: losses that they add are handed on
    layers: Sequence[keras.layers.Layer] = (),
) -> R:
    """Calls `function(*inputs)` and keeps for the gradient only the values that `policy` names.

    The backward pass computes the others again (Chen et al., 2016,
    https://arxiv.org/abs/1604.06174) from the inputs and the variables as they were, once the
    gradients of the outputs are there. An optimization barrier ties the two, or XLA would take both
    computations for one. So the gradients are the same, to rounding, and so are random numbers: of
    those from TensorFlow's own generators, what is made of them is kept. A variable that the
    function assigns is assigned once.

    That is so in a graph that XLA compiles and a tape records, as a train step's does. Elsewhere
    this is `function(*inputs)`. Memory is saved on a GPU; on a CPU XLA drops the barrier, and
    neither memory nor time changes.

    The function is traced once, and may read variables and tensors from outside. ValueError is
    raised if the policy is none or names no value; or if a loop, a branch or a function within
    assigns a variable, or draws random numbers that no variable's value determines.

    >>> w = tf.Variable(3.0)
    >>> @tf.function(jit_compile=True)
    ... def gradient(x):
    ...     with tf.GradientTape() as tape:
    ...         y = recomputed(lambda x: tf.tanh(w * x), x)
    ...     return tape.gradient(y, w)
    >>> round(float(gradient(tf.constant(0.5))), 4)
    0.0904
    """
    policy = require_policy(policy)
    if policy == "everything_saveable":
        return function(*inputs)
    is_differentiated = not tf.executing_eagerly() and private.record.could_possibly_record()
    if not is_differentiated or not in_xla():
        return function(*inputs)

    block = _Block(function, inputs, list(layers))
    if policy != "nothing_saveable":
        block.keep(policy)
    values = block.read()
    accumulators: list[OfferedTotal | None] = []
    if has_gpu():
        accumulators = block.accumulators()
    with private.record.stop_recording():
        y, kept = block.forward(values)

    @custom_gradient
    def run(y, inputs, values):
        def gradient(*dy):
            gradients = block.backward(list(dy), values, kept)
            if has_gpu():
                gradients = _in_turn(gradients, len(inputs), accumulators)
            _refuse_second_derivatives(gradients, [*inputs, *values, *dy])
            # The outputs come from the copy, whose gradients are computed here.
            return [None] * len(y) + gradients

        return [tf.identity(t) for t in y], gradient

    return block.packed(run(y, block.outer_inputs, values))


class _Capture(NamedTuple):
    """A tensor from outside of a traced graph and the placeholder that stands for it within."""

    outer: tf.Tensor
    inner: tf.Tensor


class _Place(NamedTuple):
    """A place in a list or dict of a layer where a tensor of the traced graph is stored."""

    holder: Any
    key: Any

    @property
    def value(self) -> tf.Tensor:
        return self.holder[self.key]


class _Outputs(NamedTuple):
    """Everything that a function gives out while it is traced: tensors and other values."""

    nest: Any  # as the function returns it
    flat: list[object]  # the tensors and other values of the nest
    masks: list[tf.Tensor | None]  # the Keras masks of its values, composites taken as one
    places: list[_Place]  # where layers store tensors, such as losses

    def tensors(self) -> list[tf.Tensor]:
        stored = [place.value for place in self.places]
        return [value for value in [*self.flat, *self.masks, *stored] if _is_tensor(value)]


class _Block(RecomputedFunction, Generic[R]):
    """Function traced for `outer_inputs`: the tensors that it is passed or takes from outside."""

    def __init__(
        self, function: Callable[..., R], inputs: Sequence, layers: list[keras.layers.Layer]
    ):
        self._layers = layers
        flat = tf.nest.flatten(inputs, expand_composites=True)
        masks = _masks_of(inputs)
        passed = [value for value in [*flat, *masks] if _is_tensor(value)]
        floating = [t for t in passed if _is_floating(t)]

        def traced(*tensors):
            graph = tf.compat.v1.get_default_graph()
            placeholders = iter(tensors)

            def placed(value):
                if not _is_tensor(value):
                    return value
                if _is_floating(value):
                    return next(placeholders)
                # It is captured, so that an attention mask can be followed to what makes it
                # outside.
                return graph.capture(value)

            placed_flat = [placed(value) for value in flat]
            placed_masks = [placed(mask) for mask in masks]
            arguments = tf.nest.pack_sequence_as(inputs, placed_flat, expand_composites=True)
            _set_masks(arguments, placed_masks)
            return self._collected(function(*arguments))

        with collected_names() as names, allow_outer_casts():
            specs = [tf.TensorSpec.from_tensor(t) for t in floating]
            concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        graph = concrete.graph

        captures = [_Capture(outer, inner) for outer, inner in graph.captures]
        self._handles = [capture for capture in captures if capture.inner.dtype == tf.resource]
        captured = [capture for capture in captures if capture.inner.dtype != tf.resource]
        self.outer_inputs = [*floating, *[capture.outer for capture in captured]]
        placeholders = graph.inputs[: len(floating)]
        self._inputs = [*placeholders, *[capture.inner for capture in captured]]
        passed_ids = {id(t) for t in passed}
        roots = []
        for inner, outer in zip(self._inputs, self.outer_inputs, strict=True):
            if id(outer) in passed_ids:
                roots.append(inner)

        self._variables = {id(v.handle): v for v in graph.variables}
        # By the name of a variable's handle: what is read of it first, and what is assigned to it
        # last.
        self._read: dict[str, tf.Tensor] = {}
        self._assigned: dict[str, tf.Tensor] = {}
        same = self._follow_state(graph)
        self._states = []
        for handle in self._handles:
            if id(handle.outer) in self._variables or handle.inner.name in self._read:
                self._states.append(handle)

        super().__init__(
            concrete,
            names,
            roots,
            targets=[t for t in graph.outputs if _is_floating(t)],
            sources=self._differentiable(),
            same=same,
        )
        self.residuals = self._with_draws()

    def _differentiable(self) -> list[tf.Tensor | None]:
        """Returns the inputs, then the handles of variables; None where no gradient exists."""
        sources = []
        for t in self._inputs:
            sources.append(t if _is_floating(t) else None)
        for state in self._states:
            value = self._read.get(state.inner.name)
            has_gradient = value is None or _is_floating(value)
            sources.append(state.inner if has_gradient else None)
        return sources

    def keep(self, policy: Policy) -> None:
        """Chooses the `residuals` by a policy, and adds what is made of random numbers."""
        super().keep(policy)
        self.residuals = self._with_draws()

    def _with_draws(self) -> list[tf.Tensor]:
        """Adds what is made of numbers from TensorFlow's own generators to the residuals.

        The next draw of such a generator would give other numbers.
        """
        kept = {t.name: t for t in self.residuals}
        for op in self._graph.get_operations():
            if op.type not in DRAWS:
                continue
            for drawn in op.outputs:
                t = self._smallest_made_of(drawn)
                kept[t.name] = t
        return list(kept.values())

    def _smallest_made_of(self, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the smallest tensor that holds all that is used of a drawn one.

        Of a dropout's numbers these are the bools whether they are above the rate: a quarter of the
        bytes.
        """
        t = drawn
        smallest = drawn
        consumers = t.consumers()
        while len(consumers) == 1 and len(consumers[0].outputs) == 1:
            consumer = consumers[0]
            if any(operand.name in self._varying for operand in consumer.inputs):
                break
            t = consumer.outputs[0]
            if t.dtype.size <= smallest.dtype.size and t.shape == smallest.shape:
                smallest = t
            consumers = t.consumers()
        return smallest

    def _follow_state(self, graph: tf.Graph) -> dict[str, tf.Tensor]:
        """Finds each variable's value wherever it is read, so that no copy reads or assigns one.

        Returns the values that stand in for later reads, by the names of what these reads give.
        """
        same: dict[str, tf.Tensor] = {}
        used_elsewhere: dict[str, tf.Operation] = {}
        handles = {inner.name: outer for outer, inner in self._handles}
        for op in graph.get_operations():
            used = [t.name for t in op.inputs if t.name in handles]
            if not used:
                continue
            name = used[0]
            if op.type == "ReadVariableOp":
                value = self._assigned.get(name, self._read.get(name))
                if value is None:
                    self._read[name] = op.outputs[0]
                else:
                    same[op.outputs[0].name] = value
            elif op.type in _ASSIGNS:
                self._assigned[name] = self._combined(op, name)
            else:
                _, written = private.get_read_write_resource_inputs(op)
                if written:
                    raise ValueError(self._untraceable(op, handles, [t.name for t in written]))
                for used_name in used:
                    used_elsewhere[used_name] = op

        for name in used_elsewhere.keys() & self._assigned.keys():
            raise ValueError(self._untraceable(used_elsewhere[name], handles, [name]))
        return same

    def _combined(self, op: tf.Operation, name: str) -> tf.Tensor:
        """Returns the value that a variable has after an operation that assigns it."""
        operand = op.inputs[1]
        combine = _ASSIGNS[op.type]
        if combine is None:
            return operand
        with op.graph.as_default(), tf.control_dependencies(None):
            if name not in self._assigned and name not in self._read:
                self._read[name] = tf.raw_ops.ReadVariableOp(
                    resource=op.inputs[0], dtype=operand.dtype
                )
            before = self._assigned.get(name, self._read.get(name))
            return combine(before, operand)

    def _untraceable(
        self, op: tf.Operation, handles: dict[str, tf.Tensor], names: list[str]
    ) -> str:
        """Formats an error about the variables whose handles have these names."""
        variables = []
        for name in names:
            if name in handles:
                variable = self._variables.get(id(handles[name]))
                if variable is not None:
                    variables.append(variable.name)
        if not variables:
            variables = names
        return (
            f"What is to be computed again assigns {variables}, which {op.name!r} ({op.type}) "
            "reads or writes in a loop, a branch or a function of its own, so that it would not "
            "start from the same value: leave that layer out of what is recomputed."
        )

    def _collected(self, outputs: R) -> list[tf.Tensor]:
        """Returns the tensors that the function gives out while it is traced.

        These are the ones that it returns, their masks, and what layers store.
        """
        self._outputs = _Outputs(
            nest=outputs,
            flat=tf.nest.flatten(outputs, expand_composites=True),
            masks=_masks_of(outputs),
            places=_places_of_graph(self._layers, tf.compat.v1.get_default_graph()),
        )
        return self._outputs.tensors()

    def packed(self, y: Sequence[tf.Tensor]) -> R:
        """Packs floating tensors into what the function returns."""
        floating = iter(y)
        tensors = []
        for t in self._copied_outputs:
            tensors.append(next(floating) if _is_floating(t) else t)

        remaining = iter(tensors)
        outputs = self._outputs
        flat = [next(remaining) if _is_tensor(value) else value for value in outputs.flat]
        masks = [next(remaining) if _is_tensor(mask) else mask for mask in outputs.masks]
        for place, value in zip(outputs.places, remaining, strict=True):
            place.holder[place.key] = value
        nest = tf.nest.pack_sequence_as(outputs.nest, flat, expand_composites=True)
        _set_masks(nest, masks)
        return nest

    def read(self) -> list[tf.Tensor]:
        """Reads each of the variables once."""
        values = []
        for outer, inner in self._states:
            if id(outer) in self._variables:
                value = tf.convert_to_tensor(self._variables[id(outer)])
            else:  # one that is only added to is known by its handle alone
                dtype = self._read[inner.name].dtype
                value = tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype)
            values.append(value)
        return values

    def accumulators(self) -> list[OfferedTotal | None]:
        """Returns the accumulators of the variables' gradients, where the step offers them."""
        return [accumulator_of(self._variables.get(id(state.outer))) for state in self._states]

    def _fed(self, values: list[tf.Tensor]) -> Values:
        """Returns the outer inputs and the variables' values, by the names of what they feed."""
        fed = self.feed(self._inputs, self.outer_inputs)
        for state, value in zip(self._states, values, strict=True):
            name = state.inner.name
            if name in self._read:
                fed[self._read[name].name] = value
        return fed

    @property
    def _kept(self) -> list[tf.Tensor]:
        """The residuals beside the roots."""
        return [t for t in self.residuals if t.name not in self._root_names]

    def forward(self, values: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Copies the forward pass: the floating outputs and what is kept; assigns the variables."""
        assigned_handles = [
            handle for handle in self._handles if handle.inner.name in self._assigned
        ]
        assigned_values = [self._assigned[handle.inner.name] for handle in assigned_handles]
        state_types = {"ReadVariableOp", *_ASSIGNS}
        effects = [op for op in self._graph.control_outputs if op.type not in state_types]
        fetches = [self._graph.outputs, self._kept, assigned_values]
        self._copied_outputs, kept, new_values = self.copy(
            "forward", fetches, self._fed(values), effects
        )
        for handle, value in zip(assigned_handles, new_values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle.outer, value=value)
        return [t for t in self._copied_outputs if _is_floating(t)], kept

    def backward(
        self, dy: list[tf.Tensor], values: list[tf.Tensor], kept: list[tf.Tensor]
    ) -> list[Gradient]:
        """Copies the gradients of the outer inputs, then of the variables."""
        reads = set()
        for state in self._states:
            if state.inner.name in self._read:
                reads.add(self._read[state.inner.name].name)

        def tied(fed):
            # Sizes among the integers have to stay known; seeds are tied too, or the numbers drawn
            # would be kept.
            tied_names = []
            for name, t in fed.items():
                if _is_floating(t) or name in reads or _is_data(t):
                    tied_names.append(name)
            by_id = {id(fed[name]): fed[name] for name in tied_names}
            if not by_id:
                return {}
            barred = private.xla.optimization_barrier(*by_id.values())
            barred_by_id = dict(zip(by_id, barred, strict=True))
            return {name: barred_by_id[id(fed[name])] for name in tied_names}

        fed = {**self._fed(values), **self.feed(self._kept, kept)}
        gradients = []
        for gradient in self.gradients(dy, fed, tied):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = _Rows(gradient.values, gradient.indices, gradient.dense_shape)
            gradients.append(gradient)
        return gradients


def _places_of_graph(layers: Sequence[keras.layers.Layer], graph: tf.Graph) -> list[_Place]:
    """Returns where layers, and the scope around them, have stored tensors of a graph."""
    holders: list[Any] = []
    for layer in layers:
        for value in vars(layer).values():
            if isinstance(value, (list, dict)):
                holders.append(value)
    holders += [vars(layer) for layer in layers]
    holders += [private.eager_losses(layer, None) for layer in layers]
    scope = stateless_scope()
    holders += [getattr(scope, "losses", None), getattr(scope, "state_mapping", None)]

    places = []
    distinct = {id(holder): holder for holder in holders if holder}
    for holder in distinct.values():
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            value = holder[key]
            if tf.is_symbolic_tensor(value) and value.graph is graph:
                places.append(_Place(holder, key))
    return places


def _in_turn(
    gradients: list[Gradient], count: int, accumulators: list[OfferedTotal | None]
) -> list[Gradient]:
    """Makes the first `count` gradients wait until accumulators have had the others added.

    XLA would put off the weights' gradients, and hold what each is computed from. No barrier is
    left when it orders operations, but an operand is: 0 times an element of each sum, which is 0 in
    every step that is not skipped.
    """
    d_inputs = gradients[:count]
    d_variables = gradients[count:]

    zeros = []
    for gradient, accumulator in zip(d_variables, accumulators, strict=True):
        # One without an accumulator may be that of a frozen weight, which nothing needs.
        if isinstance(gradient, tf.Tensor) and accumulator is not None:
            total = accumulator.total + tf.cast(gradient, accumulator.total.dtype)
            accumulator.note(gradient, total)
            element = tf.reshape(total[(slice(1),) * total.shape.rank], [])
            zeros.append(tf.cast(0.0 * element, tf.float32))
    if not zeros:
        return gradients

    zero = tf.add_n(zeros)
    waiting = []
    for gradient in d_inputs:
        if isinstance(gradient, tf.Tensor):
            gradient = gradient + tf.cast(zero, gradient.dtype)
        waiting.append(gradient)
    return [*waiting, *d_variables]


class _Rows(tf.IndexedSlices):
    """Gradient of some rows that a custom gradient returns with their indices, not values alone."""

    __composite_gradient__ = types.SimpleNamespace(
        get_gradient_components=lambda value: value,
        replace_gradient_components=lambda value, components: components,
    )


def _refuse_second_derivatives(gradients: Sequence[Gradient], sources: Sequence[tf.Tensor]) -> None:
    """Raises where a tape asks for second derivatives.

    To a tape the copies are constant, so they would be wrong.
    """

    def refuse(*_):
        raise LookupError("What is computed again has no second derivatives: compute it plainly.")

    components = tf.nest.flatten(gradients, expand_composites=True)
    tensors = [t for t in components if t is not None]
    private.record.record_operation("recomputed", tensors, list(sources), refuse)


def _masks_of(nest: object) -> list[tf.Tensor | None]:
    """Returns the Keras mask of each value of a nest; None where it has none."""
    masks = []
    for value in tf.nest.flatten(nest):
        mask = None
        if tf.is_tensor(value):
            mask = private.keras_mask(value, None)
        masks.append(mask)
    return masks


def _set_masks(nest: object, masks: Sequence[tf.Tensor | None]) -> None:
    for t, mask in zip(tf.nest.flatten(nest), masks, strict=True):
        if mask is not None:
            private.keras_mask.set(t, mask)


def _is_tensor(value: object) -> bool:
    return isinstance(value, tf.Tensor)


def _is_floating(t: tf.Tensor) -> bool:
    return t.dtype.is_floating or t.dtype.is_complex


def _is_data(t: tf.Tensor) -> bool:
    return t.dtype not in (tf.string, tf.resource, tf.variant) and (t.shape.rank or 0) > 1
