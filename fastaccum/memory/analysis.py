"""What a train step will take of a device's memory: by compiling it for specs, with no data and no run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from fastaccum.data.arrays import PREFETCH
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.distribute.step_builder import Step
from fastaccum.memory.buffers import Buffer, Kind, StepMemory, of_program
from fastaccum.memory.device import LIMIT, DeviceMemory, available
from fastaccum.step.program import hlo_proto, memory_of

IN_FLIGHT = 2 + PREFETCH  # stacks that a fit holds: one is trained on, one waits to be read, others are made ahead


def dispatch_memory(step: Step, dispatch: Dispatch) -> StepMemory:
    """What a dispatch of these shapes, whose tensors may be specs, takes of each replica's device."""
    return held(step, compiled(step, dispatch))


def compiled(step: Step, dispatch: Dispatch) -> list[tuple[Any, Any]]:
    """The concrete functions that a replica runs for such a dispatch, and the `HloProto` that each compiles to."""
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), dispatch.stacks)
    return [(concrete, hlo_proto(concrete)) for concrete in step.traced(dispatch._replace(stacks=specs))]


def held(step: Step, programs: list[tuple[Any, Any]]) -> StepMemory:
    """What these programs of a step take, one after the other."""
    layers = {layer.name for layer in step.objective.model.layers}
    trained = [tuple(v.shape) for v in step.cycle.variables]
    stays = resident(step)
    moments = []
    for concrete, proto in programs:
        found = [*stays, *_arguments(concrete), *of_program(proto, layers, trained)]
        moments.append(StepMemory(memory_of(proto), tuple(buffer for buffer in found if buffer.bytes)))
    return max(moments, key=lambda moment: moment.peak_bytes)


def bytes_at_most(step: Step, programs: Iterable[Any]) -> int | None:
    """Bytes that what is `held` cannot exceed, known without compiling: of all that the graphs compute, as if nothing
    were let go; None where a graph does not say.
    """
    total = sum(buffer.bytes for buffer in resident(step))
    for concrete in programs:
        if (computed := _computed(concrete)) is None:
            return None
        total += computed + sum(buffer.bytes for buffer in _arguments(concrete))
    return total


# What hands on what another operation has made.
_ALIASES = {"Identity", "IdentityN", "NoOp", "ReadVariableOp", "Reshape", "StatefulPartitionedCall", "PartitionedCall"}


def _computed(concrete: Any) -> int | None:
    """Bytes of every operation's outputs in a concrete function's graph, those of its functions among them, taken as
    of four bytes an element (eight, where float64 is computed); None if a shape is not known.
    """
    graph = concrete.graph.as_graph_def(add_shapes=True)
    functions = {function.signature.name: function.node_def for function in graph.library.function}
    sizes: dict[str, float] = {}

    def of_nodes(nodes: Iterable[Any]) -> float:
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        return sum(of_node(node) + _listed(node, constants) for node in nodes)

    def of_node(node: Any) -> float:
        called = [value.func.name for value in node.attr.values() if value.func.name in functions]
        total = sum(map(of_function, called))
        if node.op in _ALIASES:
            return total
        for shape in node.attr["_output_shapes"].list.shape:
            unknown = shape.unknown_rank or any(dim.size < 0 for dim in shape.dim)
            total += math.inf if unknown else math.prod(dim.size for dim in shape.dim)
        return total

    def of_function(name: str) -> float:
        if name not in sizes:
            sizes[name] = of_nodes(functions[name])
        return sizes[name]

    wide = any(tensor.dtype in (tf.float64, tf.complex128) for tensor in concrete.inputs)
    total = of_nodes(graph.node) * (8 if wide else 4)
    return None if math.isinf(total) else int(total)


def _listed(node: Any, constants: Mapping[str, Any]) -> float:
    """Elements of the list that an operation makes; infinite where its length or a shape is not known."""
    if not node.op.startswith("TensorList") or node.op in ("TensorListSetItem", "TensorListGetItem", "TensorListStack"):
        return 0
    sizes = [constants.get(name.partition(":")[0]) for name in node.input[:2]]
    if node.op != "TensorListReserve" or None in sizes:
        return math.inf
    shape, length = map(tf.make_ndarray, sizes)
    return 2 * int(length) * math.prod(shape.tolist()) if shape.ndim and (shape >= 0).all() else math.inf  # and a copy


def limit_of(step: Step, memory: DeviceMemory | None = None) -> int:
    """What `peak_bytes` of a built step may reach: what is `available`, and what its variables have taken of it."""
    memory = memory or available()
    if memory.source == LIMIT:
        return memory.total
    return memory.free // step.sharing + sum(buffer.bytes for buffer in resident(step))


def stacked(batch: Batch, accumulation: int) -> Batch:
    """Specs of a step's stack, from those of one micro-batch."""
    return tf.nest.map_structure(lambda s: tf.TensorSpec([accumulation, *s.shape], s.dtype), batch)


def resident(step: Step) -> list[Buffer]:
    """The variables that stay in memory: the model's, the optimizer's slots, and what a step keeps of its own."""
    objective, cycle = step.objective, step.cycle
    found: dict[int, Buffer] = {}

    def add(kind: Kind, variables: Iterable[Any]) -> None:
        for variable in variables:
            value = variable if isinstance(variable, tf.Variable) else variable.value
            path = getattr(variable, "path", value.name.partition(":")[0])
            layer, _, name = path.rpartition("/")
            shape = tuple(value.shape)
            found.setdefault(id(value), Buffer(_bytes(shape, value.dtype), kind, layer, name, shape))

    add("weights", objective.model.variables)
    add("weights", cycle.trained)
    add("optimizer slots", cycle.optimizer.variables)
    add("other", [*step.running.variables, *objective.state])
    return list(found.values())


def _arguments(concrete: Any) -> Iterator[Buffer]:
    """What a program is given, and the tensors that it was traced with; its variables are not among them."""
    captured, (arguments, _) = concrete.captured_inputs, concrete.structured_input_signature
    given = [each._asdict() if isinstance(each, Batch) else {"": each} for each in arguments]
    names = [place for each in given for name, nest in each.items() for place in _places(name, nest)]
    for name, tensor in zip(names, concrete.inputs, strict=False):
        kind: Kind = "data" if name else "accumulators"
        copies = IN_FLIGHT if name else 1
        yield Buffer(copies * _bytes(tensor.shape, tensor.dtype), kind, "", name, tuple(tensor.shape))
    for tensor in captured:
        if tensor.dtype != tf.resource:
            yield Buffer(_bytes(tensor.shape, tensor.dtype), "other", "", "a constant", tuple(tensor.shape))


def _places(name: str, nest: Any) -> list[str]:
    """The names of a nest's tensors, in the order of `tf.nest`: "x['image']", "x[0]"."""
    if not isinstance(nest, (Mapping, list, tuple)):
        return [name] * (nest is not None)
    parts = [(key, nest[key]) for key in sorted(nest)] if isinstance(nest, Mapping) else enumerate(nest)
    return [place for key, part in parts for place in _places(name and f"{name}[{key!r}]", part)]


def _bytes(shape: Iterable[int], dtype: tf.DType) -> int:
    return math.prod(shape) * dtype.size
