"""Computes parts of a model for rows of documents, to try out what packed rows do to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import raw, restored
from fastaccum.layers import documents
from fastaccum.layers.interceptors import Interceptor, intercepting
from fastaccum.layers.scan import probe_layers
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.probe_rows import ProbeRow, as_tensors

# Added to the weights, times numbers drawn from a normal distribution: a gate that is 0 before the
# training would hide what it lets in.
_SHIFT_OF_WEIGHTS = 0.05


class Trial:
    """A function of a packed row, traced once, with documents kept apart as by a train step.

    Args:
        objective: of the model that the function calls.
        function: returns a list of tensors, for a `ProbeRow` of tensors.
        row: arrays like those of the rows to come.
        observers: further interceptors of the model's layers.
        counters: variables that go on from row to row, such as those of metrics. All others are
            put back, so each row meets the same seeds and statistics.
    """

    def __init__(
        self,
        objective: ModelObjective,
        function: Callable[[ProbeRow], list[tf.Tensor]],
        row: ProbeRow,
        *,
        observers: Iterable[Interceptor] = (),
        counters: Sequence[tf.Variable] = (),
    ):
        model = objective.model
        called = model.called_layers

        def compute(row: ProbeRow) -> list[tf.Tensor]:
            interceptors = documents.make_interceptors(called)
            attending: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if objective.attention is not None:
                interceptors += objective.attention.make_forms(called)
                attending = objective.attention.entered()
            interceptors += observers
            # Of blocks that repeat the first one is called alone.
            interceptors += probe_layers(model.model).interceptors
            with attending, intercepting(interceptors):
                return function(row)

        traced = tf.function(compute, autograph=False)
        self._traced = traced.get_concrete_function(as_tensors(row))

        # The model's order: that of a graph differs from process to process.
        places = {id(raw(variable)): place for place, variable in enumerate(model.variables)}

        def place_of(variable: tf.Variable) -> tuple[int, str]:
            return places.get(id(variable), len(places)), variable.name

        state_ids = {id(raw(variable)) for variable in objective.state}
        counter_ids = {id(variable) for variable in counters}
        self._weights: list[tf.Variable] = []
        self._state: list[tf.Variable] = []  # seeds too
        for variable in sorted(self._traced.graph.variables, key=place_of):
            if id(variable) in counter_ids:
                continue
            if variable.dtype.is_floating and id(variable) not in state_ids:
                self._weights.append(variable)
            else:
                self._state.append(variable)

    @contextlib.contextmanager
    def shifted_weights(self) -> Iterator[None]:
        """Moves the weights a little away from 0 inside the block.

        No weight changes its sign, since a model may take its root or its logarithm.
        """
        with restored(self._weights):
            for number, weight in enumerate(self._weights):
                noise = _SHIFT_OF_WEIGHTS * tf.random.stateless_normal(weight.shape, [0, number])
                noise = tf.cast(noise, weight.dtype)
                value = weight.read_value()
                weight.assign_add(tf.where(value == 0, noise, tf.abs(noise) * tf.sign(value)))
            yield

    def compute(self, row: ProbeRow) -> list[np.ndarray]:
        """Computes the function for a row of arrays."""
        with restored(self._state):
            return [result.numpy() for result in self._traced(as_tensors(row))]
