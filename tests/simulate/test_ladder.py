"""The search for a knee finds a bound that is known."""

from __future__ import annotations

import pytest

from kvoy_simulate.ladder import Ladder, Rung, climb


@pytest.mark.parametrize("truth", [0.3, 3.7, 8.0, 14.9, 100.0])
def test_the_knee_is_the_highest_rate_within_the_bound(truth: float) -> None:
    ladder = climb(lambda rate: rate / truth, bound=1.0, first_rate=8.0, tolerance=0.1)

    assert truth - 0.1 <= ladder.knee <= truth


def test_bisection_takes_one_run_per_halving() -> None:
    ladder = climb(lambda rate: rate, bound=13.0, first_rate=8.0, tolerance=0.5)

    assert [rung.rate for rung in ladder.rungs] == [8.0, 16.0, 12.0, 14.0, 13.0, 13.5]
    assert ladder.knee == 13.0


def test_a_bound_that_always_holds_ends_the_search() -> None:
    ladder = climb(lambda rate: 0.0, bound=1.0, first_rate=1.0, tolerance=0.1)

    assert ladder.knee == 256.0
    assert len(ladder.rungs) == 9


def test_a_bound_that_never_holds_has_no_knee() -> None:
    ladder = climb(lambda rate: 2.0, bound=1.0, first_rate=1.0, tolerance=0.1)

    assert ladder.knee == 0.0
    assert len(ladder.rungs) == 9


def test_a_lucky_run_beyond_the_first_failure_is_not_the_knee() -> None:
    ladder = Ladder(1.0, (Rung(4.0, 0.5), Rung(8.0, 2.0), Rung(9.0, 0.9)))

    assert ladder.knee == 4.0
