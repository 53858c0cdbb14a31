"""The largest micro-batch that fits, found by compiling few of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

COMPILATIONS = 5  # enough for any rising curve over the divisors of a global batch, up to 31 of them


def divisors(number: int, multiple_of: int = 1, at_most: int | None = None) -> list[int]:
    """The divisors of a number that are multiples of another, in rising order, none above `at_most`.

    >>> divisors(24), divisors(24, multiple_of=2, at_most=12)
    ([1, 2, 3, 4, 6, 8, 12, 24], [2, 4, 6, 8, 12])
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*low, *(number // d for d in low)})
    return [d for d in found if d % multiple_of == 0 and (at_most is None or d <= at_most)]


def largest_that_fits(
    peak: Callable[[int], int], candidates: Sequence[int], limit: int, floor: int = 0
) -> tuple[int | None, dict[int, int]]:
    """The largest of the candidates whose peak is at most `limit`, and the peaks that were asked for.

    What is returned was asked for and fits, and the next larger candidate was asked for and does not; a None says
    that the smallest does not. A peak must not fall as the rows grow. Between the largest known to fit and the
    smallest known not to, the next one asked for is where a line through them meets the limit, then its neighbour, but
    never so far to one side that more could be needed than by halving: 4 for up to 15 candidates, 5 for up to 31.

    Args:
        peak: bytes for a number of rows; costly.
        candidates: numbers of rows, rising.
        floor: bytes that every number of rows needs.

    >>> asked = []
    >>> def peak(rows):
    ...     asked.append(rows)
    ...     return 100 + 10 * rows
    >>> largest_that_fits(peak, divisors(64), limit=300, floor=100)[0], asked
    (16, [8, 32, 16])
    """
    asked: dict[int, int] = {}
    low, high = -1, len(candidates)  # places known to fit, and not to
    while high - low > 1:
        place = _next(candidates, asked, low, high, limit, floor)
        rows = candidates[place]
        asked[rows] = peak(rows)
        low, high = (place, high) if asked[rows] <= limit else (low, place)
    return (None if low < 0 else candidates[low]), asked


def _next(candidates: Sequence[int], asked: dict[int, int], low: int, high: int, limit: int, floor: int) -> int:
    """The place between `low` and `high` to ask for."""
    middle = (low + high) // 2
    if not asked:
        return middle
    points = sorted({0: floor, **asked}.items())
    around = bisect_right([rows for rows, _ in points], 0 if low < 0 else candidates[low])
    (x0, y0), (x1, y1) = points[around - 1 : around + 1] if around < len(points) else points[-2:]
    meets = x0 + (limit - y0) * (x1 - x0) / (y1 - y0) if y1 > y0 else candidates[-1]
    guess = bisect_right(candidates, meets) - 1
    # On either side of the place asked for, what is left must be found by halving.
    most = min(COMPILATIONS, len(candidates).bit_length())
    left = max(most - 1 - len(asked), 0)
    reach = 2**left
    if high - low <= 2 * reach:
        guess = min(max(guess, high - reach), low + reach)
    return min(max(guess, low + 1), high - 1)  # where nothing larger seems to fit, the neighbour shows it
