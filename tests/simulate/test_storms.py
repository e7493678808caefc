"""Random failures in small fleets: whatever happens, every request ends and every lease returns.

Each storm checks all invariants of pools, ledgers, schedulers and block pools right after each
mishap and at random moments, and that nothing is left of any request at the end. `python -m
kvoy_simulate.storm` runs any number of them.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy_simulate.fleet_testing import column_bytes
from kvoy_simulate.outcome import Status
from kvoy_simulate.storm import brew, weather

NUM_SEEDS = 1000
NUM_PARTS = 10


@settings(max_examples=5, deadline=None)
@given(st.integers(10**6, 10**9))
def test_nothing_is_lost_in_any_storm(seed: int) -> None:
    weather(seed)


def test_a_storm_is_the_same_again() -> None:
    assert column_bytes(weather(3)) == column_bytes(weather(3))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_thousand_storms_lose_nothing(part: int) -> None:
    ends = brew(range(part, NUM_SEEDS, NUM_PARTS))

    total = sum(ends.values())
    assert ends[Status.OK] > total / 2
    assert ends[Status.BROKEN] + ends[Status.CUT] + ends[Status.REFUSED] > 0
