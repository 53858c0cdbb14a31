"""The search for the largest micro-batch that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence


def divisors(number: int, multiple_of: int = 1, at_most: int | None = None) -> list[int]:
    """Returns the divisors of a number that are multiples of another, in rising order, none above `at_most`.

    >>> divisors(24), divisors(24, multiple_of=2, at_most=12)
    ([1, 2, 3, 4, 6, 8, 12, 24], [2, 4, 6, 8, 12])
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*low, *(number // d for d in low)})
    return [d for d in found if d % multiple_of == 0 and (at_most is None or d <= at_most)]


def largest_that_fits(peak: Callable[[int], float], candidates: Sequence[int], limit: float) -> int | None:
    """Bisects rising `candidates` for the largest whose peak is at most `limit`; returns None where none fits.

    `peak` returns the bytes for a number of rows, and must not fall as the rows grow. It is called, once each, for the
    candidate that is returned and for the next larger one, and for `log2(len(candidates) + 1)` candidates at most.

    >>> largest_that_fits(lambda rows: 100 + 10 * rows, divisors(64), limit=300)
    16
    """
    fitting = bisect_right(candidates, limit, key=peak)
    return candidates[fitting - 1] if fitting else None
