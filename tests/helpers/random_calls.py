"""Strategies that draw calls of the public names as lines of Python, and a judge of their outcome.

A call must end in a TypeError or ValueError of fastaccum that names the argument, with nothing
moved, or in a right result.
"""

import collections
import contextlib
import pathlib
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from hypothesis import currently_in_test_context, event, note, reject, settings
from hypothesis import strategies as st

import fastaccum as fa

PACKAGES = tuple(str(pathlib.Path(m.__file__).resolve().parent) for m in (fa, fa.kernels))
SIGNATURE = r"unexpected keyword argument|missing \d+ required|positional arguments? but"

Codes = Sequence[str | st.SearchStrategy[str]]


class PassedIn(Exception):
    """Raised by a callable that the caller passed: not an error of fastaccum's."""


class Wrong(AssertionError):
    """The judge's verdict on a call that neither worked nor was refused as it should be."""


# What arguments are made of.


def raises(*args, **kwargs):
    raise PassedIn("raised by what was passed")


class Holder:
    """An object of no kind."""


class Text(str):
    """A subclass of str."""


class Whole(int):
    """A subclass of int."""


class Lies:
    """An array-like whose length is not that of its array."""

    def __init__(self, array, length):
        self.array = array
        self.length = length

    def __len__(self):
        return self.length

    def __array__(self, dtype=None, copy=None):
        return self.array


class BrokenArray:
    """An array-like that makes no array."""

    def __array__(self, dtype=None, copy=None):
        return "no array"


def generator(*items):
    yield from items


def exhausted(*items):
    """Returns an iterator that has ended."""
    iterator = iter(items)
    collections.deque(iterator, 0)
    return iterator


NAMES = {
    **{name: value for name, value in vars().items() if not name.startswith("_")},
    "nan": float("nan"),
    "inf": float("inf"),
}


def codes(text: str) -> list[str]:
    """Splits a table of Python expressions, which ` | ` and line ends separate."""
    return [code.strip() for code in re.split(r" \| |\n", text) if code.strip()]


# For any argument. `without` leaves out those that an argument takes.
ANYTHING = codes("""
    None | True | False | np.True_ | 0 | -1 | -0.0 | 1 | 2.5 | nan | inf | -inf | 10**400 | 1e-50
    1e300 | 2j | '' | 'x' | b'x' | Text('x') | Whole(3) | '\\0' | '\\ud800' | [] | () | {} | set()
    [[]] | [None] | {'a': {}} | [1, 'a'] | {1: 2} | {1: 2, 'a': 3} | object | Holder() | Holder
    raises | lambda: None | lambda a, b, c: None | range(0) | range(3) | generator() | generator(1)
    exhausted(1) | memoryview(b'abcd') | np.float32(2) | np.int64(3) | np.str_('a') | np.array(None)
    np.datetime64('2020-01-01') | np.array(1) | np.array([]) | np.zeros((2, 0)) | np.array(['a', 'b'])
    np.array([{}, 1], object) | np.array([(1, 2.)], 'i4,f4') | np.array(['2020-01-01'], 'M8[D]')
    np.ma.masked_array([1., 2.], [True, False]) | np.ma.masked | tf.constant(2.) | tf.constant(1)
    tf.Variable(2.) | tf.constant('a') | tf.ragged.constant([[1.], [1., 2.]])
    tf.sparse.from_dense([[1., 0.]]) | keras.KerasTensor((None, 4)) | tf.TensorSpec([2]) | tf.float32
    ... | type | NotImplemented | slice(2) | Exception('a') | Lies(np.ones((12, 4)), 3) | BrokenArray()
    np | tf.data.Dataset | tf.data.Dataset.range(3) | tf.data.Dataset.range(0) | keras.Variable(1.)
    keras.layers.Dense(1)
""")


def without(*left_out: str) -> list[str]:
    """Returns `ANYTHING` but for these."""
    unknown = set(left_out) - set(ANYTHING)
    assert not unknown, unknown
    return [code for code in ANYTHING if code not in left_out]


def integers(low: int, high: int) -> st.SearchStrategy[str]:
    return st.integers(low, high).map(repr)


def numbers(low: float, high: float) -> st.SearchStrategy[str]:
    """Draws a number whose logarithm is even over the range."""
    return st.floats(np.log(low), np.log(high)).map(lambda power: repr(float(np.exp(power))))


# Calls.


class Values(NamedTuple):
    """What may be passed for an argument.

    `valid` is taken; `odd` may be refused, or taken with a right result; `bad` must be refused.
    """

    valid: Codes
    bad: Codes = ()
    odd: Codes = ()


class Call(NamedTuple):
    """`function(name=code, ...)` after the lines `setup`.

    `names` are further words by which an error may name the culprit. `may_refuse` is for calls
    whose arguments are valid by themselves, but not with each other. `way` is how a function of
    tensors runs.
    """

    function: str
    arguments: dict[str, str]
    bad: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    setup: str = ""
    way: str = "eager"
    may_refuse: bool = False

    @property
    def code(self) -> str:
        arguments = ", ".join(f"{name}={code}" for name, code in self.arguments.items())
        way = "" if self.way == "eager" else f"  # {self.way}"
        return f"{self.setup}\n{self.function}({arguments}){way}".strip()

    def values(self, **names: Any) -> dict[str, Any]:
        """Makes the arguments; a draw whose argument cannot be made is rejected."""
        try:
            return {k: eval(code, {**NAMES, **names}) for k, code in self.arguments.items()}
        except Exception:
            reject()


def code_of(choices: Codes) -> st.SearchStrategy[str]:
    """Draws one of the expressions, some of which are drawn themselves."""
    return st.one_of([st.just(c) if isinstance(c, str) else c for c in choices])


@st.composite
def calls(
    draw: Any, function: str, table: Mapping[str, Values], required: Sequence[str] = (), **more: Any
) -> Call:
    """Draws a call whose arguments are valid, but for up to three."""
    optional = [name for name in table if name not in required]
    replaceable = [name for name, values in table.items() if values.bad or values.odd]
    chosen = draw(st.sets(st.sampled_from(optional), max_size=5)) if optional else set()
    replaced = draw(st.sets(st.sampled_from(replaceable), max_size=3))
    arguments = {}
    bad = []
    odd = []
    for name, values in table.items():
        choices = values.valid
        if name in replaced and draw(st.integers(1, len(values.bad) + len(values.odd))) > len(
            values.odd
        ):
            choices = values.bad
            bad.append(name)
        elif name in replaced:
            choices = values.odd
            odd.append(name)
        elif name not in chosen and name not in required:
            continue
        arguments[name] = draw(code_of(choices))
    return Call(function, arguments, tuple(bad), tuple(odd), **more)


def fuzz(examples: int) -> settings:
    """Settings of a fuzzed test: tests/fuzz/conftest.py registers the profile."""
    return settings(settings.get_profile("fuzz"), max_examples=examples)


# The judge.


def no_state() -> None:
    """The state of a call that has nothing to move."""


def judge(
    call: Call,
    run: Callable[[], Any],
    check: Callable[[Any], None] = lambda result: None,
    state: Callable[[], Any] = no_state,
) -> str:
    """Runs a call and returns its outcome: "refused", "raised by what was passed" or "result".

    Args:
        check: raises AssertionError if a result is wrong.
        state: returns what a call that is refused must not move.

    Raises:
        Wrong: for any other outcome.
    """
    if currently_in_test_context():
        note(call.code)  # printed where it fails
    outcome = _judge(call, run, check, state)
    if currently_in_test_context():
        event(outcome)  # counted by --hypothesis-show-statistics
    return outcome


def _judge(call, run, check, state):
    before = state()
    with unfiltered_tracebacks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = run()
        except Exception as error:
            outcome = _judge_error(call, error)
            if outcome == "refused" and state() != before:
                raise Wrong(f"It moved something, and then was refused: {error}") from error
            return outcome
        if call.bad:
            raise Wrong(f"{', '.join(call.bad)}: taken in silence.")
        try:
            check(result)
        except Exception as error:
            raise Wrong(f"The result is wrong: {type(error).__name__}: {error}") from error
    return "result"


@contextlib.contextmanager
def unfiltered_tracebacks():
    """Keeps an error's innermost frames, by which the judge knows whose error it is."""
    tf.debugging.disable_traceback_filtering()
    keras.config.disable_traceback_filtering()
    yield
    tf.debugging.enable_traceback_filtering()
    keras.config.enable_traceback_filtering()


def _judge_error(call: Call, error: Exception) -> str:
    cause = error
    while cause is not None:
        if isinstance(cause, PassedIn) or "raised by what was passed" in str(cause):
            return "raised by what was passed"
        cause = cause.__cause__
    described = f"{type(error).__name__}: {str(error)[:1000]}"
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_of_fastaccum = str(pathlib.Path(raised_in).resolve()).startswith(PACKAGES)
    is_of_signature = type(error) is TypeError and re.search(SIGNATURE, str(error))
    if is_of_signature and "site-packages" not in raised_in:
        return "refused"
    is_public = type(error).__module__.startswith("fastaccum")
    if type(error) not in (TypeError, ValueError) and not is_public:
        raise Wrong(f"A raw error. {described}") from error
    if not is_of_fastaccum:
        raise Wrong(f"An error of others. {described}") from error
    names = [*call.arguments, *call.names]
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in names):
        raise Wrong(f"An error that names no argument. {described}") from error
    if not (call.bad or call.odd or call.may_refuse):
        raise Wrong(f"A valid call is refused. {described}") from error
    return "refused"
