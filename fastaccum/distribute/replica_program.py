"""A function compiled for one replica, and called with the variables of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fastaccum.distribute.replicas import Replicas, first_components


class ReplicaProgram:
    """A compiled function of one replica: traced on the first one's variables, and called with those of any.

    `program(*args)` traces it, if need be; `program(*args)(i, *args)` calls it on local replica i, in a graph.

    `around` makes a scope for the trace.
    """

    outputs: Any = None  # specs of what it returned when it was traced last

    def __init__(self, function: Callable[..., Any], replicas: Replicas, jit_compile: bool, around: Callable[[], Any]):
        self._function = tf.function(function, jit_compile=jit_compile, autograph=False)
        self._replicas, self._around = replicas, around

    def __call__(self, *args: Any) -> TracedProgram:
        specs = _specs(args)
        with first_components(), self._around():
            concrete = self._function.get_concrete_function(*specs)
        traced = TracedProgram(concrete, self._replicas)
        self.outputs = traced.outputs
        return traced


class TracedProgram:
    """A `ReplicaProgram` for arguments of known shapes; `outputs` are specs of what it returns."""

    def __init__(self, concrete: Any, replicas: Replicas):
        self._concrete, self._replicas = concrete, replicas
        self.outputs = _specs(concrete.structured_outputs)
        # Copies of variables must exist before the graph that synchronizes them.
        self._captured = [
            [replicas.on(i, handle) for handle in concrete.captured_inputs] for i in range(len(replicas.devices))
        ]

    def __call__(self, replica: int, *args: Any) -> Any:
        with tf.device(self._replicas.devices[replica]):
            tensors = [t for t in tf.nest.flatten(args) if t is not None]
            return self._concrete._call_flat(tensors, self._captured[replica])


def _specs(nest: Any) -> Any:
    return tf.nest.map_structure(lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest)
