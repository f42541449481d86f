"""The statistics of a comparison: an interval for a mean, and a test of paired differences."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

RESAMPLES = 10_000
FLIPS = 9_999
"""Number of random assignments of signs in a test that is too large to be exact. The smallest
p-value is then 1 / (FLIPS + 1) = 0.0001."""
MAX_EXACT_STEPS = 2_000_000
"""Maximum number of steps of the exact test, about 2 s. A step adds one difference to one possible
sum. Each data set of the paper needs fewer, such as 530,000 for 650 problems with four votes each.
"""
SEED = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    interval: tuple[float, float] | None
    """The 95 % interval of the mean; None if there is only one value."""
    count: int
    """The number of values."""


@dataclass(frozen=True, slots=True)
class PValue:
    """The two-sided p-value of a sign-flip test."""

    value: float
    is_exact: bool
    """False if the value is estimated from FLIPS random assignments of signs."""


def estimate(values: Sequence[Fraction]) -> Estimate | None:
    """Return the mean of the values and its bootstrap interval, or None without values."""
    if not values:
        return None
    return Estimate(mean(values), bootstrap_interval(values), len(values))


def mean(values: Sequence[Fraction]) -> float:
    """Return the mean of at least one value."""
    return float(sum(values) / len(values))


def bootstrap_interval(values: Sequence[Fraction]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, by the percentile bootstrap; None for fewer than
    two values.

    Each value belongs to one problem, so that the interval is over problems. The same values give
    the same interval.
    """
    if len(values) < 2:
        return None
    rng = random.Random(SEED)
    # Integers over a common denominator: their sums do not depend on the order of addition.
    scale, numbers = _over_common_denominator(values)
    size = len(numbers)
    sums = sorted(sum(rng.choices(numbers, k=size)) for _ in range(RESAMPLES))
    low, high = (sums[_rank(quantile)] / (scale * size) for quantile in (0.025, 0.975))
    return low, high


def paired_p_value(differences: Sequence[Fraction]) -> PValue:
    """Return the two-sided p-value of the sign-flip test: the share of all assignments of signs to
    the differences whose sum is at least as far from 0 as the observed sum.

    With one repeat and scores of 0 and 1, the differences are -1, 0 and 1, and the test is
    McNemar's exact test. If the exact test would exceed MAX_EXACT_STEPS, as with many differences
    whose denominators differ, the p-value is estimated from FLIPS random assignments with a fixed
    seed. The observed assignment then counts as one more of them, so that the test keeps its level
    (Phipson and Smyth 2010, "Permutation p-values should never be zero"). The standard error of an
    estimate near 0.05 is 0.002.
    """
    _, numbers = _over_common_denominator([value for value in differences if value])
    observed_sum = abs(sum(numbers))
    counts = _sign_sum_counts(numbers)
    if counts is None:
        return PValue(
            (1 + _count_extreme_flips(numbers, observed_sum)) / (1 + FLIPS), is_exact=False
        )
    extreme = sum(count for total, count in counts.items() if abs(total) >= observed_sum)
    return PValue(float(Fraction(extreme, 2 ** len(numbers))), is_exact=True)


def _sign_sum_counts(numbers: Sequence[int]) -> Mapping[int, int] | None:
    """Return the number of assignments of signs that give each sum, or None if counting them takes
    more than MAX_EXACT_STEPS steps."""
    counts = Counter({0: 1})
    states = 0
    for number in numbers:
        states += len(counts)
        if states > MAX_EXACT_STEPS:
            return None
        following: Counter[int] = Counter()
        for total, count in counts.items():
            following[total + number] += count
            following[total - number] += count
        counts = following
    return counts


def _count_extreme_flips(numbers: Sequence[int], observed_sum: int) -> int:
    """Return how many of FLIPS random assignments have a sum that is at least `observed_sum` away
    from 0."""
    rng = random.Random(SEED)
    sizes = Counter(abs(number) for number in numbers)
    extreme = 0
    for _ in range(FLIPS):
        # One random bit for each difference of a size: the difference is negative if it is 1.
        total = sum(
            size * (count - 2 * rng.getrandbits(count).bit_count()) for size, count in sizes.items()
        )
        extreme += abs(total) >= observed_sum
    return extreme


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile: the smallest value such that at least `share` (0 to 1) of
    the values are less than or equal to it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _over_common_denominator(values: Sequence[Fraction]) -> tuple[int, list[int]]:
    """Return a common denominator of the values, and their numerators over it."""
    scale = math.lcm(*(value.denominator for value in values))
    return scale, [int(value * scale) for value in values]


def _rank(quantile: float) -> int:
    return math.ceil(quantile * RESAMPLES) - 1
