"""The interval and the test of paired differences, against values that are known otherwise."""

import math
from fractions import Fraction
from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.statistics import (
    FLIPS,
    PValue,
    bootstrap_interval,
    mean,
    paired_p_value,
    percentile,
)

HALF = Fraction(1, 2)


def flips(values: list[Fraction]) -> float:
    """Return the p-value of the sign-flip test by all assignments of signs."""
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in product((1, -1), repeat=len(values))
    ]
    return sum(each >= abs(sum(values)) for each in sums) / len(sums)


def normal_p_value(values: list[Fraction]) -> float:
    """Return the p-value of the normal approximation of the sign-flip test."""
    z = abs(sum(values)) / math.sqrt(sum(value * value for value in values))
    return math.erfc(z / math.sqrt(2))


@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=8))
def test_exact_p_value_equals_the_one_computed_from_all_sign_flips(values: list[Fraction]) -> None:
    found = paired_p_value(values)
    assert found.is_exact
    assert found.value == pytest.approx(flips(values))


def test_p_value_of_whole_number_differences_equals_that_of_mcnemars_test() -> None:
    better, worse = 9, 2
    differences = [Fraction(1)] * better + [Fraction(-1)] * worse + [Fraction(0)] * 100
    tail = sum(comb(11, k) for k in range(worse + 1)) / 2**11
    assert paired_p_value(differences).value == pytest.approx(2 * tail)


def test_p_value_of_many_repeats_is_computed_exactly() -> None:
    differences = [Fraction(number % 33 - 15, 16) for number in range(650)]
    found = paired_p_value(differences)
    assert found.is_exact
    assert found.value == pytest.approx(normal_p_value(differences), rel=0.02)


def test_p_value_of_differences_with_mixed_denominators_is_estimated_by_random_sign_flips() -> None:
    # The exact test of these differences has 2 ** 400 sums at most, over a common denominator of
    # 240,240.
    denominators = [11, 12, 13, 14, 15, 16]
    differences = [
        Fraction(number % 23 - 10, denominators[number % 6] * 2) for number in range(400)
    ]
    found = paired_p_value(differences)
    assert not found.is_exact
    assert found.value == pytest.approx(normal_p_value(differences), abs=0.01)
    assert found == paired_p_value(differences)


def test_estimated_p_value_is_never_zero() -> None:
    differences = [Fraction(1, number + 1) for number in range(60)]
    assert paired_p_value(differences) == PValue(1 / (FLIPS + 1), is_exact=False)


def test_bootstrap_interval_needs_two_values() -> None:
    assert bootstrap_interval([HALF]) is None


def test_bootstrap_interval_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([HALF] * 5) == (0.5, 0.5)


def test_bootstrap_interval_of_many_values_is_near_the_normal_interval() -> None:
    values = [Fraction(number % 2) for number in range(400)]
    interval = bootstrap_interval(values)
    assert interval == pytest.approx((0.5 - 1.96 / 40, 0.5 + 1.96 / 40), abs=0.006)
    assert interval == bootstrap_interval(values)


def test_mean_of_fractions_is_computed_without_rounding() -> None:
    assert mean([Fraction(1, 3)] * 3) == 1 / 3


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.95, 4.0), (0.0, 1.0), (1.0, 4.0)])
def test_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value
