"""A finished request leaves no reference cycle: the more streams a router has the more seldom the
collector comes, and what waits for it is memory that grows."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
import pytest

from kvoy_contract.testing import FakeEngine
from kvoy_router.testing import running_router

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
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.server.port}") as client,
    ):
        await client.post(path, json=body)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.disable()
        try:
            for _ in range(NUM_REQUESTS):
                assert (await client.post(path, json=body)).status_code == 200
            gc.collect()
            left = ours()
        finally:
            gc.enable()
            gc.set_debug(0)
            gc.garbage.clear()

    assert not [name for name, count in left.items() if count >= NUM_REQUESTS // 2], left
