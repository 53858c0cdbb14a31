"""The device memory of a train step: read off its compiled programs, with no data and no run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.storage import Storage
from fastaccum.basics.attributes import Variable, raw
from fastaccum.data.arrays import PREFETCH
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.kernels import private
from fastaccum.memory.buffers import Buffer, HloProto, Kind, StepMemory, program_buffers
from fastaccum.memory.device import LIMIT, DeviceMemory, available
from fastaccum.step.compiler_ir import MemoryAnalysis, hlo_proto, memory_of
from fastaccum.step.engine import Engine

# The number of stacks that a fit holds: one is trained on, one waits to be read, others are made
# ahead.
IN_FLIGHT = 2 + PREFETCH


def dispatch_memory(engine: Engine, dispatch: Dispatch) -> StepMemory:
    """Compiles a step for a dispatch of specs; returns the memory it takes of each device."""
    return measure(engine, compile_programs(engine.trace(dispatch)))


def compile_programs(
    functions: Iterable[ConcreteFunction],
) -> list[tuple[ConcreteFunction, HloProto]]:
    """Compiles concrete functions, and pairs each with its `HloProto`."""
    return [(concrete, hlo_proto(concrete)) for concrete in functions]


def measure(engine: Engine, programs: list[tuple[ConcreteFunction, HloProto]]) -> StepMemory:
    """Returns the memory of a step at its largest moment.

    The moments are the runs of its programs, one after the other, and the exchange of replicas.
    """
    layers = {layer.name for layer in engine.objective.model.layers}
    trained = [tuple(variable.shape) for variable in engine.cycle.variables]
    resident_buffers = resident(engine)

    moments = []
    for concrete, proto in programs:
        buffers = [
            *resident_buffers,
            *_arguments(concrete),
            *program_buffers(proto, layers, trained),
        ]
        not_empty = tuple(buffer for buffer in buffers if buffer.bytes)
        moments.append(StepMemory(memory_of(proto), not_empty))

    # Between the first program and the second, the replicas exchange what the first one has summed.
    if engine.exchanged_bytes and len(programs) > 1:
        first_program, _ = programs[0]
        data = [buffer for buffer in _arguments(first_program) if buffer.kind == "data"]
        exchanged = Buffer(engine.exchanged_bytes, "accumulators", "", "exchanged by replicas")
        memory_plan = MemoryAnalysis(
            argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=engine.exchanged_bytes
        )
        moments.append(StepMemory(memory_plan, (*resident_buffers, *data, exchanged)))

    return max(moments, key=lambda moment: moment.peak_bytes)


def needs_shares(
    weights: Sequence[Variable],
    trained: Sequence[Variable],
    devices: list[str],
    storage: Storage,
    slots: float,
) -> bool:
    """Tells if replicas must share the optimizer's slots out, since a device cannot hold all.

    Beside the slots a device holds the weights and what replicas exchange. `slots` is how many
    numbers the optimizer keeps for each number of a trained weight, in this storage.
    """
    weight_bytes = _bytes_of_variables(weights)
    # The exchange holds two gradients of each trained weight: before it and after.
    exchanged_bytes = 2 * _bytes_of_variables(trained)
    slot_bytes = 0.0
    for variable in trained:
        slot_bytes += slots * _bytes(raw(variable).shape, tf.as_dtype(storage.slot_dtype(variable)))
    needed = weight_bytes + slot_bytes + exchanged_bytes

    # Replicas on a CPU take from one memory.
    devices_of_memory = 1
    if "CPU" in devices[0]:
        devices_of_memory = len(devices)

    def room(memory: DeviceMemory) -> int:
        if memory.source == LIMIT:
            return memory.total
        return memory.free // devices_of_memory + weight_bytes  # the weights are there already

    return needed > min(room(available(device)) for device in devices)


def _bytes_of_variables(variables: Iterable[Variable]) -> int:
    return sum(_bytes(raw(variable).shape, raw(variable).dtype) for variable in variables)


def bytes_at_most(engine: Engine, functions: Iterable[ConcreteFunction]) -> int | None:
    """Bounds the bytes that `measure` finds from above, without compiling.

    The bound is the sum of all results in the graphs, as if none were freed; None if a size is
    unknown.
    """
    total = resident_bytes(engine) + engine.exchanged_bytes
    for concrete in functions:
        computed_bytes = _computed(concrete)
        if computed_bytes is None:
            return None
        total += computed_bytes
        total += sum(buffer.bytes for buffer in _arguments(concrete))
    return total


# The operations that take no memory of their own: the result of each is another operation's, or a
# list of axes that XLA computes while it compiles.
_WITHOUT_MEMORY = {
    "BroadcastGradientArgs",
    "Identity",
    "IdentityN",
    "NoOp",
    "ReadVariableOp",
    "Reshape",
    "StatefulPartitionedCall",
    "PartitionedCall",
}

# Operations that take a list of tensors and make no new one. What they read from it counts as a
# result of theirs.
_READS_OR_WRITES_LIST = ("TensorListSetItem", "TensorListGetItem", "TensorListStack")


def _computed(concrete: ConcreteFunction) -> int | None:
    """Sums the bytes of all results in a graph and in the functions that it calls.

    Returns None if a shape is unknown.
    """
    graph = concrete.graph.as_graph_def(add_shapes=True)
    functions = {function.signature.name: function.node_def for function in graph.library.function}

    def count_in_nodes(nodes: Iterable[tf.compat.v1.NodeDef]) -> float:
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        elements: float = 0
        for node in nodes:
            elements += count_in_node(node)
            elements += _list_elements(node, constants)
        return elements

    def count_in_node(node: tf.compat.v1.NodeDef) -> float:
        elements: float = 0
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name in functions:
                    elements += count_in_function(called.name)
        if node.op in _WITHOUT_MEMORY:
            return elements
        for shape in node.attr[private.OUTPUT_SHAPES].list.shape:
            elements += _elements(shape)
        return elements

    @functools.cache
    def count_in_function(name: str) -> float:
        return count_in_nodes(functions[name])

    # Every element counts 4 bytes, or 8 if an input is of double precision.
    is_wide = any(tensor.dtype in (tf.float64, tf.complex128) for tensor in concrete.inputs)
    bytes_of_element = 8 if is_wide else 4
    total = count_in_nodes(graph.node) * bytes_of_element
    if math.isinf(total):
        return None
    return int(total)


def _elements(shape: Any) -> float:
    """Counts the elements of a TensorShapeProto; infinite if its rank or a size is unknown."""
    if shape.unknown_rank:
        return math.inf
    sizes = [dim.size for dim in shape.dim]
    if any(size < 0 for size in sizes):
        return math.inf
    return math.prod(sizes)


def _list_elements(node: tf.compat.v1.NodeDef, constants: Mapping[str, object]) -> float:
    """Counts the elements of the list that an operation makes, twice, since XLA may copy a list.

    They are infinite if the list's length or a shape in it is unknown, or where another operation
    than TensorListReserve makes the list.
    """
    if not node.op.startswith("TensorList") or node.op in _READS_OR_WRITES_LIST:
        return 0
    if node.op != "TensorListReserve":
        return math.inf

    # TensorListReserve takes the shape of an element, and the number of elements.
    operands = [constants.get(name.partition(":")[0]) for name in node.input[:2]]
    if None in operands:
        return math.inf
    element_shape, length = map(tf.make_ndarray, operands)
    is_known = element_shape.ndim and (element_shape >= 0).all()
    if not is_known:
        return math.inf
    return 2 * int(length) * math.prod(element_shape.tolist())


def limit_of(engine: Engine, memory: DeviceMemory) -> int:
    """Returns what a built step's `peak_bytes` may reach: free memory and that of its variables."""
    if memory.source == LIMIT:
        return memory.total
    return memory.free // engine.sharing + resident_bytes(engine)


def specs(sample: Batch, rows: int) -> Batch:
    """Makes the specs of a micro-batch like `sample`, of so many rows.

    Raises:
        ValueError: raised if another axis is not known.
    """
    for leaf in tf.nest.flatten(sample):
        if not leaf.shape[1:].is_fully_defined():
            raise ValueError(
                f"The data's rows have shape {tuple(leaf.shape[1:])}: their memory cannot be "
                "planned while an axis is unknown. Pad all to one length (.padded_batch with "
                "padded_shapes), or plan with arrays of the longest rows there are."
            )
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype), sample
    )


def stacked(batch: Batch, accumulation: int) -> Batch:
    """Makes the specs of a step's stack from those of one micro-batch."""
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([accumulation, *spec.shape], spec.dtype), batch
    )


def dispatch_of(sample: Batch, rows: int, accumulation: int) -> Dispatch:
    """Makes the specs of the dispatch with which `fit` trains on so many rows like `sample`."""
    micro_batch = specs(sample, rows)._replace(valid=tf.TensorSpec([rows], tf.bool))
    return Dispatch((stacked(micro_batch, accumulation),))


def resident(engine: Engine) -> list[Buffer]:
    """Lists what stays in memory: the variables of the model, the optimizer and the step's sums."""
    objective = engine.objective
    cycle = engine.cycle
    buffers: dict[int, Buffer] = {}  # by the variable's identity, since a model may share weights

    def add(kind: Kind, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        for variable in variables:
            value = variable if isinstance(variable, tf.Variable) else variable.value
            path = getattr(variable, "path", value.name.partition(":")[0])
            layer, _, name = path.rpartition("/")
            shape = tuple(value.shape)
            buffer = Buffer(_bytes(shape, value.dtype), kind, layer, name, shape)
            buffers.setdefault(id(value), buffer)

    add("weights", objective.model.variables)
    add("weights", cycle.trained)
    elsewhere = engine.elsewhere  # the slots that other replicas hold
    add("optimizer slots", [v for v in cycle.optimizer.variables if id(v) not in elsewhere])
    add("other", [*engine.running.variables, *objective.state])
    return list(buffers.values())


def resident_bytes(engine: Engine) -> int:
    return sum(buffer.bytes for buffer in resident(engine))


class _Argument(NamedTuple):
    """Description of a tensor that a program is called with."""

    kind: Kind
    name: str  # its place in the batch; "" for a sum
    copies: int  # in memory at once


def _arguments(concrete: ConcreteFunction) -> Iterator[Buffer]:
    """Yields the tensors that a program is called with or captured, other than its variables.

    A program's arguments are batches, or sums that a program before it has accumulated.
    """
    positional, _ = concrete.structured_input_signature
    arguments: list[_Argument] = []
    for argument in positional:
        if isinstance(argument, Batch):
            for field, nest in argument._asdict().items():
                for name in _places(field, nest):
                    arguments.append(_Argument("data", name, IN_FLIGHT))
        else:
            for _ in _places("sums", argument):
                arguments.append(_Argument("accumulators", name="", copies=1))

    # `inputs` are the tensors of the arguments, then the captured ones.
    for argument, tensor in zip(arguments, concrete.inputs, strict=False):
        size = argument.copies * _bytes(tensor.shape, tensor.dtype)
        yield Buffer(size, argument.kind, "", argument.name, tuple(tensor.shape))

    for tensor in concrete.captured_inputs:
        if tensor.dtype != tf.resource:
            size = _bytes(tensor.shape, tensor.dtype)
            yield Buffer(size, "other", "", "a constant", tuple(tensor.shape))


def _places(name: str, nest: object) -> list[str]:
    """Names the tensors of a nest, in the order of `tf.nest`: "x['image']", "x[0]"."""
    if nest is None:
        return []
    items: Iterable[tuple[Any, object]]
    if isinstance(nest, Mapping):
        items = [(key, nest[key]) for key in sorted(nest)]
    elif isinstance(nest, (list, tuple)):
        items = enumerate(nest)
    else:
        return [name]

    names = []
    for key, part in items:
        names += _places(f"{name}[{key!r}]", part)
    return names


def _bytes(shape: Iterable[int], dtype: tf.DType) -> int:
    return math.prod(shape) * dtype.size
