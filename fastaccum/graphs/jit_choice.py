"""Chooses what `jit_compile="auto"` is on a CPU: if a train step runs faster as an XLA program.

XLA:CPU runs the gradients of convolutions as scalar code, but saves launches of operations and
passes over memory. The rule compares the two in multiply-adds of a forward convolution, by factors
from `python -m benchmarks.tools.jit_forms` (docs/performance.md). It looks at the model, at the
rows of a micro-batch, at the CPU and at whether TensorFlow has oneDNN on.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.kernels import private

# Operations that cost multiply-adds at each element of their result, at each element of their
# input, and nothing.
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_TRANSPOSED = {"Conv2DBackpropInput", "Conv3DBackpropInputV2"}
_FREE = {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape"}

# What XLA saves on an element of a result, in multiply-adds. This factor and the next ones are
# from `python -m benchmarks.tools.jit_forms`.
_ELEMENT = 0.5

# What XLA saves in each micro-batch on an operation with its gradients, in multiply-adds.
_OPERATION = 2_000.0

# What XLA saves in each micro-batch however large the model is, in multiply-adds.
_STEP = 300_000.0

# What XLA saves in each micro-batch on a weight, in multiply-adds. It is less where oneDNN's
# products of matrices are about as fast as XLA's.
_WEIGHT = 2.3
_WEIGHT_WITH_ONEDNN = 0.5

# The rows of a micro-batch where the data do not say.
_ROWS = 16

# True if TensorFlow's operations use oneDNN.
ONEDNN: bool = private.has("pywrap_util_port") and private.pywrap_util_port.IsMklEnabled()

# Linux's description of the CPU; other systems have none.
_CPU = pathlib.Path("/proc/cpuinfo")

# True if the CPU computes 16 float32 numbers at a time.
AVX512 = _CPU.exists() and " avx512f " in _CPU.read_text()

Node: TypeAlias = "tf.compat.v1.NodeDef"


class Work(NamedTuple):
    """The work of a forward pass, counted."""

    # Multiply-adds of convolutions, for a row. In a depthwise one each channel counts with all, as
    # XLA:CPU computes the gradient. Less than 0 if TensorFlow has no kernel for one on a CPU.
    convolved: float = 0.0
    computed: float = 0.0  # elements of all results, for a row
    operations: float = 0.0  # however many rows there are

    def plus(self, work: Work, turns: int = 1) -> Work:
        """Returns the sum with what a loop of so many turns does in all of them."""
        return Work(
            self.convolved + turns * work.convolved,
            self.computed + turns * work.computed,
            self.operations + turns * work.operations,
        )


def is_faster_compiled(work: Work, parameters: int, rows: int | None) -> bool:
    """Tells if a train step on micro-batches of so many rows is faster with XLA on a CPU."""
    per_weight = _WEIGHT_WITH_ONEDNN if ONEDNN and not AVX512 else _WEIGHT
    per_micro_batch = _STEP + _OPERATION * work.operations + per_weight * parameters
    saved_on_a_row = _ELEMENT * work.computed + per_micro_batch / (rows or _ROWS)
    return work.convolved <= saved_on_a_row


def count(traced: ConcreteFunction) -> Work:
    """Counts the work of a traced function of a batch, and of the functions that it calls."""
    graph = traced.graph.as_graph_def(add_shapes=True)
    rows = traced.inputs[0].shape[0] or 1
    functions = {function.signature.name: function for function in graph.library.function}

    def of_function(name: str) -> Work:
        function = functions[name]
        arguments = {}
        for i, argument in enumerate(function.signature.input_arg):
            arguments[argument.name] = _shape(function.arg_attr[i])
        work = of_nodes(function.node_def, arguments)
        # Keras compiles grouped convolutions by themselves, for which TensorFlow has no kernel.
        if function.attr[private.XLA_MUST_COMPILE].b and work.convolved:
            return work._replace(convolved=-math.inf)
        return work

    def of_nodes(nodes: Sequence[Node], arguments: dict[str, list[int]]) -> Work:
        shapes = dict(arguments)
        for node in nodes:
            shapes[node.name] = _shape(node)

        total = Work()
        for node in nodes:
            called = [value.func.name for value in node.attr.values()]
            total = total.plus(_work(node, shapes))
            turns = _turns(node, nodes, shapes) if node.op.endswith("While") else 1
            for name in called:
                if name in functions:
                    total = total.plus(of_function(name), turns)
        return total

    total = of_nodes(graph.node, {})
    return Work(total.convolved / rows, total.computed / rows, total.operations)


def _work(node: Node, shapes: Mapping[str, list[int]]) -> Work:
    """Counts the work of a node, without that of the functions that it calls."""
    if node.op in _FREE:
        return Work()
    computed = math.prod(_shape(node))
    is_transposed = node.op in _TRANSPOSED
    is_convolution = is_transposed or node.op in _CONVOLUTIONS
    if (is_convolution or "Pool" in node.op) and _has_no_kernel(node):
        return Work(-math.inf, computed, 1)
    if not is_convolution:
        return Work(0.0, computed, 1)

    # A convolution's inputs are x and the kernel; those of a transposed one are the size of the
    # result, the kernel and x. The kernel is applied at each element of the result, or, where
    # transposed, of x.
    kernel = _input_shape(node, 1, shapes)
    applied = math.prod(_input_shape(node, 2, shapes)) if is_transposed else computed
    return Work(math.prod(kernel[:-1]) * applied, computed, 1)


def _has_no_kernel(node: Node) -> bool:
    """Tells if TensorFlow may have no CPU kernel of a convolution, a pooling or its gradient."""
    dtype = node.attr["T"].type
    if "Pool3D" in node.op and dtype == tf.float16.as_datatype_enum:
        return True
    if ONEDNN and "3D" not in node.op and dtype == tf.float32.as_datatype_enum:
        return False
    is_dilated = max(node.attr["dilations"].list.i, default=1) > 1
    if node.op in _TRANSPOSED and is_dilated:
        return True
    return node.attr["data_format"].s.startswith(b"NC")


def _turns(loop: Node, nodes: Sequence[Node], shapes: Mapping[str, list[int]]) -> int:
    """Returns the length of the longest list that a loop reads.

    A recurrent layer's reads its time steps.
    """
    inputs = {_node_name(name) for name in loop.input}
    turns = 1
    for node in nodes:
        if node.op == "TensorListFromTensor" and node.name in inputs:
            shape = _input_shape(node, 0, shapes)
            if shape:
                turns = max(turns, shape[0])
    return turns


def _input_shape(node: Node, position: int, shapes: Mapping[str, list[int]]) -> list[int]:
    """Returns the shape of an input of a node, or an empty one where it is not known."""
    return shapes.get(_node_name(node.input[position]), [])


def _node_name(tensor: str) -> str:
    """Returns the name of the node whose result a tensor is."""
    return tensor.partition(":")[0]


def _shape(node: Any) -> list[int]:
    """Returns the shape of a node's first result, or of an argument; unknown sizes are 1."""
    # The protos of nodes and of arguments share no class.
    shapes = node.attr[private.OUTPUT_SHAPES].list.shape
    if not shapes:
        return []
    return [max(dim.size, 1) for dim in shapes[0].dim]
