"""The planner's choices under one limit for the models of `python -m benchmarks.memory plan`, which
takes three; those that the zoo has are tried there.
"""

import pytest

from benchmarks.memory.models import CASES
from benchmarks.memory.plan import CHOICES, COMPILATIONS, planned


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("KerasHub")])
def test_the_choice_is_the_largest_that_fits(name):
    for row in planned(CASES[name], CHOICES[1:2]):
        assert row["largest"] and row["compiled"] <= COMPILATIONS, row
