"""Random calls of the public names, each a line of Python, and a judge of what comes of one.

A call must end in a TypeError or ValueError of fastaccum's own that names the argument, with
nothing moved, or in a right result. Call `number` of seed `seed` is always the same one.
"""

import collections
import contextlib
import itertools
import pathlib
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import fastaccum as fa

HOMES = tuple(str(pathlib.Path(m.__file__).resolve().parent) for m in (fa, fa.kernels))
PASTE = "import keras, numpy as np, tensorflow as tf\nimport fastaccum as fa\nfrom fuzzing import *"
WHERE = "<a fuzzed call>"
SIGNATURE = r"unexpected keyword argument|missing \d+ required|positional arguments? but"
nan, inf = float("nan"), float("inf")

Code = str | Callable[[np.random.Generator], str]


class Values(NamedTuple):
    """What may be passed for an argument, as Python's source, or functions that draw it.

    `valid` is taken and must give what the oracle says; `odd` may be refused or taken, and then the
    result must be right, as far as the oracle of the call can tell; `bad` must be refused.
    """

    valid: Sequence[Code]
    bad: Sequence[Code] = ()
    odd: Sequence[Code] = ()


class Call(NamedTuple):
    """`function(name=code, ...)` after the lines `setup`; `names`: what else an error may name than
    the arguments.
    """

    function: str
    arguments: dict[str, str]
    odd: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    setup: str = ""
    names: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The call as text to be pasted, below `PASTE`."""
        arguments = ", ".join(
            f"{name}={code}" if name.isidentifier() else code
            for name, code in self.arguments.items()
        )
        return "\n".join(filter(None, (self.setup, f"{self.function}({arguments})")))


def draw(
    rng: np.random.Generator,
    function: str,
    table: Mapping[str, Values],
    *,
    required: Sequence[str] = (),
    chance: float = 0.3,
    odd: Sequence[int] = (0, 1, 1, 1, 2, 3),
    **rest: Any,
) -> Call:
    """A call whose arguments are valid, but for one of `odd` many; those not `required` are each
    there by `chance`.
    """
    strange = rng.choice(list(table), min(len(table), int(rng.choice(odd))), replace=False).tolist()
    arguments, odd_ones, bad_ones = {}, [], []
    for name, values in table.items():
        choices = values.valid
        if name in strange and (values.bad or values.odd):
            which = int(rng.integers(len(values.bad) + len(values.odd)))
            choices = [[*values.bad, *values.odd][which]]
            (bad_ones if which < len(values.bad) else odd_ones).append(name)
        elif name not in required and rng.random() > chance:
            continue
        code = choices[int(rng.integers(len(choices)))]
        arguments[name] = code(rng) if callable(code) else code
    return Call(function, arguments, tuple(odd_ones), tuple(bad_ones), **rest)


def integers(low: int, high: int) -> Code:
    """Draws a whole number."""
    return lambda rng: repr(int(rng.integers(low, high + 1)))


def numbers(low: float, high: float) -> Code:
    """Draws a number, its logarithm even over the range."""
    return lambda rng: repr(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


class Wrong(Exception):
    """What the judge says of a call that went neither way."""


class Unmade(Exception):
    """An argument cannot be made: int8 of NaN, say."""


class Theirs(Exception):
    """Raised by what was passed: it is not for us to change."""


def raises(*args: Any, **kwargs: Any) -> Any:
    """A callable that raises."""
    raise Theirs("raised by what was passed")


def is_ours(error: BaseException) -> bool:
    """Whether fastaccum raised an error, as such or from another one."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return str(pathlib.Path(last).resolve()).startswith(HOMES)


def names_one(message: str, names: Sequence[str]) -> bool:
    """Whether a message names one of the arguments."""
    return any(re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", message) for name in names)


def judge(
    call: Call, run: Callable[[], Any], state: Callable[[], Any], right: Callable[[Any], None]
) -> str:
    """What came of a call: "refused", "raised by what was passed" or "result"; raises Wrong
    otherwise.

    Args:
        state: bytes of what a call that is refused must not move.
        right: raises AssertionError if a result is wrong.
    """
    before = state()
    try:
        result = run()
    except Exception as error:
        outcome = _of_error(call, error)
        if outcome == "refused" and state() != before:
            raise Wrong(f"It moved something, and then was refused: {error}") from error
        return outcome
    if call.bad:
        raise Wrong(f"{', '.join(call.bad)}: taken in silence.")
    try:
        right(result)
    except Exception as error:
        raise Wrong(f"The result is wrong: {type(error).__name__}: {error}") from error
    return "result"


def _of_error(call: Call, error: Exception) -> str:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(each, Theirs) or "raised by what was passed" in str(each) for each in chain):
        return "raised by what was passed"
    what = f"{type(error).__name__}: {str(error)[:1000]}"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if (
        type(error) is TypeError
        and re.search(SIGNATURE, str(error))
        and "site-packages" not in last
    ):
        return "refused"
    if type(error) not in (TypeError, ValueError) and not type(error).__module__.startswith(
        "fastaccum"
    ):
        raise Wrong(f"A raw error. {what}") from error
    if not is_ours(error):
        raise Wrong(f"An error of others. {what}") from error
    if not names_one(str(error), [*call.arguments, *call.names]):
        raise Wrong(f"An error that names no argument. {what}") from error
    return "refused"


class Found(NamedTuple):
    """A call that went wrong."""

    seed: int
    number: int
    code: str
    why: str
    where: str


def fuzz(
    calls: int,
    seed: int,
    make: Callable[
        [np.random.Generator],
        tuple[Call, Callable[[], Any], Callable[[], Any], Callable[[Any], None]],
    ],
    first: int = 0,
) -> tuple[collections.Counter, list[Found]]:
    """Makes and judges calls; returns how many came to what, and those that went wrong.

    `make` returns what `judge` takes: the call, what runs it, what must not move, and what checks a
    result.
    """
    with _unfiltered_tracebacks():
        return _judged(calls, seed, make, first)


@contextlib.contextmanager
def _unfiltered_tracebacks():
    """Keeps an error's innermost frames inside the block, without which one from within looks like
    one of ours.
    """
    tf.debugging.disable_traceback_filtering()
    keras.config.disable_traceback_filtering()
    yield
    tf.debugging.enable_traceback_filtering()
    keras.config.enable_traceback_filtering()


def _judged(calls, seed, make, first):
    outcomes, found = collections.Counter(), []
    for number in range(first, first + calls):
        try:
            call, run, state, right = make(np.random.default_rng((seed, number)))
        except Unmade:
            outcomes["cannot be made"] += 1
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[judge(call, run, state, right)] += 1
        except Wrong as why:
            outcomes["WRONG"] += 1
            frames = traceback.extract_tb(why.__cause__.__traceback__) if why.__cause__ else []
            where = " <- ".join(
                f"{pathlib.Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:])
            )
            found.append(Found(seed, number, call.code, str(why), where))
    return outcomes, found


def report(found: Sequence[Found], most: int = 30) -> str:
    """The calls that went wrong, as code, alike ones once."""
    kinds = collections.defaultdict(list)
    for each in found:
        kinds[each.where or each.why[:80]].append(each)
    texts = [
        f"{len(found)} calls went wrong, in {len(kinds)} ways. {PASTE!r} makes the names that "
        "they use.\n"
    ]
    for alike in itertools.islice(kinds.values(), most):
        each = min(alike, key=lambda f: len(f.code))
        title = f"--- seed {each.seed}, call {each.number} ({len(alike)} alike) at {each.where}"
        texts.append(f"{title}\n{each.code}\n{each.why}\n")
    return "\n".join(texts)


def value(code: str, names: Mapping[str, Any]) -> Any:
    """What the source of an argument makes; raises Unmade where that is an error."""
    try:
        return eval(compile(code, WHERE, "eval"), dict(names))
    except Exception as error:
        raise Unmade(code) from error


class Holder:
    """An object of no kind."""

    def __repr__(self):
        return "Holder()"


class Text(str):
    """A str of its own class."""


class Whole(int):
    """An int of its own class."""


class Lies:
    """An array-like whose length is not that of its array."""

    def __init__(self, array, length):
        self.array, self.length = array, length

    def __len__(self):
        return self.length

    def __array__(self, dtype=None, copy=None):
        return self.array


class BrokenArray:
    """An array-like that makes no array."""

    def __array__(self, dtype=None, copy=None):
        return "no array"


def exhausted(*items):
    """An iterator that has ended."""
    iterator = iter(items)
    collections.deque(iterator, 0)
    return iterator


def generator(*items):
    """A generator of these."""
    yield from items


# For any argument; what takes one of them all the same leaves it out by `without`.
ANYTHING = (
    *(
        "None",
        "True",
        "False",
        "np.True_",
        "0",
        "-1",
        "-0.0",
        "1",
        "2.5",
        "nan",
        "inf",
        "-inf",
        "10**400",
        "1e-50",
        "1e300",
    ),
    *(
        "2j",
        "''",
        "'x'",
        "b'x'",
        "Text('x')",
        "Whole(3)",
        "'\\0'",
        "'\\ud800'",
        "[]",
        "()",
        "{}",
        "set()",
        "[[]]",
        "[None]",
    ),
    *(
        "{'a': {}}",
        "[1, 'a']",
        "{1: 2}",
        "{1: 2, 'a': 3}",
        "object",
        "Holder()",
        "Holder",
        "raises",
        "lambda: None",
        "lambda a, b, c: None",
    ),
    *(
        "range(0)",
        "range(3)",
        "generator()",
        "generator(1)",
        "exhausted(1)",
        "memoryview(b'abcd')",
        "np.float32(2)",
    ),
    *(
        "np.int64(3)",
        "np.str_('a')",
        "np.datetime64('2020-01-01')",
        "np.array(None)",
        "np.array(1)",
        "np.array([])",
    ),
    *(
        "np.zeros((2, 0))",
        "np.array([{}, 1], object)",
        "np.array(['a', 'b'])",
        "np.array([(1, 2.)], 'i4,f4')",
    ),
    *(
        "np.array(['2020-01-01'], 'datetime64[D]')",
        "np.ma.masked_array([1., 2.], [True, False])",
        "np.ma.masked",
    ),
    *(
        "tf.constant(2.)",
        "tf.constant(1)",
        "tf.Variable(2.)",
        "tf.constant('a')",
        "tf.ragged.constant([[1.], [1., 2.]])",
    ),
    *(
        "tf.sparse.from_dense([[1., 0.]])",
        "keras.KerasTensor((None, 4))",
        "tf.TensorSpec([2])",
        "tf.float32",
        "...",
        "type",
    ),
    *(
        "NotImplemented",
        "slice(2)",
        "Exception('a')",
        "Lies(np.ones((12, 4)), 3)",
        "BrokenArray()",
        "np",
        "tf.data.Dataset",
    ),
    *(
        "tf.data.Dataset.range(3)",
        "tf.data.Dataset.range(0)",
        "keras.Variable(1.)",
        "keras.layers.Dense(1)",
    ),
)


def without(*codes: str) -> list[str]:
    """`ANYTHING`, but for these."""
    unknown = set(codes) - set(ANYTHING)
    assert not unknown, unknown
    return [each for each in ANYTHING if each not in codes]
