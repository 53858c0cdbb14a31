"""Traces an optimizer's update once for all variables of the same shape and dtype.

A model of many layers has many such variables. Tracing `update_step` for each of them, and
translating each trace to XLA, takes a large part of the first train step. Here the trace of one
variable becomes a function of values, which is called for the others:

    new_variable, *new_slots = update(gradient, variable, *slots, learning_rate, iterations, ok)

XLA inlines the calls: the compiled program is the same.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.attributes import raw, replaced
from fastaccum.kernels import private

# The operations that assign a variable, each with the new value that it makes of the old one and
# of what it is passed.
_ASSIGNMENTS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "AssignVariableOp": lambda old, passed: passed,
    "AssignAddVariableOp": tf.add,
    "AssignSubVariableOp": tf.subtract,
}
# The lists of an optimizer that hold no slots.
_NO_SLOTS = (private.variables.name, private.trainable_variables.name)

# A trained variable, and then its slot in each of the optimizer's lists of slots, or None.
OwnVariables: TypeAlias = list[Any]
UpdateStep: TypeAlias = Callable[[tf.Tensor, tf.Variable, Any], None]


class _NotShareable(Exception):
    """Raised for an update that is more than new values of one variable and its slots."""


class _SharedUpdate(NamedTuple):
    """An update as a function of values, for any variable of one spec."""

    function: ConcreteFunction  # of a gradient, the variables' values and the common tensors
    read: list[int]  # the variables whose values it takes, by their places in `OwnVariables`
    common: list[tf.Tensor]  # the same for all: the learning rate, the count of updates, `ok`
    assigned: list[int]  # the variables whose new values it returns
    traced: OwnVariables  # with which it was traced

    def apply(self, gradient: tf.Tensor, own: OwnVariables) -> None:
        """Updates a variable and its slots."""
        values = [own[place].read_value() for place in self.read]
        # Not a plain call: TensorFlow would inline it, and then XLA translate it, once for each.
        # A branch is translated once. As it is the only one, XLA makes no conditional of it.
        new_values = tf.raw_ops.StatelessCase(
            branch_index=0,
            input=[gradient, *values, *self.common],
            Tout=[t.dtype for t in self.function.outputs],
            branches=[self.function],
            output_shapes=[t.shape for t in self.function.outputs],
        )
        for place, new_value in zip(self.assigned, new_values, strict=True):
            own[place].assign(new_value)


@contextlib.contextmanager
def shared_updates(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[tf.Tensor, keras.Variable]],
    ok: tf.Tensor,
    selected: set[int],
) -> Iterator[None]:
    """Lets one of Keras's optimizers trace its updates in the block once for each spec.

    Updates that are traced in the block may select by `ok`, and then add the ids of variables to
    `selected`; so does each update that a trace stands for. A spec that one variable has alone, and
    an update that assigns other variables or does more than compute, stay as they are.
    """
    update_one: UpdateStep = optimizer.update_step
    indices = private.variables_indices(optimizer)
    slot_lists = _slot_lists(optimizer)

    def own_variables(variable: tf.Variable) -> OwnVariables:
        index = indices.get(private.var_key(optimizer, variable))
        if index is None:
            return [variable]
        return [variable, *(raw(slots[index]) for slots in slot_lists)]

    counts = collections.Counter(_spec(gradient, own_variables(raw(v))) for gradient, v in pairs)
    shared_by_spec: dict[Hashable, _SharedUpdate | None] = {}

    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any) -> None:
        own = own_variables(variable)
        spec = _spec(gradient, own)
        if spec is None or counts[spec] < 2:
            update_one(gradient, variable, learning_rate)
            return
        if spec not in shared_by_spec:
            shared_by_spec[spec] = _share(update_one, gradient, own, learning_rate, ok)
        shared = shared_by_spec[spec]
        if shared is None:
            update_one(gradient, variable, learning_rate)
            return
        shared.apply(gradient, own)
        for place in shared.assigned:
            if id(shared.traced[place]) in selected:
                selected.add(id(own[place]))

    with replaced([(optimizer, "update_step", update)]):
        yield


def _slot_lists(optimizer: keras.optimizers.Optimizer) -> list[list[keras.Variable | None]]:
    """Lists the optimizer's lists with a slot, or None, for each variable, in their order."""
    count = len(private.variables_indices(optimizer))
    slot_lists = []
    for name, value in vars(optimizer).items():
        if name in _NO_SLOTS or not isinstance(value, list) or len(value) != count:
            continue
        if all(slot is None or isinstance(slot, keras.Variable) for slot in value):
            slot_lists.append(value)
    return slot_lists


def _spec(gradient: tf.Tensor | tf.IndexedSlices, own: OwnVariables) -> Hashable:
    """Returns what is equal for variables of the same update; None where that is not known."""
    if not isinstance(gradient, tf.Tensor):
        return None
    specs: list[Hashable] = []
    for value in [gradient, *own]:
        if value is None:  # Muon has no second moments of matrices
            specs.append(None)
        elif value.shape.is_fully_defined():
            specs.append((tuple(value.shape), value.dtype))
        else:
            return None
    return tuple(specs)


def _share(
    update_one: UpdateStep,
    gradient: tf.Tensor,
    own: OwnVariables,
    learning_rate: Any,
    ok: tf.Tensor,
) -> _SharedUpdate | None:
    """Traces the update of a variable as a function of values; None where it is none."""

    @tf.function(autograph=False)
    def update(gradient):
        update_one(gradient, own[0], learning_rate)

    spec = tf.TensorSpec(gradient.shape, gradient.dtype)
    traced = update.get_concrete_function(spec)
    places_of_handles = {}
    for place, variable in enumerate(own):
        if variable is not None:
            places_of_handles[id(variable.handle)] = place
    variables_of_handles = {id(v.handle): v for v in traced.graph.variables}

    # By the names of the handles and tensors that the trace captured.
    places: dict[str, int] = {}
    common: dict[str, tf.Tensor] = {}
    for outside, inside in traced.graph.captures:
        variable = variables_of_handles.get(id(outside))
        if id(outside) in places_of_handles:
            places[inside.name] = places_of_handles[id(outside)]
        elif variable is not None and variable.shape.rank == 0:
            common[inside.name] = variable.read_value()
        elif outside is ok or outside is learning_rate:
            common[inside.name] = outside
        else:
            return None
    assigned = []
    for operation in traced.graph.get_operations():
        if operation.type in _ASSIGNMENTS and operation.inputs[0].name not in assigned:
            assigned.append(operation.inputs[0].name)
    if not places.keys() >= set(assigned):
        return None

    @tf.function(autograph=False)
    def compute(gradient, own_values, common_values):
        values = {traced.inputs[0].name: gradient}
        values.update(zip(places, own_values, strict=True))
        values.update(zip(common, common_values, strict=True))
        _replay(traced.graph, values)
        return [values[handle] for handle in assigned]

    try:
        function = compute.get_concrete_function(
            spec,
            [tf.TensorSpec(own[place].shape, own[place].dtype) for place in places.values()],
            [tf.TensorSpec(t.shape, t.dtype) for t in common.values()],
        )
    except _NotShareable:
        return None
    return _SharedUpdate(
        function,
        read=list(places.values()),
        common=list(common.values()),
        assigned=[places[handle] for handle in assigned],
        traced=own,
    )


def _replay(graph: tf.Graph, values: dict[str, tf.Tensor]) -> None:
    """Computes a graph's operations in the default graph.

    `values` has those of its inputs, by name, and gets those of all tensors. The name of a handle
    stands for what its variable holds.
    """
    for operation in graph.get_operations():
        if operation.type in ("Placeholder", "NoOp"):
            continue
        inputs = [values[t.name] for t in operation.inputs]
        if operation.type in _ASSIGNMENTS:
            values[operation.inputs[0].name] = _ASSIGNMENTS[operation.type](*inputs)
            continue
        results = inputs if operation.type == "ReadVariableOp" else _copy(operation, inputs)
        for tensor, result in zip(operation.outputs, results, strict=True):
            values[tensor.name] = result


def _copy(operation: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Copies an operation; raises _NotShareable for one that does more than compute."""
    calls = any(a.HasField("func") or a.list.func for a in operation.node_def.attr.values())
    takes_handles = any(t.dtype == tf.resource for t in operation.inputs)
    if operation.op_def.is_stateful or takes_handles or calls:
        raise _NotShareable
    attributes = dict(operation.node_def.attr)
    attributes.pop(private.PLACED_WITH, None)
    copy = tf.compat.v1.get_default_graph().create_op(
        operation.type,
        inputs,
        [t.dtype for t in operation.outputs],
        attrs=attributes,
        op_def=operation.op_def,
    )
    return copy.outputs
