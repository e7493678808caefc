"""A stream whose engine fails goes on from another: the client sees what an undisturbed run gives.

Real engines and a real router in one event loop; the connection between them breaks at any byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvoy_engine.testing_server import running_engine, sim_config
from kvoy_router.failover_testing import ALL_TOLD, TOLD, Bench, bench, read_stream
from kvoy_router.testing import SECRET, eventually, in_flight

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 20,
    "seed": 5,
}
SLOW_STEP_S = 0.1
"""The first ids that an engine says are far from all, also on a busy machine."""
TEXT: dict[str, Any] = {"model": "sim", "prompt": "hi", "max_tokens": 20, "seed": 5}


@contextlib.asynccontextmanager
async def simulated(
    num_engines: int = 2, sim_base_s: float = 0.0005, **settings: Any
) -> AsyncIterator[Bench]:
    config = sim_config(secret=SECRET, sim_base_s=sim_base_s, enable_prefix_caching=False)
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(running_engine(config)) for _ in range(num_engines)
        ]
        yield await stack.enter_async_context(bench(engines, **settings))


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
async def test_wherever_the_connection_breaks_the_client_sees_one_stream(
    body: dict[str, Any],
) -> None:
    async with simulated() as bench:
        whole = await bench.ask(body)
        (size,) = bench.cuts.num_bytes
        positions = random.Random(1).sample(range(1, size), 24)

        for position in [*positions, *range(size - 30, size)]:
            (await bench.ask(body, position)).assert_equals(whole)

        assert whole.reasons == {0: ["length"]}
        assert whole.usage["completion_tokens"] == 20
        bench.assert_clean()


async def test_choices_and_usage_in_each_chunk_go_on() -> None:
    async with simulated() as bench:
        plain = await bench.ask(TEXT | {"max_tokens": 12, "n": 3})
        # One choice ends early, so that breaks come while others go on.
        body = TEXT | {"max_tokens": 12, "n": 3, "stop": plain.texts[1][4:6]}
        body["stream_options"] = {"continuous_usage_stats": True}
        whole = await bench.ask(body)
        (size,) = bench.cuts.num_bytes

        for position in random.Random(2).sample(range(size // 10, size), 12):
            (await bench.ask(body, position)).assert_equals(whole)
        bench.assert_clean()


async def test_a_stop_string_that_lies_across_the_seam_is_found() -> None:
    async with simulated() as bench:
        plain = await bench.ask(TEXT | {"max_tokens": 30})
        body = TEXT | {"max_tokens": 30, "stop": plain.texts[0][9:13]}
        whole = await bench.ask(body)
        (size,) = bench.cuts.num_bytes

        for position in range(size // 3, size, max(1, size // 25)):
            (await bench.ask(body, position)).assert_equals(whole)

        assert whole.reasons == {0: ["stop"]}
        assert whole.texts[0] == plain.texts[0][: plain.texts[0].index(plain.texts[0][9:13])]


async def test_eight_streams_survive_the_end_of_their_engine() -> None:
    config = sim_config(secret=SECRET, sim_base_s=0.04, enable_prefix_caching=False)
    bodies = [CHAT | {"seed": seed, "max_tokens": 60} for seed in range(8)]
    async with (
        running_engine(config) as one,
        running_engine(config) as other,
        bench([one, other]) as both,
    ):
        wholes = await asyncio.gather(*(read_stream(both.client, body) for body in bodies))
        # Those of one engine, of eight on two. All have begun when the first has got so far.
        both.cuts.after[:] = [min(both.cuts.num_bytes) // 2] * 4

        seen = await asyncio.gather(*(read_stream(both.client, body) for body in bodies))

        for one_seen, whole in zip(seen, wholes, strict=True):
            one_seen.assert_equals(whole)
        await eventually(lambda: sum(in_flight(both.router)) == 0)
        both.assert_clean()


async def test_an_engine_at_the_end_of_its_drain_hands_its_streams_over() -> None:
    config = sim_config(
        secret=SECRET, sim_base_s=0.02, drain_timeout_s=0.2, enable_prefix_caching=False
    )
    body = CHAT | {"max_tokens": 60}
    async with (
        running_engine(config) as one,
        running_engine(config) as other,
        bench([one, other]) as both,
    ):
        whole = await both.ask(body)
        asked = asyncio.create_task(read_stream(both.client, body))
        await eventually(lambda: len(both.cuts.num_bytes) == 2 and both.cuts.num_bytes[1])
        (begun,) = (e for e in both.router.pool.endpoints if e.ledger.in_flight)
        draining = one if begun.address == both.links[0].address else other
        draining.server.request_drain()

        (await asked).assert_equals(whole)
        assert await draining.running == 0


async def test_a_stream_goes_on_a_second_time() -> None:
    async with simulated(3, SLOW_STEP_S) as bench:
        proxy = bench.router.proxy
        # However soon an engine breaks: the request is not suspect.
        limits = replace(proxy.options.failover, begin_s=0.0)
        proxy.use_options(replace(proxy.options, failover=limits))
        whole = await bench.ask(CHAT)

        seen = await bench.ask(CHAT, TOLD, TOLD)

        seen.assert_equals(whole)
        assert len(bench.cuts.num_bytes) == 3


async def test_without_another_engine_the_client_is_told_inside_the_stream() -> None:
    async with simulated(1, SLOW_STEP_S) as bench:
        seen = await bench.ask(CHAT, TOLD)

    assert seen.error is not None
    assert "no other engine can go on with it" in seen.error["message"]
    assert not seen.is_done
    assert 0 < len(seen.texts[0]) < 20


async def test_a_stream_longer_than_the_router_remembers_is_not_resumed() -> None:
    async with simulated(max_resume_kib=1) as bench:
        seen = await bench.ask(CHAT | {"max_tokens": 400}, ALL_TOLD)

    assert seen.error is not None
    assert "longer than the router remembers" in seen.error["message"]


async def test_beyond_the_memory_of_all_streams_further_ones_are_not_resumed() -> None:
    async with simulated() as bench:
        memory = bench.router.resume_memory
        memory.max_bytes = memory.used_bytes + 2 * 1024
        seen = await bench.ask(CHAT | {"max_tokens": 800}, ALL_TOLD)
        (await bench.ask(CHAT, TOLD)).assert_equals(await bench.ask(CHAT))

        assert seen.error is not None
        assert "memory for resuming streams was full" in seen.error["message"]
        assert memory.num_refused == 1
        assert memory.used_bytes == 0, "all is given back with the streams"


async def test_resumes_are_bounded_per_request_and_by_the_budget_of_all() -> None:
    body = CHAT | {"max_tokens": 100}
    async with simulated(num_engines=4, max_resumes=1) as bench:
        (await bench.ask(body, TOLD)).assert_equals(await bench.ask(body))
    async with simulated(2, SLOW_STEP_S, retry_burst=0, retry_share=0.0) as bench:
        seen = await bench.ask(body, TOLD)

    assert seen.error is not None
    assert "too many other requests" in seen.error["message"]


async def test_a_request_that_breaks_two_engines_at_its_beginning_is_ended() -> None:
    async with simulated(4, SLOW_STEP_S) as bench:
        proxy = bench.router.proxy
        # On a busy machine a second may pass between a first byte and the break behind it.
        limits = replace(proxy.options.failover, begin_s=60.0)
        proxy.use_options(replace(proxy.options, failover=limits))
        seen = await bench.ask(CHAT, TOLD, TOLD, TOLD)

        assert sum(link.num_requests for link in bench.links) == 2
    assert seen.error is not None
    assert "two engines have failed while they began this request" in seen.error["message"]
