"""The planner's choice for a KerasHub model, under one of the limits of `python -m
benchmarks.memory plan`.
"""

import pytest

from benchmarks.memory.models import CASES
from benchmarks.memory.plan import CHOICES, COMPILATIONS, planned


@pytest.mark.zoo
@pytest.mark.sample
def test_the_choice_is_the_largest_that_fits():
    pytest.importorskip("keras_hub")
    for row in planned(CASES["KerasHub GPT-2"], CHOICES[1:2]):
        assert row["largest"] and row["compiled"] <= COMPILATIONS, row
