"""`python -m kvoy_router` as a process: starting, refusing to start, draining, and its memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import psutil
import pytest

from kvoy_contract.testing import FakeEngine, Script
from kvoy_contract.testing_ports import free_port
from kvoy_router.testing import SECRET, eventually, flag_of

pytestmark = pytest.mark.slow

StartEngine = Callable[..., Awaitable[FakeEngine]]
StartRouter = Callable[..., Awaitable[asyncio.subprocess.Process]]

STREAM = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    processes: list[asyncio.subprocess.Process] = []

    async def start(*flags: str) -> asyncio.subprocess.Process:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvoy_router",
            *flags,
            env=environment | {"KVOY_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_ready(port: int) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/ready")
                if answer.status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


async def test_sigterm_lets_running_streams_end_and_exits_0(
    start_engine: StartEngine, start_router: StartRouter
) -> None:
    engine = await start_engine()
    gate = asyncio.Event()
    engine.script = Script(pieces=("x",) * 20, gap_s=0.03, gate=gate)
    port = free_port()
    router = await start_router("--engine", flag_of(engine), "--port", str(port))
    await until_ready(port)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
        await eventually(lambda: engine.in_flight == 1)
        router.send_signal(signal.SIGTERM)
        gate.set()
        answer = await asking

    _, errors = await router.communicate()
    assert answer.text.count('"content": "x"') == 20
    assert answer.text.endswith("data: [DONE]\n\n")
    assert router.returncode == 0, errors.decode()


async def test_a_port_in_use_is_one_clear_line_and_a_failure(start_router: StartRouter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router = await start_router("--engine", "127.0.0.1:9", "--port", str(port))
        _, errors = await router.communicate()

    assert router.returncode == 1
    lines = errors.decode().strip().splitlines()
    assert lines == [f"kvoy router: port {port} on 127.0.0.1 is in use; choose another with --port"]


async def test_a_router_that_knows_a_hundred_engines_stays_small(
    start_engine: StartEngine, start_router: StartRouter
) -> None:
    engines = [await start_engine(heartbeat_s=1.0) for _ in range(100)]
    port = free_port()
    flags = [flag for engine in engines for flag in ("--engine", flag_of(engine))]
    router = await start_router(*flags, "--port", str(port), "--log-level", "warning")
    await eventually(lambda: all(engine.num_acks for engine in engines), timeout_s=120)
    await until_ready(port)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for _ in range(200):
            assert (await client.post("/v1/chat/completions", json=STREAM)).status_code == 200

    assert psutil.Process(router.pid).memory_info().rss < 200e6
