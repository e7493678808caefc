"""How often a router asks engines to report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvoy_contract.testing import FakeEngine
from kvoy_router.pool import PoolConfig
from kvoy_router.report_pace import LONGEST_S, ReportPace, interval_s
from kvoy_router.testing import eventually, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]


def test_a_small_fleet_reports_at_its_own_pace() -> None:
    assert interval_s(1, 2000) == 0.0
    assert interval_s(50, 2000) == 0.0


def test_a_large_fleet_shares_one_budget() -> None:
    for num_engines in (100, 400, 1000):
        assert num_engines / interval_s(num_engines, 2000) == pytest.approx(2000)


def test_no_interval_is_longer_than_the_heartbeat() -> None:
    assert interval_s(100_000, 2000) == LONGEST_S


def test_engines_hear_of_another_pace_only_where_it_makes_a_difference() -> None:
    pace = ReportPace(2000)

    assert pace.next_s(10) is None
    assert pace.next_s(1000) == 0.5
    assert pace.next_s(1000) is None
    assert pace.next_s(1100) is None
    assert pace.next_s(1300) == 0.65
    assert pace.next_s(10) == 0.0
    assert pace.next_s(10) is None


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_reports_per_s"):
        PoolConfig(max_reports_per_s=0)


async def test_engines_are_asked_on_their_streams(start_engine: StartEngine) -> None:
    engines = [await start_engine(), await start_engine()]

    async with running_router(engines, max_reports_per_s=4):
        await eventually(lambda: all(e.asked_intervals_s == {0.5} for e in engines))


async def test_a_small_fleet_is_asked_for_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine]):
        await eventually(lambda: engine.num_acks == 1)
        assert engine.asked_intervals_s == {0.0}
