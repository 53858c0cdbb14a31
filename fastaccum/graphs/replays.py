"""Computes a traced graph again, with other values for what it reads: in an optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from fastaccum.kernels import private

# The operations that assign a variable, each with the new value that it makes of the old one and
# of what it is passed.
ASSIGNMENTS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "AssignVariableOp": lambda old, passed: passed,
    "AssignAddVariableOp": tf.add,
    "AssignSubVariableOp": tf.subtract,
}
NOT_REPLAYED = ("Placeholder", "NoOp")


def only_computes(operation: tf.Operation) -> bool:
    """Tells if an operation of a trace does no more than compute, or read a variable."""
    if operation.type in (*NOT_REPLAYED, "ReadVariableOp"):
        return True
    calls = any(a.HasField("func") or a.list.func for a in operation.node_def.attr.values())
    takes_handles = any(t.dtype == tf.resource for t in operation.inputs)
    return not (operation.op_def.is_stateful or takes_handles or calls)


def compute_common(
    graph: tf.Graph, common: Mapping[str, tf.Tensor]
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Computes, in the default graph, what a graph computes from the `common` tensors alone.

    Returns that with `common`, by name, and those of the tensors that the rest of the graph takes.
    """
    computed = dict(common)
    constants: set[str] = set()  # the names of what is computed from no input
    handed = {}
    for operation in graph.get_operations():
        if operation.type in NOT_REPLAYED:
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


def replay(
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
        if operation.type in NOT_REPLAYED:
            continue
        if operation.outputs and operation.outputs[0].name in computed:
            continue
        if operation.type in ASSIGNMENTS:
            # What is computed from a slot later is computed from the selected value. Otherwise XLA
            # would compute a new slot twice, once from a copy of the old one.
            old, passed = (values[t.name] for t in operation.inputs)
            new = ASSIGNMENTS[operation.type](old, passed)
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
