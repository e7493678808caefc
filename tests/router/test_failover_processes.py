"""Real processes that are killed or stopped in the middle of streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvoy_contract.testing_ports import free_port
from kvoy_router.app import Router
from kvoy_router.failover_testing import Seen, client_of, read_stream
from kvoy_router.testing import SECRET, eventually, in_flight, running_router

pytestmark = pytest.mark.slow

START_S = 60.0
NUM_STREAMS = 8
BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 150,
}


@dataclass(slots=True)
class Engine:
    """A simulated engine in a process of its own, 50 steps a second."""

    process: asyncio.subprocess.Process
    address: str
    telemetry_address: str

    async def num_running(self) -> float:
        async with httpx.AsyncClient(base_url=f"http://{self.address}") as client:
            text = (await client.get("/metrics")).text
        (line,) = re.findall(r"^kvoy_engine_running_sequences (\S+)$", text, re.MULTILINE)
        return float(line)

    async def until_running(self, wanted: bool) -> None:
        """Wait until sequences run, or none does."""
        async with asyncio.timeout(START_S):
            while bool(await self.num_running()) is not wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def process(
    module: str, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A running process and the file that it logs into."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
    with tempfile.TemporaryFile() as log:
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *flags,
            env=environment | {"KVOY_SECRET": SECRET},
            stderr=log,
        )
        try:
            yield started, log.fileno()
        finally:
            with contextlib.suppress(ProcessLookupError):
                started.kill()
            await started.wait()


@contextlib.asynccontextmanager
async def simulated_engine() -> AsyncIterator[Engine]:
    flags = ("--runner", "sim", "--port", "0", "--telemetry-port", "0", "--sim-base-s", "0.02")
    async with process("kvoy_engine", *flags, "--no-enable-prefix-caching") as (started, log):

        def found() -> re.Match[str] | None:
            text = os.pread(log, 1 << 20, 0).decode()
            assert started.returncode is None, text
            return re.search(r"url=http://(\S+):(\d+) telemetry_port=(\d+)", text)

        await eventually(found, START_S)
        match = found()
        assert match is not None
        yield Engine(started, f"{match[1]}:{match[2]}", f"{match[1]}:{match[3]}")


@contextlib.asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[list[Engine], Router, httpx.AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        engines = list(
            await asyncio.gather(*(stack.enter_async_context(simulated_engine()) for _ in range(2)))
        )
        router = await stack.enter_async_context(running_router(engines))  # type: ignore[arg-type]
        yield engines, router, await stack.enter_async_context(client_of(router))


async def ask_all(client: httpx.AsyncClient, seen: list[Seen]) -> list[Seen]:
    """One stream into each of these."""
    bodies = [BODY | {"seed": seed} for seed in range(len(seen))]
    return await asyncio.gather(*map(read_stream, [client] * len(seen), bodies, seen))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_outlive_an_engine_that_is_killed_or_stopped(how: signal.Signals) -> None:
    async with two_engines() as (engines, router, client):
        wholes = await ask_all(client, [Seen() for _ in range(NUM_STREAMS)])
        seen = [Seen() for _ in range(NUM_STREAMS)]
        asked = asyncio.create_task(ask_all(client, seen))
        first = engines[0]
        await eventually(lambda: all(any(one.texts.values()) for one in seen))
        assert in_flight(router) == [NUM_STREAMS // 2] * 2

        first.process.send_signal(how)
        await asked

        for one, whole in zip(seen, wholes, strict=True):
            one.assert_equals(whole)
        assert in_flight(router) == [0, 0]
        router.pool.check_integrity()
        counted = router.metrics.expose().decode()
        assert (
            f'kvoy_router_resumes_total{{model="sim",outcome="resumed"}} {NUM_STREAMS // 2}.0'
            in (counted)
        )
        if how is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            await first.until_running(False)


async def test_a_killed_router_breaks_its_streams_and_frees_the_engines() -> None:
    async with simulated_engine() as engine:
        port = free_port()
        flag = f"{engine.address}@{engine.telemetry_address.rpartition(':')[2]}"
        async with (
            process("kvoy_router", "--port", str(port), "--engine", flag) as (router, _),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            await until_ready(client)
            asked = asyncio.create_task(read_stream(client, BODY | {"max_tokens": 1500}))
            await engine.until_running(True)

            router.kill()

            with pytest.raises(httpx.RemoteProtocolError):
                await asked
            await engine.until_running(False)


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
