"""A finished request or connection leaves no reference cycle: the more streams a router has the
more seldom the collector comes, and what waits for it is memory that grows."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from kvoy_contract.testing import FakeEngine
from kvoy_contract.testing_script import Script
from kvoy_router.testing import eventually, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]
NUM_REQUESTS = 20


def ours() -> Counter[str]:
    """What only the collector finds, of objects and functions of the router."""
    found: Counter[str] = Counter()
    for thing in gc.garbage:
        module = getattr(thing, "__module__", None) or ""
        if module.startswith("kvoy_router"):
            found[getattr(thing, "__qualname__", type(thing).__qualname__)] += 1
    return found


@contextmanager
def left_to_collector(found: Counter[str]) -> Iterator[None]:
    """Adds to `found` what is garbage after the block and would wait for the collector."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.disable()
    try:
        yield
        gc.collect()
        found += ours()
    finally:
        gc.enable()
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_finished_request_leaves_nothing_to_the_collector(
    start_engine: StartEngine, stream: bool, path: str
) -> None:
    engine = await start_engine()
    said = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "m", "max_tokens": 4, "stream": stream, **said}
    async with (
        running_router([engine]) as router,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.server.port}", timeout=60) as client,
    ):
        await client.post(path, json=body)
        left: Counter[str] = Counter()
        with left_to_collector(left):
            for _ in range(NUM_REQUESTS):
                assert (await client.post(path, json=body)).status_code == 200

    assert not [name for name, count in left.items() if count >= NUM_REQUESTS // 2], left


@pytest.mark.parametrize("leaves_early", [True, False])
async def test_a_closed_connection_leaves_nothing_to_the_collector(
    start_engine: StartEngine, leaves_early: bool
) -> None:
    """A client's, and where it leaves in the middle of its stream the one to the engine too."""
    engine = await start_engine()
    engine.script = Script(pieces=("a", "b", "c"), gap_s=30.0 if leaves_early else 0.0)
    body = {"model": "m", "prompt": "hi", "stream": True}

    async with running_router([engine]) as router:

        async def ask() -> None:
            address = f"http://127.0.0.1:{router.server.port}"
            async with (
                httpx.AsyncClient(base_url=address, timeout=60) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and leaves_early:
                        break
            await eventually(lambda: not router.server.num_connections)

        await ask()
        left: Counter[str] = Counter()
        with left_to_collector(left):
            for _ in range(NUM_REQUESTS):
                await ask()

    assert not [name for name, count in left.items() if count >= NUM_REQUESTS // 2], left
