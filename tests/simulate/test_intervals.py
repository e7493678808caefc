"""Order statistics and intervals against values worked out by hand or taken from tables."""

from __future__ import annotations

import math
from random import Random

import pytest

from kvoy_simulate.intervals import (
    mean_interval,
    percentile,
    ratio_interval,
    t_quantile,
)


@pytest.mark.parametrize(
    ("q", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0), (33.333333333333336, 2.0)]
)
def test_a_percentile_lies_between_order_statistics(q: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (4, 2.776), (30, 2.042), (60, 2.000), (1000, 1.962)]
)
def test_students_quantile_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=0.0006)


def test_an_interval_of_a_mean_is_students() -> None:
    interval = mean_interval([9.0, 10.0, 11.0, 10.0])

    half = 3.182 * math.sqrt((1 + 0 + 1 + 0) / 3 / 4)
    assert interval.value == 10.0
    assert (interval.low, interval.high) == pytest.approx((10 - half, 10 + half))


def test_one_seed_tells_no_interval() -> None:
    interval = mean_interval([3.0])

    assert interval.value == 3.0
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_paired_ratios_cancel_what_seeds_have_in_common() -> None:
    interval = ratio_interval([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])

    assert (interval.value, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_ratio_and_its_inverse_are_treated_alike() -> None:
    a, b = [1.0, 3.0, 2.5], [2.0, 2.0, 4.0]

    one, other = ratio_interval(a, b), ratio_interval(b, a)

    assert one.value * other.value == pytest.approx(1.0)
    assert one.low * other.high == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_what_is_no_ratio_is_not_a_number(bad: float) -> None:
    assert math.isnan(ratio_interval([1.0, 2.0], [1.0, bad]).value)
    assert math.isnan(ratio_interval([], []).value)


def test_ninety_five_of_a_hundred_intervals_hold_the_truth() -> None:
    random = Random(5)

    def holds() -> bool:
        ratios = [math.exp(random.gauss(math.log(1.5), 0.3)) for _ in range(4)]
        interval = ratio_interval(ratios, [1.0] * 4)
        return interval.low <= 1.5 <= interval.high

    assert sum(holds() for _ in range(2000)) / 2000 == pytest.approx(0.95, abs=0.02)
