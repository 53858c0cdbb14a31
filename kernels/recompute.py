"""`recomputed`: a function of tensors whose gradient recomputes its values, instead of keeping
them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.checkpoint_name import collected_names
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.gradients import Accumulator
from fastaccum.kernels.recomputed_function import (
    DRAWS,
    Gradient,
    Policy,
    RecomputedFunction,
    Values,
    require_policy,
)
from fastaccum.kernels.rounded import allow_outer_casts, stateless_scope
from fastaccum.kernels.trace_context import accumulator_of
from fastaccum.kernels.xla_ops import in_xla

R = TypeVar("R")
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
    """Calls `function(*inputs)` and keeps none of its values for the gradient but those that
    `policy` names.

    The backward pass computes the others again (Chen et al., 2016,
    https://arxiv.org/abs/1604.06174) from the inputs
    and the variables as they were, once the gradients of the outputs are there: an optimization
        barrier ties the two,
    or XLA would take both computations for one. So the gradients are the same, to rounding, and
        random numbers are: of
    those from TensorFlow's own generators, what is made of them is kept. A variable that the
    function assigns is assigned once.

    That is so in a graph that XLA compiles and a tape looks on, as a train step's does. Elsewhere
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
    differentiated = not tf.executing_eagerly() and private.record.could_possibly_record()
    if policy == "everything_saveable" or not differentiated or not in_xla():
        return function(*inputs)
    block = _Block(function, inputs, list(layers))
    if policy != "nothing_saveable":
        block.keep(policy)
    values = block.read()
    accumulators = block.accumulators() if has_gpu() else []
    with private.record.stop_recording():
        y, kept = block.forward(values)

    @custom_gradient
    def run(y, inputs, values):
        def gradient(*dy):
            found = block.backward(list(dy), values, kept)
            if has_gpu():
                found = _in_turn(found, len(inputs), accumulators)
            _refuse_second_derivatives(found, [*inputs, *values, *dy])
            return [None] * len(y) + found

        return [tf.identity(t) for t in y], gradient

    return block.packed(run(y, block.given, values))


class _Block(RecomputedFunction, Generic[R]):
    """A function traced for `given`, the tensors that it is passed, and those that it takes from
    outside.
    """

    def __init__(
        self, function: Callable[..., R], inputs: Sequence, layers: list[keras.layers.Layer]
    ):
        self._layers = layers
        flat = tf.nest.flatten(inputs, expand_composites=True)
        masks = [
            private.keras_mask(t, None) if tf.is_tensor(t) else None
            for t in tf.nest.flatten(inputs)
        ]
        passed = [t for t in [*flat, *masks] if _is_tensor(t)]
        floating = [t for t in passed if _is_floating(t)]

        def traced(*tensors):
            # Others are captured, so that an attention mask can be followed to what makes it
            # outside.
            given, capture = iter(tensors), tf.compat.v1.get_default_graph().capture
            placed = [
                (next(given) if _is_floating(t) else capture(t)) if _is_tensor(t) else t
                for t in [*flat, *masks]
            ]
            arguments = tf.nest.pack_sequence_as(
                inputs, placed[: len(flat)], expand_composites=True
            )
            _set_masks(arguments, placed[len(flat) :])
            return self._collected(function(*arguments))

        with collected_names() as names, allow_outer_casts():
            specs = [tf.TensorSpec.from_tensor(t) for t in floating]
            concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        graph = concrete.graph
        self._handles = [
            (outer, inner) for outer, inner in graph.captures if inner.dtype == tf.resource
        ]
        captured = [(outer, inner) for outer, inner in graph.captures if inner.dtype != tf.resource]
        self.given = [*floating, *(outer for outer, _ in captured)]
        self._inputs = [*graph.inputs[: len(floating)], *(inner for _, inner in captured)]
        roots = [
            t
            for t, outer in zip(self._inputs, self.given, strict=True)
            if any(outer is each for each in passed)
        ]
        self._variables = {id(v.handle): v for v in graph.variables}
        # By the name of a variable's handle: what is read of it first, and what is assigned to it
        # last.
        self._read: dict[str, tf.Tensor] = {}
        self._assigned: dict[str, tf.Tensor] = {}
        same: dict[str, tf.Tensor] = {}
        self._follow_state(graph, same)
        self._states = [
            (o, t) for o, t in self._handles if id(o) in self._variables or t.name in self._read
        ]
        sources = [t if _is_floating(t) else None for t in self._inputs]
        reads = [(t, self._read.get(t.name)) for _, t in self._states]
        sources += [t if value is None or _is_floating(value) else None for t, value in reads]
        super().__init__(
            concrete, names, roots, [t for t in graph.outputs if _is_floating(t)], sources, same
        )
        self.residuals = self._with_draws()

    def keep(self, policy: Policy) -> None:
        super().keep(policy)
        self.residuals = self._with_draws()

    def _with_draws(self) -> list[tf.Tensor]:
        """Adds what is made of numbers from TensorFlow's own generators to the residuals: the next
        draw differs.
        """
        kept = {t.name: t for t in self.residuals}
        for op in self._graph.get_operations():
            for t in op.outputs if op.type in DRAWS else ():
                smallest = t
                # Of a dropout's, whether they are above the rate: a quarter of the bytes.
                while len(after := t.consumers()) == 1 and len(after[0].outputs) == 1:
                    if {each.name for each in after[0].inputs} & self._varying:
                        break
                    (t,) = after[0].outputs
                    smallest = (
                        t
                        if t.dtype.size <= smallest.dtype.size and t.shape == smallest.shape
                        else smallest
                    )
                kept[smallest.name] = smallest
        return list(kept.values())

    def _follow_state(self, graph: tf.Graph, same: dict[str, tf.Tensor]) -> None:
        """Finds the value that every variable has where it is read, so that no copy has to read or
        to assign one.
        """
        elsewhere: dict[str, tf.Operation] = {}
        handles = {inner.name: outer for outer, inner in self._handles}
        for op in graph.get_operations():
            own = [t for t in op.inputs if t.name in handles]
            if not own:
                continue
            name = own[0].name
            if op.type == "ReadVariableOp":
                if (value := self._assigned.get(name, self._read.get(name))) is not None:
                    same[op.outputs[0].name] = value
                else:
                    self._read[name] = op.outputs[0]
            elif op.type in _ASSIGNS:
                self._assigned[name] = self._combined(op, name)
            else:
                if writes := private.get_read_write_resource_inputs(op)[1]:
                    raise ValueError(self._untraceable(op, handles, [t.name for t in writes]))
                elsewhere |= {t.name: op for t in own}
        for name in elsewhere.keys() & self._assigned.keys():
            raise ValueError(self._untraceable(elsewhere[name], handles, [name]))

    def _combined(self, op: tf.Operation, name: str) -> tf.Tensor:
        value, combine = op.inputs[1], _ASSIGNS[op.type]
        if combine is None:
            return value
        with op.graph.as_default(), tf.control_dependencies(None):
            if name not in self._assigned and name not in self._read:
                self._read[name] = tf.raw_ops.ReadVariableOp(
                    resource=op.inputs[0], dtype=value.dtype
                )
            return combine(self._assigned.get(name, self._read.get(name)), value)

    def _untraceable(
        self, op: tf.Operation, handles: dict[str, tf.Tensor], names: list[str]
    ) -> str:
        found = [self._variables.get(id(handles[name])) for name in names if name in handles]
        variables = [v.name for v in found if v is not None] or names
        return (
            f"What is to be computed again assigns {variables}, which {op.name!r} ({op.type}) "
            "reads or writes in a loop, a branch or a function of its own, so that it would not "
            "start from the same value: leave that layer out of what is recomputed."
        )

    def _collected(self, outputs: R) -> list[tf.Tensor]:
        """Returns the tensors that the function returns, their masks, and what layers store while
        it is traced.
        """
        graph = tf.compat.v1.get_default_graph()
        self._outputs = outputs
        self._flat = tf.nest.flatten(outputs, expand_composites=True)
        self._masks = [
            private.keras_mask(t, None) if tf.is_tensor(t) else None
            for t in tf.nest.flatten(outputs)
        ]
        scope = stateless_scope()
        own = [vars(layer) for layer in self._layers]
        holders: list[Any] = [
            value for each in own for value in each.values() if isinstance(value, (list, dict))
        ]
        holders += [*own, *(private.eager_losses(layer, None) for layer in self._layers)]
        holders += [getattr(scope, "losses", None), getattr(scope, "state_mapping", None)]
        holders = list({id(each): each for each in holders if each}.values())
        places = [
            (each, key)
            for each in holders
            for key in (each if isinstance(each, dict) else range(len(each)))
        ]
        self._aside = [
            (each, k)
            for each, k in places
            if tf.is_symbolic_tensor(each[k]) and each[k].graph is graph
        ]
        return [
            t
            for t in [*self._flat, *self._masks, *(place[key] for place, key in self._aside)]
            if _is_tensor(t)
        ]

    def packed(self, y: Sequence[tf.Tensor]) -> R:
        """Packs floating tensors into what the function returns."""
        floating = iter(y)
        values = iter([next(floating) if _is_floating(t) else t for t in self._found])
        flat, masks = (
            [next(values) if _is_tensor(t) else t for t in ts] for ts in (self._flat, self._masks)
        )
        for (place, key), value in zip(self._aside, values, strict=True):
            place[key] = value
        outputs = tf.nest.pack_sequence_as(self._outputs, flat, expand_composites=True)
        _set_masks(outputs, masks)
        return outputs

    def read(self) -> list[tf.Tensor]:
        """Reads each of the variables once."""
        return [
            tf.convert_to_tensor(self._variables[id(outer)])
            if id(outer) in self._variables
            # One that is only added to is known by its handle alone.
            else tf.raw_ops.ReadVariableOp(resource=outer, dtype=self._read[inner.name].dtype)
            for outer, inner in self._states
        ]

    def accumulators(self) -> list[Accumulator | None]:
        """Returns the accumulators of the variables' gradients, where the step offers them."""
        return [accumulator_of(self._variables.get(id(outer))) for outer, _ in self._states]

    def _fed(self, values: list[tf.Tensor]) -> Values:
        reads = zip(self._states, values, strict=True)
        read = {self._read[t.name].name: value for (_, t), value in reads if t.name in self._read}
        return {**self.feed(self._inputs, self.given), **read}

    @property
    def _kept(self) -> list[tf.Tensor]:
        """The residuals beside the roots."""
        return [t for t in self.residuals if t.name not in self._root_names]

    def forward(self, values: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Copies the forward pass: the floating outputs and what is kept; assigns the variables."""
        after = [
            (outer, self._assigned[inner.name])
            for outer, inner in self._handles
            if inner.name in self._assigned
        ]
        state = {"ReadVariableOp", *_ASSIGNS}
        effects = [op for op in self._graph.control_outputs if op.type not in state]
        fetches = [self._graph.outputs, self._kept, [value for _, value in after]]
        self._found, kept, after_values = self.copy("forward", fetches, self._fed(values), effects)
        for (handle, _), value in zip(after, after_values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return [t for t in self._found if _is_floating(t)], kept

    def backward(
        self, dy: list[tf.Tensor], values: list[tf.Tensor], kept: list[tf.Tensor]
    ) -> list[Gradient]:
        """Copies the gradients of what is given, then of the variables."""
        state = {self._read[t.name].name for _, t in self._states if t.name in self._read}

        def tied(given):
            # Sizes among the integers have to stay known; seeds are tied too, or the numbers drawn
            # would be kept.
            names = [
                name for name, t in given.items() if _is_floating(t) or name in state or _is_data(t)
            ]
            each = list({id(given[name]): given[name] for name in names}.values())
            if not each:
                return {}
            after = dict(zip(map(id, each), private.xla.optimization_barrier(*each), strict=True))
            return {name: after[id(given[name])] for name in names}

        found = self.gradients(dy, {**self._fed(values), **self.feed(self._kept, kept)}, tied)
        return [
            _Rows(g.values, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else g
            for g in found
        ]


def _in_turn(
    gradients: list[Gradient], count: int, accumulators: list[Accumulator | None]
) -> list[Gradient]:
    """Makes the first `count` gradients wait until the others have been added to their
    accumulators.

    XLA would put off the weights' gradients, and hold what each is computed from. No barrier is
    left when it orders
    operations, but an operand is: 0 times an element of each sum, which is 0 in every step that is
        not skipped.
    """
    ends = []
    for gradient, accumulator in zip(gradients[count:], accumulators, strict=True):
        # One without an accumulator may be that of a frozen weight, which nothing needs.
        if isinstance(gradient, tf.Tensor) and accumulator is not None:
            total = accumulator.total + tf.cast(gradient, accumulator.total.dtype)
            accumulator.note(gradient, total)
            ends.append(
                tf.cast(0.0 * tf.reshape(total[(slice(1),) * total.shape.rank], []), tf.float32)
            )
    if not ends:
        return gradients
    zero = tf.add_n(ends)
    inputs = [
        g + tf.cast(zero, g.dtype) if isinstance(g, tf.Tensor) else g for g in gradients[:count]
    ]
    return [*inputs, *gradients[count:]]


class _Rows(tf.IndexedSlices):
    """Gradient of some rows that a custom gradient returns as `IndexedSlices`, and not as their
    values alone.
    """

    __composite_gradient__ = types.SimpleNamespace(
        get_gradient_components=lambda value: value,
        replace_gradient_components=lambda value, components: components,
    )


def _refuse_second_derivatives(gradients: Sequence[Gradient], sources: Sequence[tf.Tensor]) -> None:
    """Raises where a tape asks for second derivatives: to a tape the copies are constant, so they
    would be wrong.
    """

    def refuse(*_):
        raise LookupError("What is computed again has no second derivatives: compute it plainly.")

    parts = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
    private.record.record_operation("recomputed", parts, list(sources), refuse)


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
