"""When the step loop counts as stuck, and when an engine is ready."""

from __future__ import annotations

import pytest

from kvoy_engine.health import CoreWatch, Phase, Readiness
from kvoy_engine.messages import Load


def test_an_idle_core_is_never_stuck() -> None:
    watch = CoreWatch(stall_timeout_s=10, token_budget=2048)

    watch.on_output(Load(prefill_tokens_per_s=1e6), 5.0, is_outstanding=False)

    assert watch.problem(1e6) is None
    assert watch.last_step_age_s(1e6) == 0


def test_a_core_with_work_must_answer_in_time() -> None:
    watch = CoreWatch(stall_timeout_s=10, token_budget=2048)
    watch.on_output(Load(prefill_tokens_per_s=1e6), 0.0, is_outstanding=False)
    watch.on_submit(100.0)

    early, late = watch.problem(109.0), watch.problem(111.0)
    watch.on_output(Load(prefill_tokens_per_s=1e6), 112.0, is_outstanding=True)

    assert early is None
    assert late is not None
    assert watch.problem(113.0) is None


def test_a_slow_machine_gets_the_time_that_its_steps_take() -> None:
    watch = CoreWatch(stall_timeout_s=10, token_budget=2000)

    watch.on_output(Load(prefill_tokens_per_s=100), 0.0, is_outstanding=True)

    assert watch.stall_limit_s() == pytest.approx(100.0)


def test_a_dead_core_stays_dead() -> None:
    watch = CoreWatch(stall_timeout_s=10, token_budget=2048)

    watch.on_failed("signal 9")

    assert "signal 9" in (watch.problem(0.0) or "")


def readiness(*, expect_router: bool) -> Readiness:
    return Readiness(expect_router=expect_router, router_wait_s=30)


def test_nothing_is_ready_before_it_is_loaded() -> None:
    state = readiness(expect_router=False)

    assert not state.is_ready(1e6)


def test_without_routers_loaded_is_ready() -> None:
    state = readiness(expect_router=False)
    state.on_loaded(10.0)

    assert state.is_ready(10.0)


def test_an_expected_router_is_waited_for_but_not_for_ever() -> None:
    state = readiness(expect_router=True)
    state.on_loaded(10.0)

    assert not state.is_ready(39.0)
    assert state.is_ready(40.0)


def test_every_live_router_must_have_acknowledged() -> None:
    state = readiness(expect_router=True)
    state.on_loaded(10.0)
    state.on_watch_started(1)
    state.on_watch_started(2)
    state.on_snapshot_acknowledged(1)

    one = state.is_ready(11.0)
    state.on_snapshot_acknowledged(2)

    assert not one
    assert state.is_ready(11.0)


def test_a_router_that_left_is_not_waited_for() -> None:
    state = readiness(expect_router=False)
    state.on_watch_started(1)
    state.on_loaded(10.0)

    waiting = state.is_ready(11.0)
    state.on_watch_ended(1)

    assert not waiting
    assert state.is_ready(11.0)


def test_readiness_is_not_withdrawn_for_a_routers_sake_but_for_draining() -> None:
    state = readiness(expect_router=True)
    state.on_loaded(10.0)
    state.on_watch_started(1)
    state.on_snapshot_acknowledged(1)
    granted = state.is_ready(11.0)

    state.on_watch_started(2)
    state.on_watch_ended(1)
    kept = state.is_ready(12.0)
    state.on_drain()

    assert granted
    assert kept
    assert not state.is_ready(13.0)
    assert state.phase is Phase.DRAINING
