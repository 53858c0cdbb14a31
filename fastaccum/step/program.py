"""Compiled programs: called with little overhead, and asked for their IR and the memory that XLA planned."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import optree
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from fastaccum.checks import one_of
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.kernels.random_keys import hoist_prng_key
from fastaccum.lines import warn
from fastaccum.step import compile_cache, xla_cache

Stage = Literal[
    "hlo",
    "hlo_no_metadata",
    "hlo_serialized",
    "optimized_hlo",
    "optimized_hlo_dot",
    "optimized_hlo_proto_serialized",
    "optimized_hlo_serialized",
    "stablehlo",
    "stablehlo_serialized",
]


class MemoryAnalysis(NamedTuple):
    """Bytes of a compiled program, from XLA's buffer assignment; the names are those of JAX.

    Attributes:
        argument_bytes: inputs: the stack, the variables and the optimizer's slots.
        output_bytes: outputs, updated variables included.
        alias_bytes: the part of the outputs that lives in the inputs' own buffers.
        temp_bytes: everything in between: activations, accumulators, workspaces.
        peak_bytes: argument + output - alias + temp.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class Retraces:
    """Warns, once for all programs that share it, where one of them is compiled for one shape after the other."""

    MANY = 32  # more than the lengths that anyone buckets by, and short last stacks beside them

    def __init__(self) -> None:
        self._warned = False

    def note(self, signatures: Iterable[tuple], seconds: float) -> None:
        """Called with those of all of a program's calls, and what their first calls took, when there is one more."""
        shapes = [[shape for _, shape, _ in leaves] for _, *leaves in signatures]
        if self._warned or len(shapes) <= self.MANY:
            return
        self._warned = True
        most = max(({str(shape): None for shape in column} for column in zip(*shapes, strict=False)), key=len)
        first, last = list(most)[:3], list(most)[-1]
        warn(
            f"{len(shapes)} programs were made so far, one for each kind of stack, which took {seconds:.0f} s; all "
            f"stay in memory. One tensor came in {len(most)} shapes, [micro-batches, rows, ...]: {', '.join(first)}, "
            f"..., {last}. Pad to a few lengths: dataset.padded_batch(batch_size, padded_shapes), or "
            "dataset.bucket_by_sequence_length(..., pad_to_bucket_boundary=True) with batches that fill a stack each."
        )


def _unheard(part: str) -> None:
    """Says nothing."""


_announcer = contextvars.ContextVar[Callable[[str], Any]]("announcer", default=_unheard)


@contextlib.contextmanager
def announced(say: Callable[[str], Any] | None) -> Iterator[None]:
    """Within the scope a program that is traced and compiled tells of that in parts of one line; None: nothing does."""
    if say is None:
        yield
        return
    begun = False

    def note(part: str) -> None:
        nonlocal begun
        begun = not part.endswith("\n")
        say(part)

    token = _announcer.set(note)
    try:
        yield
    finally:
        _announcer.reset(token)
        if begun:  # an error ended the line
            say("\n")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within the scope no garbage is looked for: a trace makes many objects that stay, and to find that they do took a
    fifth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Program:
    """A function of nests of tensors, traced and compiled once per structure, shapes and dtypes.

    The same as `tf.function`, but found by these alone, called with the variables' handles that were looked up once,
    and past TensorFlow's own layers of Python.

    Takes nests of tensors and None only; TypeError if something in them is neither. Programs of one training share
    `retraces`.

    >>> double = Program(lambda x: 2.0 * x)
    >>> float(double(tf.constant(1.0))), float(double(tf.constant(2.0))), double.traces
    (2.0, 4.0, 1)

    Attributes:
        admit: makes a scope for the first run of a concrete function; what it raises keeps it from running.
        anew: `retrace`, of it and of the compiled functions that it calls.
    """

    admit: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __init__(self, function: Callable[..., Any], jit_compile: bool = True, retraces: Retraces | None = None):
        self._numbered = functools.partial(xla_cache.numbered, function)
        drawing = hoist_prng_key()(function)
        self._compiled = functools.partial(tf.function, drawing, jit_compile=jit_compile, autograph=False)
        self.function = self._compiled()
        self.anew = self.retrace
        self._calls: dict[tuple, Callable[[list[tf.Tensor]], Any]] = {}
        self._retraces = retraces or Retraces()
        self.seconds: dict[tuple, float] = {}  # that the first call of each kind took, by its signature

    def __call__(self, *args: Any) -> Any:
        leaves, signature = flat(args)
        call = self._calls.get(signature)
        return self._first_call(args, leaves, signature) if call is None else call(leaves)

    def _first_call(self, args: Any, leaves: list[Any], signature: tuple) -> Any:
        for leaf in leaves:
            if not tf.is_tensor(leaf):
                raise TypeError(
                    f"A program takes tensors in plain dicts, lists and tuples, and there is a "
                    f"{type(leaf).__name__}: {leaf!r:.200}. Make it one of these."
                )
        start = time.perf_counter()
        say = _announcer.get() if self._compiled.keywords["jit_compile"] else _unheard
        say("Tracing the train step: ")
        concrete = self.traced(*args)
        call = self._calls[signature] = _call_of(concrete, args)

        def again() -> Any:
            self.anew()
            self._calls[signature] = _call_of(self.traced(*args), args)
            return self._calls[signature](leaves)

        traced, name = time.perf_counter(), tf.compat.as_str(concrete.name)
        # TensorFlow's log lines would come in the middle of ours; level 0 asks for them (Keras sets 1).
        asked = say is _unheard or os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        with self._first(concrete, signature), contextlib.nullcontext() if asked else xla_cache.quietly():
            last = compile_cache.seconds_last_time(name)
            say(f"{traced - start:.1f} s. Compiling it{'' if last is None else f' ({last:.1f} s last time)'}: ")
            outputs, loaded = compile_cache.called(name, lambda: call(leaves), again)
        end = time.perf_counter()
        say(f"{end - traced:.1f} s{', loaded from the compile cache' * loaded}.\n")
        self.seconds[signature] = end - start
        self._retraces.note(self._calls, sum(self.seconds.values()))
        return outputs

    @contextlib.contextmanager
    def _first(self, concrete: Any, signature: tuple) -> Iterator[None]:
        """Around a first run, which after an error is the first again."""
        try:
            with self.admit(concrete):
                yield
        except BaseException:
            self._calls.pop(signature, None)
            raise

    def traced(self, *args: Any) -> Any:
        """The concrete function for nests of tensors, or of specs of them."""
        with _interruptible(), _as_graphs(), graph_scoped_gradients(), without_collection(), self._numbered():
            return self.function.get_concrete_function(*args)

    def retrace(self) -> None:
        """Lets go of what was traced: each kind of call traces and compiles the function anew."""
        self.function = self._compiled()
        self._calls = {}

    @property
    def traces(self) -> int:
        """How often the function was traced, since `retrace` if that was called."""
        return self.function.experimental_get_tracing_count()


@contextlib.contextmanager
def aside(*owners: Any) -> Iterator[None]:
    """Within it these programs are traced anew; after it they have what they had before, and nothing of that."""
    before = [dict(vars(each)) for each in owners]
    for each in owners:
        each.retrace()
    try:
        yield
    finally:
        for each, had in zip(owners, before, strict=True):
            vars(each).update(had)


def programs(functions: Iterable[Callable[..., Any]], jit_compile: bool) -> list[Program]:
    """Programs of one training: of too many shapes they warn once."""
    retraces = Retraces()
    return [Program(function, jit_compile, retraces) for function in functions]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within the scope Ctrl-C ends a trace as it ends other Python: in TensorFlow's C++ a KeyboardInterrupt is dropped,
    or becomes an error of another kind.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupts = []

    def note(*args: Any) -> None:
        try:
            before(*args)
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _as_graphs() -> Iterator[None]:
    """Within the scope, each `tf.function` is one, whatever `tf.config.run_functions_eagerly` says: what is called in a
    program's trace cannot run eagerly.
    """
    if not tf.config.functions_run_eagerly():
        yield
        return
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(True)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by AutoGraph, wherever it is called: inline, where a nested tf.function would hide its ops."""
    enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
    return autograph.convert(recursive=True, conversion_ctx=enabled)(function)


def flat(nest: Any) -> tuple[list[Any], tuple]:
    """The arrays or tensors of a nest, and what nests that one program takes have in common."""
    leaves, structure = optree.tree_flatten(nest)
    return leaves, (structure, *[(type(t), getattr(t, "shape", None), getattr(t, "dtype", None)) for t in leaves])


def _call_of(concrete: Any, args: Any) -> Callable[[list[tf.Tensor]], Any]:
    """Calls a concrete function, traced with `args`, with the tensors of a nest like these."""
    captured, function = concrete.captured_inputs, concrete._inference_function
    given, returned = map(optree.tree_structure, (args, concrete.structured_outputs))
    order, size = _order(given), len(function.function_type.flat_outputs)
    places = np.argsort(_order(returned)).tolist()
    plain = len(places) == size  # each output is one tensor, not a RaggedTensor of several

    def call(leaves: list[tf.Tensor]) -> Any:
        tensors, now = [leaves[number] for number in order], context.context()
        if not (plain and now.executing_eagerly()) or record.could_possibly_record():
            return concrete._call_flat(tensors, captured)
        # What `_call_flat` ends in, where there is no graph and no tape.
        with InterpolateRuntimeError(function):
            outputs = now.call_function(function.name, tensors + captured, size)
        return optree.tree_unflatten(returned, [outputs[place] for place in places])

    return call


@contextlib.contextmanager
def variables_kept(handles: Iterable[tf.Tensor]) -> Iterator[None]:
    """Around a run of a program: the variables that it captured, whose handles are among these, outlive its failure.

    XLA writes a program's results over the variables that they replace, and where it runs out of memory before it
    begins, it has freed these. Values that are held elsewhere it leaves alone, and writes to memory of its own; so this
    takes as much again.
    """
    resources = [handle for handle in handles if handle.dtype == tf.resource]
    dtypes = [get_eager_safe_handle_data(handle).shape_and_type[0].dtype for handle in resources]
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=d) for h, d in zip(resources, dtypes, strict=True)]
    yield
    values.clear()
    # What XLA has allocated it does not write over, then or later: back to memory of TensorFlow's.
    for handle, dtype in zip(resources, dtypes, strict=True):
        with tf.device(handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=value))


def _order(structure: Any) -> list[int]:
    """Numbers of a structure's leaves in the order of TensorFlow's nests, which sort the keys of an OrderedDict too."""
    numbers = optree.tree_unflatten(structure, range(structure.num_leaves))
    return [number for number in tf.nest.flatten(numbers) if number is not None]


def compiler_ir(function: Any, *args: Any, stage: Stage = "optimized_hlo") -> str | bytes:
    """What `function(*args)`, a `tf.function` or a `Program`, compiles to at a stage of XLA; nothing is run.

    Raises:
        ValueError: raised if the function is not compiled with XLA.
    """
    one_of("stage", stage, get_args(Stage))
    function = getattr(function, "function", function)
    if not function._jit_compile:
        raise ValueError("jit_compile=False: there is no XLA program whose IR could be read. Pass jit_compile=True.")
    with graph_scoped_gradients():
        return function.experimental_get_compiler_ir(*args)(stage=stage)


def hlo_proto(concrete: Any) -> hlo_pb2.HloProto:
    """What a concrete function compiles to, with XLA's plan of its memory; takes no data, runs nothing."""
    captured = concrete.captured_inputs
    given = concrete.inputs[: len(concrete.inputs) - len(captured)]
    compiled = context.context().get_compiler_ir(
        device_name=tf.zeros([]).device,
        platform_name=None,
        function_name=concrete.name,
        flat_args=[tf.TensorSpec(t.shape, t.dtype) for t in given],
        captured_inputs=captured,
        stage="optimized_hlo_proto_serialized",
    )
    return hlo_pb2.HloProto.FromString(compiled)


def memory_analysis(function: Any, *args: Any) -> MemoryAnalysis:
    """XLA's memory plan for `function(*args)`; compiles, runs nothing."""
    compiled = compiler_ir(function, *args, stage="optimized_hlo_proto_serialized")
    return memory_of(hlo_pb2.HloProto.FromString(compiled))


def memory_of(proto: hlo_pb2.HloProto) -> MemoryAnalysis:
    """XLA's memory plan of a compiled program."""
    argument = output = alias = temp = 0
    for allocation in proto.buffer_assignment.buffer_allocations:
        size = allocation.size
        if allocation.is_entry_computation_parameter:
            argument += size
            if allocation.maybe_live_out:
                output, alias = output + size, alias + size
        elif allocation.maybe_live_out:
            output += size
        elif not (allocation.is_constant or allocation.is_thread_local):
            temp += size
    return MemoryAnalysis(argument, output, alias, temp)
