"""Compiled programs, called with little overhead, and what is said while they compile."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.basics.warnings import warn
from fastaccum.kernels import private
from fastaccum.step import compile_cache
from fastaccum.step.tracing import TracedFunction

_FEWER_SIZES = "Make batches of a few sizes, such as by dataset.unbatch().batch(batch_size)."
_FEWER_LENGTHS = (
    "Where the model leaves padding out, as by a mask, pad to a few lengths: "
    "dataset.padded_batch(batch_size, padded_shapes), or dataset.bucket_by_sequence_length(..., "
    "pad_to_bucket_boundary=True) with batches that fill an update each. "
    "Trainer(max_programs=...) is how many lengths fastaccum pads to by itself "
    "(docs/guides/varying-batches.md)."
)


class Retraces:
    """Warns of a program that is compiled for `many` shapes.

    Programs that share the object are warned of once, all together.
    """

    def __init__(self, many: int = 32) -> None:
        self._many = many
        self._warned = False

    def note(self, seconds: Mapping[tuple, float], axes: Sequence[str]) -> None:
        """Counts a program's signatures, of which the last one is new.

        `seconds` has what the first call with each of them took, `axes` the names of the first axes
        of their tensors.
        """
        *_, (structure, *_) = seconds
        programs = []  # the shapes of each one's tensors
        for known_structure, *leaves in seconds:
            if known_structure == structure:
                programs.append([shape for _, shape, _ in leaves])
        if self._warned or len(programs) < self._many:
            return
        self._warned = True

        # The tensor that came in the most shapes, and the axes in which these differ.
        shapes: list[tuple] = []
        for column in zip(*programs, strict=False):
            shapes_of_one = list(dict.fromkeys(tuple(shape) for shape in column))
            if len(shapes_of_one) > len(shapes):
                shapes = shapes_of_one
        names = []
        only_rows_differ = True
        for axis, lengths in enumerate(zip(*shapes, strict=False)):
            if len({*lengths}) == 1:
                continue
            if axis < len(axes):
                names.append(axes[axis])
            else:
                names.append("lengths")
                only_rows_differ = False

        shown = [str(shape) for shape in shapes]
        if len(shown) > 4:
            shown[3:-1] = ["..."]
        remedy = _FEWER_SIZES if only_rows_differ else _FEWER_LENGTHS
        warn(
            f"{len(programs)} programs were made so far, one for each kind of stack, which took "
            f"{sum(seconds.values()):.0f} s; all stay in memory. What differs: "
            f"{', '.join(dict.fromkeys(names))}. One tensor came in {len(shapes)} shapes, "
            f"[{', '.join(axes)}, ...]: {', '.join(shown)}. {remedy}"
        )


def _say_nothing(part: str) -> None: ...


_announcer = contextvars.ContextVar[Callable[[str], object]]("announcer", default=_say_nothing)


@contextlib.contextmanager
def announce(say: Callable[[str], object] | None) -> Iterator[None]:
    """Passes parts of a line to `say` while programs are traced and compiled inside the block; None
    changes nothing.
    """
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


class _Relaxed:
    """A trace that is open in the rows, and in lengths where those of its signatures have
    differed.
    """

    def __init__(self, shapes: list[tuple]):
        self.shapes = shapes  # of the arguments' leaves
        self.concrete: ConcreteFunction | None = None
        self.is_refused = False  # the function cannot be traced so

    def covers(self, signature: tuple) -> bool:
        """Tells if the trace takes arguments of this signature."""
        return self.concrete is not None and self._merged(signature) == self.shapes

    def opened_for(self, signature: tuple) -> list[tuple]:
        """Returns the shapes, open where this signature differs, and in all rows: a last batch is
        short.
        """
        return [
            (*shape[:1], None, *shape[2:]) if len(shape) > 1 else shape
            for shape in self._merged(signature)
        ]

    def _merged(self, signature: tuple) -> list[tuple]:
        merged = []
        for known, own in zip(self.shapes, _shapes(signature), strict=True):
            merged.append(
                tuple(one if one == other else None for one, other in zip(known, own, strict=True))
            )
        return merged


def _shapes(signature: tuple) -> list[tuple]:
    _, *leaves = signature
    return [tuple(shape) for _, shape, _ in leaves]


class Program(TracedFunction):
    """A function of nests of tensors and None, traced and compiled once per structure, shapes and
    dtypes.

    Called with variables' handles that were looked up once, without TensorFlow's layers of Python.
    Programs of one training share `retraces`. One that `may_relax` has one trace for all lengths
    behind the first axis, where XLA does not compile it and the function can be traced so.
    """

    # Returns the scope of a concrete function's first run; an error of the scope keeps it from
    # running.
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
        # and whatever else retraces the compiled functions that this one calls
        self.anew = self.retrace
        self.may_relax = False
        self.what = "the train step"  # for what is said while it compiles
        # names of the arguments' first axes, for a warning
        self.axes: tuple[str, ...] = ("micro-batches", "rows")
        self._calls: dict[tuple, Callable[[list[tf.Tensor]], Any]] = {}
        # by what signatures that differ in lengths have in common
        self._relaxed: dict[tuple, _Relaxed] = {}
        self._retraces = retraces or Retraces()
        # that the first call of each kind took, by its signature
        self.seconds: dict[tuple, float] = {}

    def __call__(self, *args: object) -> Any:
        leaves, signature = flatten(args)
        call = self._calls.get(signature)
        return self._first_call(args, leaves, signature) if call is None else call(leaves)

    def _first_call(self, args: tuple, leaves: list[tf.Tensor], signature: tuple) -> Any:
        for leaf in leaves:
            if not tf.is_tensor(leaf):
                raise TypeError(
                    "A program takes tensors in plain dicts, lists and tuples, not "
                    f"{type(leaf).__name__} {leaf!r:.99}."
                )
        start = time.perf_counter()
        say = _announcer.get() if self.jit_compile else _say_nothing
        say(f"Tracing {self.what}: ")
        relaxed = self._find_relaxed(signature)
        if relaxed is not None and relaxed.covers(signature):
            assert relaxed.concrete is not None
            self._calls[signature] = _call_of(relaxed.concrete, args)
            return self._run_relaxed(relaxed, args, leaves, signature)
        concrete = None
        if relaxed is not None:
            concrete = self._trace_relaxed(relaxed, leaves, signature)
        if concrete is None:
            concrete = self.trace(*args)
        call = self._calls[signature] = _call_of(concrete, args)

        def run() -> object:
            if relaxed is not None and relaxed.concrete is concrete:
                return self._run_relaxed(relaxed, args, leaves, signature)
            return call(leaves)

        def again() -> object:
            self.anew()
            self._calls[signature] = _call_of(self.trace(*args), args)
            return self._calls[signature](leaves)

        traced, name = time.perf_counter(), tf.compat.as_str(concrete.name)
        try:
            with self.admit(concrete):
                last = compile_cache.seconds_last_time(name)
                say(
                    f"{traced - start:.1f} s. Compiling "
                    f"it{'' if last is None else f' ({last:.1f} s last time)'}: "
                )
                outputs, loaded = compile_cache.called(name, run, again)
        except BaseException:  # the next run is the first again
            self._calls.pop(signature, None)
            self._relaxed = {}
            raise
        end = time.perf_counter()
        say(f"{end - traced:.1f} s{', loaded from the compile cache' * loaded}.\n")
        self.seconds[signature] = end - start
        if relaxed is None or relaxed.concrete is not concrete:
            self._retraces.note(self.seconds, self.axes)
        return outputs

    def _run_relaxed(
        self, relaxed: _Relaxed, args: tuple, leaves: list[tf.Tensor], signature: tuple
    ) -> object:
        """Runs a relaxed trace for the first time with this signature; a trace of its own where
        that fails.

        Code that asks for a length, as `table[: x.shape[1]]` does, finds none in a relaxed trace.
        Variables are as before then. A shape that does not fit is refused by the trace of its own.
        """
        assert relaxed.concrete is not None
        variables = list(relaxed.concrete.graph.variables)
        before = [variable.read_value() for variable in variables]
        try:
            return self._calls[signature](leaves)
        except tf.errors.InvalidArgumentError:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        relaxed.is_refused = True
        relaxed.concrete = None
        self._calls = {}
        super().retrace()  # tf.function would take the relaxed trace for this signature
        self._calls[signature] = _call_of(self.trace(*args), args)
        return self._calls[signature](leaves)

    def _find_relaxed(self, signature: tuple) -> _Relaxed | None:
        """Returns the trace of signatures that differ from this one in lengths alone; None if there
        may be none.
        """
        if self.jit_compile or not self.may_relax:
            return None
        structure, *leaves = signature
        in_common = (structure, *((len(shape), *shape[:1], dtype) for _, shape, dtype in leaves))
        if in_common not in self._relaxed:
            self._relaxed[in_common] = _Relaxed(_shapes(signature))
        return self._relaxed[in_common]

    def _trace_relaxed(
        self, relaxed: _Relaxed, leaves: list[tf.Tensor], signature: tuple
    ) -> ConcreteFunction | None:
        """Traces the function for all lengths that have come so far; None where it needs to know
        them.
        """
        if relaxed.is_refused:
            return None
        shapes = relaxed.opened_for(signature)
        specs = [
            tf.TensorSpec(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        try:
            concrete = self.trace(*optree.tree_unflatten(signature[0], specs))
        except Exception:  # of any code in the model
            relaxed.is_refused = True
            return None
        relaxed.shapes, relaxed.concrete = shapes, concrete
        return concrete

    def retrace(self) -> None:
        super().retrace()
        self._calls = {}
        self._relaxed = {}
        self.seconds = {}


def make_programs(
    functions: Iterable[Callable[..., object]], jit_compile: bool, retraces: Retraces | None = None
) -> list[Program]:
    """Makes programs of one training; those that share `retraces`, as all of one call do, warn once
    of many shapes.
    """
    retraces = retraces or Retraces()
    return [Program(function, jit_compile, retraces) for function in functions]


def flatten(nest: Any) -> tuple[list[tf.Tensor], tuple]:
    """Flattens a nest to its arrays or tensors, and the signature that nests of one program have in
    common.
    """
    leaves, structure = optree.tree_flatten(nest)
    return leaves, (
        structure,
        *[(type(t), getattr(t, "shape", None), getattr(t, "dtype", None)) for t in leaves],
    )


def _call_of(concrete: ConcreteFunction, args: tuple) -> Callable[[list[tf.Tensor]], Any]:
    """Returns a function that calls a concrete function, traced with `args`, with the tensors of a
    nest like these.
    """
    captured, function = concrete.captured_inputs, private.inference_function(concrete)
    given, returned = map(optree.tree_structure, (args, concrete.structured_outputs))
    order, size = _order(given), len(function.function_type.flat_outputs)
    places = np.argsort(_order(returned)).tolist()
    plain = len(places) == size  # each output is one tensor, not a RaggedTensor of several
    if not (private.has("context") and private.has("record")):
        return lambda leaves: concrete(*optree.tree_unflatten(given, leaves))
    # Looked up once, since a call takes as long as some of its Python.
    context = private.context
    record = private.record
    interpolated = contextlib.nullcontext
    if private.has("InterpolateRuntimeError"):
        interpolated = private.InterpolateRuntimeError

    def call(leaves: list[tf.Tensor]) -> object:
        tensors = [leaves[number] for number in order]
        now = context.context()
        if not (plain and now.executing_eagerly()) or record.could_possibly_record():
            return private.call_flat(concrete, tensors, captured)
        # What `_call_flat` ends in, where there is no graph and no tape.
        with interpolated(function):
            outputs = now.call_function(function.name, tensors + captured, size)
        return optree.tree_unflatten(returned, [outputs[place] for place in places])

    return call


def _order(structure: optree.PyTreeSpec) -> list[int]:
    """Numbers a structure's leaves in the order of TensorFlow's nests.

    These sort the keys of an OrderedDict, too.
    """
    numbers = optree.tree_unflatten(structure, range(structure.num_leaves))
    return [number for number in tf.nest.flatten(numbers) if number is not None]


@contextlib.contextmanager
def preserve_variables(handles: Iterable[tf.Tensor]) -> Iterator[None]:
    """Keeps the values of a program's variables through a failure of its run inside the block."""
    # XLA writes results over variables, and may run out of memory once these are freed; held
    # elsewhere, it leaves them.
    variables = []
    for handle in handles:
        if handle.dtype == tf.resource:
            kind = private.get_eager_safe_handle_data(handle).shape_and_type[0]
            variables.append((handle, kind.dtype))
    values = []
    for handle, dtype in variables:
        values.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
    yield
    values.clear()
    # What XLA has allocated it does not write over, then or later: back to memory of TensorFlow's.
    for handle, dtype in variables:
        with tf.device(handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=value))
