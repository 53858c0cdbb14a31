"""Traces an optimizer's update once for all variables of the same shape and dtype.

A model of many layers has many such variables. Tracing weight decay and `update_step` for each of
them, and translating each trace to XLA, takes a large part of the first train step. Here the trace
of one variable becomes a function of values,

    new_variable, *new_slots = update(gradient, variable, *slots, learning_rate, iterations, ok)

and a function of the variables' handles, which reads them, calls it and assigns them, is called
for each of the others. XLA inlines the calls: the compiled program is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
_NOT_REPLAYED = ("Placeholder", "NoOp")
# The lists of an optimizer that hold no slots.
_NO_SLOTS = (private.variables.name, private.trainable_variables.name)

# A trained variable, and then its slot in each of the optimizer's lists of slots, or None.
OwnVariables: TypeAlias = list[Any]
UpdateStep: TypeAlias = Callable[[tf.Tensor, tf.Variable, Any], None]
Decay: TypeAlias = Callable[[Sequence[keras.Variable]], None]


class _Update(NamedTuple):
    """The update of one variable."""

    gradient: tf.Tensor
    own: OwnVariables
    variable: keras.Variable


class _ByHandles(NamedTuple):
    """An update as a function of `ok`, a gradient, handles and `common` tensors."""

    function: ConcreteFunction
    common: list[tf.Tensor]  # the same for all variables of the spec


class _SharedUpdate:
    """The trace of an update, as a function of handles for any variable of its spec.

    Args:
        traced: the update of the variables `own`, as a function of a gradient.
        places: the places in `own` of the variables that it captures, by the names of the handles.
        common: what it captures besides, by name: scalar variables, such as the count of updates,
            and the learning rate.
        own: the variables that it was traced with.
    """

    def __init__(
        self,
        traced: ConcreteFunction,
        places: dict[str, int],
        common: dict[str, tf.Variable | tf.Tensor],
        own: OwnVariables,
    ):
        self._traced = traced
        self._places = places
        self._common = common
        self._own = own
        self._by_handles: _ByHandles | None = None
        self._assigned: list[str] = []  # the names of the handles
        for operation in traced.graph.get_operations():
            if operation.type in _ASSIGNMENTS and operation.inputs[0].name not in self._assigned:
                self._assigned.append(operation.inputs[0].name)

    def assigned(self, own: OwnVariables) -> list[tf.Variable]:
        """Lists the variables that the update of `own` assigns."""
        return [own[self._places[name]] for name in self._assigned]

    def apply(self, ok: tf.Tensor, gradient: tf.Tensor, own: OwnVariables) -> None:
        """Updates a variable and its slots where `ok`."""
        if self._by_handles is None:
            # Made at the first update: Keras's Nadam assigns a scalar that all of them read just
            # before it.
            self._by_handles = self._make(gradient)
        function, common = self._by_handles
        handles = [own[place].handle for place in self._places.values()]
        tf.raw_ops.StatefulPartitionedCall(
            args=[ok, gradient, *handles, *common], Tout=[], f=function
        )

    def _make(self, gradient: tf.Tensor) -> _ByHandles:
        graph = self._traced.graph
        common = {}
        for name, value in self._common.items():
            common[name] = value.read_value() if isinstance(value, tf.Variable) else value
        computed, handed = _compute_common(graph, common)
        names = [self._traced.inputs[0].name, *self._places, *handed]
        assigned = self._assigned

        @tf.function(autograph=False)
        def compute(ok, *inputs):
            values = dict(zip(names, inputs, strict=True))
            _replay(graph, values, ok, computed)
            return [values[handle] for handle in assigned]

        touched = [self._own[place] for place in self._places.values()]
        function = compute.get_concrete_function(
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec(gradient.shape, gradient.dtype),
            *(tf.TensorSpec(v.shape, v.dtype) for v in touched),
            *(tf.TensorSpec(t.shape, t.dtype) for t in handed.values()),
        )
        places = list(self._places)
        places_assigned = [places.index(name) for name in assigned]
        return _ByHandles(
            _assign_by_handles(function, touched, places_assigned), list(handed.values())
        )


@contextlib.contextmanager
def shared_updates(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[tf.Tensor, keras.Variable]],
    ok: tf.Tensor,
) -> Iterator[set[int]]:
    """Lets one of Keras's optimizers trace its updates in the block once for each spec.

    Yields the ids of the variables whose updates are shared. These change only where `ok`. A spec
    that one variable has alone, and an update that assigns other variables or does more than
    compute, stay as they are.
    """
    update_one: UpdateStep = optimizer.update_step
    indices = private.variables_indices(optimizer)
    slot_lists = _slot_lists(optimizer)
    decay: Decay = getattr(optimizer, private.apply_weight_decay.name)

    updates_by_spec: dict[Hashable, list[_Update]] = {}
    for gradient, variable in pairs:
        index = indices.get(private.var_key(optimizer, variable))
        if index is None:
            continue  # another part's
        own = [raw(variable), *(raw(slots[index]) for slots in slot_lists)]
        spec = _spec(gradient, own)
        if spec is not None:
            # Asked as Keras asks: by the tf.Variable, whose name differs.
            key = (spec, private.use_weight_decay(optimizer, own[0]))
            updates_by_spec.setdefault(key, []).append(_Update(gradient, own, variable))

    learning_rate = optimizer.learning_rate  # computed once, where it is a schedule's
    shared_by_variable: dict[int, tuple[_SharedUpdate, OwnVariables]] = {}
    selected: set[int] = set()
    for updates in updates_by_spec.values():
        if len(updates) < 2:
            continue
        shared = _share(decay, update_one, updates[0], learning_rate)
        if shared is None:
            continue
        for _, own, _ in updates:
            shared_by_variable[id(own[0])] = (shared, own)
            selected.update(id(variable) for variable in shared.assigned(own))

    waiting = set(shared_by_variable)

    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any) -> None:
        if id(variable) not in shared_by_variable:
            update_one(gradient, variable, learning_rate)
            return
        shared, own = shared_by_variable[id(variable)]
        shared.apply(ok, gradient, own)
        waiting.discard(id(variable))

    def decay_others(variables: Sequence[keras.Variable]) -> None:
        decay([v for v in variables if id(raw(v)) not in shared_by_variable])

    methods = {"update_step": update, private.apply_weight_decay.name: decay_others}
    with replaced((optimizer, name, method) for name, method in methods.items()):
        yield selected
    if waiting:
        # The caller took it that they change only where `ok`.
        raise RuntimeError(f"{type(optimizer).__name__} did not update {len(waiting)} variables")


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
    decay: Decay, update_one: UpdateStep, first: _Update, learning_rate: Any
) -> _SharedUpdate | None:
    """Traces the first update of a spec for all of them.

    Returns None for an update that is more than new values of one variable and its slots.
    """
    own = first.own

    @tf.function(autograph=False)
    def update(gradient):
        decay([first.variable])
        update_one(gradient, own[0], learning_rate)

    gradient_spec = tf.TensorSpec(first.gradient.shape, first.gradient.dtype)
    traced = update.get_concrete_function(gradient_spec)
    places_of_handles = {}
    for place, variable in enumerate(own):
        if variable is not None:
            places_of_handles[id(variable.handle)] = place
    variables_of_handles = {id(v.handle): v for v in traced.graph.variables}
    places: dict[str, int] = {}
    common: dict[str, tf.Variable | tf.Tensor] = {}
    for outside, inside in traced.graph.captures:
        variable = variables_of_handles.get(id(outside))
        if id(outside) in places_of_handles:
            places[inside.name] = places_of_handles[id(outside)]
        elif variable is not None and variable.shape.rank == 0:
            common[inside.name] = variable
        elif outside is learning_rate:
            common[inside.name] = outside
        else:
            return None
    for operation in traced.graph.get_operations():
        if operation.type in _ASSIGNMENTS and operation.inputs[0].name in places:
            continue
        if not _only_computes(operation):
            return None
    return _SharedUpdate(traced, places, common, own)


def _only_computes(operation: tf.Operation) -> bool:
    """Tells if an operation of a trace does no more than compute, or read a variable."""
    if operation.type in (*_NOT_REPLAYED, "ReadVariableOp"):
        return True
    calls = any(a.HasField("func") or a.list.func for a in operation.node_def.attr.values())
    takes_handles = any(t.dtype == tf.resource for t in operation.inputs)
    return not (operation.op_def.is_stateful or takes_handles or calls)


def _assign_by_handles(
    computed: ConcreteFunction, touched: Sequence[tf.Variable], assigned: Sequence[int]
) -> ConcreteFunction:
    """Returns `computed` as a function that reads and assigns variables by their handles.

    `computed` is one of `ok`, a gradient, the values of the `touched` variables and others. It
    returns the new values of those at the places `assigned` among them.
    """
    count = len(touched)

    @tf.function(autograph=False)
    def read_and_assign(ok, gradient, *inputs):
        handles = inputs[:count]
        values = []
        for handle, variable in zip(handles, touched, strict=True):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
            value.set_shape(variable.shape)
            values.append(value)
        # Not a plain call: TensorFlow would inline it, and then XLA translate it, once for each.
        # A branch is translated once. As it is the only one, XLA makes no conditional of it.
        new_values = tf.raw_ops.StatelessCase(
            branch_index=0,
            input=[ok, gradient, *values, *inputs[count:]],
            Tout=[t.dtype for t in computed.outputs],
            branches=[computed],
            output_shapes=[t.shape for t in computed.outputs],
        )
        for place, new_value in zip(assigned, new_values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handles[place], value=new_value)

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in computed.inputs]
    specs[2 : 2 + count] = [tf.TensorSpec([], tf.resource) for _ in touched]
    return read_and_assign.get_concrete_function(*specs)


def _compute_common(
    graph: tf.Graph, common: Mapping[str, tf.Tensor]
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Computes, in the default graph, what a graph computes from the `common` tensors alone.

    Returns that with `common`, by name, and those of the tensors that the rest of the graph takes.
    """
    computed = dict(common)
    constants: set[str] = set()  # the names of what is computed from no input
    handed = {}
    for operation in graph.get_operations():
        if operation.type in _NOT_REPLAYED:
            continue
        others = [t for t in operation.inputs if t.name not in constants]
        if not others:
            constants.update(t.name for t in operation.outputs)
        elif all(t.name in computed for t in others):
            values = dict(computed)
            for t in operation.inputs:
                if t.name in constants:
                    values[t.name] = _copy_constant(t)
            _replay_one(operation, values)
            computed.update({t.name: values[t.name] for t in operation.outputs})
        else:
            handed.update({t.name: computed[t.name] for t in others if t.name in computed})
    return computed, handed


def _copy_constant(t: tf.Tensor) -> tf.Tensor:
    """Copies a tensor that is computed from no input to the default graph."""
    inputs = [_copy_constant(taken) for taken in t.op.inputs]
    return _copy(t.op, inputs)[t.value_index]


def _replay(
    graph: tf.Graph,
    values: dict[str, tf.Tensor],
    ok: tf.Tensor,
    computed: Mapping[str, tf.Tensor],
) -> None:
    """Computes a graph's operations in the default graph.

    `values` has those of its inputs, by name, and gets those of all tensors. The name of a handle
    stands for what its variable holds, which changes where `ok`. Operations whose outputs were
    `computed` outside are left out.
    """
    for operation in graph.get_operations():
        if operation.type in _NOT_REPLAYED:
            continue
        if operation.outputs and operation.outputs[0].name in computed:
            continue
        if operation.type in _ASSIGNMENTS:
            # What is computed from a slot later is computed from the selected value. Otherwise XLA
            # would compute a new slot twice, once from a copy of the old one.
            old, passed = (values[t.name] for t in operation.inputs)
            new = _ASSIGNMENTS[operation.type](old, passed)
            values[operation.inputs[0].name] = tf.where(ok, new, old)
        else:
            _replay_one(operation, values)


def _replay_one(operation: tf.Operation, values: dict[str, tf.Tensor]) -> None:
    """Computes an operation that assigns nothing, and adds its outputs to the values."""
    results = [values[t.name] for t in operation.inputs]
    if operation.type != "ReadVariableOp":
        results = _copy(operation, results)
    for tensor, result in zip(operation.outputs, results, strict=True):
        values[tensor.name] = result


def _copy(operation: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Copies an operation to the default graph."""
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
