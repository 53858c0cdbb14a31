"""Compiled programs, called with little overhead."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import optree
import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.step import compile_cache, compile_messages, xla_cache
from fastaccum.step.compile_messages import Retraces
from fastaccum.step.tracing import TracedFunction


class Program(TracedFunction):
    """A function of nests of tensors, traced and compiled once per structure, shapes and dtypes.

    A `tf.function` whose traces are found by structure, shapes and dtypes alone, and called with variables' handles
    that were looked up once, without TensorFlow's layers of Python.

    Takes nests of tensors and None only; TypeError if something in them is neither. Programs of one training share
    `retraces`.

    >>> double = Program(lambda x: 2.0 * x)
    >>> float(double(tf.constant(1.0))), float(double(tf.constant(2.0))), double.traces
    (2.0, 4.0, 1)

    Attributes:
        admit: returns the scope of a concrete function's first run; an error of the scope keeps it from running.
        anew: retraces the program and the compiled functions that it calls.
    """

    admit: Callable[[ConcreteFunction], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(self, function: Callable[..., object], jit_compile: bool = True, retraces: Retraces | None = None):
        super().__init__(function, jit_compile)
        self.anew = self.retrace
        self._calls: dict[tuple, Callable[[list[tf.Tensor]], Any]] = {}
        self._retraces = retraces or Retraces()
        self.seconds: dict[tuple, float] = {}  # that the first call of each kind took, by its signature

    def __call__(self, *args: object) -> Any:
        leaves, signature = flatten(args)
        call = self._calls.get(signature)
        return self._first_call(args, leaves, signature) if call is None else call(leaves)

    def _first_call(self, args: tuple, leaves: list[tf.Tensor], signature: tuple) -> Any:
        for leaf in leaves:
            if not tf.is_tensor(leaf):
                raise TypeError(
                    f"A program takes tensors in plain dicts, lists and tuples, and there is a "
                    f"{type(leaf).__name__}: {leaf!r:.200}. Make it one of these."
                )
        start = time.perf_counter()
        say = compile_messages.announcer() if self.jit_compile else compile_messages.say_nothing
        say("Tracing the train step: ")
        concrete = self.trace(*args)
        call = self._calls[signature] = _call_of(concrete, args)

        def again() -> object:
            self.anew()
            self._calls[signature] = _call_of(self.trace(*args), args)
            return self._calls[signature](leaves)

        traced, name = time.perf_counter(), tf.compat.as_str(concrete.name)
        # TensorFlow's log lines would come in the middle of ours; level 0 asks for them (Keras sets 1).
        asked = say is compile_messages.say_nothing or os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        with self._first(concrete, signature), contextlib.nullcontext() if asked else xla_cache.silence_tensorflow():
            last = compile_cache.seconds_last_time(name)
            say(f"{traced - start:.1f} s. Compiling it{'' if last is None else f' ({last:.1f} s last time)'}: ")
            outputs, loaded = compile_cache.called(name, lambda: call(leaves), again)
        end = time.perf_counter()
        say(f"{end - traced:.1f} s{', loaded from the compile cache' * loaded}.\n")
        self.seconds[signature] = end - start
        self._retraces.note(self._calls, sum(self.seconds.values()))
        return outputs

    @contextlib.contextmanager
    def _first(self, concrete: ConcreteFunction, signature: tuple) -> Iterator[None]:
        """Admits a first run; after an error the next run is the first again."""
        try:
            with self.admit(concrete):
                yield
        except BaseException:
            self._calls.pop(signature, None)
            raise

    def retrace(self) -> None:
        super().retrace()
        self._calls = {}

    @property
    def traces(self) -> int:
        """The number of traces, since `retrace` if that was called."""
        return self.function.experimental_get_tracing_count()


@contextlib.contextmanager
def temporary_retrace(owners: Iterable[TracedFunction]) -> Iterator[None]:
    """Retraces programs for XLA inside the block and restores their earlier traces on exit."""
    owners = list(owners)
    before = [dict(vars(each)) for each in owners]
    for each in owners:
        each.jit_compile = True
        each.retrace()
    try:
        yield
    finally:
        for each, had in zip(owners, before, strict=True):
            vars(each).update(had)


def make_programs(functions: Iterable[Callable[..., object]], jit_compile: bool) -> list[Program]:
    """Makes the programs of one training, which warn once of too many shapes."""
    retraces = Retraces()
    return [Program(function, jit_compile, retraces) for function in functions]


def flatten(nest: Any) -> tuple[list[tf.Tensor], tuple]:
    """Flattens a nest to its arrays or tensors, and the signature that nests of one program have in common."""
    leaves, structure = optree.tree_flatten(nest)
    return leaves, (structure, *[(type(t), getattr(t, "shape", None), getattr(t, "dtype", None)) for t in leaves])


def _call_of(concrete: ConcreteFunction, args: tuple) -> Callable[[list[tf.Tensor]], Any]:
    """Returns a function that calls a concrete function, traced with `args`, with the tensors of a nest like these."""
    captured, function = concrete.captured_inputs, concrete._inference_function
    given, returned = map(optree.tree_structure, (args, concrete.structured_outputs))
    order, size = _order(given), len(function.function_type.flat_outputs)
    places = np.argsort(_order(returned)).tolist()
    plain = len(places) == size  # each output is one tensor, not a RaggedTensor of several

    def call(leaves: list[tf.Tensor]) -> object:
        tensors, now = [leaves[number] for number in order], context.context()
        if not (plain and now.executing_eagerly()) or record.could_possibly_record():
            return concrete._call_flat(tensors, captured)
        # What `_call_flat` ends in, where there is no graph and no tape.
        with InterpolateRuntimeError(function):
            outputs = now.call_function(function.name, tensors + captured, size)
        return optree.tree_unflatten(returned, [outputs[place] for place in places])

    return call


def _order(structure: optree.PyTreeSpec) -> list[int]:
    """Numbers a structure's leaves in the order of TensorFlow's nests, which sort the keys of an OrderedDict too."""
    numbers = optree.tree_unflatten(structure, range(structure.num_leaves))
    return [number for number in tf.nest.flatten(numbers) if number is not None]
