"""Argument checks: what passes, and what their errors say."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum import checks
from fastaccum.kernels.checks import as_tensor, number, shown


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        (
            number,
            (-1, "a number of at least 0", lambda v: v >= 0),
            ValueError,
            "n=-1 must be a number of at least 0.",
        ),
        (
            checks.positive,
            (-1.0, ", or None"),
            ValueError,
            "n=-1.0 must be a positive, finite number, or None.",
        ),
        (
            checks.positive,
            (1e-50,),
            ValueError,
            "n=1e-50 must be a positive, finite number: in float32 it is 0.",
        ),
        (
            checks.fraction,
            (1 - 1e-9,),
            ValueError,
            "n=0.999999999 must be a number of at least 0 and below 1.",
        ),
        (checks.fraction, (1.5,), ValueError, "n=1.5 must be a number of at least 0 and below 1."),
        (checks.whole_number, (0,), ValueError, "n=0 must be a whole number of at least 1."),
        (checks.whole_number, (2.5,), ValueError, "n=2.5 must be a whole number of at least 1."),
        (checks.whole_number, (True,), TypeError, "n=True must be a whole number of at least 1."),
        (checks.true_or_false, ("batch",), TypeError, "n='batch' must be True or False."),
        (
            checks.one_of,
            ("stop", ("skip", "raise")),
            ValueError,
            "n='stop' must be 'skip' or 'raise'.",
        ),
    ],
)
def test_an_error_names_argument_value_and_rule(check, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check("n", *arguments)


def test_what_passes_has_its_type():
    assert [
        type(v)
        for v in (checks.whole_number("n", 8.0), checks.positive("n", 1), checks.fraction("n", 0))
    ] == [
        int,
        float,
        float,
    ]
    assert (
        checks.class_weight({0: 1, 2: 5.0}) == {0: 1.0, 2: 5.0}
        and checks.positive_or_none("n", None) is None
    )
    with pytest.raises(
        ValueError, match=r"class_weight=\{0: 1.0, 1: -5.0\} must map .*; 1: -5.0 does not"
    ):
        checks.class_weight({0: 1.0, 1: -5.0})
    with pytest.raises(ValueError, match=r"not rounded to 0 there; 1: 1e-46 does not"):
        checks.class_weight({0: 0.0, 1: 1e-46})


def left():
    """A tensor of a graph that was left."""
    tensors = []
    tf.function(lambda: tensors.append(tf.ones([2]))).get_concrete_function()
    return tensors[0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "n=None must be a tensor, or an array"),
        ([[1.0], [1.0, 2.0]], TypeError, r"n=\[\[1.0\], \[1.0, 2.0\]\] must be a tensor"),
        (10**400, TypeError, r"n=10{199}\.\.\. must be a tensor"),
        (keras.KerasTensor((2, 3)), TypeError, "n=<KerasTensor .* must be a tensor"),
        (
            tf.ragged.constant([[1.0], [1.0, 2.0]]),
            TypeError,
            "n=<tf.RaggedTensor .* must be a tensor",
        ),
        (np.ma.masked_array([1.0, 2.0], [True, False]), TypeError, "n is a masked array"),
        (left(), ValueError, "n=.* is a tensor of a graph that is no longer being built"),
    ],
)
def test_arguments_that_make_no_tensor_are_named(value, error, message):
    with pytest.raises(error, match=message):
        as_tensor("n", value)
    with pytest.raises(error, match=message):
        tf.function(lambda: as_tensor("n", value), autograph=False)()


def test_a_tensor_of_a_graph_around_this_one_is_taken():
    inner = tf.function(lambda t: t + 1)
    assert (
        tf.function(
            lambda t: inner(tf.while_loop(lambda _: False, lambda _: as_tensor("n", t), [t])[0])
        )(1.0)
        == 2
    )


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8"])
def test_an_array_of_the_other_byte_order_is_read_as_it_is(dtype):
    """A graph of TensorFlow's reads its bytes in the wrong order."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for read in (as_tensor, tf.function(as_tensor, autograph=False)):
        np.testing.assert_array_equal(read("n", array), array)


def test_a_value_is_shown_whatever_it_is():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert [shown(v) for v in (10**5000, Broken(), np.float32(2), "a")] == [
        "<int>",
        "<Broken>",
        "2.0",
        "'a'",
    ]
    assert len(shown("a" * 1000)) < 250
