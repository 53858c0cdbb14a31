"""Argument checks: what passes, and what their errors say."""

import re

import pytest

from fastaccum import checks
from fastaccum.kernels.checks import number


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        (number, (-1, "a number of at least 0", lambda v: v >= 0), ValueError, "n=-1 must be a number of at least 0."),
        (checks.positive, (-1.0, ", or None"), ValueError, "n=-1.0 must be a positive, finite number, or None."),
        (checks.positive, (1e-50,), ValueError, "n=1e-50 must be a positive, finite number: in float32 it is 0."),
        (checks.fraction, (1 - 1e-9,), ValueError, "n=0.999999999 must be a number of at least 0 and below 1."),
        (checks.fraction, (1.5,), ValueError, "n=1.5 must be a number of at least 0 and below 1."),
        (checks.whole_number, (0,), ValueError, "n=0 must be a whole number of at least 1."),
        (checks.whole_number, (2.5,), ValueError, "n=2.5 must be a whole number of at least 1."),
        (checks.whole_number, (True,), TypeError, "n=True must be a whole number of at least 1."),
        (checks.true_or_false, ("batch",), TypeError, "n='batch' must be True or False."),
        (checks.one_of, ("stop", ("skip", "raise")), ValueError, "n='stop' must be 'skip' or 'raise'."),
    ],
)
def test_an_error_names_argument_value_and_rule(check, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check("n", *arguments)


def test_what_passes_has_its_type():
    assert [type(v) for v in (checks.whole_number("n", 8.0), checks.positive("n", 1), checks.fraction("n", 0))] == [
        int,
        float,
        float,
    ]
    assert checks.class_weight({0: 1, 2: 5.0}) == {0: 1.0, 2: 5.0} and checks.positive_or_none("n", None) is None
    with pytest.raises(ValueError, match=r"class_weight=\{0: 1.0, 1: -5.0\} must map .*; 1: -5.0 does not"):
        checks.class_weight({0: 1.0, 1: -5.0})
    with pytest.raises(ValueError, match=r"none 0 there that is not 0; 1: 1e-46 does not"):
        checks.class_weight({0: 0.0, 1: 1e-46})
