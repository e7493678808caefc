"""Engines that come, go and come back: traffic follows them, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvoy_contract.testing import FakeEngine, Fault, Script
from kvoy_router.app import Router
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import Origin
from kvoy_router.found import FoundEngine
from kvoy_router.http_client import ClientLimits
from kvoy_router.testing import SECRET, eventually, flag_of, in_flight, is_routable, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]


def client_of(router: Router) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{router.server.port}",
        timeout=60,
        limits=httpx.Limits(max_connections=None),
    )


async def ask(client: httpx.AsyncClient, text: str = "hi", **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return await client.post("/v1/chat/completions", json=body)


def fleet_of(engines: list[FakeEngine]) -> list[FoundEngine]:
    origin = Origin(secret=SECRET)
    return [FoundEngine(EngineAddress.parse(flag_of(engine)), origin) for engine in engines]


@pytest.mark.parametrize("fault", ["refuses", Fault.HANG_BEFORE_HEAD, Fault.RESET_BEFORE_HEAD])
async def test_after_a_storm_of_failures_a_healthy_engine_serves_at_once(
    start_engine: StartEngine, fault: str
) -> None:
    engine = await start_engine(max_num_seqs=1000)

    async with (
        running_router(
            [engine],
            first_byte_timeout_s=0.3,
            whole_answer_timeout_s=0.3,
            connect_timeout_s=0.3,
        ) as router,
        client_of(router) as client,
    ):
        if fault == "refuses":
            await engine.stop_http()
        else:
            engine.script = Script(fault=Fault(fault))
        stormy = await asyncio.gather(*(ask(client, f"{i}") for i in range(100)))
        assert {answer.status_code for answer in stormy} <= {502, 503, 504}
        assert in_flight(router) == [0]

        # Only the storm was to be short: a healthy engine may take its time on a busy machine.
        router.clients.limits = ClientLimits()
        engine.script = Script()
        if fault == "refuses":
            await engine.start_http()
        healthy = [await ask(client) for _ in range(10)]

        assert [answer.status_code for answer in healthy] == [200] * 10
        assert in_flight(router) == [0]
        await eventually(lambda: engine.in_flight == 0)
        assert router.clients.num_idle == 1
        router.pool.check_integrity()


async def test_a_new_engine_of_unknown_load_gets_no_more_than_its_share(
    start_engine: StartEngine,
) -> None:
    warm = [await start_engine() for _ in range(3)]
    slow = asyncio.Event()

    async with (
        running_router(warm, policy="kv-aware") as router,
        client_of(router) as client,
    ):
        numbers = itertools.count()

        async def ask_many(count: int) -> list[httpx.Response]:
            return await asyncio.gather(
                *(ask(client, f"{next(numbers)} of many words" * 20) for _ in range(count))
            )

        await ask_many(12)
        new = await start_engine()
        new.is_muted = True  # nothing is known of its load: that is not "idle"
        for engine in (*warm, new):
            engine.script = Script(gate=slow)
        router.fleet.apply(fleet_of([*warm, new]))
        await eventually(lambda: new.num_acks == 1)

        every = [*warm, new]
        asking = asyncio.create_task(ask_many(40))
        await eventually(lambda: sum(len(engine.requests) for engine in every) == 12 + 40)
        num_held = len(new.requests)
        slow.set()
        answers = await asking

        assert {answer.status_code for answer in answers} == {200}
        assert num_held <= 40 / 4 * 1.5
        assert in_flight(router) == [0] * 4

        new.is_muted = False
        await eventually(lambda: is_routable(router.pool, new.address))
        await ask_many(40)
        assert len(new.requests) > num_held


async def test_the_first_engine_of_an_empty_fleet_is_used_as_soon_as_it_is_ready(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(max_num_seqs=8)

    async with (
        running_router([], wait=False, model=("m",)) as router,
        client_of(router) as client,
    ):
        before = await asyncio.gather(*(ask(client) for _ in range(50)))
        router.fleet.apply(fleet_of([engine]))
        await eventually(lambda: is_routable(router.pool, engine.address))
        after = await asyncio.gather(*(ask(client) for _ in range(50)))

        assert {answer.status_code for answer in before} == {503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in before)
        assert {answer.status_code for answer in after} == {200}
        assert in_flight(router) == [0]
