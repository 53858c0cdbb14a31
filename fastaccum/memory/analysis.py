"""The device memory of a train step: read off its compiled programs, with no data and no run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.attributes import Variable, raw
from fastaccum.data.arrays import PREFETCH
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.kernels import private
from fastaccum.memory.buffers import Buffer, HloProto, Kind, StepMemory, program_buffers
from fastaccum.memory.device import LIMIT, DeviceMemory, available
from fastaccum.step.compiler_ir import MemoryAnalysis, hlo_proto, memory_of
from fastaccum.step.step import Step

# stacks that a fit holds: one is trained on, one waits to be read, others are made ahead
IN_FLIGHT = 2 + PREFETCH


def dispatch_memory(step: Step, dispatch: Dispatch) -> StepMemory:
    """Compiles a step for a dispatch of specs, and returns the memory that it takes of each
    replica's device.
    """
    return measure(step, compile_programs(step.trace(dispatch)))


def compile_programs(
    functions: Iterable[ConcreteFunction],
) -> list[tuple[ConcreteFunction, HloProto]]:
    """Compiles concrete functions, and pairs each with its `HloProto`."""
    return [(concrete, hlo_proto(concrete)) for concrete in functions]


def measure(step: Step, programs: list[tuple[ConcreteFunction, HloProto]]) -> StepMemory:
    """Returns the memory of a step's programs, which run one after the other, while the largest of
    them runs.
    """
    layers = {layer.name for layer in step.objective.model.layers}
    trained = [tuple(v.shape) for v in step.cycle.variables]
    stays = resident(step)
    moments = []
    for concrete, proto in programs:
        found = [*stays, *_arguments(concrete), *program_buffers(proto, layers, trained)]
        moments.append(
            StepMemory(memory_of(proto), tuple(buffer for buffer in found if buffer.bytes))
        )
    if step.exchanged_bytes and len(programs) > 1:  # between the first and the second
        data = [buffer for buffer in _arguments(programs[0][0]) if buffer.kind == "data"]
        found = [
            *stays,
            *data,
            Buffer(step.exchanged_bytes, "accumulators", "", "exchanged by replicas"),
        ]
        moments.append(StepMemory(MemoryAnalysis(0, 0, 0, step.exchanged_bytes), tuple(found)))
    return max(moments, key=lambda moment: moment.peak_bytes)


def needs_shares(
    weights: Sequence[Variable], trained: Sequence[Variable], devices: list[str], slots: float
) -> bool:
    """Tells if a device would be too small for all slots, `slots` numbers a weight, beside what
    replicas exchange.
    """
    held, updated = (
        sum(_bytes(raw(v).shape, raw(v).dtype) for v in each) for each in (weights, trained)
    )
    needed = held + (slots + 2) * updated
    sharing = len(devices) if "CPU" in devices[0] else 1
    return needed > min(
        m.total if m.source == LIMIT else m.free // sharing + held for m in map(available, devices)
    )


def bytes_at_most(step: Step, functions: Iterable[ConcreteFunction]) -> int | None:
    """Bounds `measure` from above without compiling, as if no result were freed; None if a size is
    unknown.
    """
    total = resident_bytes(step) + step.exchanged_bytes
    for concrete in functions:
        if (computed := _computed(concrete)) is None:
            return None
        total += computed + sum(buffer.bytes for buffer in _arguments(concrete))
    return total


# Operations whose result is another operation's, or a list of axes that XLA computes while it
# compiles.
_ALIASES = {
    "Identity",
    "IdentityN",
    "NoOp",
    "ReadVariableOp",
    "Reshape",
    "StatefulPartitionedCall",
    "PartitionedCall",
}
_ALIASES |= {"BroadcastGradientArgs"}


def _computed(concrete: ConcreteFunction) -> int | None:
    """Sums the bytes of all results in a graph and the functions that it calls; returns None if a
    shape is unknown.
    """
    graph = concrete.graph.as_graph_def(add_shapes=True)
    functions = {function.signature.name: function.node_def for function in graph.library.function}

    def of_nodes(nodes: Iterable[tf.compat.v1.NodeDef]) -> float:
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        return sum(of_node(node) + _list_elements(node, constants) for node in nodes)

    def of_node(node: tf.compat.v1.NodeDef) -> float:
        total = sum(
            of_function(value.func.name)
            for value in node.attr.values()
            if value.func.name in functions
        )
        if node.op in _ALIASES:
            return total
        for shape in node.attr[private.OUTPUT_SHAPES].list.shape:
            unknown = shape.unknown_rank or any(dim.size < 0 for dim in shape.dim)
            total += math.inf if unknown else math.prod(dim.size for dim in shape.dim)
        return total

    @functools.cache
    def of_function(name: str) -> float:
        return of_nodes(functions[name])

    # any element counts 8 bytes
    wide = any(tensor.dtype in (tf.float64, tf.complex128) for tensor in concrete.inputs)
    total = of_nodes(graph.node) * (8 if wide else 4)
    return None if math.isinf(total) else int(total)


def _list_elements(node: tf.compat.v1.NodeDef, constants: Mapping[str, object]) -> float:
    """Counts the elements of the list that an operation makes; infinite where its length or a shape
    is unknown.
    """
    if not node.op.startswith("TensorList") or node.op in (
        "TensorListSetItem",
        "TensorListGetItem",
        "TensorListStack",
    ):
        return 0
    sizes = [constants.get(name.partition(":")[0]) for name in node.input[:2]]
    if node.op != "TensorListReserve" or None in sizes:
        return math.inf
    shape, length = map(tf.make_ndarray, sizes)
    # and a copy
    return (
        2 * int(length) * math.prod(shape.tolist())
        if shape.ndim and (shape >= 0).all()
        else math.inf
    )


def limit_of(step: Step, memory: DeviceMemory) -> int:
    """Returns the bytes that `peak_bytes` of a built step may reach: free memory, and the
    variables' share of it.
    """
    return (
        memory.total
        if memory.source == LIMIT
        else memory.free // step.sharing + resident_bytes(step)
    )


def specs(sample: Batch, rows: int) -> Batch:
    """Specs of a micro-batch like `sample`, of so many rows; raises ValueError where another axis
    is not known.
    """
    for leaf in tf.nest.flatten(sample):
        if not leaf.shape[1:].is_fully_defined():
            raise ValueError(
                f"The data's rows are of shape {tuple(leaf.shape[1:])}: what memory they need is "
                "not known. Pad all to one length (.padded_batch with padded_shapes), or plan "
                "with arrays of the longest rows there are."
            )
    return tf.nest.map_structure(lambda s: tf.TensorSpec([rows, *s.shape[1:]], s.dtype), sample)


def stacked(batch: Batch, accumulation: int) -> Batch:
    """Specs of a step's stack, from those of one micro-batch."""
    return tf.nest.map_structure(lambda s: tf.TensorSpec([accumulation, *s.shape], s.dtype), batch)


def dispatch_of(sample: Batch, rows: int, accumulation: int) -> Dispatch:
    """Specs of the dispatch with which `fit` trains on micro-batches like `sample`, of so many
    rows.
    """
    return Dispatch(
        (stacked(specs(sample, rows)._replace(valid=tf.TensorSpec([rows], tf.bool)), accumulation),)
    )


def resident(step: Step) -> list[Buffer]:
    """The variables that stay in memory: the model's, the optimizer's slots and the step's sums."""
    objective, cycle = step.objective, step.cycle
    found: dict[int, Buffer] = {}

    def add(kind: Kind, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        for variable in variables:
            value = variable if isinstance(variable, tf.Variable) else variable.value
            layer, _, name = getattr(variable, "path", value.name.partition(":")[0]).rpartition("/")
            shape = tuple(value.shape)
            found.setdefault(
                id(value), Buffer(_bytes(shape, value.dtype), kind, layer, name, shape)
            )

    add("weights", objective.model.variables)
    add("weights", cycle.trained)
    elsewhere = step.elsewhere
    add("optimizer slots", [v for v in cycle.optimizer.variables if id(v) not in elsewhere])
    add("other", [*step.running.variables, *objective.state])
    return list(found.values())


def resident_bytes(step: Step) -> int:
    return sum(buffer.bytes for buffer in resident(step))


def _arguments(concrete: ConcreteFunction) -> Iterator[Buffer]:
    """The tensors that a program is called with or captured, other than its variables."""
    captured, (arguments, _) = concrete.captured_inputs, concrete.structured_input_signature
    given = [each._asdict() if isinstance(each, Batch) else {"": each} for each in arguments]
    names = [
        place for each in given for name, nest in each.items() for place in _places(name, nest)
    ]
    for name, tensor in zip(names, concrete.inputs, strict=False):
        kind: Kind = "data" if name else "accumulators"
        copies = IN_FLIGHT if name else 1
        yield Buffer(
            copies * _bytes(tensor.shape, tensor.dtype), kind, "", name, tuple(tensor.shape)
        )
    for tensor in captured:
        if tensor.dtype != tf.resource:
            yield Buffer(
                _bytes(tensor.shape, tensor.dtype), "other", "", "a constant", tuple(tensor.shape)
            )


def _places(name: str, nest: object) -> list[str]:
    """Names the tensors of a nest, in the order of `tf.nest`: "x['image']", "x[0]"."""
    if not isinstance(nest, (Mapping, list, tuple)):
        return [name] * (nest is not None)
    parts = (
        [(key, nest[key]) for key in sorted(nest)] if isinstance(nest, Mapping) else enumerate(nest)
    )
    return [place for key, part in parts for place in _places(name and f"{name}[{key!r}]", part)]


def _bytes(shape: Iterable[int], dtype: tf.DType) -> int:
    return math.prod(shape) * dtype.size
