"""An engine as a pod sees it: probes while it loads, signals, floods, logs, the end of grace."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc.aio
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as rpc
from kvoy_engine.build import ModelLoadFailed
from kvoy_engine.http_server import StartFailed
from kvoy_engine.server import EngineServer, LoadedEngine
from kvoy_engine.testing_server import running_engine, sim_config

DEADLINE_S = 60.0
BODY = {"model": "sim", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `holds()` is true; fails after a generous deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


async def has_ports(server: EngineServer) -> bool:
    return server.grpc_port != 0


async def is_unready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 503


@pytest.fixture
async def loading() -> AsyncIterator[tuple[EngineServer, asyncio.Task[int]]]:
    """An engine whose model never finishes loading."""

    async def load() -> LoadedEngine:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets that event")

    server = EngineServer(sim_config(), load)
    running = asyncio.ensure_future(server.run())
    await until(lambda: has_ports(server))
    yield server, running
    if not running.done():
        server.request_drain()
        await running


def client_of(server: EngineServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=DEADLINE_S)


async def test_a_loading_engine_lives_and_says_that_it_is_not_ready(
    loading: tuple[EngineServer, asyncio.Task[int]],
) -> None:
    server, _ = loading
    async with client_of(server) as client:
        statuses = {
            path: (await client.get(path)).status_code
            for path in ("/health", "/started", "/ready", "/metrics")
        }
        refused = await client.post("/v1/completions", json=BODY)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = rpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as described:
            await stub.Describe(pb.DescribeRequest())
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    assert statuses == {"/health": 200, "/started": 503, "/ready": 503, "/metrics": 200}
    assert refused.status_code == 503
    assert described.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "loading" in (described.value.details() or "")
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_engine_that_is_told_to_end_while_it_loads_ends_at_once(
    loading: tuple[EngineServer, asyncio.Task[int]],
) -> None:
    server, running = loading

    server.request_drain()

    assert await running == 0


async def test_a_loaded_engine_has_started_and_stays_so_while_it_drains() -> None:
    async with (
        running_engine(sim_config(sim_base_s=0.01)) as engine,
        client_of(engine.server) as client,
    ):
        started = (await client.get("/started")).status_code
        async with client.stream("POST", "/v1/completions", json=BODY) as stream:
            engine.server.request_drain()
            await until(lambda: is_unready(client))
            draining = (await client.get("/started")).status_code
            lines = [line async for line in stream.aiter_lines() if line]

    assert (started, draining) == (200, 200)
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("error", [ModelLoadFailed("bad model"), RuntimeError("unforeseen")])
async def test_whatever_ends_the_loading_is_a_failed_model(error: Exception) -> None:
    async def load() -> LoadedEngine:
        raise error

    with pytest.raises(StartFailed, match=str(error)) as failed:
        await EngineServer(sim_config(), load).run()

    assert failed.value.reason == "ModelLoadFailed"


async def test_the_end_of_the_grace_ends_what_still_runs_with_an_error() -> None:
    async with running_engine(sim_config(sim_base_s=0.02, drain_timeout_s=0.2)) as engine:
        async with (
            client_of(engine.server) as client,
            client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 9999}) as stream,
        ):
            engine.server.request_drain()
            lines = [line async for line in stream.aiter_lines() if line]
        status = await engine.running

    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert status == 0


@pytest.mark.slow
async def test_health_answers_and_streams_go_on_under_a_flood_of_huge_bad_bodies() -> None:
    bodies = [b'{"model":"sim","messages":' + b"[" * (20 << 20), b'{"prompt":"' + b"x" * (20 << 20)]
    async with (
        running_engine(sim_config(sim_base_s=0.01)) as engine,
        client_of(engine.server) as client,
    ):
        stream = asyncio.ensure_future(read_all(client))
        flood = [
            asyncio.ensure_future(client.post("/v1/chat/completions", content=body))
            for body in bodies * 5
        ]
        health = []
        while not all(task.done() for task in flood):
            health.append((await client.get("/health")).status_code)
        answers = {task.result().status_code for task in flood}
        lines = await stream

    assert answers == {400}
    assert set(health) == {200}
    assert lines[-1] == "data: [DONE]"


async def read_all(client: httpx.AsyncClient) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=BODY) as stream:
        return [line async for line in stream.aiter_lines() if line]


def wait_for_url(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        if found := re.search(r"engine serves .*url=(http://)[\d.]+(:\d+)", log.read_text()):
            return f"{found[1]}127.0.0.1{found[2]}"
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_as_process_1_of_a_container_it_drains_on_sigterm(tmp_path: Path) -> None:
    """Process 1 gets no signal for which it has no handler."""
    namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.geteuid() != 0:
        namespace += ["--user", "--map-root-user"]
    engine = [sys.executable, "-m", "kvoy_cli", "serve", "--runner", "sim", "--host", "0.0.0.0"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*namespace, *engine, "--port", "0", "--telemetry-port", "0"], stderr=file
        )
    try:
        url = wait_for_url(log, process)
        (inner,) = psutil.Process(process.pid).children()
        body = BODY | {"max_tokens": 20}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            inner.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()

    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert status == 0


@pytest.mark.slow
def test_json_logs_are_lines_of_standard_output_and_probes_write_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvoy_engine", "--runner", "sim", "--log-format", "json"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", "0", "--telemetry-port", "0"], stdout=file, stderr=subprocess.PIPE
        )
    try:
        url = wait_for_url(log, process)
        before = len(log.read_text().splitlines())
        for path in ("/health", "/started", "/ready", "/metrics") * 5:
            assert httpx.get(f"{url}{path}").status_code == 200
        after = len(log.read_text().splitlines())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()

    assert before == after
    assert all("event" in json.loads(line) for line in log.read_text().splitlines())
    assert errors == b""
