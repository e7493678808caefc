"""Fake engines and an HTTP client for the tests of the router's I/O."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvoy_cluster.api_server import ApiServer
from kvoy_contract.testing import FakeEngine
from kvoy_router.testing import SECRET
from kvoy_scene.scene import Scene

StartEngine = Callable[..., Awaitable[FakeEngine]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Routers run on uvloop; what deals with transports itself also runs on asyncio's own loop."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_http_server.py":
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts fake engines that know the secret, and stops them at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> FakeEngine:
            return await stack.enter_async_context(FakeEngine(**{"secret": SECRET} | options))

        yield start


@pytest.fixture
def scene(
    api_server: ApiServer, kvoy_crds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    """A namespace on a real API server, and a router's account there."""
    scene = Scene(api_server, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(scene.kubeconfig))
    return scene
