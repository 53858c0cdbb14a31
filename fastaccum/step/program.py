"""Programs: functions of nests of tensors, traced and compiled once for each kind of call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import optree
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.kernels import private
from fastaccum.step import compile_cache
from fastaccum.step.announcements import Say, announcer, say_nothing
from fastaccum.step.relaxed_traces import RelaxedTrace, RelaxedTraces
from fastaccum.step.retraces import Retraces
from fastaccum.step.signatures import Signature, flatten
from fastaccum.step.tracing import TracedFunction


class Program(TracedFunction):
    """A function of nests of tensors and None, traced once per structure, shapes and dtypes.

    Programs of one training share `retraces`.

    Attributes:
        admit: returns the scope of a concrete function's first run; an error of the scope keeps it
            from running.
        may_relax: True if one trace may be for all lengths behind the first axis, where XLA does
            not compile the program and the function can be traced so.
        what: the name of the program in what is said while it compiles.
        axes: the names of the arguments' first axes, for a warning.
        seconds: the time that the first call of each kind took, by its signature.
    """

    admit: Callable[[ConcreteFunction], contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext
    )

    def __init__(
        self,
        function: Callable[..., object],
        jit_compile: bool = True,
        retraces: Retraces | None = None,
    ):
        super().__init__(function, jit_compile)
        self.may_relax = False
        self.what = "the train step"
        self.axes: tuple[str, ...] = ("micro-batches", "rows")
        self.seconds: dict[Signature, float] = {}
        self._calls: dict[Signature, Callable[[list[tf.Tensor]], Any]] = {}
        self._relaxed_traces = RelaxedTraces()
        self._retraces = retraces or Retraces()

    def __call__(self, *args: object) -> Any:
        leaves, signature = flatten(args)
        call = self._calls.get(signature)
        if call is None:
            return self._first_call(args, leaves, signature)
        return call(leaves)

    def _first_call(self, args: tuple, leaves: list[tf.Tensor], signature: Signature) -> Any:
        """Traces the function for a new signature, and runs it while saying how long each takes.

        The trace is a relaxed one, for all lengths, where that is asked for and possible; else one
        for this signature. A relaxed trace is admitted, timed and announced once. Other lengths
        that it covers are then called as if they had been before.
        """
        _require_tensors(leaves)
        relaxed = None
        if self.may_relax and not self.jit_compile:
            relaxed = self._relaxed_traces.find(signature)
            if relaxed.covers(signature):
                return self._call_relaxed(relaxed, args, leaves, signature)

        say: Say = say_nothing
        if self.jit_compile:
            say = announcer()
        start = time.perf_counter()
        say(f"Tracing {self.what}: ")
        concrete = None
        if relaxed is not None:
            concrete = relaxed.trace(self, leaves, signature)
        if concrete is None:
            relaxed = None  # where there was one, the function needs to know lengths
            concrete = self.trace(*args)
        traced = time.perf_counter()

        cached = compile_cache.entries()
        try:
            with self.admit(concrete):
                say(f"{traced - start:.1f} s. Compiling it: ")
                if relaxed is None:
                    outputs = self._keep_call(concrete, args, signature)(leaves)
                else:
                    outputs = self._call_relaxed(relaxed, args, leaves, signature)
        except BaseException as error:
            # The next call traces and announces again, as a first one.
            self._calls.pop(signature, None)
            self._relaxed_traces = RelaxedTraces()
            remedy = compile_cache.remedy_for(error)
            if remedy is None or not isinstance(error, tf.errors.OpError):
                raise
            raise type(error)(error.node_def, error.op, f"{error.message}\n{remedy}") from error
        end = time.perf_counter()
        origin = ""
        if cached and compile_cache.entries() == cached:
            origin = ", loaded from the compile cache"
        say(f"{end - traced:.1f} s{origin}.\n")
        self.seconds[signature] = end - start
        # Each trace for one signature alone counts, also that of a relaxed one given up in the run.
        if relaxed is None or relaxed.concrete is None:
            self._retraces.note(self.seconds, self.axes)
        return outputs

    def _call_relaxed(
        self, relaxed: RelaxedTrace, args: tuple, leaves: list[tf.Tensor], signature: Signature
    ) -> object:
        """Calls a relaxed trace with a new signature; where that fails, a trace of its own.

        Code that asks for a length, as `table[: x.shape[1]]` does, finds none in a relaxed trace.
        The call then fails, its variables are put back, and the function is traced for these
        lengths alone. If they are wrong for the model, that trace raises its error.
        """
        assert relaxed.concrete is not None
        variables = list(relaxed.concrete.graph.variables)
        before = [variable.read_value() for variable in variables]
        call = self._keep_call(relaxed.concrete, args, signature)
        try:
            return call(leaves)
        except tf.errors.InvalidArgumentError:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        relaxed.refuse()
        self._calls = {}
        super().retrace()  # tf.function would take the relaxed trace for this signature
        return self._keep_call(self.trace(*args), args, signature)(leaves)

    def _keep_call(
        self, concrete: ConcreteFunction, args: tuple, signature: Signature
    ) -> Callable[[list[tf.Tensor]], Any]:
        """Returns the call of a trace, kept for the next arguments of this signature."""
        call = _make_call(concrete, args)
        self._calls[signature] = call
        return call

    def retrace(self) -> None:
        super().retrace()
        self._calls = {}
        self._relaxed_traces = RelaxedTraces()
        self.seconds = {}


def make_programs(
    functions: Iterable[Callable[..., object]], jit_compile: bool, retraces: Retraces | None = None
) -> list[Program]:
    """Makes programs of one training; those that share `retraces` warn once of many shapes."""
    retraces = retraces or Retraces()
    return [Program(function, jit_compile, retraces) for function in functions]


def _require_tensors(leaves: Iterable[object]) -> None:
    for leaf in leaves:
        if not tf.is_tensor(leaf):
            raise TypeError(
                "A program takes tensors in plain dicts, lists and tuples, not "
                f"{type(leaf).__name__} {leaf!r:.99}."
            )


def _make_call(concrete: ConcreteFunction, args: Any) -> Callable[[list[tf.Tensor]], Any]:
    """Returns a function that calls a concrete function with the tensors of a nest like `args`.

    The order of its arguments and results, and the handles of its variables, are looked up once.
    """
    # Leaves are in optree's order. The concrete function takes and returns TensorFlow's.
    order = _tensorflow_order(optree.tree_structure(args))
    captured = list(concrete.captured_inputs)
    returned = optree.tree_structure(concrete.structured_outputs)
    output_count = len(concrete.outputs)

    # A RaggedTensor among the results is several outputs, which TensorFlow puts together.
    has_plain_results = returned.num_leaves == output_count
    has_names = all(map(private.has, ("context", "record", "InterpolateRuntimeError")))
    if not (has_plain_results and has_names):
        return lambda leaves: private.call_flat(
            concrete, [leaves[number] for number in order], captured
        )

    function = concrete.inference_fn
    # The inverse: where each of optree's leaves is among TensorFlow's results.
    places = np.argsort(_tensorflow_order(returned)).tolist()
    record = private.record
    context = private.context.context()
    interpolate_errors = private.InterpolateRuntimeError(function)

    def call(leaves: list[tf.Tensor]) -> Any:
        tensors = [leaves[number] for number in order]
        if not context.executing_eagerly() or record.could_possibly_record():
            return private.call_flat(concrete, tensors, captured)
        # `_call_flat` ends in these lines where there is no graph and no tape. Its Python takes
        # some percent of a small model's train step.
        with interpolate_errors:
            outputs = context.call_function(function.name, tensors + captured, output_count)
        return optree.tree_unflatten(returned, [outputs[place] for place in places])

    return call


def _tensorflow_order(structure: optree.PyTreeSpec) -> list[int]:
    """Lists where each leaf of `tf.nest.flatten` is among the leaves that optree flattens to.

    The two differ for an OrderedDict, whose keys TensorFlow sorts.
    """
    numbered = optree.tree_unflatten(structure, range(structure.num_leaves))
    return [number for number in tf.nest.flatten(numbered) if number is not None]
