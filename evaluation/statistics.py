"""The statistics of a comparison: an interval for a mean, and a test of paired differences."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    interval: tuple[float, float] | None
    """None for one value."""
    count: int
    """The number of values."""


def estimate(values: Sequence[Fraction]) -> Estimate | None:
    """Return the mean of the values and its bootstrap interval, or None without values."""
    if not values:
        return None
    return Estimate(mean(values), bootstrap_interval(values), len(values))


def mean(values: Sequence[Fraction]) -> float:
    """Return the mean of at least one value."""
    return float(sum(values) / len(values))


def bootstrap_interval(values: Sequence[Fraction]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, by the percentile bootstrap; None for less than two
    values.

    Each value belongs to one problem, so that the interval is over problems. The same values give
    the same interval.
    """
    return _interval(tuple(values)) if len(values) > 1 else None


@lru_cache(maxsize=1000)  # both reports and the charts show the same intervals
def _interval(values: tuple[Fraction, ...]) -> tuple[float, float]:
    rng = random.Random(SEED)
    # Integers over a common denominator: their sums do not depend on the order of addition.
    scale, numbers = _integers(values)
    size = len(numbers)
    sums = sorted(sum(rng.choices(numbers, k=size)) for _ in range(RESAMPLES))
    low, high = (sums[_rank(quantile)] / (scale * size) for quantile in (0.025, 0.975))
    return low, high


def paired_p_value(differences: Sequence[Fraction]) -> float:
    """Return the two-sided p-value of the exact sign-flip test: the share of all assignments of
    signs to the differences whose sum is at least as far from 0 as the observed sum.

    With one repeat and scores of 0 and 1, the differences are -1, 0 and 1, and the test is
    McNemar's exact test.
    """
    _, numbers = _integers([value for value in differences if value])
    counts = Counter({0: 1})
    for number in numbers:
        following: Counter[int] = Counter()
        for total, count in counts.items():
            following[total + number] += count
            following[total - number] += count
        counts = following
    observed = abs(sum(numbers))
    extreme = sum(count for total, count in counts.items() if abs(total) >= observed)
    return float(Fraction(extreme, 2 ** len(numbers)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least the given share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _integers(values: Sequence[Fraction]) -> tuple[int, list[int]]:
    """Return a common denominator of the values, and their numerators over it."""
    scale = math.lcm(*(value.denominator for value in values))
    return scale, [int(value * scale) for value in values]


def _rank(quantile: float) -> int:
    return math.ceil(quantile * RESAMPLES) - 1
