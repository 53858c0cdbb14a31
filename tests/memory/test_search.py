"""The search for the largest micro-batch that fits: always the right one, verified, in few compilations."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fastaccum.memory.search import COMPILATIONS, divisors, largest_that_fits

GLOBAL_BATCHES = st.one_of(st.sampled_from([64, 512, 720, 768, 1000, 1024, 1536, 4096]), st.integers(1, 1024))


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
    return kind, floor, peaks


def searched(peaks, candidates, limit, floor):
    asked = []

    def peak(rows):
        asked.append(rows)
        return peaks[rows]

    chosen, known = largest_that_fits(peak, candidates, limit, floor)
    assert list(known.items()) == [(rows, peaks[rows]) for rows in asked]  # each once
    return chosen, asked


def require_verified(chosen, asked, peaks, candidates, limit):
    fits = [rows for rows in candidates if peaks[rows] <= limit]
    assert chosen == (fits[-1] if fits else None)
    larger = candidates[len(fits) : len(fits) + 1]
    assert {*([chosen] if chosen else []), *larger} <= {*asked}


@settings(max_examples=150, deadline=None)
@given(curves(), GLOBAL_BATCHES, st.floats(0, 1.1))
def test_every_curve_is_searched_in_few_compilations(curve, global_batch, share):
    _, floor, peaks = curve
    candidates = divisors(global_batch, at_most=1024)
    limit = int(floor + share * (peaks[candidates[-1]] - floor))
    chosen, asked = searched(peaks, candidates, limit, floor)
    require_verified(chosen, asked, peaks, candidates, limit)
    assert len(asked) <= math.ceil(math.log2(len(candidates) + 1)) or len(candidates) > 31


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([840, 2520, 5040, 1260, 1680]), st.integers(0, 10**9), st.floats(0, 1.1), st.floats(-0.02, 0.02))
def test_many_divisors_take_no_more_where_the_peak_is_near_a_line(global_batch, floor, share, bend):
    candidates = divisors(global_batch, at_most=1024)
    peaks = {rows: floor + int(1e6 * rows * (1 + bend * math.sin(rows))) for rows in range(1, 1025)}
    limit = int(floor + share * (peaks[candidates[-1]] - floor))
    chosen, asked = searched(peaks, candidates, limit, floor)
    require_verified(chosen, asked, peaks, candidates, limit)
    assert len(asked) <= COMPILATIONS


def test_on_a_line_three_are_enough():
    peaks = {rows: 10**9 + 10**7 * rows for rows in range(1, 1025)}
    for limit in (10**9 + 10**7 * rows for rows in (1, 3, 100, 700)):
        chosen, asked = searched(peaks, divisors(1024), limit, 10**9)
        require_verified(chosen, asked, peaks, divisors(1024), limit)
        assert len(asked) <= 4
