"""What flow control hears of a pool, and what it does with it."""

from __future__ import annotations

import dataclasses

import pytest

from kvoy_contract.errors import ApiError, Unavailable
from kvoy_router.endpoint import EngineInfo, Origin
from kvoy_router.fleet_testing import IDLE, MODEL, Fleet, prompt_hashes
from kvoy_router.flow import FlowControl
from kvoy_router.flow_room import PoolRoom
from kvoy_router.flow_ticket import FlowLimits, Line, Ticket
from kvoy_router.split import Service

ENOUGH_S = 0.5


def room_of(fleet: Fleet, *blocked: str) -> PoolRoom:
    return PoolRoom(fleet.pool, lambda now_s: frozenset(blocked))


def wait_s(fleet: Fleet, room: PoolRoom | None = None) -> float | None:
    return (room or room_of(fleet)).wait_s(Line(MODEL), fleet.now_s, ENOUGH_S)


def test_an_idle_fleet_has_room() -> None:
    assert wait_s(Fleet(3)) == 0.0


def test_the_engine_that_would_begin_first_counts() -> None:
    fleet = Fleet(3)
    for name, seconds in (("e0", 9), ("e1", 2), ("e2", 5)):
        fleet.report(name, running=1, queued_prefill_tokens=seconds * 10_000)

    assert wait_s(fleet) == pytest.approx(2.0)


def test_an_engine_with_room_is_found_wherever_it_is() -> None:
    fleet = Fleet(5)
    room = room_of(fleet)
    for free in ("e3", "e0", "e4", "e4", "e1"):
        for number in range(5):
            tokens = 0 if f"e{number}" == free else 50_000
            fleet.report(f"e{number}", running=1, queued_prefill_tokens=tokens)

        assert wait_s(fleet, room) == 0.0


def test_an_engine_without_seats_makes_wait_until_one_is_free() -> None:
    fleet = Fleet(1, info=EngineInfo(epoch=b"1", served_model=MODEL, max_num_seqs=4))
    fleet.report("e0", running=4, step_time_s=0.1)

    waited = wait_s(fleet)

    assert waited is not None
    assert waited > 1.0


def test_a_slow_and_tiny_engine_without_requests_has_room() -> None:
    """Else it would never be sent one."""
    fleet = Fleet(1)
    fleet.report("e0", dataclasses.replace(IDLE, step_time_s=5.0, total_blocks=4, free_blocks=4))

    assert wait_s(fleet) == 0.0


def test_an_engine_that_a_pick_passes_over_makes_no_room() -> None:
    """A dead engine looks empty: it would switch flow control off for all the others."""
    fleet = Fleet(3)
    for name in ("e0", "e1", "e2"):
        fleet.report(name, running=1, queued_prefill_tokens=90_000)
    fleet.pool.on_lost("e0", fleet.now_s)
    fleet.report("e1", IDLE)

    assert wait_s(fleet, room_of(fleet, "e1")) == pytest.approx(9.0)


def test_a_silent_engine_makes_no_room_beside_one_that_reports() -> None:
    fleet = Fleet(2)
    fleet.now_s += 60.0
    fleet.report("e1", running=1, queued_prefill_tokens=90_000)

    assert wait_s(fleet) == pytest.approx(9.0)


def test_where_all_would_be_passed_over_they_make_room_as_picks_take_them() -> None:
    fleet = Fleet(2)
    fleet.report("e1", running=1, queued_prefill_tokens=90_000)
    fleet.pool.on_lost("e0", fleet.now_s)

    assert wait_s(fleet, room_of(fleet, "e1")) == 0.0


def shared_fleet() -> Fleet:
    """One engine of each of two services; the one of `stable` has 9 s of prompts queued."""
    fleet = Fleet(0)
    for name in ("stable", "canary"):
        fleet.pool.add_endpoint(name, origin=Origin(service=name))
        fleet.add(name)
    fleet.pool.set_services(
        [Service(name="stable", model=MODEL, weight=95), Service(name="canary", model=MODEL)]
    )
    fleet.report("stable", running=1, queued_prefill_tokens=90_000)
    return fleet


def test_an_idle_service_makes_no_room_for_the_share_of_another() -> None:
    fleet = shared_fleet()
    room = room_of(fleet)

    assert room.wait_s(Line(MODEL, "stable"), fleet.now_s, ENOUGH_S) == pytest.approx(9.0)
    assert room.wait_s(Line(MODEL, "canary"), fleet.now_s, ENOUGH_S) == 0.0


def test_the_share_of_a_service_that_cannot_serve_finds_room_where_it_passes_on_to() -> None:
    fleet = shared_fleet()
    fleet.pool.on_lost("canary", fleet.now_s)
    room = room_of(fleet)

    assert room.wait_s(Line(MODEL, "canary"), fleet.now_s, ENOUGH_S) == pytest.approx(9.0)
    assert room.wait_s(Line(MODEL, "gone"), fleet.now_s, ENOUGH_S) == pytest.approx(9.0)


def test_the_lines_of_one_model_wait_and_end_apart() -> None:
    fleet = shared_fleet()
    flow = FlowControl(room_of(fleet), FlowLimits(), lambda ticket, error: None)
    held, passing = (
        Ticket(Line(MODEL, name), tokens=1, arrived_s=0.0) for name in ("stable", "canary")
    )

    assert not flow.enter(held, 0.0)
    assert flow.enter(passing, 0.0)
    assert flow.waiting_lines() == [held.line]
    flow.start(passing)
    flow.end(held, 0.0)
    flow.forget(MODEL)
    assert [line for line, _ in flow.queues()] == [passing.line]
    flow.end(passing, 0.0)
    assert list(flow.queues()) == []


def test_what_this_router_has_just_sent_counts_at_once() -> None:
    fleet = Fleet(1)
    fleet.pool.pick(fleet.request(prompt_hashes(20_000, "a")), fleet.now_s)

    assert wait_s(fleet) == pytest.approx(2.0, rel=0.05)


def test_without_a_serving_engine_there_is_no_wait_to_tell() -> None:
    fleet = Fleet(1)
    fleet.pool.set_draining("e0", True)

    assert wait_s(fleet) is None
    assert room_of(fleet).wait_s(Line("nope"), fleet.now_s, ENOUGH_S) is None


def test_an_engine_that_has_not_reported_is_judged_by_what_was_sent_to_it() -> None:
    fleet = Fleet(0)
    fleet.add("e0", load=None)
    assert wait_s(fleet) == 0.0

    for number in range(4):
        fleet.pool.pick(fleet.request(prompt_hashes(16_000, number)), fleet.now_s)

    waited = wait_s(fleet)
    assert waited is not None
    assert waited > 1.0


def test_held_requests_reach_a_first_engine_only_as_fast_as_it_takes_them() -> None:
    """A pool that starts from nothing is not flooded by all that waited for it."""
    fleet = Fleet(0)
    fleet.pool.declare_model(MODEL)
    refused: list[tuple[Ticket, ApiError]] = []
    flow = FlowControl(
        room_of(fleet),
        FlowLimits(max_waiting_s=60.0),
        lambda ticket, error: refused.append((ticket, error)),
    )
    held = [Ticket(Line(MODEL), tokens=4_000, arrived_s=fleet.now_s) for _ in range(100)]
    for ticket in held:
        assert not flow.enter(ticket, fleet.now_s)
    assert flow.next(Line(MODEL), fleet.now_s) is None

    fleet.add("e0")
    sent = 0
    while (chosen := flow.next(Line(MODEL), fleet.now_s)) is not None:
        fleet.pool.pick(fleet.request(prompt_hashes(4_000, sent)), fleet.now_s)
        flow.start(chosen)
        sent += 1

    assert 1 < sent < 8, "1 s of prefill at 10,000 tokens/s"
    fleet.now_s += 60.0
    fleet.report("e0", running=1, queued_prefill_tokens=50_000)
    flow.expire(fleet.now_s)
    assert len(refused) == 100 - sent
    assert flow.num_waiting == 0


def test_the_queue_of_a_model_that_is_gone_goes_with_its_last_request() -> None:
    fleet = Fleet(1)
    flow = FlowControl(room_of(fleet), FlowLimits(), lambda ticket, error: None)
    ticket = Ticket(Line(MODEL), tokens=1, arrived_s=0.0)
    assert flow.enter(ticket, 0.0)

    flow.forget(MODEL)
    assert [line for line, _ in flow.queues()] == [Line(MODEL)]
    flow.end(ticket, 0.0)

    assert list(flow.queues()) == []


def test_a_full_hold_says_that_nothing_can_serve() -> None:
    fleet = Fleet(0)
    fleet.pool.declare_model(MODEL)
    flow = FlowControl(room_of(fleet), FlowLimits(max_held=1), lambda ticket, error: None)
    flow.enter(Ticket(Line(MODEL), tokens=1, arrived_s=0.0), 0.0)

    with pytest.raises(Unavailable):
        flow.enter(Ticket(Line(MODEL), tokens=1, arrived_s=0.0), 0.0)
