"""A router in the caller's event loop, in front of fake engines; for tests and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from kvoy_contract.testing import FakeEngine
from kvoy_contract.tracing import Tracing
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.http_client import Exchange
from kvoy_router.pool import Pool

SECRET = "fleet-secret"


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (conditions are about sockets, nobody signals them)
            await asyncio.sleep(0.005)


def flag_of(engine: FakeEngine) -> str:
    """The engine as `--engine` takes it."""
    return f"{engine.address}@{engine.telemetry_address.rpartition(':')[2]}"


@contextlib.asynccontextmanager
async def running_router(
    engines: Sequence[FakeEngine],
    *,
    wait: bool = True,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    """A router that knows the engines, listening on a free port. `settings` go to its config."""
    defaults: dict[str, Any] = {
        "engine": tuple(map(flag_of, engines)) or ("127.0.0.1:9",),
        "port": 0,
        "secret": SECRET,
        "drain_timeout_s": 1.0,
        "policy": "round-robin",
        "max_held_s": 0.0,
    }
    config = RouterConfig(**defaults | settings)
    router = Router(config, tracing=tracing)
    async with router.serving():
        if wait:
            await eventually(lambda: all(is_routable(router.pool, e.address) for e in engines))
        yield router


def is_routable(pool: Pool, address: str) -> bool:
    endpoint = pool.endpoint(address)
    return endpoint is not None and endpoint.is_routable


def hurry(router: Router, address: str, limit_s: float) -> None:
    """Give this engine's answers `limit_s` in all respects, and those of the others all the time in
    the world: on a busy machine a good engine may be later than a bad one is to be waited for."""
    clients, ask = router.clients, router.clients.request
    usual = clients.limits
    short = replace(usual, first_byte_s=limit_s, whole_answer_s=limit_s, idle_s=limit_s)

    async def request(to: str, *args: Any, **options: Any) -> Exchange:
        clients.limits = short if to == address else usual  # a request keeps what it begins with
        return await ask(to, *args, **options)

    clients.request = request  # type: ignore[assignment, method-assign]


def in_flight(router: Router) -> list[int]:
    """Per engine, in the pool's order."""
    return [endpoint.ledger.in_flight for endpoint in router.pool.endpoints]
