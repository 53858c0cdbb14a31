"""The search for the largest micro-batch that fits: always the right one, verified, in few
compilations.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastaccum.memory.planner import divisors, largest_that_fits

GLOBAL_BATCHES = st.one_of(
    st.sampled_from([64, 512, 720, 768, 1000, 1024, 1536, 2520, 4096, 5040]), st.integers(1, 1024)
)


@st.composite
def curves(draw):
    """A peak that never falls: near-linear, in steps, concave, or with a jump."""
    floor, slope = draw(st.integers(0, 10**9)), draw(st.floats(1.0, 1e8))
    kind = draw(st.sampled_from(["linear", "steps", "concave", "convex", "jump", "flat"]))
    step, power = draw(st.integers(2, 256)), draw(st.floats(0.3, 0.95))
    at = draw(st.integers(1, 1024))
    shape = {
        "linear": lambda rows: rows + 0.05 * math.sin(rows) * rows,
        "steps": lambda rows: math.ceil(rows / step) * step,
        "concave": lambda rows: rows**power,
        "convex": lambda rows: rows ** (1 + power),
        "jump": lambda rows: rows + 1e4 * (rows >= at),
        "flat": lambda rows: 1,
    }[kind]
    peaks, highest = {}, floor
    for rows in range(1, 5041):
        highest = peaks[rows] = max(highest, floor + int(slope * shape(rows)))
    return floor, peaks


def searched(peaks, candidates, limit):
    asked = []

    def peak(rows):
        asked.append(rows)
        return peaks[rows]

    chosen = largest_that_fits(peak, candidates, limit)
    assert len(asked) == len({*asked})
    return chosen, asked


def require_verified(chosen, asked, peaks, candidates, limit):
    fits = [rows for rows in candidates if peaks[rows] <= limit]
    assert chosen == (fits[-1] if fits else None)
    larger = candidates[len(fits) : len(fits) + 1]
    assert {*([chosen] if chosen else []), *larger} <= {*asked}


@settings(max_examples=150, deadline=None)
@given(curves(), GLOBAL_BATCHES, st.floats(0, 1.1))
def test_every_curve_is_searched_in_few_compilations(curve, global_batch, share):
    floor, peaks = curve
    candidates = divisors(global_batch, at_most=1024)
    limit = int(floor + share * (peaks[candidates[-1]] - floor))
    chosen, asked = searched(peaks, candidates, limit)
    require_verified(chosen, asked, peaks, candidates, limit)
    assert len(asked) <= math.ceil(math.log2(len(candidates) + 1))


@pytest.mark.parametrize(("global_batch", "most"), [(1024, 4), (720, 5), (5040, 6)])
def test_many_divisors_take_few_compilations(global_batch, most):
    candidates = divisors(global_batch)
    for limit in (0, *candidates):
        chosen, asked = searched({rows: rows for rows in candidates}, candidates, limit)
        assert (chosen or 0) == limit and len(asked) <= most
