"""`kvoy bench router-cost`: what the router adds, against a relay that understands nothing.

Three measurements on stand-in engines that cost little themselves: CPU time per streamed chunk
beside the relay's, time added to short requests beside going to the engine directly, and memory
of a router that knows a hundred engines. All of them alternate with their baseline within the
run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_cli.bench.load import LoadRun, run_closed_loop, run_open_loop
from kvoy_cli.bench.processes import (
    BenchError,
    child,
    cpu_seconds,
    free_ports,
    resident_bytes,
    wait_until,
)
from kvoy_cli.bench.report import Report
from kvoy_cli.bench.request import chat, completion
from kvoy_cli.bench.router_cost_report import ChunkCost, Latency, Sizes, build_report
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.stack import known_engines, router, settle

_SMOKE = Sizes(
    num_streams=2,
    chunks_per_stream=20,
    latency_s=0.3,
    rate=50.0,
    num_known_engines=3,
    hashes_per_engine=(0, 50),
)
_RELAYS = {"relay": (), "relay on streams": ("--streams",)}
_STARTED_S = 20.0


@dataclass(frozen=True, slots=True)
class _Route:
    """One way to the stand-in engine; `pid` is of the process in the middle."""

    client: Client
    pid: int | None


async def run(context: BenchContext) -> Report:
    sizes = _SMOKE if context.is_smoke else Sizes()
    async with AsyncExitStack() as stack:
        routes = await _start(stack, context, sizes)
        costs: dict[str, list[ChunkCost]] = {name: [] for name in (*_RELAYS, "router")}
        for name in costs:
            await _stream(routes[name], sizes)  # warm: connections, first-use costs
        for repeat in range(context.repeats):
            context.say(f"CPU per chunk, repeat {repeat + 1} of {context.repeats}")
            for name in costs:
                costs[name].append(await _stream(routes[name], sizes))
        latencies: dict[str, list[Latency]] = {name: [] for name in ("direct", "router", "relay")}
        for repeat in range(context.repeats):
            context.say(f"added latency, repeat {repeat + 1} of {context.repeats}")
            for name in latencies:
                latencies[name].append(await _short_requests(routes[name], sizes, repeat))
    resident = {
        count: await _resident_of_fleet(context, sizes.num_known_engines, count)
        for count in sizes.hashes_per_engine
    }
    return build_report(sizes, costs, latencies, resident)


async def _start(stack: AsyncExitStack, context: BenchContext, sizes: Sizes) -> dict[str, _Route]:
    context.say("starting a stand-in engine, two relays and a router")
    folder = None if context.is_smoke else context.model_folder()
    tokenizer = () if folder is None else ("--tokenizer", str(folder))
    gap = ("--gap-s", str(sizes.gap_s))
    (entry,) = await stack.enter_async_context(fake_engines(context, *gap, *tokenizer))
    target = entry.partition("@")[0]
    direct = await stack.enter_async_context(Client(target))
    routes = {"direct": _Route(direct, None)}
    for name, flags in _RELAYS.items():
        routes[name] = await _relay(stack, context, target, flags)
    front = await stack.enter_async_context(router([entry], "kv-aware", context))
    client = await stack.enter_async_context(Client(front.url))
    routes["router"] = _Route(client, front.child.pid)
    return routes


async def _relay(
    stack: AsyncExitStack, context: BenchContext, target: str, flags: tuple[str, ...]
) -> _Route:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvoy_cli.bench.relay", str(port), target.rpartition(":")[2]]
    process = await stack.enter_async_context(
        child(f"relay-{port}", [*command, *flags], context.logs)
    )
    client = await stack.enter_async_context(Client(f"127.0.0.1:{port}"))

    async def answers() -> bool:
        return (await client.send(completion(MODEL, "hello", 1, stream=False))).is_ok

    await wait_until(answers, [process], "an answer through the relay", _STARTED_S)
    return _Route(client, process.pid)


@asynccontextmanager
async def fake_engines(context: BenchContext, *flags: str) -> AsyncIterator[list[str]]:
    """Router entries of stand-in engines, all in one process."""
    command = [sys.executable, "-m", "kvoy_cli.bench.fake_engine", *flags]
    async with child("fake-engines", command, context.logs, stdout=subprocess.PIPE) as process:
        stdout = process.process.stdout
        assert stdout is not None
        line = await asyncio.to_thread(stdout.readline)
        if not line:
            raise process.failure("did not start")
        yield msgspec.json.decode(line, type=list[str])


async def _stream(route: _Route, sizes: Sizes) -> ChunkCost:
    """All streams at once, one event per write; CPU of the process in the middle per event."""
    assert route.pid is not None
    request = completion(MODEL, "hello", sizes.chunks_per_stream)
    before_s = cpu_seconds(route.pid)
    load = await run_closed_loop(
        route.client, iter([request] * sizes.num_streams), sizes.num_streams
    )
    used_s = cpu_seconds(route.pid) - before_s
    _check(load)
    num_chunks = sum(len(outcome.arrivals) for outcome in load.outcomes)
    if num_chunks != sizes.num_streams * sizes.chunks_per_stream:
        raise BenchError(f"{num_chunks} chunks came of {sizes.num_streams} streams")
    return ChunkCost(
        cpu_us=1e6 * used_s / num_chunks,
        chunks_per_s=num_chunks / (load.end_s - load.start_s),
        events_per_read=num_chunks / sum(outcome.num_reads for outcome in load.outcomes),
        generator_cpu_share=load.generator_cpu_share,
    )


async def _short_requests(route: _Route, sizes: Sizes, repeat: int) -> Latency:
    """Poisson arrivals; the same ones for every route in a repeat."""
    messages = [
        {"role": "user", "content": "What is the tallest mountain of Europe, and how high?"}
    ]
    request = chat(MODEL, messages, 8, stream=False)
    offsets = poisson_offsets(sizes.rate, sizes.latency_s, seed=repeat)
    before_s = 0.0 if route.pid is None else cpu_seconds(route.pid)
    load = await run_open_loop(
        route.client, iter([request] * len(offsets)), offsets, sizes.latency_s, drain_s=1.0
    )
    used_s = 0.0 if route.pid is None else cpu_seconds(route.pid) - before_s
    _check(load)
    return Latency(
        times_ms=tuple(1000 * (outcome.end_s - outcome.sent_s) for outcome in load.outcomes),
        cpu_us=1e6 * used_s / len(load.outcomes),
        generator_cpu_share=load.generator_cpu_share,
    )


def _check(load: LoadRun) -> None:
    failed = [outcome for outcome in load.outcomes if not outcome.is_ok]
    if failed:
        raise BenchError(f"{len(failed)} of {len(load.outcomes)} failed: {failed[0].error}")


async def _resident_of_fleet(context: BenchContext, num_engines: int, num_hashes: int) -> int:
    """Resident bytes of a router that knows so many engines, each holding so many strides."""
    context.say(f"memory of a router that knows {num_engines} engines of {num_hashes:,} hashes")
    flags = ("--count", str(num_engines), "--hashes", str(num_hashes))
    async with (
        fake_engines(context, *flags) as entries,
        router(entries, "kv-aware", context) as front,
        Client(front.url) as client,
    ):
        for _ in range(2 * num_engines):
            await client.send(completion(MODEL, "hello", 1, stream=False))
        await settle(3.0)
        known = sum(engine.num_hashes for engine in await known_engines(front))
        if known != num_engines * num_hashes:
            raise BenchError(f"the router knows {known:,} hashes of {num_engines * num_hashes:,}")
        return resident_bytes(front.child.pid)
