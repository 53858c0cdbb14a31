"""Finds by traces what a model's calls do beside returning outputs, and what they compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters import added_losses
from fastaccum.basics.attributes import Nest, Variable
from fastaccum.graphs import jit_choice, row_counts, row_mixing, traces


class CallEffects:
    """The effects of a model's calls, as their traces showed them so far."""

    def __init__(self) -> None:
        # The reductions by which the losses that a call adds count:
        self.added_reductions: list[str] = []
        # The variables that a call assigns, besides those that layers hold for it:
        self.assigned: list[Variable] = []
        # Whether the model's result for a row depends on other rows:
        self.mixes_rows = False
        # An operation by which the number of rows reaches what the model returns:
        self.row_counter: str | None = None
        # What a call in training computes on a row:
        self.work: jit_choice.Work | None = None
        # Operations that call Python, as by tf.py_function:
        self.python_calls: list[str] = []
        # Operations in training that draw what no seed of the model's says:
        self.unsaved_draws: list[str] = []

    def trace(
        self,
        call: Callable[[Nest], Nest],
        x: Nest,
        training: bool,
        may_count_rows: Callable[[], bool],
    ) -> ConcreteFunction:
        """Traces a call, and notes if it mixes rows, and in training its work and draws.

        `may_count_rows` is asked after the call was traced, which may build layers.
        """
        try:
            traced = traces.trace(call, x)
            if training and may_count_rows():
                self.row_counter = row_counts.find_row_counter(traced, call, x)
            if self.row_counter or row_mixing.find_mixing_op(traced, call, x):
                self.mixes_rows = True
        except (ValueError, TypeError, tf.errors.InvalidArgumentError):
            # A model of a fixed batch size cannot be tried with other rows.
            traced = traces.trace(call, x, rows=None)
            self.mixes_rows = True
        if training:
            self.work = jit_choice.count(traced)
            self.unsaved_draws = [
                op.name for op in traced.graph.get_operations() if op.type in traces.UNSEEDED
            ]
        return traced

    def note(
        self, traced: ConcreteFunction, variables: list[Variable], losses: Iterable[tf.Tensor]
    ) -> None:
        """Notes what a traced call assigns, its calls of Python, and the `losses` that it added.

        `variables` are the model's.
        """
        assigned = [*self.assigned, *traces.list_assigned(traced.graph, variables)]
        by_identity = {id(variable): variable for variable in assigned}
        self.assigned = list(by_identity.values())

        python_calls = {*self.python_calls, *traces.list_python_calls(traced.graph)}
        self.python_calls = sorted(python_calls)

        reductions = map(added_losses.get_reduction, losses)
        self.added_reductions = sorted({*self.added_reductions, *reductions})
