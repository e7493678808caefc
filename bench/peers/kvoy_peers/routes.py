"""The ways to the same engines: directly, through a bare relay, through Kvoy, through each peer.

What cannot be installed or started is handed back as absent with its reason, never left out.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import (
    BenchError,
    child,
    free_ports,
    resident_bytes,
    tree_cpu_seconds,
    wait_until,
)
from kvoy_cli.bench.request import chat
from kvoy_cli.bench.stack import router
from kvoy_peers.environment import NotInstalled, Requirements, install
from kvoy_peers.names import DIRECT, KVOY, RELAY
from kvoy_peers.peer import Peer, Place

_RELAY_START_S = 20.0
_HELLO_S = 5.0
_REASON_CHARS = 300
_WARM_MESSAGES = [{"role": "user", "content": "Hello."}]


@dataclass(frozen=True, slots=True)
class Backends:
    """The engines that all routes of a part lead to."""

    entries: tuple[str, ...]
    """As Kvoy's router takes them: `host:port@telemetry_port`."""
    model: str
    tokenizer: Path | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(entry.partition("@")[0].rpartition(":")[2]) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    client: Client
    pid: int | None
    """The process in the middle, whose children count with it; None: there is none."""

    def cpu_s(self) -> float:
        return 0.0 if self.pid is None else tree_cpu_seconds(self.pid)

    def resident_bytes(self) -> int:
        return 0 if self.pid is None else resident_bytes(self.pid)


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that is not measured."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Roster:
    routes: tuple[Route, ...]
    absent: tuple[Absent, ...]

    def named(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)


async def start_routes(
    stack: AsyncExitStack,
    context: BenchContext,
    backends: Backends,
    peers: Sequence[Peer],
    environments: Path,
) -> Roster:
    """All of them at once; they end with `stack`. Raises BenchError where Kvoy itself or the relay
    does not come up."""
    direct = await stack.enter_async_context(Client(f"127.0.0.1:{backends.ports[0]}"))
    routes = [Route(DIRECT, direct, None), await _relay(stack, context, backends)]
    front = await stack.enter_async_context(router(backends.entries, "kv-aware", context))
    client = await stack.enter_async_context(Client(front.url))
    routes.append(Route(KVOY, client, front.child.pid))
    absent: list[Absent] = []
    for peer in peers:
        started = await _try_to_start(stack, context, backends, peer, environments)
        if isinstance(started, Route):
            routes.append(started)
        else:
            context.say(f"{peer.name} is not measured: {started.reason}")
            absent.append(started)
    return Roster(tuple(routes), tuple(absent))


async def _relay(stack: AsyncExitStack, context: BenchContext, backends: Backends) -> Route:
    (port,) = free_ports(1)
    targets = [str(target) for target in backends.ports]
    command = [sys.executable, "-m", "kvoy_cli.bench.relay", str(port), *targets]
    process = await stack.enter_async_context(child(f"relay-{port}", command, context.logs))
    client = await stack.enter_async_context(Client(f"127.0.0.1:{port}"))

    async def answers() -> bool:
        return (await _hello(client, backends.model)).is_ok

    await wait_until(answers, [process], "an answer through the relay", _RELAY_START_S)
    return Route(RELAY, client, process.pid)


async def _try_to_start(
    stack: AsyncExitStack,
    context: BenchContext,
    backends: Backends,
    peer: Peer,
    environments: Path,
) -> Route | Absent:
    """Whatever goes wrong belongs to the peer's row, and ends what had been started of it."""
    context.say(f"starting {peer.name}")
    try:
        async with AsyncExitStack() as own:
            programs = await install(peer.name, environments)
            route = await _start(own, context, backends, peer, programs)
            await stack.enter_async_context(own.pop_all())
            return route
    except (NotInstalled, BenchError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        return Absent(peer.name, reason[:_REASON_CHARS])


async def _start(
    stack: AsyncExitStack, context: BenchContext, backends: Backends, peer: Peer, programs: Path
) -> Route:
    port, *spare = free_ports(1 + peer.num_spare_ports)
    folder = context.logs / f"{peer.name}-{port}"
    folder.mkdir()
    place = Place(
        programs,
        folder,
        port,
        tuple(spare),
        backends.ports,
        backends.model,
        backends.tokenizer,
    )
    processes = []
    for index, launch in enumerate(peer.launches(place)):
        for name, text in launch.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        name = f"{peer.name}-{port}-{index}"
        processes.append(
            await stack.enter_async_context(
                child(name, launch.command, context.logs, dict(launch.env))
            )
        )
    client = await stack.enter_async_context(Client(f"127.0.0.1:{port}"))
    said: list[Outcome] = []

    async def answers() -> bool:
        said.append(await _hello(client, backends.model))
        return said[-1].is_ok

    try:
        await wait_until(answers, processes, "an answer", peer.start_s)
    except BenchError as error:
        last = said[-1] if said else None
        hint = f"; last answer: {last.error} {last.body[:120]!r}" if last is not None else ""
        raise BenchError(f"{str(error).partition(';')[0]}{hint}") from error
    return Route(peer.name, client, processes[-1].pid)


async def _hello(client: Client, model: str) -> Outcome:
    """One short request, which a server that accepts and then is silent cannot hold up."""
    outcome = Outcome(due_s=time.perf_counter())
    try:
        async with asyncio.timeout(_HELLO_S):
            return await client.send(chat(model, _WARM_MESSAGES, 1, stream=False), outcome)
    except TimeoutError:
        outcome.error = f"no answer within {_HELLO_S:.0f} s"
        return outcome


def version_of(peer: Peer) -> str:
    return Requirements.of(peer.name).versions[peer.package]
