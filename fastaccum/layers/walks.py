"""Runs a functional model's graph part by part, in place of Keras's own walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.layers.blocks import Segment


class Part(Protocol):
    """A part of a graph, by what it takes and gives."""

    @property
    def inputs(self) -> list[keras.KerasTensor]: ...
    @property
    def outputs(self) -> list[keras.KerasTensor]: ...


P = TypeVar("P", bound=Part)


def may_walk(inputs: Nest, options: Mapping[str, object]) -> bool:
    """Tells if a call of Keras's walk may be replaced.

    It may be where a graph is traced, and Keras asks for nothing but the outputs.
    """
    is_symbolic = any(isinstance(t, keras.KerasTensor) for t in keras.tree.flatten(inputs))
    return not (tf.executing_eagerly() or options or is_symbolic)


def run_segments(
    graph: keras.Function,
    segments: Sequence[P],
    inputs: Nest,
    run: Callable[[P, list[tf.Tensor]], list[tf.Tensor]],
) -> Nest:
    """Runs the parts of a graph one after the other, each by `run`."""
    flat = keras.tree.flatten(inputs)
    # The tensors that stand for a graph's KerasTensors, by the ids of these.
    values = {id(t): value for t, value in zip(graph.inputs, flat, strict=True)}
    for segment in segments:
        results = run(segment, [values[id(t)] for t in segment.inputs])
        for t, result in zip(segment.outputs, results, strict=True):
            values[id(t)] = result
    outputs = [values[id(t)] for t in graph.outputs]
    return keras.tree.pack_sequence_as(graph.output, outputs)


def run_nodes(segment: Segment, operation_fn: Callable, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Runs the nodes of a segment."""
    values = {id(t): value for t, value in zip(segment.inputs, inputs, strict=True)}
    for node in segment.nodes:
        args, kwargs = node.arguments.fill_in(values)
        outputs = operation_fn(node.operation)(*args, **kwargs)
        for t, output in zip(node.outputs, keras.tree.flatten(outputs), strict=False):
            values[id(t)] = output
    return [values[id(t)] for t in segment.outputs]
