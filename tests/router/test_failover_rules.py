"""The bounds on going past failing engines: budgets, breakers, hangs, one request's course."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_router.breaker import BreakerLimits, Breakers, BreakerState
from kvoy_router.endpoint import Endpoint, EngineInfo, LoadView
from kvoy_router.errors import BadResponse, ConnectFailed, ConnectionBroken, EngineHung
from kvoy_router.failover import Failover, FailoverLimits, GaveUp
from kvoy_router.hang_watch import TICK_S, HangWatch
from kvoy_router.lease import Ledger
from kvoy_router.retry_budget import RetryBudget

INFO = EngineInfo(epoch=b"one", served_model="m", max_num_batched_tokens=1000)


def engine(name: str = "e:1") -> Endpoint:
    endpoint = Endpoint(name, "", 1, Ledger())
    endpoint.info = INFO
    return endpoint


# The budget.


@given(
    share=st.floats(0, 1),
    burst=st.integers(0, 50),
    events=st.lists(st.tuples(st.booleans(), st.floats(0, 2)), max_size=300),
)
def test_attempts_never_exceed_the_burst_the_drip_and_the_share(
    share: float, burst: int, events: list[tuple[bool, float]]
) -> None:
    budget = RetryBudget(share, burst, per_s=0.5)
    now_s = num_requests = num_attempts = 0.0
    for is_request, gap_s in events:
        now_s += gap_s
        if is_request:
            budget.on_request()
            num_requests += 1
        elif budget.take(now_s):
            num_attempts += 1
        assert 0 <= budget.tokens <= burst
        assert num_attempts <= burst + share * num_requests + 0.5 * now_s + 1e-6


def test_a_spent_budget_comes_back_with_traffic_and_with_time() -> None:
    budget = RetryBudget(share=0.25, burst=2, per_s=0.1)

    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.on_request()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert [budget.take(10.0) for _ in range(2)] == [True, False]
    assert budget.num_refused == 3


# The breaker.


def test_an_engine_that_fails_again_and_again_is_left_alone_and_probed() -> None:
    breakers, failing = Breakers(BreakerLimits(3, 1.0, 3.0)), engine()
    for _ in range(2):
        breakers.on_failure(failing, 0.0)
    assert breakers.blocked(0.0) == frozenset()

    breakers.on_failure(failing, 0.0)
    breakers.on_failure(failing, 0.5)  # an attempt that had begun before
    assert breakers.blocked(0.9) == {failing.id}
    assert breakers.state(failing, 0.9) is BreakerState.OPEN

    assert breakers.blocked(1.0) == frozenset()
    breakers.on_pick(failing, 1.0)
    assert breakers.state(failing, 1.0) is BreakerState.HALF_OPEN
    assert breakers.blocked(1.5) == {failing.id}, "one probe at a time"
    breakers.on_failure(failing, 1.5)
    assert breakers.blocked(3.4) == {failing.id}, "twice the pause"
    breakers.on_pick(failing, 3.5)
    breakers.on_failure(failing, 3.5)
    assert breakers.blocked(6.4) == {failing.id}
    assert breakers.blocked(6.5) == frozenset(), "no longer than the longest"

    breakers.on_pick(failing, 6.5)
    breakers.on_success(failing)
    assert breakers.state(failing, 6.5) is BreakerState.CLOSED
    assert breakers.blocked(6.5) == frozenset()


def test_a_probe_that_nobody_hears_of_does_not_block_for_ever() -> None:
    breakers, failing = Breakers(BreakerLimits(1, 1.0)), engine()
    breakers.on_failure(failing, 0.0)
    breakers.on_pick(failing, 1.0)  # its client leaves

    assert breakers.blocked(1.9) == {failing.id}
    assert breakers.blocked(2.0) == frozenset()


def test_another_process_at_the_address_has_a_closed_breaker() -> None:
    breakers, failing = Breakers(BreakerLimits(1, 10.0)), engine()
    breakers.on_failure(failing, 0.0)
    failing.info = replace(INFO, epoch=b"two")

    assert breakers.blocked(0.1) == frozenset()
    assert breakers.state(failing, 0.1) is BreakerState.CLOSED
    breakers.trip(failing, 0.1)
    assert breakers.blocked(0.2) == {failing.id}
    breakers.keep_only([engine()])
    assert breakers.blocked(0.2) == frozenset()


def test_without_a_limit_on_failures_nothing_opens() -> None:
    breakers, failing = Breakers(BreakerLimits(0)), engine()
    for _ in range(100):
        breakers.on_failure(failing, 0.0)

    assert breakers.blocked(0.0) == frozenset()


# Hangs.


class Time:
    """Ticks a watch as a router does, with an engine that reports or does not."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.watch = HangWatch(3.0)

    def run(self, engines: list[Endpoint], seconds: float, *silent: Endpoint) -> bool:
        """Whether any hangs at the end."""
        hangs = []
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for each in engines:
                if each not in silent:
                    each.load_s = self.now_s
            hangs = self.watch.tick(engines, self.now_s)
        return bool(hangs)


def test_an_engine_hangs_after_three_silent_seconds_and_until_it_reports() -> None:
    time, one, other = Time(), engine("e:1"), engine("e:2")
    assert not time.run([one, other], 5.0)

    assert not time.run([one, other], 2.75, one)
    assert time.run([one, other], 0.5, one)
    assert time.watch.is_hung(one)
    assert not time.watch.is_hung(other)
    assert not time.run([one, other], TICK_S)


def test_an_engine_that_never_reported_does_not_hang() -> None:
    time, never = Time(), engine()

    assert not time.run([never], 60.0, never)


def test_a_router_that_slept_takes_no_engine_for_hanging() -> None:
    time, one = Time(), engine()
    time.run([one], 1.0)

    time.now_s += 3600.0

    assert not time.run([one], 1.0, one)


@pytest.mark.parametrize(
    ("load", "hangs"),
    [
        (LoadView(step_time_s=0.01, last_step_age_s=2.9), False),
        (LoadView(step_time_s=0.01, last_step_age_s=3.1), True),
        (LoadView(step_time_s=1.0, last_step_age_s=4.9), False),
        (LoadView(step_time_s=1.0, last_step_age_s=5.1), True),
        (LoadView(step_time_s=0.0, last_step_age_s=60.0), False),
        # Its queue's prefill, as much as one step takes: 1 + 1000/500 s.
        (
            LoadView(
                step_time_s=1.0,
                prefill_tokens_per_s=500,
                queued_prefill_tokens=9000,
                last_step_age_s=14.9,
            ),
            False,
        ),
        (
            LoadView(
                step_time_s=1.0,
                prefill_tokens_per_s=500,
                queued_prefill_tokens=9000,
                last_step_age_s=15.1,
            ),
            True,
        ),
        (LoadView(step_time_s=1.0, queued_prefill_tokens=1, last_step_age_s=60.0), False),
    ],
)
def test_a_step_hangs_beyond_five_times_its_own_estimate(load: LoadView, hangs: bool) -> None:
    time, one = Time(), engine()
    one.load = load

    assert time.run([one], 1.0) is hangs


# One request's course.


def course(retries: RetryBudget | None = None, **limits: float) -> Failover:
    plenty = RetryBudget(1.0, 1000)
    return Failover(FailoverLimits(**limits), retries or plenty, plenty)  # type: ignore[arg-type]


def test_a_request_that_two_engines_die_of_at_its_beginning_is_ended() -> None:
    way = course(max_retries=9)

    assert way.after(ConnectionBroken("x"), None, 10.0) is None
    assert way.after(ConnectFailed("x"), None, 10.0) is None, "nothing was sent to that one"
    assert way.after(EngineHung("x"), 19.5, 20.0) is GaveUp.SUSPECT


def test_engines_that_die_later_are_no_suspicion_and_are_bounded_all_the_same() -> None:
    way = course(max_resumes=2)

    assert way.after(ConnectionBroken("x"), 0.0, 5.0) is None
    assert way.after(ConnectionBroken("x"), 6.0, 9.0) is None
    assert way.after(ConnectionBroken("x"), 10.0, 15.0) is GaveUp.TOO_MANY
    assert (way.num_resumes, way.num_retries, way.num_kills) == (2, 0, 0)


def test_retries_take_from_the_budget_of_all() -> None:
    budget = RetryBudget(0.0, 1)

    assert course(budget).after(BadResponse("x"), None, 0.0) is None
    assert course(budget).after(None, None, 0.0) is GaveUp.BUDGET


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, ConnectionBroken, ConnectFailed, BadResponse, EngineHung]),
            st.none() | st.floats(0, 5),
        ),
        max_size=20,
    )
)
def test_every_course_ends(failures: list[tuple[type[BadResponse] | None, float | None]]) -> None:
    way, num_attempts = course(), 1
    for kind, first_byte_s in failures:
        stop = way.after(None if kind is None else kind("x"), first_byte_s, 5.0)
        if stop is not None:
            break
        num_attempts += 1

    assert num_attempts <= 1 + 2 + 2
    assert way.num_kills <= 2
