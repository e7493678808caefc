"""Many large bodies at once: what a router makes of them, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable

import httpx
import pytest

from kvoy_contract.testing import FakeEngine, Script
from kvoy_contract.testing_ports import free_port
from kvoy_router.app import Router
from kvoy_router.body_memory import REQUEST_BYTES
from kvoy_router.testing import SECRET, eventually, flag_of, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

MIB = 1024 * 1024
SHORT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
ROOMY = {"max_model_len": 100_000_000, "num_blocks": 100_000_000}
"""Of an engine to which no prompt is too long."""


def chat_of(num_bytes: int) -> bytes:
    words = "The router sends each request to the engine that holds its work. "
    content = (words * (num_bytes // len(words) + 1))[:num_bytes]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def url_of(router: Router) -> str:
    return f"http://127.0.0.1:{router.server.port}"


async def ask(client: httpx.AsyncClient, body: bytes, path: str = "/v1/chat/completions") -> int:
    return (await client.post(path, content=body)).status_code


async def test_a_prompt_too_long_for_the_memory_is_encoded_by_its_engine(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(**ROOMY)

    async with running_router([engine], max_buffered_mib=16) as router:
        async with httpx.AsyncClient(base_url=url_of(router), timeout=60) as client:
            assert await ask(client, chat_of(20_000)) == 200
            assert await ask(client, chat_of(100_000)) == 200
            metrics = (await client.get("/metrics")).text
        assert router.memory.bodies.used_bytes == 0

    encoded, sent_on = engine.requests
    assert encoded.envelope is not None
    assert sent_on.envelope is not None
    assert encoded.envelope.token_ids
    assert not sent_on.envelope.token_ids
    assert sent_on.body == chat_of(100_000)
    assert "kvoy_router_prompts_not_encoded_total 1.0" in metrics


async def test_token_ids_without_room_in_memory_are_left_out(start_engine: StartEngine) -> None:
    """The byte tokenizer makes four bytes of each one: more than the body's place has for them."""
    engine = await start_engine(**ROOMY)

    async with running_router([engine], max_buffered_mib=100) as router:
        router.memory.bodies.held.claim(router.memory.bodies.held.max_bytes - 350_000)
        async with httpx.AsyncClient(base_url=url_of(router), timeout=60) as client:
            assert await ask(client, chat_of(100_000)) == 200

    envelope = engine.requests[0].envelope
    assert envelope is not None
    assert not envelope.token_ids


async def test_a_body_that_decodes_to_more_than_there_is_memory_is_refused_by_its_cost(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(**ROOMY)
    ids = b'{"model":"m","prompt":[' + b"200," * 400_000 + b"1]}"

    async with running_router([engine], max_buffered_mib=100) as router:
        async with httpx.AsyncClient(base_url=url_of(router), timeout=60) as client:
            answer = await client.post("/v1/completions", content=ids)
            tokens = await client.post("/tokenize", content=chat_of(300_000))
        assert router.memory.bodies.used_bytes == 0

    assert answer.status_code == tokens.status_code == 413
    assert "bytes of memory, more than the" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_bytes", [20_000, 100_000], ids=["small", "large"])
async def test_what_a_request_holds_is_counted_to_its_end(
    start_engine: StartEngine, num_bytes: int
) -> None:
    engine = await start_engine(**ROOMY)
    gate = asyncio.Event()
    engine.script = Script(gate=gate)
    body = chat_of(num_bytes)

    async with running_router([engine], max_buffered_mib=400) as router:
        memory = router.memory.bodies
        async with httpx.AsyncClient(base_url=url_of(router), timeout=60) as client:
            asking = asyncio.create_task(ask(client, body))
            await eventually(lambda: engine.in_flight)
            used, working = memory.used_bytes, memory.decoding.used_bytes
            gate.set()
            assert await asking == 200
        await eventually(lambda: memory.used_bytes == 0)

    assert working == 0
    # Besides what any request costs: the body, its token ids twice, the hashes of each 64 tokens.
    assert used == pytest.approx(REQUEST_BYTES + len(body) * (1 + 2 * 4 + 65 / 64), rel=0.01)


async def test_a_small_limit_bounds_what_is_remembered_of_prompts(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine], memory_mib=64) as router:
        encoder = router.prompts.get(engine.tokenizer.digest)

    assert encoder is not None
    assert encoder.known_prefixes.max_bytes == 8 * MIB
    assert encoder.cache.max_bytes == 4 * MIB


@pytest.mark.slow
async def test_a_flood_of_large_bodies_stays_in_the_memory_and_short_requests_are_answered(
    start_engine: StartEngine,
) -> None:
    """Twelve bodies of 8 MB, which would be a gigabyte if all were read and decoded and sent on at
    once, and a router that has 320 MB for everything."""
    limit_mib, body = 320, chat_of(8_000_000)
    engine = await start_engine(**ROOMY)
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
    router = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvoy_router", "--engine", flag_of(engine), "--port", str(port)),
        *("--memory-mib", str(limit_mib), "--log-level", "error"),
        env=environment | {"KVOY_SECRET": SECRET},
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            await until_answered(client)
            flood = [asyncio.create_task(ask(client, body)) for _ in range(12)]
            short: list[int] = []
            while not all(each.done() for each in flood):
                short.append(await ask(client, SHORT))
                await asyncio.sleep(0.02)
            large = [await each for each in flood]
        peak_mib = peak_bytes(router.pid) / MIB
    finally:
        router.kill()
        await router.wait()

    assert set(short) == {200}
    assert 200 in large
    assert set(large) <= {200, 503}
    assert peak_mib < limit_mib


async def until_answered(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if await ask(client, SHORT) == 200:
                    return
            await asyncio.sleep(0.02)


def peak_bytes(pid: int) -> int:
    """The most that was resident since the process began."""
    with open(f"/proc/{pid}/status") as lines:
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
