"""Engines and routers as child processes on free loopback ports, ready before a benchmark
measures."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.machine import usable_cores
from kvoy_cli.bench.processes import BenchError, Child, child, free_ports, wait_until

_READY_S = 240.0
_HTTP_TIMEOUT_S = 5.0
SIM_MODEL = "sim"
SECRET_VARIABLE = "KVOY_SECRET"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start one engine; `flags` are those of `kvoy serve`."""

    model: str
    flags: tuple[str, ...] = ()
    num_threads: int | None = None

    def command(self, port: int, telemetry_port: int) -> list[str]:
        threads = () if self.num_threads is None else ("--num-threads", str(self.num_threads))
        return [
            *(sys.executable, "-m", "kvoy_engine", self.model),
            *("--port", str(port), "--telemetry-port", str(telemetry_port)),
            *threads,
            *self.flags,
        ]

    def environment(self) -> dict[str, str]:
        threads = str(self.num_threads or usable_cores())
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


@dataclass(frozen=True, slots=True)
class Engine:
    child: Child
    port: int
    telemetry_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def router_entry(self) -> str:
        return f"{self.address}@{self.telemetry_port}"


@dataclass(frozen=True, slots=True)
class Router:
    child: Child
    port: int
    policy: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def torch_engine(
    model: str | Path, num_engines: int, *flags: str, served_name: str = "bench"
) -> EngineSpec:
    """An engine with its share of the cores: cores ÷ engines, at least one thread."""
    return EngineSpec(
        model=str(model),
        flags=("--served-model-name", served_name, *flags),
        num_threads=max(1, usable_cores() // num_engines),
    )


def sim_engine(*flags: str, served_name: str = "bench") -> EngineSpec:
    return EngineSpec(
        model=SIM_MODEL, flags=("--runner", "sim", "--served-model-name", served_name, *flags)
    )


@asynccontextmanager
async def engines(
    specs: Sequence[EngineSpec], context: BenchContext
) -> AsyncIterator[list[Engine]]:
    """Start all, then wait until all are ready. Raises BenchError where one does not come up."""
    ports = free_ports(2 * len(specs))
    async with AsyncExitStack() as stack:
        started: list[Engine] = []
        for index, spec in enumerate(specs):
            port, telemetry_port = ports[2 * index : 2 * index + 2]
            process = await stack.enter_async_context(
                child(
                    f"engine-{port}",
                    spec.command(port, telemetry_port),
                    context.logs,
                    {**spec.environment(), SECRET_VARIABLE: context.secret},
                )
            )
            started.append(Engine(process, port, telemetry_port))
        for engine in started:
            await _wait_ready(engine.child, engine.port)
        yield started


@asynccontextmanager
async def router(
    entries: Sequence[str], policy: str, context: BenchContext, *flags: str
) -> AsyncIterator[Router]:
    """A router over `entries` (`host:port@telemetry_port`), ready once it knows all of them."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvoy_router", "--port", str(port), "--policy", policy]
    command += ["--engine", *entries, *flags]
    env = {SECRET_VARIABLE: context.secret}
    async with child(f"router-{policy}-{port}", command, context.logs, env) as process:
        await _wait_ready(process, port)
        started = Router(process, port, policy)
        await _wait_known(started, len(entries))
        yield started


async def _wait_ready(process: Child, port: int) -> None:
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:

        async def is_ready() -> bool:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/ready")
            except httpx.HTTPError:
                return False
            return answer.status_code == 200

        await wait_until(is_ready, [process], "readiness", _READY_S)


async def _wait_known(started: Router, count: int) -> None:
    """Wait until the router's own view holds `count` engines that can be picked."""

    async def knows_all() -> bool:
        return sum(engine.is_routable for engine in await known_engines(started)) >= count

    await wait_until(knows_all, [started.child], f"knowledge of {count} engines", _READY_S)


@dataclass(frozen=True, slots=True)
class KnownEngine:
    is_routable: bool
    num_hashes: int


async def known_engines(started: Router) -> list[KnownEngine]:
    """The engines as `GET /debug/engines` shows them."""
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
        answer = await client.get(f"{started.url}/debug/engines")
    if answer.status_code != 200:
        raise BenchError(f"{started.url}/debug/engines answered {answer.status_code}")
    return [
        KnownEngine(engine["routable"], engine["held_hashes"])
        for engine in answer.json()["engines"]
    ]


async def settle(seconds: float) -> None:
    """Let telemetry catch up and caches of the processor cool between two measurements."""
    await asyncio.sleep(seconds)
