"""Engines that hang: their requests go to others, once both heartbeat and answer are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvoy_contract.testing import FakeEngine, Fault, Script
from kvoy_router.app import Router
from kvoy_router.breaker import BreakerState
from kvoy_router.failover_testing import client_of, read_stream
from kvoy_router.testing import eventually, in_flight, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PIECES = ("a", "b", "c", "d", "e", "f")


async def busy_and_other(engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """The engine that has the request, and the one that has not."""
    await eventually(lambda: sum(engine.in_flight for engine in engines) == 1)
    one, other = engines
    return (one, other) if one.in_flight else (other, one)


def breaker_of(router: Router, engine: FakeEngine) -> BreakerState:
    endpoint = router.pool.endpoint(engine.address)
    assert endpoint is not None
    return router.breakers.state(endpoint, router._now_s())


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.HANG_BEFORE_HEAD])
async def test_a_stream_of_a_hanging_engine_goes_on_elsewhere(
    start_engine: StartEngine, fault: Fault
) -> None:
    engines = [await start_engine(resume=True), await start_engine(resume=True)]
    for engine in engines:
        engine.script = Script(pieces=PIECES, fault=fault, fault_after=2)

    async with running_router(engines, hang_timeout_s=0.8) as router, client_of(router) as client:
        asked = asyncio.create_task(read_stream(client, CHAT))
        hanging, other = await busy_and_other(engines)
        other.script = Script(pieces=PIECES)
        hanging.is_muted = True
        seen = await asked

        assert seen.texts == {0: "".join(PIECES)}
        assert seen.is_done
        assert in_flight(router) == [0, 0]
        await eventually(lambda: hanging.num_aborted == 1)
        (resumed,) = other.requests
        assert resumed.envelope is not None
        is_from_the_beginning = fault is Fault.HANG_BEFORE_HEAD
        assert (resumed.envelope.resume is None) is is_from_the_beginning
        assert breaker_of(router, hanging) is BreakerState.OPEN

        hanging.is_muted = False
        await eventually(lambda: breaker_of(router, hanging) is not BreakerState.OPEN)


async def test_an_engine_whose_stream_flows_does_not_hang(start_engine: StartEngine) -> None:
    engines = [await start_engine(resume=True), await start_engine(resume=True)]
    for engine in engines:
        engine.script = Script(pieces=PIECES, gap_s=0.5)

    async with running_router(engines, hang_timeout_s=2.0) as router, client_of(router) as client:
        asked = asyncio.create_task(read_stream(client, CHAT))
        mute, other = await busy_and_other(engines)
        mute.is_muted = True
        seen = await asked

        assert seen.texts == {0: "".join(PIECES)}
        assert other.requests == []


async def test_without_another_engine_a_request_waits_for_one_that_hangs(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(resume=True)
    gate = asyncio.Event()
    engine.script = Script(pieces=PIECES, gate=gate)

    async with running_router([engine], hang_timeout_s=0.4) as router, client_of(router) as client:
        asked = asyncio.create_task(read_stream(client, CHAT))
        await eventually(lambda: engine.in_flight == 1)
        engine.is_muted = True
        await eventually(lambda: breaker_of(router, engine) is BreakerState.OPEN)
        engine.is_muted = False
        gate.set()

        assert (await asked).texts == {0: "".join(PIECES)}
        assert len(engine.requests) == 1


async def test_a_stuck_step_hangs_though_its_heartbeat_goes_on(start_engine: StartEngine) -> None:
    engines = [await start_engine(resume=True), await start_engine(resume=True)]
    for engine in engines:
        engine.script = Script(pieces=PIECES, fault=Fault.HANG, fault_after=3)

    async with running_router(engines, hang_timeout_s=0.8) as router, client_of(router) as client:
        asked = asyncio.create_task(read_stream(client, CHAT))
        stuck, other = await busy_and_other(engines)
        other.script = Script(pieces=PIECES)
        stuck.load.last_step_age_s = 60.0

        assert (await asked).texts == {0: "".join(PIECES)}
        assert len(other.requests) == 1
