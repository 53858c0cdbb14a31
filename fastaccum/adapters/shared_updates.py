"""Traces an optimizer's update once for all variables of the same shape and dtype.

A model of many layers has many such variables. Tracing weight decay and `update_step` for each of
them, and translating each trace to XLA, takes a large part of the first train step. Here the trace
of one variable becomes a function of values,

    new_variable, *new_slots = update(gradient, variable, *slots, learning_rate, iterations, ok)

and a function of the variables' handles, which reads them, calls it and assigns them, is called
for each of the others. XLA inlines the calls: the compiled program is the same.

Where a weight or a slot is stored in fewer bytes, the trace is that of float32 variables which
stand in for them, and which nobody ever makes. The function reads what is stored as float32, and
rounds the new values to what is stored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.stand_ins import stand_in
from fastaccum.adapters.storage import (
    AS_COMPUTED,
    AS_KERAS,
    Draw,
    OwnVariables,
    Storage,
    Stored,
    slot_lists,
    stored_slot,
    stored_variable,
)
from fastaccum.basics.attributes import raw, replaced
from fastaccum.graphs.replays import (
    ASSIGNMENTS,
    NOT_REPLAYED,
    compute_common,
    only_computes,
    replay,
)
from fastaccum.kernels import private
from fastaccum.kernels.xla_ops import barred, in_xla

# Operations that compute each number of a slot from those at its place alone.
_ELEMENTWISE = {
    "Abs",
    "AddV2",
    "BroadcastTo",
    "Cast",
    "Const",
    "Exp",
    "Fill",
    "Greater",
    "GreaterEqual",
    "Identity",
    "Less",
    "LessEqual",
    "Log",
    "LogicalAnd",
    "LogicalNot",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mul",
    "MulNoNan",
    "Neg",
    "NotEqual",
    "OnesLike",
    "Pow",
    "ReadVariableOp",
    "RealDiv",
    "Reciprocal",
    "Rsqrt",
    "SelectV2",
    "Sign",
    "Sqrt",
    "Square",
    "SquaredDifference",
    "Sub",
    "ZerosLike",
}

# So do these, if all inputs and outputs have as many numbers. Keras adds [1, n] and [1, n] by them.
_ELEMENTWISE_IF_ALIKE = {"BiasAdd", "Squeeze"}

UpdateStep: TypeAlias = Callable[[tf.Tensor, tf.Variable, Any], None]
Decay: TypeAlias = Callable[[Sequence[keras.Variable]], None]


class _Update(NamedTuple):
    """The update of one variable."""

    gradient: tf.Tensor
    own: OwnVariables
    variable: keras.Variable


class _ByHandles(NamedTuple):
    """An update as a function of `ok`, a gradient, a key, handles and `common` tensors."""

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
        self._touched = _variables_of(own, places.values())
        self._assigned: list[str] = []  # the names of the handles
        for operation in traced.graph.get_operations():
            if operation.type in ASSIGNMENTS and operation.inputs[0].name not in self._assigned:
                self._assigned.append(operation.inputs[0].name)
        self._assigned_as_stored: list[Stored] = []
        for name in self._assigned:
            stored = own[places[name]]
            assert stored is not None
            self._assigned_as_stored.append(stored)

    def assigned(self, own: OwnVariables) -> list[tf.Variable]:
        """Lists the variables that the update of `own` assigns."""
        return _variables_of(own, [self._places[name] for name in self._assigned])

    def apply(self, ok: tf.Tensor, gradient: tf.Tensor, own: OwnVariables, key: tf.Tensor) -> None:
        """Updates a variable and its slots where `ok`; they are rounded by `key`, uint32 [2]."""
        if self._by_handles is None:
            # Made at the first update: Keras's Nadam assigns a scalar that all of them read just
            # before it.
            self._by_handles = self._make(gradient)
        function, common = self._by_handles
        handles = [v.handle for v in _variables_of(own, self._places.values())]
        tf.raw_ops.StatefulPartitionedCall(
            args=[ok, gradient, key, *handles, *common], Tout=[], f=function
        )

    def _make(self, gradient: tf.Tensor) -> _ByHandles:
        common = {}
        for name, value in self._common.items():
            common[name] = value.read_value() if isinstance(value, tf.Variable) else value
        computed, handed = compute_common(self._traced.graph, common)
        count = len(self._touched)

        @tf.function(autograph=False)
        def compute(ok, gradient, key, *inputs):
            old_values = inputs[:count]
            common_values = dict(zip(handed, inputs[count:], strict=True))
            update = functools.partial(self._update, ok, gradient, common_values, computed)
            new_values = update(old_values)
            measures = []
            for stored, value in zip(self._assigned_as_stored, new_values, strict=True):
                measures.append(stored.format.measure(value))
            if in_xla() and any(measures):
                # XLA would keep the numbers, in float32, until all are measured. So they are
                # computed again from what is stored.
                barred_values = barred(*old_values, *itertools.chain(*measures))
                old_values = barred_values[:count]
                measures = tf.nest.pack_sequence_as(measures, barred_values[count:])
                new_values = update(old_values)
            return self._select(ok, key, old_values, new_values, measures)

        function = compute.get_concrete_function(
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec(gradient.shape, gradient.dtype),
            tf.TensorSpec([2], tf.uint32),
            *(tf.TensorSpec(v.shape, v.dtype) for v in self._touched),
            *(tf.TensorSpec(t.shape, t.dtype) for t in handed.values()),
        )
        place_of = {id(variable): i for i, variable in enumerate(self._touched)}
        places_assigned = [place_of[id(variable)] for variable in self.assigned(self._own)]
        return _ByHandles(
            _assign_by_handles(function, self._touched, places_assigned), list(handed.values())
        )

    def _update(
        self,
        ok: tf.Tensor,
        gradient: tf.Tensor,
        common_values: Mapping[str, tf.Tensor],
        computed: Mapping[str, tf.Tensor],
        old_values: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Computes the new numbers of what the update assigns, from the old values as stored."""
        name_of_gradient = self._traced.inputs[0].name
        shape_of_trace = self._traced.inputs[0].shape
        is_reshaped = shape_of_trace != gradient.shape

        def in_shape_of_trace(value: tf.Tensor) -> tf.Tensor:
            return tf.reshape(value, shape_of_trace) if is_reshaped else value

        values = {name_of_gradient: in_shape_of_trace(gradient), **common_values}
        old_values_of_places = _split(old_values, self._own, self._places.values())
        for (name, place), of_place in zip(self._places.items(), old_values_of_places, strict=True):
            stored = self._own[place]
            assert stored is not None
            values[name] = in_shape_of_trace(stored.format.read(of_place))
        replay(self._traced.graph, values, ok, computed)
        return [values[name] for name in self._assigned]

    def _select(
        self,
        ok: tf.Tensor,
        key: tf.Tensor,
        old_values: Sequence[tf.Tensor],
        new_values: Sequence[tf.Tensor],
        measures: Sequence[Sequence[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Writes new numbers as they are stored; returns the old values where not `ok`."""
        old_value_of = dict(zip(map(id, self._touched), old_values, strict=True))
        selected = []
        for number, stored in enumerate(self._assigned_as_stored):
            written = stored.format.write(new_values[number], Draw(key, number), measures[number])
            for variable, value in zip(stored.variables, written, strict=True):
                if stored.format is not AS_COMPUTED:  # otherwise `replay` has selected already
                    old_value = tf.reshape(old_value_of[id(variable)], value.shape)
                    value = tf.where(ok, value, old_value)
                selected.append(tf.reshape(value, variable.shape))
        return selected


@contextlib.contextmanager
def shared_updates(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[tf.Tensor, keras.Variable]],
    ok: tf.Tensor,
    storage: Storage = AS_KERAS,
    *,
    only_stored: bool = False,
) -> Iterator[set[int]]:
    """Lets one of Keras's optimizers trace its updates in the block once for each spec.

    Yields the ids of the variables whose updates are shared. These change only where `ok`. A spec
    that one variable has alone, and an update that assigns other variables or does more than
    compute, stay as they are, but for variables that `storage` stores in fewer bytes: they are
    always updated so. With `only_stored` they alone are, and the others where `storage` changes
    slots.

    Raises:
        ValueError: raised if the update of such a variable does more than compute each number from
            those at its place.
    """
    # Not the optimizer's own attribute: that may be the guard that refuses Keras's fit.
    update_one: UpdateStep = functools.partial(type(optimizer).update_step, optimizer)
    indices = private.variables_indices(optimizer)
    lists = slot_lists(optimizer)
    decay: Decay = getattr(optimizer, private.apply_weight_decay.name)

    updates_by_spec: dict[Hashable, list[_Update]] = {}
    for gradient, variable in pairs:
        index = indices.get(private.var_key(optimizer, variable))
        if index is None:
            continue  # another part's
        own: OwnVariables = [stored_variable(variable, storage)]
        for slots in lists.values():
            slot = slots[index]
            own.append(None if slot is None else stored_slot(slot, storage))
        spec = _spec(gradient, own)
        if spec is None and _is_stored(own):
            raise _refusal(optimizer, own, "has a gradient of unknown shape, or of some rows")
        if spec is not None:
            # Asked as Keras asks: by the tf.Variable, whose name differs.
            key = (spec, private.use_weight_decay(optimizer, raw(variable)))
            updates_by_spec.setdefault(key, []).append(_Update(gradient, own, variable))

    learning_rate = optimizer.learning_rate  # computed once, where it is a schedule's
    shared_by_variable: dict[int, tuple[_SharedUpdate, OwnVariables]] = {}
    selected: set[int] = set()
    for updates in updates_by_spec.values():
        is_stored = _is_stored(updates[0].own)
        # Then weights that are too small for int8 tell, too, if the optimizer is elementwise.
        must_be_elementwise = storage.changes_slots
        if not is_stored and not must_be_elementwise and (only_stored or len(updates) < 2):
            continue
        shared = _share(
            optimizer, decay, update_one, updates[0], learning_rate, must_be_elementwise
        )
        if shared is None:
            if is_stored:
                raise _refusal(optimizer, updates[0].own, "assigns other variables than its slots")
            continue
        for _, own, variable in updates:
            shared_by_variable[id(raw(variable))] = (shared, own)
            selected.update(id(variable) for variable in shared.assigned(own))

    waiting = set(shared_by_variable)
    no_key = tf.zeros([2], tf.uint32)
    step = tf.cast(tf.convert_to_tensor(raw(optimizer.iterations)), tf.uint32)

    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any) -> None:
        if id(variable) not in shared_by_variable:
            update_one(gradient, variable, learning_rate)
            return
        shared, own = shared_by_variable[id(variable)]
        key = no_key
        if _is_stored(own):
            place = indices[private.var_key(optimizer, variable)]
            key = tf.stack([step, tf.constant(place, tf.uint32)])
        shared.apply(ok, gradient, own, key)
        waiting.discard(id(variable))

    def decay_others(variables: Sequence[keras.Variable]) -> None:
        decay([v for v in variables if id(raw(v)) not in shared_by_variable])

    methods = {"update_step": update, private.apply_weight_decay.name: decay_others}
    with replaced((optimizer, name, method) for name, method in methods.items()):
        yield selected
    if waiting:
        # The caller took it that they change only where `ok`.
        raise RuntimeError(f"{type(optimizer).__name__} did not update {len(waiting)} variables")


def _is_stored(own: OwnVariables) -> bool:
    """Tells if a variable or one of its slots is stored otherwise than the update computes."""
    return any(stored is not None and stored.format is not AS_COMPUTED for stored in own)


def _variables_of(own: OwnVariables, places: Iterable[int]) -> list[tf.Variable]:
    """Lists the variables that hold what stands at these places."""
    variables: list[tf.Variable] = []
    for place in places:
        stored = own[place]
        assert stored is not None
        variables.extend(stored.variables)
    return variables


def _split(
    values: Sequence[tf.Tensor], own: OwnVariables, places: Iterable[int]
) -> list[Sequence[tf.Tensor]]:
    """Splits the values of `_variables_of` into those of each place."""
    parts = []
    start = 0
    for place in places:
        stored = own[place]
        assert stored is not None
        end = start + len(stored.variables)
        parts.append(values[start:end])
        start = end
    return parts


def _refusal(optimizer: keras.optimizers.Optimizer, own: OwnVariables, problem: str) -> ValueError:
    dtypes = set()
    for stored in own:
        if stored is not None and stored.format is not AS_COMPUTED:
            dtypes.add(stored.variables[0].dtype.name)
    stored_in = " and ".join(sorted(dtypes)) or "fewer bytes, if they are large"
    return ValueError(
        f"optimizer={type(optimizer).__name__} {problem}, where weights or slots are stored in "
        f"{stored_in}: only an update that computes each number of a weight "
        "from those at its place can be stored so. Use AdamW, or pass "
        "Trainer(optimizer_state_dtype='float32', stochastic_rounding=False)."
    )


def _spec(gradient: tf.Tensor | tf.IndexedSlices, own: OwnVariables) -> Hashable:
    """Returns what is equal for variables of the same update; None where that is not known."""
    if not isinstance(gradient, tf.Tensor) or not gradient.shape.is_fully_defined():
        return None
    specs: list[Hashable] = [(tuple(gradient.shape), gradient.dtype)]
    for stored in own:
        if stored is None:  # Muon has no second moments of matrices
            specs.append(None)
        elif stored.shape.is_fully_defined():
            specs.append(stored.spec)
        else:
            return None
    return tuple(specs)


def _share(
    optimizer: keras.optimizers.Optimizer,
    decay: Decay,
    update_one: UpdateStep,
    first: _Update,
    learning_rate: Any,
    must_be_elementwise: bool,
) -> _SharedUpdate | None:
    """Traces the first update of a spec for all of them.

    Returns None for an update that is more than new values of one variable and its slots. Raises
    ValueError for one that must be elementwise, and is not.
    """
    own = first.own
    is_stored = _is_stored(own)
    weight: Any = first.variable
    variables: list[tf.Variable | None] = []
    attributes: list[tuple[object, str, object]] = []
    if is_stored:
        weight, variables, attributes = stand_in(optimizer, own, first.variable)
    else:
        variables = [None if stored is None else stored.variables[0] for stored in own]
    # The decay takes the rate as it was computed, which for a schedule may take a condition.
    rate = private.current_learning_rate
    attributes.append((optimizer, rate.name, lambda: learning_rate))

    @tf.function(autograph=False)
    def update(gradient):
        decay([weight])
        update_one(gradient, raw(weight), learning_rate)

    gradient_spec = tf.TensorSpec(raw(weight).shape, first.gradient.dtype)
    with replaced(attributes):
        traced = update.get_concrete_function(gradient_spec)
    captures = _sort_captures(traced, variables, learning_rate)
    if captures is None:
        return None
    if must_be_elementwise:
        for operation in traced.graph.get_operations():
            if not _assigns(operation) and not _is_elementwise(operation):
                raise _refusal(optimizer, own, f"computes {operation.type} of a weight or a slot")
    if not _only_assigns(traced.graph, captures.places):
        return None
    return _SharedUpdate(traced, captures.places, captures.common, own)


class _Captures(NamedTuple):
    """Captures of the trace of an update."""

    places: dict[str, int]  # of its own variables, by the names of their handles
    common: dict[str, tf.Variable | tf.Tensor]  # scalars of all updates, by name


def _sort_captures(
    traced: ConcreteFunction, variables: Sequence[tf.Variable | None], learning_rate: Any
) -> _Captures | None:
    """Sorts what a trace captures; returns None if there is more than `_Captures` can hold."""
    places_of_handles = {}
    for place, variable in enumerate(variables):
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
    return _Captures(places, common)


def _assigns(operation: tf.Operation) -> bool:
    return operation.type in ASSIGNMENTS


def _only_assigns(graph: tf.Graph, names: Collection[str]) -> bool:
    """Tells if a trace computes, assigns the variables of these handles, and does no more."""
    for operation in graph.get_operations():
        if _assigns(operation):
            if operation.inputs[0].name not in names:
                return False
        elif not only_computes(operation):
            return False
    return True


def _is_elementwise(operation: tf.Operation) -> bool:
    """Tells if an operation takes scalars only, or computes each number from those at its place."""
    if operation.type in _ELEMENTWISE or operation.type in NOT_REPLAYED:
        return True
    if operation.type in _ELEMENTWISE_IF_ALIKE:
        sizes = {tensor.shape.num_elements() for tensor in (*operation.inputs, *operation.outputs)}
        if len(sizes) == 1:
            return True
    return all(tensor.shape.rank == 0 for tensor in operation.inputs)


def _assign_by_handles(
    computed: ConcreteFunction, touched: Sequence[tf.Variable], assigned: Sequence[int]
) -> ConcreteFunction:
    """Returns `computed` as a function that reads and assigns variables by their handles.

    `computed` is one of `ok`, a gradient, a key, the values of the `touched` variables and others.
    It returns the new values of those at the places `assigned` among them.
    """
    count = len(touched)

    @tf.function(autograph=False)
    def read_and_assign(ok, gradient, key, *inputs):
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
            input=[ok, gradient, key, *values, *inputs[count:]],
            Tout=[t.dtype for t in computed.outputs],
            branches=[computed],
            output_shapes=[t.shape for t in computed.outputs],
        )
        for place, new_value in zip(assigned, new_values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handles[place], value=new_value)

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in computed.inputs]
    specs[3 : 3 + count] = [tf.TensorSpec([], tf.resource) for _ in touched]
    return read_and_assign.get_concrete_function(*specs)
