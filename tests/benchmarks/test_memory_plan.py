"""The planner's choices for the models of `python -m benchmarks.memory plan`, but for those that the zoo has."""

import pytest

from benchmarks.memory.models import CASES
from benchmarks.memory.plan import COMPILATIONS, planned


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("KerasHub")])
def test_the_choice_is_the_largest_that_fits(name):
    for row in planned(CASES[name]):
        assert row["largest"] and row["compiled"] <= COMPILATIONS, row
