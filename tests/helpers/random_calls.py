"""Strategies of random calls, and the judge of how they end.

A call is right if its result is an oracle's, or if it ends in a TypeError or ValueError of
fastaccum that names the culprit, with nothing moved.
"""

import contextlib
import numbers
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from hypothesis import currently_in_test_context, event, settings
from hypothesis import strategies as st

import fastaccum as fa

PACKAGES = tuple(str(pathlib.Path(m.__file__).resolve().parent) for m in (fa, fa.kernels))
SIGNATURE = r"unexpected keyword argument|missing \d+ required|positional arguments? but"
SMALLEST = float(np.finfo("float32").tiny)
LARGEST = float(np.finfo("float32").max)
nan = float("nan")
inf = float("inf")


class PassedIn(Exception):
    """Raised by a callable that the caller passed: not an error of fastaccum's."""


class Wrong(AssertionError):
    """The judge's verdict on a call that neither worked nor was refused as it should be."""


# What may be wrong with an argument.


def raises(*args, **kwargs):
    raise PassedIn("raised by what was passed")


class Lies:
    """An array-like that has another length than its array."""

    def __init__(self, array, length):
        self.array = array
        self.length = length

    def __len__(self):
        return self.length

    def __array__(self, dtype=None, copy=None):
        return self.array


JUNK = [
    *(
        None,
        True,
        False,
        np.True_,
        0,
        -1,
        -0.0,
        1,
        2.5,
        nan,
        inf,
        -inf,
        10**400,
        1e-50,
        1e300,
        1e39,
    ),
    *(2j, "", "x", b"x", "1", "\0", "\ud800", (), [], {}, set(), [[]], [None], {"a": {}}, {1: 2}),
    *({1: 2, "a": 3}, object, object(), raises, lambda: None, lambda a, b, c: None, range(0), ...),
    *(range(3), slice(2), type, np, tf.float32, memoryview(b"abcd"), Exception("a"), [1, "a"]),
    *(
        np.float32(2),
        np.int64(3),
        np.str_("a"),
        np.datetime64("2020"),
        np.ma.masked,
        np.zeros([2, 0]),
    ),
    *(np.array(None), np.array(1), np.array(["a", "b"]), np.array([(1, 2.0)], "i4,f4")),
    *(tf.constant(2.0), tf.constant("a"), tf.ragged.constant([[1.0], [1.0, 2.0]])),
    *(tf.sparse.from_dense([[1.0, 0.0]]), tf.TensorSpec([2]), keras.KerasTensor((None, 4))),
    *(keras.losses.MeanSquaredError, keras.optimizers.Adam, keras.Sequential, tf.data.Dataset),
    *(keras.layers.Flatten(), keras.metrics.Mean(), keras.Variable(1.0)),
]
OF_NUMBERS = [
    *(lambda v: -v, lambda v: v + 0.5, lambda v: v * 1e39, lambda v: v / 1e45),
    *(np.float16, str, np.array, lambda v: [v]),
]
DTYPES = (*("f8", "f2", ">f4", "i1", "u1", "i8", "bool", "c8", "O", "str", "M8[s]"), "longdouble")
OF_ARRAYS = [
    *(lambda a: a[:0], lambda a: a[:-1], lambda a: a[0], lambda a: a[None], lambda a: a[..., None]),
    *(lambda a: a[..., :0], lambda a: a[..., :1], np.ravel, np.transpose, lambda a: a[::-1]),
    *(lambda a: a * nan, lambda a: a * inf, lambda a: a * 0, lambda a: a - 100, lambda a: a + 0.5),
    *(lambda a: a * 1e9, lambda a: a.astype("int64") + 2**32, np.asfortranarray, np.ma.array),
    *(lambda a: np.ma.masked_array(a, a == a.flat[0]), list, np.ndarray.tolist, str, lambda a: [a]),
    *(lambda a: {"x": a}, lambda a: [a, a], iter, tf.constant, tf.Variable),
    *(
        lambda a: Lies(a, 3),
        lambda a: Lies(a.astype(object), len(a)),
        lambda a: keras.Input(a.shape),
    ),
    *(lambda a: tf.TensorSpec(a.shape), lambda a: tf.RaggedTensor.from_tensor(a)),
    *(lambda a: tf.sparse.from_dense(a), lambda a: tf.IndexedSlices(a, [0], a.shape), memoryview),
    *(lambda a, d=d: a.astype(d) for d in DTYPES),
]


def changes_of(value: Any) -> list[Callable[[Any], Any]]:
    """Lists the ways in which a right value may be changed."""
    if isinstance(value, np.ndarray) and value.size:
        return OF_ARRAYS
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return OF_NUMBERS
    return [lambda v: [v], lambda v: (v, None), type, str, lambda v: {"x": v}]


@st.composite
def spoiled(draw: Any, valid: st.SearchStrategy) -> Any:
    """Draws a value that is wrong for an argument, or right but unusual."""
    value = draw(valid)
    leaves = tf.nest.flatten(value) if isinstance(value, (dict, list, tuple)) else [value]
    if leaves and leaves[0] is not value and draw(st.booleans()):
        place = draw(st.integers(0, len(leaves) - 1))
        leaves[place] = draw(spoiled(st.just(leaves[place])))
        return tf.nest.pack_sequence_as(value, leaves)
    if not draw(st.booleans()):
        return draw(st.sampled_from(JUNK) | st.builds(iter, st.just([1])))
    try:
        return draw(st.sampled_from(changes_of(value)))(value)
    except Exception:  # such a value cannot be made
        return object()


# Arguments: what may be passed, and which spoiled values may be taken.


def anything(value: Any) -> bool:
    """The oracle alone tells whether a spoiled value may be taken."""
    return True


def nothing(value: Any) -> bool:
    return False


class Argument(NamedTuple):
    """An argument: values that are taken, whether a spoiled value may be (it must be refused
    otherwise), and what it may be beside the spoiled values of any argument.
    """

    valid: st.SearchStrategy
    accepts: Callable[[Any], bool] = anything
    odd: st.SearchStrategy = st.nothing()


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def is_whole(value: Any, least: int = 1) -> bool:
    return is_number(value) and least <= in_python(value) <= sys.maxsize and value == int(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and SMALLEST <= in_python(value) <= LARGEST


def in_python(value: Any) -> Any:
    """Returns a number as one of Python's, which compare exactly."""
    return value.item() if isinstance(value, np.generic) else value


def is_loss_scale(value: Any) -> bool:
    is_name = value is None or (isinstance(value, str) and value == "auto")
    return is_name or is_positive(value) or isinstance(value, (fa.NoLossScale, fa.StaticLossScale))


def is_empty(value: Any) -> bool:
    """Tells whether a value holds nothing: None, (), {} or [[]]."""
    if isinstance(value, (list, tuple, set, range, dict)):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


def or_none(argument: Argument) -> Argument:
    def accepts(value):
        return value is None or argument.accepts(value)

    return Argument(st.none() | argument.valid, accepts, odd=argument.odd | spoiled(argument.valid))


def whole(low: int, high: int) -> Argument:
    def accepts(value):
        return is_whole(value, min(low, 1))

    # Numbers just above the range mean very long trainings.
    odd = st.integers(max_value=low) | st.integers(min_value=2**63)
    return Argument(st.integers(low, high), accepts, odd)


def reals(low: float, high: float) -> st.SearchStrategy:
    """Draws numbers that float32 does not round to 0."""
    return st.floats(low, high).filter(lambda value: value == 0 or abs(value) >= SMALLEST)


def positive(low: float, high: float) -> Argument:
    """A number whose logarithm is even over the range."""
    powers = st.floats(np.log(low), np.log(high))
    return Argument(powers.map(lambda power: float(np.exp(power))), is_positive, st.floats())


def one_of(*values: Any) -> Argument:
    def accepts(value):
        return isinstance(value, (str, bool, np.bool_, numbers.Real)) and value in values

    return Argument(st.sampled_from(values), accepts)


FLAG = Argument(st.booleans(), is_flag)
LOSS_SCALE = Argument(
    st.sampled_from([None, "auto", fa.NoLossScale()])
    | st.builds(fa.StaticLossScale, st.floats(1e-3, 1e3))
    | positive(1e-3, 1e3).valid,
    is_loss_scale,
)


class Call(NamedTuple):
    """The arguments of a call, and the names of those that are spoiled."""

    arguments: dict[str, Any]
    spoiled: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # of these, those that must be refused


@st.composite
def calls(draw: Any, table: Mapping[str, Argument], required: Sequence[str] = ()) -> Call:
    """Draws a call whose arguments are valid, but for up to three."""
    chosen = draw(st.sets(st.sampled_from(list(table)), max_size=6)) | set(required)
    wrong = draw(st.sets(st.sampled_from(sorted(chosen)), max_size=3)) if chosen else set()
    arguments = {}
    refused = []
    for name, argument in table.items():
        if name in wrong:
            arguments[name] = draw(argument.odd | spoiled(argument.valid))
            if not argument.accepts(arguments[name]):
                refused.append(name)
        elif name in chosen:
            arguments[name] = draw(argument.valid)
    return Call(arguments, tuple(sorted(wrong)), tuple(refused))


def fuzz(examples: int) -> settings:
    """Settings of a fuzzed test: tests/fuzz/conftest.py registers the profile."""
    return settings(settings.get_profile("fuzz"), max_examples=examples)


# The judge.


def judge(
    call: Call,
    run: Callable[[], Any],
    check: Callable[[Any], None] = lambda result: None,
    state: Callable[[], Any] = lambda: None,
    names: Sequence[str] = (),
    may_refuse: bool = False,
) -> str:
    """Runs a call and returns its outcome: "refused", "raised by what was passed" or "result".

    Args:
        check: raises AssertionError if a result is wrong.
        state: returns what a call that is refused must not move.
        names: further words by which an error may name the culprit.
        may_refuse: the call's arguments may be valid by themselves, but not with each other.

    Raises:
        Wrong: for any other outcome.
    """
    before = state()
    with unfiltered_tracebacks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = run()
        except Exception as error:
            culprits = [*(call.arguments if may_refuse else call.spoiled), *names]
            outcome = judge_error(error, culprits, may_refuse or bool(call.spoiled))
            if outcome == "refused" and state() != before:
                raise Wrong(f"It moved something, and then was refused: {error}") from error
        else:
            outcome = "result"
            if call.refused:
                raise Wrong(f"{', '.join(call.refused)}: taken in silence.")
            try:
                check(result)
            except Exception as error:
                raise Wrong(f"The result is wrong: {type(error).__name__}: {error}") from error
    if currently_in_test_context():
        event(outcome)  # counted by --hypothesis-show-statistics
    return outcome


@contextlib.contextmanager
def unfiltered_tracebacks():
    """Keeps an error's innermost frames, by which the judge knows whose error it is."""
    tf.debugging.disable_traceback_filtering()
    keras.config.disable_traceback_filtering()
    yield
    tf.debugging.enable_traceback_filtering()
    keras.config.enable_traceback_filtering()


def judge_error(error: Exception, culprits: Sequence[str], may_refuse: bool) -> str:
    """Returns the outcome of a call that raised, or raises Wrong."""
    cause = error
    while cause is not None:
        if isinstance(cause, PassedIn) or "raised by what was passed" in str(cause):
            return "raised by what was passed"
        cause = cause.__cause__
    described = f"{type(error).__name__}: {str(error)[:1000]}"
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_of_signature = type(error) is TypeError and re.search(SIGNATURE, str(error))
    if is_of_signature and "site-packages" not in raised_in:
        return "refused"
    is_public = type(error).__module__.startswith("fastaccum")
    if type(error) not in (TypeError, ValueError) and not is_public:
        raise Wrong(f"A raw error. {described}") from error
    if not str(pathlib.Path(raised_in).resolve()).startswith(PACKAGES):
        raise Wrong(f"An error of others. {described}") from error
    if not may_refuse:
        raise Wrong(f"A valid call is refused. {described}") from error
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in culprits):
        raise Wrong(f"An error that names none of {culprits}. {described}") from error
    return "refused"
