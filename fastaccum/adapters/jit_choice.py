"""The choice of `jit_compile="auto"` on a CPU: whether a model's train step runs faster as an XLA
program.

XLA:CPU runs the gradients of convolutions as scalar code, but saves launches of operations and
passes over memory. The rule compares the two in multiply-adds of a forward convolution, by factors
from `python -m benchmarks.jit_forms` (docs/performance.md). It looks at the model, at the rows of a
micro-batch, at the CPU and at whether TensorFlow has oneDNN on.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.kernels import private

_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_TRANSPOSED = {"Conv2DBackpropInput", "Conv3DBackpropInputV2"}
_FREE = {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape"}
# What XLA saves, in multiply-adds: on an element of a result; and in each micro-batch on an
# operation (with its gradients), in all, and on a weight, by whether oneDNN's products of matrices
# are about as fast as XLA's.
_ELEMENT, _OPERATION, _STEP, _WEIGHT = 0.5, 2_000.0, 300_000.0, {False: 2.3, True: 0.5}
_ROWS = 16  # of a micro-batch, where the data do not say
# TensorFlow's operations use oneDNN.
ONEDNN: bool = private.has("pywrap_util_port") and private.pywrap_util_port.IsMklEnabled()
_CPU = pathlib.Path("/proc/cpuinfo")
# the CPU computes 16 float32 numbers at a time
AVX512 = _CPU.exists() and " avx512f " in _CPU.read_text()

Node: TypeAlias = "tf.compat.v1.NodeDef"


class Work(NamedTuple):
    """The work of a forward pass, counted."""

    # Multiply-adds of convolutions, for a row; in a depthwise one each channel counts with all, as
    # XLA:CPU computes the gradient. Less than 0 for those that TensorFlow has no kernel for on a
    # CPU.
    convolved: float = 0.0
    computed: float = 0.0  # elements of all results, for a row
    operations: float = 0.0  # however many rows there are


def is_faster_compiled(work: Work, parameters: int, rows: int | None) -> bool:
    """Tells if a train step on micro-batches of so many rows is faster with XLA on a CPU."""
    once = _STEP + _OPERATION * work.operations + _WEIGHT[ONEDNN and not AVX512] * parameters
    return work.convolved <= _ELEMENT * work.computed + once / (rows or _ROWS)


def count(traced: ConcreteFunction) -> Work:
    """Counts the work of a traced function of a batch, and of the functions that it calls."""
    graph, rows = traced.graph.as_graph_def(add_shapes=True), traced.inputs[0].shape[0] or 1
    functions = {function.signature.name: function for function in graph.library.function}

    def of_function(name: str) -> Work:
        function = functions[name]
        arguments = zip(
            function.signature.input_arg,
            (function.arg_attr[i] for i in itertools.count()),
            strict=False,
        )
        work = of_nodes(
            function.node_def, {argument.name: _shape(each) for argument, each in arguments}
        )
        # Keras compiles grouped convolutions by themselves, for which TensorFlow has no kernel.
        by_itself = function.attr[private.XLA_MUST_COMPILE].b and work.convolved
        return work._replace(convolved=-math.inf) if by_itself else work

    def of_nodes(nodes: Sequence[Node], given: dict[str, list[int]]) -> Work:
        shapes, total = given | {node.name: _shape(node) for node in nodes}, Work()
        for node in nodes:
            called = [
                of_function(v.func.name) for v in node.attr.values() if v.func.name in functions
            ]
            turns = _turns(node, nodes, shapes) if node.op.endswith("While") else 1
            found = [
                _work(node, shapes),
                *(Work(*(turns * each for each in work)) for work in called),
            ]
            total = Work(*map(sum, zip(total, *found, strict=True)))
        return total

    convolved, computed, operations = of_nodes(graph.node, {})
    return Work(convolved / rows, computed / rows, operations)


def _work(node: Node, shapes: Mapping[str, list[int]]) -> Work:
    if node.op in _FREE:
        return Work()
    computed, convolved = math.prod(_shape(node)), 0.0
    if (node.op in _CONVOLUTIONS | _TRANSPOSED or "Pool" in node.op) and _has_no_kernel(node):
        convolved = -math.inf
    elif node.op in _CONVOLUTIONS | _TRANSPOSED:
        _, kernel, *dy = (shapes.get(name.partition(":")[0], []) for name in node.input[:3])
        convolved = math.prod(kernel[:-1]) * (
            math.prod(dy[0]) if node.op in _TRANSPOSED else computed
        )
    return Work(convolved, computed, 1)


def _has_no_kernel(node: Node) -> bool:
    """Tells if TensorFlow may have no kernel for a CPU of a convolution, a pooling or its
    gradient.
    """
    spread = node.op in _TRANSPOSED and max(node.attr["dilations"].list.i, default=1) > 1
    half = "Pool3D" in node.op and node.attr["T"].type == tf.float16.as_datatype_enum
    of_onednn = (
        ONEDNN and "3D" not in node.op and node.attr["T"].type == tf.float32.as_datatype_enum
    )
    return half or (not of_onednn and (spread or node.attr["data_format"].s.startswith(b"NC")))


def _turns(loop: Node, nodes: Sequence[Node], shapes: Mapping[str, list[int]]) -> int:
    """Returns the length of the longest list that a loop reads, as a recurrent layer's reads its
    time steps.
    """
    given = {name.partition(":")[0] for name in loop.input}
    lists = [node for node in nodes if node.op == "TensorListFromTensor" and node.name in given]
    return max(
        [
            1,
            *(
                size
                for node in lists
                for size in shapes.get(node.input[0].partition(":")[0], [])[:1]
            ),
        ]
    )


def _shape(node: Any) -> list[int]:
    """Returns the shape of a node's first result, or of an argument, with 1 for what is not
    known.
    """
    # a node's or an argument's, whose protos share no class
    shapes = node.attr[private.OUTPUT_SHAPES].list.shape
    return [max(dim.size, 1) for dim in shapes[0].dim] if shapes else []
